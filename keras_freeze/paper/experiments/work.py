"""Estimates of the work that runs are, made without loading data or building networks."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from keras_freeze.paper import datasets
from keras_freeze.paper.experiments.experiment import Experiment
from keras_freeze.paper.run import Run

# Seconds per image and training step on two CPU cores, and the pixels of that image, q = 0.99:
# LeNets of MNIST in batches of 100, VGG16-D of CIFAR-10 and ResNet34 of noise in batches of 128,
# the fastest of six steps. Other machines may take half or twice as long.
_MEASURED: Mapping[str, tuple[float, int]] = {
    "lenet_300_100": (0.0023 / 100, 28 * 28),
    "lenet_5_caffe": (0.018 / 100, 28 * 28),
    "vgg16_d": (3.7 / 128, 32 * 32),
    "resnet34": (24.0 / 128, 64 * 64),
}


class Work(NamedTuple):
    """What runs amount to.

    Attributes:
        runs: how many.
        steps: batches that go forward and backward, in all of them.
        hours: roughly, on two CPU cores.
    """

    runs: int
    steps: int
    hours: float


def work_of(runs: Iterable[Run]) -> Work:
    """Estimate the work of runs from the networks, the epochs and the sizes of the data sets.

    Args:
        runs: any runs; equal ones count once.

    Returns:
        Their `Work`. The hours are rough: from a few measured steps of each network, scaled by the
        batch and the pixels; validation and tests are left out.

    Example:
        >>> work_of([Run("mnist", "lenet_300_100", "freezenet", 0.99, seed=0, epochs=25)]).steps
        13500
    """
    num_runs = num_steps = 0
    seconds = 0.0
    for run in dict.fromkeys(runs):
        steps = _steps_of(run)
        num_runs += 1
        num_steps += steps
        seconds += steps * _seconds_per_step(run)
    return Work(num_runs, num_steps, seconds / 3600)


def overview(experiments: Iterable[Experiment]) -> str:
    """List experiments with their work, as lines of text.

    Args:
        experiments: in the order to list them.

    Returns:
        A line for each, a line for all together, in which a run that several of them share counts
        once, and what the hours are.

    Example:
        >>> print(overview([EXPERIMENTS["lenet5_best_run"]]).splitlines()[1])
        lenet5_best_run  Figure S8     5      712,500     3.6  The best run at q = 0.99, its ...
    """
    experiments = list(experiments)
    rows = [(e.name, e.source, *_numbers(work_of(e.runs)), e.title) for e in experiments]
    together = work_of(run for experiment in experiments for run in experiment.runs)
    table = [
        ("name", "source", "runs", "steps", "hours", "what"),
        *rows,
        ("all together", "", *_numbers(together), ""),
    ]
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    lines = [
        "  ".join(
            [
                *(cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)),
                *(cell.rjust(width) for cell, width in zip(row[2:5], widths[2:], strict=True)),
                row[5],
            ]
        ).rstrip()
        for row in table
    ]
    return "\n".join([*lines, "Hours: roughly, on two CPU cores."])


def steps_per_epoch(run: Run) -> int:
    """Return the number of steps of an epoch of a run.

    Args:
        run: any run.

    Example:
        >>> steps_per_epoch(Run("mnist", "lenet_300_100", "freezenet", 0.99, seed=0))
        540
    """
    images = datasets.info(run.dataset).num_left(run.recipe.validation_fraction)
    steps = math.ceil(images / run.recipe.batch_size)
    return steps if run.steps_per_epoch is None else min(steps, run.steps_per_epoch)


def _steps_of(run: Run) -> int:
    """Return how many batches go forward and backward."""
    epochs = run.recipe.epochs
    passes = {
        "training": epochs,
        "gradient_flow": 1,
        "gradient_flow_in_training": 2 * epochs + 1,
        "costs": 1,
    }
    return steps_per_epoch(run) * passes[run.measure]


def _seconds_per_step(run: Run) -> float:
    seconds, pixels = _MEASURED[run.model]
    height, width, _ = datasets.info(run.dataset).image_shape
    return seconds * run.recipe.batch_size * height * width / pixels


def _numbers(work: Work) -> tuple[str, str, str]:
    return f"{work.runs:,}", f"{work.steps:,}", f"{work.hours:,.1f}"
