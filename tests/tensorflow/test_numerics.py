"""Unusual bits, constraints, NaN, ties and other numbers that go wrong quietly."""

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    bits,
    blobs,
    compiled,
    crossentropy,
    dense_model,
    equals_by_hand,
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
from oracle import brute_force_mask

import keras_freeze as kf
from keras_freeze.masks.mask import MaskEntry

pytestmark = pytest.mark.cases(1)

each_way = pytest.mark.parametrize("way", ["freeze", "first_batch"])


# Frozen entries

SPECIAL_BITS = {
    # -0.0, three NaNs with a payload, one of them signalling, two denormals, two infinities
    np.dtype("float32"): "80000000 7fc12345 ffc00001 7f800001 00000001 807fffff 7f800000 ff800000",
    np.dtype("float16"): "8000 7e55 fe01 7c01 0001 83ff 7c00 fc00",
    np.dtype(ml_dtypes.bfloat16): "8000 7fc5 ffc1 7f81 0001 807f 7f80 ff80",
}


@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
@pytest.mark.parametrize("use_ema", [False, True], ids=["compact", "full_shape"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_unusual_bits_of_frozen_weights_survive(dtype, use_ema, mode):
    kernel = keras.Variable(np.ones((8, 2)), dtype=dtype, name="kernel")
    words = [int(word, 16) for word in SPECIAL_BITS[value_of(kernel).dtype].split()]
    start = value_of(kernel)
    bits(start)[:, 0] = words
    kernel.assign(start)
    assert same_bits(value_of(kernel), start)
    optimizer = kf.FreezeOptimizer(sgd(use_ema=use_ema), l2=0.1)
    trained = np.array([[False, True]] * 8)
    optimizer.set_mask(kf.FreezeMask([MaskEntry(0, "kernel", trained)], [kernel]), [kernel])
    step = step_of(optimizer, [kernel], mode)
    for _ in range(2):
        step([tf.ones((8, 2), dtype)])
    assert same_bits(value_of(kernel)[:, 0], start[:, 0])
    assert (value_of(kernel)[:, 1] < 1.0).all()


@each_way
def test_nan_in_a_gradient_stays_where_something_is_trained(way):
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(ko.Adam(0.1, global_clipnorm=1.0), freeze_rate=0.75)
    gradients = random_gradients(variables)
    if way == "freeze":
        kf.freeze(model, mask=quarter(variables), optimizer=optimizer)
    else:
        optimizer.apply(gradients, variables)
    mask, before = optimizer.mask, values_of(variables)
    only_frozen = [
        tf.where(mask[v], g, np.nan) if is_weight(v) else g
        for v, g in zip(variables, gradients, strict=True)
    ]
    optimizer.apply(only_frozen, variables)
    assert all(np.isfinite(value_of(v)).all() for v in variables)
    assert_frozen_bits_kept(variables, mask, before)
    assert_trained_moved(variables, mask, before)
    optimizer.apply([g * np.nan for g in gradients], variables)
    assert_frozen_bits_kept(variables, mask, before)
    assert np.isnan(value_of(variables[0])[mask[variables[0]]]).all()


def constrained_model(constraint):
    keras.utils.set_random_seed(0)
    first = kl.Dense(8, kernel_constraint=constraint, bias_constraint="non_neg")
    return keras.Sequential([keras.Input((6,)), first, kl.Dense(3)])


CONSTRAINTS = {
    "max_norm": keras.constraints.MaxNorm(0.7),
    "non_neg": keras.constraints.NonNeg(),
    "unit_norm": keras.constraints.UnitNorm(),
}
CONSTRAINED_INNER = {
    "momentum": lambda: sgd(0.3, momentum=0.9),
    "adamw": lambda: ko.AdamW(0.1, weight_decay=0.5),
    "ftrl": lambda: ko.Ftrl(0.3),
}


@pytest.mark.parametrize("inner", CONSTRAINED_INNER)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_constraints_see_the_whole_kernel_and_move_only_what_is_trained(constraint, inner):
    """Ours against the bare optimizer on vectors by hand: constrain the kernel, keep the frozen."""
    function = CONSTRAINTS[constraint]
    weights = [value_of(v) for v in constrained_model(None).trainable_variables]
    gradients = random_gradients(constrained_model(None).trainable_variables)
    chosen = mask_by_hand(weights[::2], [g.numpy() for g in gradients[::2]], 0.75)[0]

    vector = keras.Variable(weights[0][chosen])
    bare = CONSTRAINED_INNER[inner]()
    expected = weights[0].copy()
    for _ in range(4):
        vector.assign(expected[chosen])
        bare.apply([tf.boolean_mask(gradients[0], chosen)], [vector])
        expected[chosen] = value_of(vector)
        expected = np.where(chosen, np.array(function(tf.constant(expected))), expected)

    for way in ("freeze", "first_batch"):
        model = constrained_model(function)
        variables = model.trainable_variables
        optimizer = kf.FreezeOptimizer(CONSTRAINED_INNER[inner](), freeze_rate=0.75)
        if way == "freeze":
            masks = mask_by_hand(weights[::2], [g.numpy() for g in gradients[::2]], 0.75)
            paths = [v.path for v in variables[::2]]
            kf.freeze(model, mask=dict(zip(paths, masks, strict=True)), optimizer=optimizer)
        for _ in range(4):
            optimizer.apply(gradients, variables)
        assert np.array_equal(optimizer.mask[variables[0]], chosen)
        found = value_of(variables[0])
        assert same_bits(found[~chosen], weights[0][~chosen])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5, err_msg=way)
        assert (value_of(variables[1]) >= 0).all()


# Scores


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_saliency_that_is_not_finite_is_refused_by_freeze(value):
    x, y = blobs()
    model = compiled(dense_model(), run_eagerly=True)
    kernel = value_of(model.layers[0].kernel)
    kernel[0, 0] = value
    model.layers[0].kernel.assign(kernel)
    before = [value_of(v) for v in model.variables]
    with pytest.raises(ValueError, match=r"NaN|finite"):
        kf.freeze(model, x, y)
    with pytest.raises(ValueError, match="body/kernel"):
        fit(model, x, y)
    assert kf.get_mask(model) is None
    assert all(
        same_bits(value_of(v), old)
        for v, old in zip(model.variables, before, strict=True)
        if v.dtype == "float32" and "moving" not in v.path
    )


@pytest.mark.parametrize("mode", ["eager", "graph", "jit"])
@pytest.mark.parametrize("frozen_weights", ["keep", "zero"])
def test_nan_in_the_first_gradient_leaves_weights_and_optimizer_alone(mode, frozen_weights):
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75, frozen_weights=frozen_weights)
    optimizer.build(variables)
    before = values_of(variables)
    gradients = random_gradients(variables)
    step = step_of(optimizer, variables, mode)
    wrong = [*gradients[:4], gradients[4] + np.nan, gradients[5]]
    if mode == "jit":  # XLA has no way to raise
        step(wrong)
    else:
        with pytest.raises(
            ValueError if mode == "eager" else tf.errors.InvalidArgumentError, match="head/kernel"
        ):
            step(wrong)
    assert all(same_bits(value_of(v), old) for v, old in zip(variables, before, strict=True))
    assert optimizer.mask is None
    assert int(optimizer.iterations) == 0
    step(gradients)
    assert optimizer.mask.num_trained == 18


SCORES = {
    "all_equal": lambda w, g: keras.ops.ones_like(w),
    "zeros_of_both_signs": lambda w, g: 0.0 * keras.ops.sign(w),
    "equal_and_negative": lambda w, g: -keras.ops.ones_like(w),
    "few_values": lambda w, g: keras.ops.round(2.0 * w),
}


@pytest.mark.parametrize("mode", ["freeze", "eager", "graph", "jit"])
@pytest.mark.parametrize("scores", SCORES)
def test_ties_are_broken_by_position_everywhere(scores, mode):
    model = dense_model()
    variables = model.trainable_variables
    start = [value_of(v) for v in variables if is_weight(v)]
    optimizer = kf.FreezeOptimizer(sgd(0.0), freeze_rate=0.25, criterion=SCORES[scores])
    if mode == "freeze":
        kf.freeze(model, *blobs(), loss=crossentropy(), optimizer=optimizer)
    else:
        step_of(optimizer, variables, mode)(random_gradients(variables))
    values = [np.array(SCORES[scores](w, w)) for w in start]
    expected = brute_force_mask(values, sum(v.size for v in values) * 3 // 4)
    for entry, trained in zip(optimizer.mask.entries, expected, strict=True):
        assert np.array_equal(entry.trained, trained)


@each_way
@pytest.mark.parametrize("jit_compile", [False, True])
def test_inputs_that_are_always_zero_do_not_take_all_the_weights(way, jit_compile):
    """Their scores are exactly 0, like a border pixel's; k is kept all the same."""
    x, y = blobs()
    x[:, :5] = 0.0
    model = compiled(dense_model(), kf.FreezeOptimizer(sgd(), 0.25), jit_compile=jit_compile)
    start = values_of(model.trainable_variables)
    weights = [i for i, v in enumerate(model.trainable_variables) if is_weight(v)]
    gradients = gradients_by_autodiff(model, x, y)
    by_hand = mask_by_hand([start[i] for i in weights], [gradients[i] for i in weights], 0.25)
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y, batch_size=48)
    mask = kf.get_mask(model)
    assert mask.num_trained == 54
    assert (gradients[0][:5] == 0).all()
    for i, expected in zip(weights, by_hand, strict=True):
        assert equals_by_hand(mask[model.trainable_variables[i]], expected)
