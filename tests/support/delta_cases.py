"""A pretrained network, and networks that are trained on it."""

import keras
import numpy as np
import storage_cases
from helpers import same_bits, sgd, value_of
from keras import layers

import keras_freeze as kf


def pretrained(seed=0, classes=3):
    """A network that was trained whole, so that no seed gives its weights."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((8, 6)),
            layers.Flatten(),
            layers.Dense(40, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.1),
            layers.Dense(20, activation="relu"),
            layers.Dense(classes),
        ]
    )
    model.compile(optimizer="adam", loss="mse")
    storage_cases.train_on(model, *storage_cases.data_for(model))
    return model


def copy_of(model):
    copied = keras.models.clone_model(model)
    copied.set_weights(model.get_weights())
    return copied


def adapted(base, seed=1, rate=0.9, **arguments):
    """A copy of the base that is trained by a few per cent on other targets."""
    model = copy_of(base)
    optimizer = kf.FreezeOptimizer(sgd(0.05, momentum=0.9), rate, **arguments)
    model.compile(optimizer=optimizer, loss="mse")
    x, y = storage_cases.data_for(model)
    y = y + np.random.default_rng(seed).normal(size=y.shape).astype("float32")
    kf.freeze(model, x, y)
    storage_cases.train_on(model, x, y)
    return model


def weights(model):
    """The variables of a model but for random states, which belong to no delta."""
    return [v for v in model.variables if not v.path.endswith("seed_generator_state")]


def assert_same_weights(first, second):
    for a, b in zip(weights(first), weights(second), strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


def count_changed(model, base):
    """How many values of a model are not those of its base."""
    pairs = zip(model.get_weights(), base.get_weights(), strict=True)
    return sum(np.count_nonzero(a != b) for a, b in pairs)


def changed_by(delta, base):
    """How many values a delta changes, which goes on its base as `load` says and off again.

    `delta` and `base` are paths of files.
    """
    device, start = keras.models.load_model(base), keras.models.load_model(base)
    kf.apply_delta(device, delta)
    assert count_changed(device, kf.load(delta, base=base)) == 0
    changed = count_changed(device, start)
    kf.remove_delta(device, delta)
    assert count_changed(device, start) == 0
    return changed
