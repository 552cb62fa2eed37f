"""The `.freeze` file: a network as a seed, a mask and a few values (docs/format.md)."""

from keras_freeze.storage.deltas import apply_delta, remove_delta
from keras_freeze.storage.errors import FreezeFileError
from keras_freeze.storage.inspection import Inspection, inspect
from keras_freeze.storage.loading import load
from keras_freeze.storage.saving import save

__all__ = [
    "FreezeFileError",
    "Inspection",
    "apply_delta",
    "inspect",
    "load",
    "remove_delta",
    "save",
]
