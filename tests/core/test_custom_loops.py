"""The programs of docs/guides/custom_training_loops.md, against NumPy and against `fit`."""

import functools
import re
import runpy
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from helpers import crossentropy, same_bits, value_of, values_of
from oracle import DenseByHand
from processes import ROOT

import keras_freeze as kf

pytestmark = pytest.mark.cases(None, tensorflow=2, jax=1)

HEADINGS = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
BATCH, NUM_IMAGES, RATE = 100, 2000, 0.98  # the programs'

FREEZE = "kf.freeze(model, x[:100], y[:100], loss=loss_function, optimizer=optimizer)\n"
LOSSES = {  # what is differentiated, and what that becomes under loss scaling
    "tensorflow": ("tape.gradient(loss,", "tape.gradient(scaled,"),
    "jax": (
        "return loss_function(y, logits),",
        "return optimizer.scale_loss(loss_function(y, logits)),",
    ),
    "torch": ("loss.backward()", "optimizer.scale_loss(loss).backward()"),
}

needs_torch = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="a program for the PyTorch backend"
)


@functools.cache
def program(heading):
    """The code under a heading of the page."""
    page = (ROOT / "docs" / "guides" / "custom_training_loops.md").read_text()
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    return code


def replaced(code, old, new):
    assert code.count(old) == 1
    return code.replace(old, new)


def with_first_batch(code):
    return replaced(code, FREEZE, "")


def with_loss_scale(code):
    backend = keras.backend.backend()
    made = re.search(r"^optimizer = .*\n", code, re.M)[0]
    outside = "optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0)\n"
    code = replaced(code, made, made + outside)
    code = code.replace("optimizer.mask.", "optimizer.inner_optimizer.mask.")
    if backend == "tensorflow":
        line = "        loss = loss_function(y, model(x, training=True))\n"
        code = replaced(code, line, line + "        scaled = optimizer.scale_loss(loss)\n")
    return replaced(code, *LOSSES[backend])


VARIANTS = {
    "freeze": lambda code: code,
    "first_batch": with_first_batch,
    "freeze_loss_scale": with_loss_scale,
    "first_batch_loss_scale": lambda code: with_first_batch(with_loss_scale(code)),
}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A function that runs a program and gives the variables it leaves behind."""
    monkeypatch.setenv("KERAS_BACKEND", keras.backend.backend())  # programs set it, too

    def run(code):
        path = tmp_path / "program.py"
        path.write_text(code)
        return SimpleNamespace(**runpy.run_path(str(path)))

    return run


@functools.cache
def data():
    x, y = kf.datasets.load_arrays("mnist_5k", "train")
    return x[:NUM_IMAGES], y[:NUM_IMAGES]


def batches():
    x, y = data()
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, NUM_IMAGES, BATCH)]


def first_values():
    return values_of(kf.models.lenet_300_100(seed=0).trainable_variables)


@functools.cache
def by_hand():
    network = DenseByHand(first_values(), learning_rate=0.05, momentum=0.9)
    gap = network.freeze(*batches()[0], RATE)
    assert gap > 1e-4  # far above what backends round differently
    for batch in batches():
        network.step(*batch)
    return network


def assert_trained_as_by_hand(model, mask, expected=None):
    expected = by_hand() if expected is None else expected
    variables = model.trainable_variables
    assert [e.position for e in mask.entries] == [0, 2, 4]
    for entry in mask.entries:
        assert np.array_equal(entry.trained, expected.masks[entry.position])
    for variable, start, trained, value in zip(
        variables, first_values(), expected.masks, expected.values, strict=True
    ):
        assert same_bits(value_of(variable)[~trained], start[~trained])
        np.testing.assert_allclose(value_of(variable), value, rtol=1e-3, atol=2e-5)
        assert np.abs(value_of(variable) - start)[trained].max() > 1e-3


@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_program_of_this_backend_trains_as_by_hand(variant, run, capsys):
    code = VARIANTS[variant](program(HEADINGS[keras.backend.backend()]))
    left = run(code)
    optimizer = left.optimizer
    if "loss_scale" in variant:
        assert optimizer.dynamic_scale.ndim == 0
        optimizer = optimizer.inner_optimizer
    assert_trained_as_by_hand(left.model, optimizer.mask)
    assert int(optimizer.iterations) == len(batches())
    # PyTorch traces nothing, so that the update can change after the first batch.
    is_compact = variant.startswith("freeze") or keras.backend.backend() == "torch"
    assert (optimizer.compact_update is not None) == is_compact
    assert "5324 weights trained" in capsys.readouterr().out


@pytest.mark.cases(1, jax=0)
@pytest.mark.parametrize("way", ["freeze", "first_batch"])
def test_the_program_of_this_backend_does_what_fit_does(way, run):
    left = run(VARIANTS[way](program(HEADINGS[keras.backend.backend()])))
    model = kf.models.lenet_300_100(seed=0)
    optimizer = kf.FreezeOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), freeze_rate=RATE)
    model.compile(optimizer=optimizer, loss=crossentropy())
    if way == "freeze":
        kf.freeze(model, *batches()[0])
    model.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0)
    assert kf.get_mask(model) == left.optimizer.mask
    for variable, other in zip(model.variables, left.model.variables, strict=True):
        np.testing.assert_allclose(value_of(variable), value_of(other), rtol=1e-3, atol=2e-5)


class SharpnessAwareByHand(DenseByHand):
    """Takes each gradient where the trained weights are moved uphill, by 0.05 in all."""

    def gradients(self, x, y):
        def differentiate():
            found = super(SharpnessAwareByHand, self).gradients(x, y)
            return [np.where(mask, g, 0.0) for g, mask in zip(found, self.masks, strict=True)]

        before, first = self.values, differentiate()
        scale = 0.05 / np.sqrt(sum(np.square(g).sum() for g in first))
        self.values = [v + scale * g for v, g in zip(before, first, strict=True)]
        second, self.values = differentiate(), before
        return second


@pytest.mark.cases(None, tensorflow=0)
@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="a program for TensorFlow")
def test_the_program_that_moves_weights_itself_trains_as_by_hand(run):
    left = run(program("TensorFlow: a step that moves the weights itself"))
    expected = SharpnessAwareByHand(first_values(), learning_rate=0.05, momentum=0.9)
    expected.masks = by_hand().masks
    for batch in batches():
        expected.step(*batch)
    assert_trained_as_by_hand(left.model, left.mask, expected)


@needs_torch
def test_the_program_with_torch_optim_trains_as_by_hand(run):
    left = run(program("PyTorch with an optimizer of torch.optim"))
    assert_trained_as_by_hand(left.model, left.mask)


@needs_torch
def test_a_model_trained_with_torch_optim_is_saved_and_loaded(run, tmp_path):
    left = run(program("PyTorch with an optimizer of torch.optim"))
    kf.save(left.model, tmp_path / "digits.freeze")
    loaded = kf.load(tmp_path / "digits.freeze")
    for variable, other in zip(loaded.variables, left.model.variables, strict=True):
        assert same_bits(value_of(variable), value_of(other))
