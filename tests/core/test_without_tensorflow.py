"""On JAX and PyTorch the core neither imports TensorFlow nor needs it to be installed."""

import importlib.metadata
import json
import sys
import tempfile
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers import blobs, crossentropy, same_bits, values_of
from oracle import DenseByHand
from processes import HIDE_TENSORFLOW, run_python

import keras_freeze as kf

pytestmark = pytest.mark.skipif(
    keras.backend.backend() == "tensorflow", reason="it is the backend itself"
)

BATCH, RATE = 12, 0.75


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self._x, self._y = x, y

    def __len__(self):
        return len(self._x) // BATCH

    def __getitem__(self, index):
        rows = slice(index * BATCH, (index + 1) * BATCH)
        return self._x[rows], self._y[rows]


def frozen_model(way, *data, frozen_weights="keep"):
    """A model compiled with a FreezeOptimizer, frozen unless the first batch is to decide."""
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((6,)), dense(8, activation="relu"), dense(3)])
    kf.reinitialize(model, seed=3)
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(
        optimizer=kf.FreezeOptimizer(inner, RATE, frozen_weights=frozen_weights),
        loss=crossentropy(),
    )
    if way == "freeze":
        kf.freeze(model, *data)
    return model


def trained_by_hand(model):
    """What a fresh model becomes in one pass over `blobs`."""
    x, y = blobs()
    expected = DenseByHand(values_of(model.trainable_variables), learning_rate=0.1, momentum=0.9)
    gap = expected.freeze(x[:BATCH], y[:BATCH], RATE)
    assert gap > 1e-3
    for start in range(0, len(x), BATCH):
        expected.step(x[start : start + BATCH], y[start : start + BATCH])
    return expected


def assert_trained_as_by_hand(model, expected, before):
    mask = kf.get_mask(model)
    for position in (0, 2):
        trained = mask.entries[position // 2].trained
        assert np.array_equal(trained, expected.masks[position])
        after = values_of(model.trainable_variables)[position]
        assert same_bits(after[~trained], before[position][~trained])
    for value, wanted in zip(values_of(model.trainable_variables), expected.values, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)


def _fits_arrays(way):
    x, y = blobs()
    model = frozen_model(way, x[:BATCH], y[:BATCH])
    expected = trained_by_hand(frozen_model("first_batch"))
    before = values_of(model.trainable_variables)
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_trained_as_by_hand(model, expected, before)


def check_arrays_after_freeze(folder):
    _fits_arrays("freeze")


def check_arrays_with_the_first_batch(folder):
    _fits_arrays("first_batch")


def _fits_a_py_dataset(way):
    batches = Batches(*blobs())
    model = frozen_model(way, batches)
    expected = trained_by_hand(frozen_model("first_batch"))
    before = values_of(model.trainable_variables)
    model.fit(batches, shuffle=False, verbose=0)
    assert_trained_as_by_hand(model, expected, before)


def check_a_py_dataset_after_freeze(folder):
    _fits_a_py_dataset("freeze")


def check_a_py_dataset_with_the_first_batch(folder):
    _fits_a_py_dataset("first_batch")


def check_report(folder):
    counts = kf.report(frozen_model("freeze", *blobs())).to_dict()
    assert (counts["num_weights"], counts["num_trained_weights"]) == (72, 18)


def check_save_and_load(folder):
    x, y = blobs()
    model = frozen_model("freeze", x, y)
    model.fit(x, y, verbose=0)
    kf.save(model, folder / "net.freeze", include_optimizer=True)
    model.save(folder / "net.keras")
    for load, name in ((kf.load, "net.freeze"), (keras.models.load_model, "net.keras")):
        loaded = load(folder / name)
        assert kf.get_mask(loaded) == kf.get_mask(model)
        for value, wanted in zip(
            values_of(loaded.variables), values_of(model.variables), strict=True
        ):
            assert same_bits(value, wanted)


def check_prune(folder):
    model = frozen_model("freeze", *blobs())
    before = values_of(model.trainable_variables)
    kf.prune(model)
    for entry in kf.get_mask(model).entries:
        value = values_of(model.trainable_variables)[entry.position]
        assert same_bits(value, np.where(entry.trained, before[entry.position], np.float32(0.0)))


def check_reinitialize(folder):
    model = frozen_model("freeze", *blobs())
    mask = kf.get_mask(model)
    kf.reinitialize(model, "xavier_normal", seed=11)
    assert kf.get_mask(model) == mask
    for stream, position in enumerate((0, 2)):
        value = values_of(model.trainable_variables)[position]
        draw = kf.initializers.XavierNormal(11, stream)
        assert same_bits(value, values_of([draw(value.shape)])[0])


def check_gradient_flow(folder):
    x, y = blobs()
    model = frozen_model("first_batch")
    expected = DenseByHand(values_of(model.trainable_variables), learning_rate=0.1, momentum=0.9)
    expected.freeze(x, y, RATE)
    kf.freeze(model, x, y)
    gradients = zip(expected.gradients(x, y), expected.masks, strict=True)
    total = sum(np.abs(gradient)[trained].sum() for gradient, trained in gradients)
    flow = kf.gradient_flow(model, x, y, batch_size=len(x))
    np.testing.assert_allclose(flow, total / (18 + 8 + 3), rtol=1e-4)


def check_callbacks(folder):
    x, y = blobs()
    model = frozen_model("first_batch")
    kf.freeze(model, x, y)
    flow = kf.callbacks.GradientFlowHistory(x, y, batch_size=len(x))
    board = kf.callbacks.FreezeBoard(folder, x, y)
    history = model.fit(x, y, epochs=2, verbose=0, callbacks=[flow, board]).history
    assert len(list(Path(folder, "freeze").iterdir())) == 1
    assert flow.history["epoch"] == [0, 1, 2]
    assert history["gradient_flow"] == flow.history["gradient_flow"][1:]
    last = kf.gradient_flow(model, x, y, batch_size=len(x))
    np.testing.assert_allclose(last, flow.history["gradient_flow"][-1], rtol=1e-5)


def check_embedded_digits(folder):
    x, y = kf.datasets.load_arrays("mnist_5k", "test")
    assert (x.shape, x.dtype) == ((500, 28, 28, 1), np.float32)
    assert np.bincount(y).tolist() == [50] * 10


def _error_of(call):
    try:
        call()
    except ImportError as error:
        return str(error)
    raise AssertionError("no ImportError")


def check_what_needs_tensorflow_says_so(folder):
    for call in (
        lambda: kf.datasets.load("mnist_5k"),
        lambda: kf.datasets.load_arrays("cifar10"),
        lambda: kf.training.train("mnist_5k", "lenet_300_100", "freezenet", 0.9, epochs=1),
    ):
        message = _error_of(call)
        assert "pip install tensorflow" in message
        assert "load_arrays('mnist_5k')" in message
        assert "PyDataset" in message


CHECKS = {
    name.removeprefix("check_"): function
    for name, function in dict(globals()).items()
    if name.startswith("check_")
}


def main():
    """Prints, for each check, what went wrong; it runs where TensorFlow is hidden."""
    found = {}
    for name, check in CHECKS.items():
        try:
            with tempfile.TemporaryDirectory() as folder:
                check(Path(folder))
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    assert sys.modules["tensorflow"] is None
    print(json.dumps(found))


@pytest.fixture(scope="module")
def outcomes():
    code = HIDE_TENSORFLOW + "import test_without_tensorflow as tests; tests.main()"
    return json.loads(run_python(code).splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_the_core_works_where_tensorflow_cannot_be_imported(name, outcomes):
    assert outcomes[name] == "", outcomes[name]


@pytest.mark.slow
def test_the_package_does_not_import_tensorflow():
    """Where it is installed; the modules that are loaded when first used included."""
    code = (
        "import sys, keras_freeze as kf\n"
        "lazy = [kf.callbacks, kf.datasets, kf.models, kf.runs, kf.saliency, kf.training]\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'tensorflow'])"
    )
    assert run_python(code).splitlines()[-1] == "[]"


@pytest.mark.slow
def test_train_starts_with_the_first_pass_where_tensorflow_reads_the_data():
    """Keras's trainers for JAX and PyTorch read a batch ahead, which must not cost a pass."""
    pytest.importorskip("tensorflow")
    arguments = ("mnist_5k", "lenet_300_100", "baseline", 0.0)
    settings = {"epochs": 1, "steps_per_epoch": 1, "l2": 0.0}
    setup = kf.training.prepare(*arguments, **settings)
    expected = DenseByHand(values_of(setup.network.weights), setup.recipe.learning_rate, 0.9)
    expected.step(*next(setup.batches().as_numpy_iterator()))
    result = kf.training.train(*arguments, **settings, verbose=False)
    for value, wanted in zip(values_of(result.model.weights), expected.values, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)
    assert importlib.metadata.version(keras.backend.backend()) in result.versions.values()
