"""One model on several devices through tf.distribute: the same as on one device."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import distribution_cases
import numpy as np
import pytest
import tensorflow as tf
from distribution_cases import CASES, FIRST, TRAINED
from helpers import crossentropy, sgd
from two_devices import difference, first_batch, network, train

import keras_freeze as kf

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


class Results(dict):
    """What the cases found in another process, which runs when the first of them is asked for."""

    def __init__(self, names, folder):
        self._names, self._folder = names, folder

    def __missing__(self, name):
        command = [sys.executable, distribution_cases.__file__, *self._names]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.update(json.loads((self._folder / "results.json").read_text()))
        assert not isinstance(self[name], str), self[name]
        return self[name]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return Results(FIRST, tmp_path_factory.mktemp("first"))


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    names = [name for name in CASES if name not in FIRST]
    return Results(names, tmp_path_factory.mktemp("more"))


@pytest.mark.parametrize(
    "name", [n if n in FIRST else pytest.param(n, marks=pytest.mark.exhaustive) for n in TRAINED]
)
def test_two_devices_train_as_one_does(results, more, name):
    found = (results if name in FIRST else more)[name]
    zero = name.startswith("zero")
    assert found.pop("difference") < 1e-6
    assert found == {
        "same mask": True,
        "copies equal": True,
        "frozen kept": not zero,
        "frozen zero": zero,
        "iterations": 3 if name == "zero, first batch" else 4,
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["accumulation", "steps_per_execution"])
def test_what_keras_cannot_do_on_two_devices_fails_alike(more, name):
    kinds = more["beyond_keras"]
    assert kinds[f"{name}, ours"] == kinds[f"{name}, plain"]


@pytest.mark.exhaustive
def test_embedding_rows_train_on_two_devices(more):
    found = more["embedding"]
    assert found["difference"] < 1e-6
    assert found["same mask"]
    assert found["copies equal"]
    assert found["frozen kept"]


@pytest.mark.exhaustive
def test_clipping_and_l2_are_those_of_keras_by_hand(more):
    assert more["by_hand"]["difference"] < 1e-6
    assert more["by_hand"]["clipped"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["freeze", "first"])
def test_frozen_weights_decay_by_the_same_factor_on_any_number_of_devices(more, way):
    found = more["decay"][way]
    assert found["difference"] < 1e-6
    assert found["same mask"]
    assert found["copies equal"]
    assert found["ratio"] < 1e-5


@pytest.mark.exhaustive
def test_a_strategy_with_one_device_changes_nothing(more):
    assert more["one_device"] < 1e-6


@pytest.mark.exhaustive
def test_mask_and_scores_do_not_depend_on_the_scope(more):
    found = more["masks"]
    assert found["masks"] == dict.fromkeys(("none", "outside", "inside", "loop"), True)
    assert found["differs without regulariser"]
    assert found["same scores"]


@pytest.mark.exhaustive
def test_freeze_builds_a_model_for_its_strategy(more):
    assert more["unbuilt_model"]["difference"] < 1e-6
    assert more["unbuilt_model"]["copies equal"]


def test_custom_loops_train_as_on_one_device(results):
    assert max(results["custom_loop"]) < 1e-6


@pytest.mark.exhaustive
def test_apply_outside_of_run_changes_every_copy(more):
    assert more["apply_outside_of_run"] == {"difference": 0.0, "copies equal": True}


@pytest.mark.exhaustive
def test_gradient_flow_and_pruning_check_are_those_of_one_device(more):
    found = more["looks"]
    assert found["difference"] < 1e-6
    assert np.allclose(*found["flows"], rtol=1e-5, atol=0)
    assert found["largest"][0] == found["largest"][1] > 0


def test_restricted_gradients_train_two_devices_as_ordinary_ones_do(results):
    found = results["restricted_gradients"]
    assert found["difference"] < 1e-6
    assert found["restricted"] == 2
    assert found["copies equal"]


@pytest.mark.exhaustive
def test_new_masks_weights_and_pruning_reach_every_copy(more):
    found = more["later_changes"]
    assert found.pop("difference") < 1e-6
    assert all(found.values()), found


@pytest.mark.exhaustive
def test_function_traced_for_an_earlier_mask_fails_and_changes_no_weight(more):
    assert "freezing mask was replaced" in more["stale_function"]["message"]
    assert more["stale_function"]["weights kept"]


@pytest.mark.exhaustive
def test_nan_on_one_device_decides_no_mask(more):
    found = more["first_batch_with_nan"]
    assert "is not finite in the first batch" in found["message"]
    assert found["weights kept"]
    assert found["mask"] is None


@pytest.mark.exhaustive
def test_files_of_a_distributed_model_are_ordinary_files(more):
    found = more["files"]
    assert found["loaded"] == [0.0, 0.0, 0.0]
    assert found["masks"] == [True, True, True]
    assert found["reports"][0] == found["reports"][1]
    assert max(found["trained on"]) < 1e-6


@pytest.mark.parametrize("way", ["freeze", "first"])
def test_one_device_strategy_trains_as_none_does(way):
    strategy = tf.distribute.OneDeviceStrategy("cpu:0")
    (model, _), (other, _) = (train(s, way) for s in (strategy, None))
    assert difference(model, other) == 0.0
    assert kf.get_mask(model) == kf.get_mask(other)


@pytest.mark.parametrize("outside", ["model", "optimizer", "inner optimizer"])
def test_what_was_created_outside_of_the_scope_is_refused(outside):
    strategy = tf.distribute.OneDeviceStrategy("cpu:0")

    def scope(part):
        return contextlib.nullcontext() if part == outside else strategy.scope()

    with scope("model"):
        model = network()
    with scope("inner optimizer"):
        inner = sgd()
    with scope("optimizer"):
        model.compile(kf.FreezeOptimizer(inner), crossentropy())
    with pytest.raises(ValueError, match=r"Received: .*(OneDeviceStrategy|no strategy) and"):
        kf.freeze(model, *first_batch())
    assert kf.get_mask(model) is None


@pytest.mark.exhaustive
def test_the_example_trains_on_two_logical_cpus(tmp_path):
    script = ROOT / "examples" / "train_on_several_devices.py"
    flags = ["--logical_cpus=2", "--epochs=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    done = subprocess.run(
        [sys.executable, str(script), *flags],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Weights: 266,200, trained: 2,662" in done.stdout
    assert "Devices: 2\nCopies of the network are equal: True" in done.stdout
    assert "Frozen weights kept their start: True" in done.stdout
    assert float(done.stdout.split("Test accuracy ")[1].rstrip("%\n")) > 50.0
