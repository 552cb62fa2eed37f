"""Train a few per cent of a network's weights; leave the rest at their random start.

An implementation of "FreezeNet: Full Performance by Reduced Storage Costs" for Keras 3.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from keras_freeze import _aliases
from keras_freeze._version import __version__


def _is_command_line() -> bool:
    """Return whether Python was started as `python -m keras_freeze`.

    Python looks for the module to run, and so imports this package, with "-m" as `sys.argv[0]`;
    what follows are the module's arguments, as at the end of `sys.orig_argv`. The name before them
    may stand behind "-m" in one word, as in `python -Imkeras_freeze`.
    """
    if getattr(sys, "argv", [""])[:1] != ["-m"]:
        return False
    word = sys.orig_argv[-len(sys.argv)]
    return (word.partition("m")[2] if word.startswith("-") else word) == __name__


# Importing the package registers FreezeOptimizer with Keras, so that `keras.models.load_model`
# finds it. The command line imports the modules that it needs and no others: what is in a file can
# be shown without Keras and a backend, which take seconds to start. For other commands,
# command_line/main.py runs this module once more, and then as it is imported everywhere else.
if TYPE_CHECKING or not _is_command_line():
    from keras_freeze import initializers
    from keras_freeze.criteria.scoring import compute_saliency
    from keras_freeze.freezing import freeze, unfreeze
    from keras_freeze.gradients.flow import gradient_flow
    from keras_freeze.masks.mask import FreezeMask
    from keras_freeze.model_state import get_mask
    from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
    from keras_freeze.pruning import PruningCheck, check_pruning, prune
    from keras_freeze.quantization import Quantization, quantize
    from keras_freeze.reinitialization import reinitialize
    from keras_freeze.reporting import report
    from keras_freeze.restricted.layers import (
        restore_gradients,
        restrict_gradients,
        value_and_grad,
    )
    from keras_freeze.storage import (
        DeltaPublisher,
        DeltaSet,
        FreezeFileError,
        apply_delta,
        follow,
        load,
        remove_delta,
        save,
    )
    from keras_freeze.trained_vector import get_trained, set_trained

_aliases.install()

# Loaded when first used: what they import (data sets, plots) is optional and slow.
_LAZY_MODULES = (
    "callbacks",
    "criteria",
    "datasets",
    "experiments",
    "models",
    "paper",
    "plots",
    "runs",
    "saliency",
    "training",
    "tuning",
)

__all__ = [
    "DeltaPublisher",
    "DeltaSet",
    "FreezeFileError",
    "FreezeMask",
    "FreezeOptimizer",
    "PruningCheck",
    "Quantization",
    "__version__",
    "apply_delta",
    "check_pruning",
    "compute_saliency",
    "follow",
    "freeze",
    "get_mask",
    "get_trained",
    "gradient_flow",
    "initializers",
    "load",
    "prune",
    "quantize",
    "reinitialize",
    "remove_delta",
    "report",
    "restore_gradients",
    "restrict_gradients",
    "save",
    "set_trained",
    "storage",
    "unfreeze",
    "value_and_grad",
    *_LAZY_MODULES,
]


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY_MODULES or name in _aliases.ALIASES:
        return importlib.import_module(f"keras_freeze.{name}")
    raise AttributeError(f"module 'keras_freeze' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
