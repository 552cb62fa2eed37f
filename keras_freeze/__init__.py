"""Train a few per cent of a network's weights; leave the rest at their random start.

An implementation of "FreezeNet: Full Performance by Reduced Storage Costs" for Keras 3.
"""

import importlib
from typing import Any

from keras_freeze._version import __version__

# Public name -> the module that defines it. Resolved on first use, so that importing the package
# costs nothing until something in it is used.
_EXPORTS = {
    "FreezeMask": "mask",
    "FreezeOptimizer": "optimizer",
    "compute_saliency": "freezing",
    "freeze": "freezing",
    "get_mask": "freezing",
    "prune": "freezing",
    "reinitialize": "freezing",
    "report": "report",
}
_MODULES = ("datasets", "initializers", "models", "plots", "training")

__all__ = ["__version__", *sorted(_EXPORTS), *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f"keras_freeze.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"keras_freeze.{name}")
    raise AttributeError(f"module 'keras_freeze' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
