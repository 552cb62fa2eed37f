"""Arithmetic with restricted weight gradients is that of gradients in full shape.

Which layers are restricted is a matter of measured costs; here they all are, in a given way.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import gradients_by_autodiff, value_of, values_of
from restricted import every_layer, frozen, points, small_mlp
from tape_gradients import gradients_of_mse

import keras_freeze as kf
from keras_freeze import backend

pytestmark = [pytest.mark.cases(1), pytest.mark.slow]


@pytest.mark.parametrize("traced", [False, True])
def test_gradients_can_be_added_and_scaled_by_hand(traced):
    models = [frozen(small_mlp()), frozen(small_mlp())]
    kf.restore_gradients(models[1])
    x, y = points()

    def steps(model):
        variables = model.trainable_variables
        halves = (slice(0, 24), slice(24, 48))
        gradients = [gradients_of_mse(model, x[half], y[half]) for half in halves]
        mean = [(0.5 * one + other / 2.0) * 2.0 for one, other in zip(*gradients, strict=True)]
        model.optimizer.apply(
            [sum([g, tf.zeros_like(v)]) for g, v in zip(mean, variables, strict=True)]
        )

    for model in models:
        (tf.function(steps) if traced else steps)(model)
    for one, other in zip(*(values_of(m.trainable_variables) for m in models), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


MASK = np.random.default_rng(5).random((6, 8)) < 0.5
ARITHMETIC = {
    "array * g": (lambda g: MASK.astype("float32") * g, lambda g: MASK * g),
    "g * array": (lambda g: g * MASK.astype("float32"), lambda g: MASK * g),
    "g * row": (lambda g: g * MASK[0].astype("float32"), lambda g: MASK[0] * g),
    "g * tensor": (lambda g: g * tf.cast(MASK, "float32"), lambda g: MASK * g),
    "tensor * g": (lambda g: tf.cast(MASK, "float32") * g, lambda g: MASK * g),
    "number * g": (lambda g: np.float32(3.0) * g * 2, lambda g: 6.0 * g),
    "scalar / g": (lambda g: g / tf.constant(4.0), lambda g: g / 4.0),
    "g / array": (lambda g: g / np.full((6, 8), 4.0, "float32"), lambda g: g / 4.0),
    "g + array": (lambda g: g + MASK.astype("float32"), lambda g: g + MASK),
    "array - g": (lambda g: MASK.astype("float32") - g, lambda g: MASK - g),
    "g - g": (lambda g: g - g / 2.0, lambda g: g / 2.0),
    "g * g": (lambda g: g * g, np.square),
    "g ** 2": (lambda g: g**2, np.square),
    "g ** 0": (lambda g: g**0, np.ones_like),
    "2 ** g": (lambda g: 2.0**g, np.exp2),
    "-g": (lambda g: -g, np.negative),
    "abs(g)": (abs, np.abs),
    "g > 0": (lambda g: tf.cast(g > 0.0, "float32"), lambda g: g > 0),
    "g @ tensor": (lambda g: g @ tf.ones((8, 2)), lambda g: g @ np.ones((8, 2))),
    "g[0]": (lambda g: g[0], lambda g: g[0]),
    "shape": (lambda g: tf.zeros(g.shape), np.zeros_like),
    "tf.norm": (tf.norm, np.linalg.norm),
    "tf.clip_by_norm": (lambda g: tf.clip_by_norm(g, 1e-3), lambda g: g / np.linalg.norm(g) * 1e-3),
    "tf.clip_by_value": (
        lambda g: tf.clip_by_value(g, -1e-3, 1e-3),
        lambda g: np.clip(g, -1e-3, 1e-3),
    ),
    "tf.reduce_mean": (lambda g: g - tf.reduce_mean(g, 0), lambda g: g - g.mean(0)),
    "keras.ops.sum": (lambda g: keras.ops.sum(g, axis=1), lambda g: g.sum(1)),
    "keras.ops.norm": (keras.ops.norm, np.linalg.norm),
    "keras.ops.add": (lambda g: keras.ops.add(g, 1.0), lambda g: g + 1.0),
    "keras.ops.where": (
        lambda g: keras.ops.where(MASK, g, tf.zeros_like(g)),
        lambda g: np.where(MASK, g, 0.0),
    ),
    "sum of three": (lambda g: sum([g, g, g]), lambda g: 3.0 * g),
}


@pytest.fixture(scope="module")
def kernel_gradients():
    """The restricted gradient of a kernel as a function, and in full shape with zeros."""
    model = frozen(small_mlp())
    kf.restore_gradients(model)
    x, y = points()
    whole = [
        value_of(g) for g in gradients_by_autodiff(model, x, y, keras.losses.MeanSquaredError())
    ]
    expected = whole[0] * kf.get_mask(model)[model.trainable_variables[0]]
    with every_layer():
        kf.restrict_gradients(model)
    return lambda: gradients_of_mse(model, x, y)[0], expected


@pytest.mark.parametrize("where", ["eager", "graph", "outside its function"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_is_that_of_the_gradient_in_full_shape(name, where, kernel_gradients):
    gradient, expected = kernel_gradients
    ours, by_hand = ARITHMETIC[name]
    if where == "eager":
        found = ours(gradient())
    elif where == "graph":
        found = tf.function(lambda: tf.convert_to_tensor(ours(gradient())))()
    else:
        found = ours(tf.function(gradient)())
    np.testing.assert_allclose(np.array(found), by_hand(expected), rtol=1e-4, atol=1e-7)


def test_arithmetic_with_an_array_is_not_done_entry_by_entry(kernel_gradients, monkeypatch):
    calls = []
    times = backend.CompactGradient.__rmul__
    monkeypatch.setattr(
        backend.CompactGradient, "__rmul__", lambda *both: calls.append(both) or times(*both)
    )
    assert isinstance(MASK.astype("float32") * kernel_gradients[0](), tf.Tensor)
    assert len(calls) == 1
    with pytest.raises(TypeError, match="ufunc"):
        np.exp(kernel_gradients[0]())


def test_gradients_that_stay_compact(kernel_gradients):
    gradient = kernel_gradients[0]()
    for result in (gradient * 2.0, 2.0 * gradient, gradient / 2.0, -gradient, gradient - gradient):
        assert isinstance(result, backend.CompactGradient)
    assert isinstance(gradient + gradient, backend.CompactGradient)
