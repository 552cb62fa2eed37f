"""Moving averages of the weights, which `fit` evaluates: frozen bits and pruned zeros."""

import keras
import numpy as np
import pytest
from helpers import (
    assert_frozen_bits_kept,
    blobs,
    compiled,
    dense_model,
    fit,
    is_weight,
    same_bits,
    sgd,
    value_of,
    values_of,
)
from keras import optimizers as ko

import keras_freeze as kf

pytestmark = pytest.mark.cases(1)

NESTINGS = {
    "alone": lambda inner: kf.FreezeOptimizer(inner, freeze_rate=0.75),
    "in_loss_scaling": lambda inner: ko.LossScaleOptimizer(kf.FreezeOptimizer(inner, 0.75)),
    "in_multi": lambda inner: ko.MultiOptimizer(
        ko.OptimizerMap(kf.FreezeOptimizer(inner, freeze_rate=0.75))
    ),
    "around_multi": lambda inner: kf.FreezeOptimizer(
        ko.MultiOptimizer(ko.OptimizerMap(inner)), freeze_rate=0.75
    ),
}


@pytest.mark.parametrize("nesting", NESTINGS)
def test_swapped_averages_are_evaluated_and_leave_frozen_bits(nesting):
    """keras#22959: evaluation sees the averages of trained weights, training goes on without."""
    x, y = blobs()
    inner = sgd(0.5, use_ema=True, ema_momentum=0.5)
    model = compiled(dense_model(), NESTINGS[nesting](inner))
    start = values_of(model.trainable_variables)
    kf.freeze(model, x, y)
    variables, mask = model.trainable_variables, kf.get_mask(model)
    averages, raw, evaluated = [None], [], []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raw.append(values_of(variables))
            averages.append(
                raw[-1]
                if averages[-1] is None
                else [0.5 * a + 0.5 * b for a, b in zip(averages[-1], raw[-1], strict=True)]
            )

        def on_test_begin(self, logs=None):
            evaluated.append(values_of(variables))

    callbacks = [keras.callbacks.SwapEMAWeights(), Watch()]
    fit(model, x, y, batch_size=16, epochs=2, callbacks=callbacks, validation_data=(x, y))
    assert len(evaluated) == 2
    for found, step in zip(evaluated, (3, 6), strict=True):
        assert_frozen_bits_kept_in(found, variables, mask, start)
        for a, b, last in zip(found, averages[step], raw[step - 1], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
            assert not np.allclose(a, last, rtol=1e-4, atol=1e-5)
    assert_frozen_bits_kept(variables, mask, start)
    for v, average in zip(variables, averages[-1], strict=True):
        np.testing.assert_allclose(value_of(v), average, rtol=1e-4, atol=1e-5)


def assert_frozen_bits_kept_in(values, variables, mask, start):
    for value, v, old in zip(values, variables, start, strict=True):
        if is_weight(v):
            assert same_bits(value[~mask[v]], old[~mask[v]])


@pytest.mark.parametrize("do", ["prune", "zero"])
def test_pruned_weights_are_zero_in_the_averages_too(do):
    """Or the next swap, or the end of `fit`, would bring the old ones back."""
    x, y = blobs()
    optimizer = kf.FreezeOptimizer(
        sgd(use_ema=True), 0.75, frozen_weights="zero" if do == "zero" else "keep"
    )
    model = compiled(dense_model(), optimizer, run_eagerly=True)
    kf.freeze(model, x, y)
    if do == "prune":
        fit(model, x, y)
        kf.prune(model)
    variables, mask = model.trainable_variables, kf.get_mask(model)
    swap = keras.callbacks.SwapEMAWeights()
    seen = []
    watch = keras.callbacks.LambdaCallback()
    watch.on_test_begin = lambda logs=None: seen.append(values_of(variables))
    if do == "zero":
        fit(model, x, y)
    model.evaluate(x, y, verbose=0, callbacks=[swap, watch])
    optimizer.finalize_variable_values(variables)
    for values in (*seen, values_of(variables)):
        for v, value in zip(variables, values, strict=True):
            assert not is_weight(v) or (value[~mask[v]] == 0).all()
    assert len(seen) == 1
