"""The large networks train on their data sets by their experiments."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from experiment_cases import tables_in

from keras_freeze.paper import preparation, recipes
from keras_freeze.paper.experiments import EXPERIMENTS
from keras_freeze.paper.runs import Results
from keras_freeze.paper.views.reports import markdown

pytestmark = pytest.mark.cases(2)

ROOT = Path(__file__).resolve().parents[2]
DATA_DIR = ROOT.parent / "shared/data/tensorflow_datasets"
SUBSET = ROOT.parent / "shared/data/tiny-imagenet-200-subset.tar.gz"


@pytest.fixture
def small_batches(monkeypatch):
    """The recipes with few images a step, so that the large networks take seconds."""
    for name in ("cifar10", "tiny_imagenet"):
        recipe = dataclasses.replace(recipes.recipe_for(name), batch_size=8)
        monkeypatch.setitem(recipes.RECIPES, name, recipe)
    monkeypatch.setattr(preparation, "_EVALUATION_BATCH", 8)


def run_and_show(experiment, label, folder, data_dir):
    """Executes one run of an experiment for two steps; its cell in the table."""
    short = experiment.changed(epochs=1, seeds=1, rates=[0.99], steps_per_epoch=2)
    series = next(s for s in short.series if s.label == label)
    (run,) = short.runs_of(series, 0.99)
    record = run.execute(data_dir=data_dir, verbose=False)
    results = Results(folder / "results.jsonl")
    results.append(record)
    table = tables_in(markdown(short, results))[0]
    return record["result"], table[2][table[0].index(label)]


@pytest.mark.exhaustive
def test_vgg16_d_trains_on_cifar_10_by_its_experiment(tmp_path, small_batches):
    if not (DATA_DIR / "cifar10").is_dir():
        pytest.skip(f"{DATA_DIR / 'cifar10'} is missing")
    label = "FreezeNet, CIFAR-10"
    result, cell = run_and_show(EXPERIMENTS["vgg16_cifar"], label, tmp_path, DATA_DIR)
    assert result["report"]["num_weights"] == 15_239_872
    assert result["report"]["num_trained_parameters"] == pytest.approx(169_000, rel=0.01)
    assert cell.startswith(f"{100 * result['test_accuracy']:.2f}")


@pytest.mark.exhaustive
def test_resnet34_trains_on_tiny_imagenet_by_its_experiment(tmp_path, small_batches):
    if not SUBSET.is_file():
        pytest.skip(f"{SUBSET} is missing")
    manual = tmp_path / "downloads" / "manual"
    manual.mkdir(parents=True)
    shutil.copy(SUBSET, manual)
    experiment = EXPERIMENTS["resnet34_tiny_imagenet"]
    result, cell = run_and_show(experiment, "FreezeNet", tmp_path, tmp_path)
    assert result["report"]["num_weights"] == 21_366_464
    assert result["report"]["num_trained_weights"] >= 213_664
    assert cell == f"{100 * result['test_accuracy']:.2f}"
