"""Small floats, loss scales, and decay over many steps."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    blobs,
    compiled,
    dense_model,
    fit,
    gradients_by_autodiff,
    is_weight,
    mask_by_hand,
    same_bits,
    sgd,
    value_of,
    values_of,
)
from keras import layers as kl
from keras import optimizers as ko
from numeric_cases import quarter, random_gradients, step_of

import keras_freeze as kf

pytestmark = pytest.mark.cases(1)

each_way = pytest.mark.parametrize("way", ["freeze", "first_batch"])


@each_way
@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
def test_small_floats_freeze_the_least_salient_in_float32(dtype, way):
    x, y = blobs()
    model = compiled(dense_model(dtype=dtype))
    scaled = isinstance(model.optimizer, ko.LossScaleOptimizer)
    assert scaled == (dtype == "mixed_float16")
    start = values_of(model.trainable_variables)
    gradients = gradients_by_autodiff(model, x, y)
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y, batch_size=48, epochs=3)

    mask, variables = kf.get_mask(model), model.trainable_variables
    assert_frozen_bits_kept(variables, mask, start)
    assert_trained_moved(variables, mask, start)
    assert int(model.optimizer.iterations) == 3
    for v, old in zip(variables, start, strict=True):
        assert value_of(v).dtype == old.dtype
    # In few bits, neighbours in the order of saliency may change places.
    weights = [i for i, v in enumerate(variables) if is_weight(v)]
    assert mask.num_trained == 72 // 4
    scores = [np.abs(start[i].astype("f") * gradients[i].astype("f")).ravel() for i in weights]
    scores = np.concatenate(scores)
    trained = np.concatenate([mask[variables[i]].ravel() for i in weights])
    assert scores[trained].min() > 0.9 * scores[~trained].max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_saliency_of_small_floats_does_not_underflow(dtype):
    """Products below what float16 holds still have an order."""
    model = keras.Sequential([keras.Input((4,)), kl.Dense(1, use_bias=False, dtype=dtype)])
    kernel = model.trainable_variables[0]
    kernel.assign(np.array([[1e-3], [2e-3], [3e-3], [4e-3]]))
    optimizer = kf.FreezeOptimizer(sgd(0.0), freeze_rate=0.5)
    step_of(optimizer, [kernel])([tf.constant([[2e-5], [4e-5], [1e-5], [1e-5]], kernel.dtype)])
    np.testing.assert_array_equal(optimizer.mask[kernel].ravel(), [False, True, False, True])
    scores = kf.compute_saliency(compiled(model, loss="mse"), np.ones((2, 4)), np.ones((2, 1)))
    assert all(s.dtype == np.float32 for s in scores.values())


@each_way
def test_loss_scale_of_the_inner_optimizer_does_not_change_the_result(way):
    x, y = blobs()
    trained = []
    for factor in (None, 64.0):
        inner = sgd(momentum=0.9, loss_scale_factor=factor)
        model = compiled(dense_model(), kf.FreezeOptimizer(inner, 0.75, l2=0.1), run_eagerly=True)
        if way == "freeze":
            kf.freeze(model, x, y)
        fit(model, x, y, batch_size=16)
        trained.append((kf.get_mask(model), values_of(model.trainable_variables)))
    assert trained[0][0] == trained[1][0]
    for a, b in zip(trained[0][1], trained[1][1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["freeze", "first_batch", "first_batch_scaled_outside"])
def test_a_criterion_of_ones_own_sees_gradients_without_the_loss_scale(way):
    """Gradients scaled up would outweigh the weights in this one, and change the mask."""
    x, y = blobs()
    inner = sgd(loss_scale_factor=None if way == "first_batch_scaled_outside" else 1024.0)
    optimizer = kf.FreezeOptimizer(
        inner, freeze_rate=0.75, criterion=lambda w, g: keras.ops.abs(g) + keras.ops.abs(w)
    )
    scaled = ko.LossScaleOptimizer(optimizer) if "outside" in way else optimizer
    model = compiled(dense_model(), scaled, run_eagerly=True)
    weights = [i for i, v in enumerate(model.trainable_variables) if is_weight(v)]
    start, gradients = values_of(model.trainable_variables), gradients_by_autodiff(model, x, y)
    scores = [np.abs(start[i]) + np.abs(gradients[i]) for i in weights]
    by_hand = mask_by_hand(scores, [np.ones_like(s) for s in scores], 0.75)
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y, batch_size=48)
    for i, expected in zip(weights, by_hand, strict=True):
        assert np.array_equal(kf.get_mask(model)[model.trainable_variables[i]], expected)


@each_way
def test_a_step_that_overflows_in_float16_is_left_out_and_decides_nothing(way):
    """The loss scale is halved instead; the mask comes from the first step that is finite."""
    model = dense_model(dtype="mixed_float16")
    variables = model.trainable_variables
    inner = kf.FreezeOptimizer(sgd(), freeze_rate=0.75)
    optimizer = ko.LossScaleOptimizer(inner, initial_scale=4.0)
    if way == "freeze":
        kf.freeze(model, mask=quarter(variables), optimizer=optimizer)
    before = values_of(variables)
    step = step_of(optimizer, variables, "graph")
    gradients = random_gradients(variables)
    step([gradients[0] * np.inf, *gradients[1:]])
    assert all(same_bits(value_of(v), b) for v, b in zip(variables, before, strict=True))
    assert (inner.mask is None) == (way == "first_batch")
    assert int(optimizer.iterations) == 0
    step(gradients)
    assert float(optimizer.dynamic_scale) == 2.0
    assert int(optimizer.iterations) == 1
    assert_frozen_bits_kept(variables, inner.mask, before)
    for v, old, gradient in zip(variables, before, gradients, strict=True):
        trained = inner.mask[v] if is_weight(v) else np.ones(v.shape, bool)
        expected = old - 0.1 * gradient.numpy() / 2.0
        np.testing.assert_allclose(value_of(v)[trained], expected[trained], rtol=1e-5, atol=1e-6)


def test_mixed_precision_with_moving_averages_trains_two_epochs():
    """keras#17225, keras#20878."""
    x, y = blobs()
    inner = ko.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)
    model = compiled(dense_model(dtype="mixed_float16"), kf.FreezeOptimizer(inner, 0.75))
    start = values_of(model.trainable_variables)
    fit(model, x, y, batch_size=16, epochs=2)
    assert int(model.optimizer.iterations) == 6
    mask = kf.get_mask(model)
    assert_frozen_bits_kept(model.trainable_variables, mask, start)
    assert_trained_moved(model.trainable_variables, mask, start)


@each_way
def test_decay_follows_its_recurrence_over_many_steps(way):
    """One step shrinks by little; hundreds of roundings must not add up."""
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(
        sgd(0.1), freeze_rate=0.75, l2=5e-3, frozen_weights="decay", criterion="magnitude"
    )
    if way == "freeze":
        compiled(model, optimizer)
        kf.freeze(model, *blobs())
    start = values_of(variables)
    step = step_of(optimizer, variables, "graph")
    for _ in range(300):
        step([tf.zeros(v.shape) for v in variables])
    for v, old in zip(variables, start, strict=True):
        if is_weight(v):
            expected = (1 - 0.1 * 5e-3) ** 300 * old.astype("float64")
            np.testing.assert_allclose(value_of(v), expected, rtol=1e-4)


@each_way
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_decay_is_refused_where_floats_are_too_short_for_it(dtype, way):
    """1 - 5e-5 is 1 in float16: frozen weights would not decay, or by what rounding makes of it."""
    model = dense_model(dtype=dtype)
    optimizer = kf.FreezeOptimizer(sgd(0.1), 0.75, l2=5e-4, frozen_weights="decay")
    compiled(model, optimizer, run_eagerly=True)
    with pytest.raises(ValueError, match="float32"):
        kf.freeze(model, *blobs()) if way == "freeze" else fit(model, *blobs())
