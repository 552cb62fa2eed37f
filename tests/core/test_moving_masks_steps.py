"""Masks that change while a LossScaleOptimizer skips batches, which are no training steps."""

import keras
import numpy as np
import pytest
from helpers import blobs, crossentropy, same_bits, value_of

import keras_freeze as kf

X, Y = blobs(num=32)


def recording(kind, changes, **arguments):
    """A callback that notes after which steps it changes, and what the optimizer counts then."""

    class Recording(kind):
        def change(self, model, optimizer, mask, step):
            changes.append((step, int(value_of(optimizer.inner_optimizer.iterations))))
            super().change(model, optimizer, mask, step)

    Recording.__name__ = kind.__name__
    return Recording(**arguments)


def regrow(changes):
    arguments = {"fraction": 0.5, "frequency": 3, "criterion": "random"}
    return recording(kf.callbacks.RegrowTrained, changes, **arguments)


def gradual(changes):
    arguments = {"initial_rate": 0.0, "final_rate": 0.8, "begin": 2, "end": 9, "frequency": 2}
    return recording(kf.callbacks.GradualFreezing, changes, **arguments)


def train(schedule, calls_of_fit, epochs):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(8, "tanh", dtype="mixed_float16"),
        keras.layers.Dense(3, dtype="float32"),
    ]
    model = keras.Sequential([keras.Input((6,)), *layers])
    inner = kf.FreezeOptimizer(keras.optimizers.SGD(0.05, momentum=0.9), 0.8)
    # Gradients overflow until the scale has been halved a few times.
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**30)
    model.compile(optimizer, crossentropy())
    if schedule is regrow:
        kf.freeze(model, X, Y)
    changes = []
    for _ in range(calls_of_fit):
        arguments = {"batch_size": 8, "shuffle": False, "verbose": 0, "epochs": epochs}
        model.fit(X, Y, callbacks=[schedule(changes)], **arguments)
    return model, changes, int(value_of(inner.inner_optimizer.iterations))


@pytest.mark.cases(1)
@pytest.mark.parametrize("schedule", [regrow, gradual])
def test_batches_that_are_skipped_are_no_steps(schedule):
    model, changes, num_steps = train(schedule, 1, 6)
    assert 9 <= num_steps < 24
    assert changes
    assert all(step == count for step, count in changes)
    again, changes_again, _ = train(schedule, 3, 2)
    assert changes_again == changes
    assert kf.get_mask(again) == kf.get_mask(model)
    for one, other in zip(again.weights, model.weights, strict=True):
        assert same_bits(value_of(one), value_of(other)), one.path
    assert np.isfinite(value_of(model.weights[0])).all()


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("num_updates", [1, 2, 3])
def test_a_batch_of_several_updates_is_as_many_steps(num_updates):
    """As in a `train_step` that trains a network several times with one batch."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    optimizer = kf.FreezeOptimizer("sgd", 0.8)
    model.compile(optimizer, crossentropy())
    kf.freeze(model, X, Y)
    changes = []
    arguments = {"fraction": 0.5, "frequency": 4, "criterion": "random"}
    callback = recording(kf.callbacks.RegrowTrained, changes, **arguments)
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    gradients = [keras.ops.ones(variable.shape) for variable in model.trainable_variables]
    for batch in range(12):
        for _ in range(num_updates):
            optimizer.apply(gradients, model.trainable_variables)
        callback.on_train_batch_end(batch)
    ends = {-(-step // num_updates) * num_updates for step in range(4, 12 * num_updates + 1, 4)}
    assert [count for _, count in changes] == sorted(ends)
