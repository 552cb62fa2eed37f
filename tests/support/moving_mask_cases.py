"""What tests of moving masks share: data, callbacks that move the mask, and one that watches."""

import itertools

import keras
import numpy as np
from helpers import blobs, compiled, same_bits, sgd, two_dense_layers, value_of

import keras_freeze as kf
from keras_freeze.callbacks import GradualFreezing, RegrowTrained

X, Y = blobs()


class Watch(keras.callbacks.Callback):
    """Checks after each step that every weight outside the mask has its frozen value."""

    def __init__(self, model):
        super().__init__()
        self.starts = {v.path: value_of(v) for v in model.trainable_variables}
        self.masks = []

    def on_train_batch_end(self, batch, logs=None):
        mask = kf.get_mask(self.model)
        optimizer = self.model.optimizer
        for variable in self.model.trainable_variables:
            entry = mask.find(variable)
            if entry is None:
                continue
            start = self.starts[variable.path]
            expected = start if optimizer.frozen_weights == "keep" else np.zeros_like(start)
            frozen = ~entry.trained
            assert same_bits(value_of(variable)[frozen], expected[frozen]), (batch, variable.path)
        self.masks.append(mask)

    @property
    def counts(self):
        return [mask.num_trained for mask in self.masks]

    @property
    def num_changes(self):
        return sum(a != b for a, b in itertools.pairwise(self.masks))


def rigl(frequency=3, fraction=0.4, **arguments):
    return RegrowTrained(fraction, frequency, "gradient", x=X, y=Y, batch_size=16, **arguments)


def gradual(initial=0.0, final=0.9, begin=2, end=9, frequency=2, **arguments):
    return GradualFreezing(initial, final, begin, end, frequency, **arguments)


SCHEDULES = {
    "rigl": (0.7, rigl),
    "set": (0.7, lambda: RegrowTrained(0.4, 3, "random")),
    "gradual": (0.0, gradual),
    "gradual from a half": (0.5, lambda: gradual(0.5)),
}


def train(model, *callbacks, epochs=2, **arguments):
    model.fit(
        X,
        Y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        **arguments,
    )


def with_loaded_weights(**arguments):
    """A model whose starts no initializer gives."""
    model = two_dense_layers()
    model.set_weights([value + 1 for value in model.get_weights()])
    return compiled(model, kf.FreezeOptimizer(sgd(), 0.7, **arguments))
