"""What others have reported of optimizers and of masks, with the number of the report."""

import axes
import keras
import loops
import numpy as np
import pytest
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    crossentropy,
    same_bits,
    values_of,
)

import keras_freeze as kf

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)


def model_of(dtype="float32"):
    model, x, y = axes.build("dense", dtype)
    return model, x, y


def scaled(inner):
    return keras.optimizers.LossScaleOptimizer(kf.FreezeOptimizer(inner, 0.5), initial_scale=2.0**8)


def fit(model, x, y, **arguments):
    return model.fit(x, y, batch_size=loops.BATCH, shuffle=False, verbose=0, **arguments)


@pytest.mark.parametrize("name", axes.OPTIMIZERS)
def test_gradients_without_variables_change_the_weights(name):
    """keras#21706: `build(variables)`, then `apply(gradients)`."""
    model, _, _ = model_of()
    optimizer = kf.FreezeOptimizer(axes.OPTIMIZERS[name](), 0.5, criterion="magnitude")
    optimizer.build(model.trainable_variables)
    before = values_of(model.trainable_variables)
    for _ in range(2):  # one that accumulates moves in the second step
        optimizer.apply([keras.ops.ones(v.shape) for v in model.trainable_variables])
    after = values_of(model.trainable_variables)
    assert any(not same_bits(old, new) for old, new in zip(before, after, strict=True))


def test_steps_in_mixed_precision_are_counted_once_each():
    """keras#20878."""
    model, x, y = model_of("mixed_float16")
    model.compile(scaled(keras.optimizers.SGD(0.01)), crossentropy())
    fit(model, x, y)
    assert int(model.optimizer.iterations) == 3


def test_averages_and_mixed_precision_go_together_for_two_epochs():
    """keras#17225."""
    model, x, y = model_of("mixed_float16")
    model.compile(scaled(keras.optimizers.Adam(0.01, use_ema=True)), crossentropy())
    before = values_of(model.trainable_variables)
    fit(model, x, y, epochs=2)
    assert_frozen_bits_kept(model.trainable_variables, kf.get_mask(model), before)
    assert all(np.isfinite(value).all() for value in values_of(model.trainable_variables))


def test_the_inner_optimizers_state_is_saved_and_loaded(tmp_path):
    """addons#2094: a wrapper that forgot what it wraps."""
    model, x, y = model_of()
    model.compile(kf.FreezeOptimizer(keras.optimizers.Adam(0.01), 0.5), crossentropy())
    fit(model, x, y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    ours, theirs = (values_of(m.optimizer.inner_optimizer.variables) for m in (model, loaded))
    assert int(loaded.optimizer.iterations) == 3
    for saved, restored in zip(ours, theirs, strict=True):
        assert same_bits(saved, restored)


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", axes.WAYS)
def test_weight_decay_and_momentum_move_no_masked_weight(way):
    """Unlearn-Saliency#32, PyTorch-Deep-Compression#2."""
    model, x, y = model_of()
    inner = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)
    model.compile(kf.FreezeOptimizer(inner, 0.9, l2=0.1), crossentropy())
    if way == "freeze":
        kf.freeze(model, x[: loops.BATCH], y[: loops.BATCH])
    before = values_of(model.trainable_variables)
    fit(model, x, y, epochs=5)
    mask = kf.get_mask(model)
    assert_frozen_bits_kept(model.trainable_variables, mask, before)
    assert_trained_moved(model.trainable_variables, mask, before)
