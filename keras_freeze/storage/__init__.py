"""The `.freeze` file: a network as a seed, a mask and a few values (docs/file_format.md).

Names are imported when they are first used: `inspect` needs neither Keras nor a backend.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keras_freeze.grids import Bits, Grid
    from keras_freeze.storage.delta_set import DeltaSet
    from keras_freeze.storage.deltas import apply_delta, remove_delta
    from keras_freeze.storage.errors import FreezeFileError
    from keras_freeze.storage.inspection import Inspection, inspect
    from keras_freeze.storage.loading import load
    from keras_freeze.storage.saving import save
    from keras_freeze.storage.streams.follower import Follower, follow
    from keras_freeze.storage.streams.publisher import DeltaPublisher

_MODULES = {
    "Bits": "grids",
    "DeltaPublisher": "storage.streams.publisher",
    "DeltaSet": "storage.delta_set",
    "Follower": "storage.streams.follower",
    "FreezeFileError": "storage.errors",
    "Grid": "grids",
    "Inspection": "storage.inspection",
    "apply_delta": "storage.deltas",
    "follow": "storage.streams.follower",
    "inspect": "storage.inspection",
    "load": "storage.loading",
    "remove_delta": "storage.deltas",
    "save": "storage.saving",
}

__all__ = [
    "Bits",
    "DeltaPublisher",
    "DeltaSet",
    "Follower",
    "FreezeFileError",
    "Grid",
    "Inspection",
    "apply_delta",
    "follow",
    "inspect",
    "load",
    "remove_delta",
    "save",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        module = importlib.import_module(f"keras_freeze.{_MODULES[name]}")
        return getattr(module, name)
    raise AttributeError(f"module 'keras_freeze.storage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
