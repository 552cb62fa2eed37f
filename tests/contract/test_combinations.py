"""Every optimizer with every layer in every precision and loop: what is frozen keeps its bits."""

import math

import axes
import keras
import loops
import pytest
from helpers import assert_frozen_bits_kept, is_weight, same_bits, values_of

import keras_freeze as kf

FREEZE_RATE = 0.75


def outer(optimizer, dtype):
    """As Keras does in `compile` for this precision."""
    is_scaled = dtype == "mixed_float16"
    return keras.optimizers.LossScaleOptimizer(optimizer) if is_scaled else optimizer


def train(optimizer, layer, dtype, loop, prepare_mask=lambda *_: None):
    """Trains a network; gives its variables and their values before and after."""
    model, x, y = axes.build(layer, dtype)
    prepare, run = loops.loop(loop, optimizer)
    prepare(model)
    prepare_mask(model, x[:8], y[:8])
    if not model.built:
        model(x[:1])
    before = values_of(model.trainable_variables)
    run(model, x, y)
    for _ in range(8):  # a loss scale that is too large lets nothing happen
        if dtype == "mixed_float16" and not float(optimizer.iterations):
            run(model, x, y)
    return model.trainable_variables, before, values_of(model.trainable_variables)


def has_moved(before, after):
    return any(not same_bits(*pair) for pair in zip(before, after, strict=True))


def check(name, layer, dtype, loop, way):
    freezing = kf.FreezeOptimizer(axes.OPTIMIZERS[name](), FREEZE_RATE)
    whole = outer(freezing, dtype)

    def freeze(model, x, y):
        if way == "freeze":
            kf.freeze(model, x, y, loss=loops.loss(), optimizer=whole)

    variables, before, after = train(whole, layer, dtype, loop, freeze)
    mask = freezing.mask
    num_weights = sum(math.prod(v.shape) for v in variables if is_weight(v))
    num_rescued = mask.num_trained - math.floor((1 - FREEZE_RATE) * num_weights)
    assert mask.num_weights == num_weights
    assert 0 <= num_rescued <= sum(map(is_weight, variables))
    assert_frozen_bits_kept(variables, mask, before)
    assert int(freezing.iterations) > 0
    return has_moved(before, after)


def train_plainly(name, layer, dtype, loop):
    optimizer = outer(axes.OPTIMIZERS[name](), dtype)
    return has_moved(*train(optimizer, layer, dtype, loop)[1:])


def test_frozen_weights_keep_their_bits_and_the_rest_is_trained(combination):
    try:
        has_trained = check(*combination)
    except AssertionError:
        raise
    except Exception as error:
        with pytest.raises(type(error.__cause__ or error)):
            train_plainly(*combination[:-1])
        pytest.skip(f"plain Keras fails alike: {type(error).__name__}: {str(error)[:100]}")
    if not has_trained:
        assert not train_plainly(*combination[:-1])
        pytest.skip("plain Keras trains nothing either")
