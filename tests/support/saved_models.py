"""Models that are frozen, trained, saved to a `.freeze` file and loaded from it."""

import keras
import storage_cases
from helpers import same_bits, value_of

import keras_freeze as kf


def trained(model, *, optimizer=None, reinitialize=True, freeze=True):
    """The model, frozen and trained for a few steps."""
    if reinitialize:
        kf.reinitialize(model, seed=5)
    if optimizer is None:
        optimizer = kf.FreezeOptimizer(keras.optimizers.Adam(1e-2), freeze_rate=0.8)
    model.compile(optimizer=optimizer, loss="mse")
    x, y = storage_cases.data_for(model)
    if freeze:
        kf.freeze(model, x, y)
    storage_cases.train_on(model, x, y)
    return model


def mlp(**arguments):
    return trained(storage_cases.MODELS["mlp"](), **arguments)


def assert_same_variables(first, second):
    assert len(first.variables) == len(second.variables)
    for a, b in zip(first.variables, second.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


def save_and_load(model, folder, **arguments):
    kf.save(model, folder / "model.freeze", **arguments)
    return kf.load(folder / "model.freeze")


METHODS = {
    "keep": {},
    "zero": {"frozen_weights": "zero"},
    "decay": {"frozen_weights": "decay", "l2": 0.05},
}


def storage_rows(folder):
    return kf.storage.inspect(folder / "model.freeze").rows
