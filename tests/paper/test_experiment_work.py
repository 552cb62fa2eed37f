"""How many steps and hours experiments take, and the list that says so."""

import math

import pytest

from keras_freeze.paper.experiments import EXPERIMENTS
from keras_freeze.paper.experiments.work import overview, work_of
from keras_freeze.paper.runs import MEASURES, Run

pytestmark = pytest.mark.cases(2)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"epochs": 25}, 25 * 540),  # 54,000 images, 100 a step
        ({"validation_fraction": 0.05}, 250 * 570),
        ({"epochs": 2, "steps_per_epoch": 3}, 2 * 3),
        ({"measure": "gradient_flow"}, 540),
        ({"measure": "gradient_flow_in_training", "epochs": 4}, 4 * 540 + 5 * 540),
    ],
)
def test_steps_come_from_epochs_batches_and_splits(settings, steps):
    run = Run("mnist", "lenet_300_100", "freezenet", 0.99, seed=0, **settings)
    assert work_of([run]).steps == steps


def test_a_last_batch_that_is_not_full_is_a_step():
    run = Run("cifar10", "vgg16_d", "snip", 0.9, seed=0, epochs=1)
    assert work_of([run]).steps == math.ceil(45_000 / 128)


def test_hours_grow_with_the_pixels_and_equal_runs_count_once():
    small, large = (
        Run(dataset, "vgg16_d", "snip", 0.9, seed=0, epochs=1, steps_per_epoch=1)
        for dataset in ("cifar10", "tiny_imagenet")
    )
    assert work_of([large]).hours == pytest.approx(4 * work_of([small]).hours)
    assert work_of([small, large, small]).runs == 2


def test_every_measure_has_an_estimate():
    for measure in MEASURES:
        run = Run("mnist_5k", "lenet_300_100", "snip", 0.9, seed=0, measure=measure)
        assert work_of([run]).steps >= 80


def test_the_list_names_every_experiment_and_counts_shared_runs_once():
    lines = overview(EXPERIMENTS.values()).splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == list(EXPERIMENTS)
    runs = {run for experiment in EXPERIMENTS.values() for run in experiment.runs}
    assert lines[-2].split()[:3] == ["all", "together", f"{len(runs):,}"]
