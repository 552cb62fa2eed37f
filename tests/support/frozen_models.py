"""A small model that is frozen, and how it is trained and checked."""

import axes
import keras
import loops
from helpers import assert_frozen_bits_kept, assert_trained_moved, crossentropy

import keras_freeze as kf

HALF = 0.5


def model_and_data():
    return axes.build("dense", "float32")


def freezing(rate=HALF, inner=None, **arguments):
    if inner is None:
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
    return kf.FreezeOptimizer(inner, rate, **arguments)


def frozen_model(way="freeze", **arguments):
    """A model, compiled, with a mask by `freeze`, or one that its first batch will find."""
    model, x, y = model_and_data()
    model.compile(freezing(**arguments), crossentropy())
    if way == "freeze":
        kf.freeze(model, x[: loops.BATCH], y[: loops.BATCH])
    return model, x, y


def fit(model, x, y=None, **arguments):
    arguments = {"batch_size": loops.BATCH if y is not None else None, **arguments}
    return model.fit(x, y, shuffle=False, verbose=0, **arguments)


def check_training(model, before):
    mask = kf.get_mask(model)
    assert_frozen_bits_kept(model.trainable_variables, mask, before)
    assert_trained_moved(model.trainable_variables, mask, before)
    return mask
