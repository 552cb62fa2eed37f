"""Every optimizer, layer, precision, loop and strategy: what is frozen keeps its bits."""

import math
import re

import axes
import keras
import loops
import pytest
from helpers import assert_frozen_bits_kept, crossentropy, is_weight, same_bits, values_of

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


def what_moves(variables, before, after):
    """Whether some weight has moved, and whether some other parameter has."""
    moved = {
        is_weight(variable)
        for variable, old, new in zip(variables, before, after, strict=True)
        if not same_bits(old, new)
    }
    return True in moved, False in moved


def check(name, layer, dtype, loop, way):
    freezing = kf.FreezeOptimizer(axes.OPTIMIZERS[name](), FREEZE_RATE)
    whole = outer(freezing, dtype)

    def freeze(model, x, y):
        if way == "freeze":
            kf.freeze(model, x, y, loss=crossentropy(), optimizer=whole)

    variables, before, after = train(whole, layer, dtype, loop, freeze)
    mask = freezing.mask
    num_weights = sum(math.prod(v.shape) for v in variables if is_weight(v))
    num_rescued = mask.num_trained - math.floor((1 - FREEZE_RATE) * num_weights)
    assert mask.num_weights == num_weights
    assert 0 <= num_rescued <= sum(map(is_weight, variables))
    assert_frozen_bits_kept(variables, mask, before)
    assert int(freezing.iterations) > 0
    return what_moves(variables, before, after)


def train_plainly(name, layer, dtype, loop):
    optimizer = outer(axes.OPTIMIZERS[name](), dtype)
    return what_moves(*train(optimizer, layer, dtype, loop))


def words(error):
    """What an error says, without the numbers of names."""
    return type(error), re.sub(r"_?\d+", "", str(error))[:60]


@pytest.mark.cases(3, tensorflow=1, jax=1)
@pytest.mark.parametrize("combination", axes.COMBINATIONS, ids="-".join)
def test_frozen_weights_keep_their_bits_and_the_rest_is_trained(combination):
    moving, ours = None, None
    try:
        moving = check(*combination)
    except AssertionError:
        raise
    except Exception as error:
        ours = error
    if ours is not None:
        with pytest.raises(Exception) as plain:  # noqa: PT011 - compared below
            train_plainly(*combination[:-1])
        assert words(plain.value) in (words(ours), words(ours.__cause__))
        pytest.skip(f"plain Keras fails alike: {type(ours).__name__}: {str(ours)[:100]}")
    if moving != (True, True):
        assert moving == train_plainly(*combination[:-1])
        pytest.skip(f"plain Keras trains no more either: weights, others: {moving}")
