"""How arrays become the state of a FreezeOptimizer, for Keras's `set_weights`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze import backend
from keras_freeze.masks import frozen_variables
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.optimizer.state import State
from keras_freeze.optimizer.trained_starts import TrainedStarts

if TYPE_CHECKING:
    from keras_freeze.optimizer.masked_optimizer import MaskedOptimizer


def set_weights(optimizer: "MaskedOptimizer", weights: Sequence[Any]) -> None:
    """Set an optimizer's `variables`; see `FreezeOptimizer.set_weights`.

    Raises:
        ValueError: if the optimizer is not built, or numbers or shapes differ.
    """
    if not optimizer.built:
        raise ValueError("`set_weights` needs an optimizer that is built.")
    problem = _problem_with(optimizer, weights)
    if problem and not _goes_back_to_first_batch(optimizer, weights):
        raise ValueError(problem)
    before = optimizer.mask
    frozen_variables.keep_current_masks(optimizer)
    for variable, weight in _settable(optimizer, weights):
        variable.assign(weight)
    if optimizer.update is not None:
        optimizer.update.forget_values()
    optimizer.propagate_mask(before)
    if optimizer.mask != before:
        optimizer.set_trained_starts(TrainedStarts())


def _settable(optimizer: "MaskedOptimizer", weights: Sequence[Any]) -> list[tuple[Any, Any]]:
    # Markers hold no values, and have another shape for each mask.
    pairs = list(zip(optimizer.variables, weights, strict=True))
    return pairs[optimizer.num_trace_markers :]


def _problem_with(optimizer: "MaskedOptimizer", weights: Sequence[Any]) -> str:
    """Return what is wrong with arrays for `variables`; nothing if they fit."""
    if len(weights) != len(optimizer.variables):
        return (
            f"Argument `weights` must have {len(optimizer.variables)} arrays. "
            f"Received: {len(weights)}."
        )
    for variable, weight in _settable(optimizer, weights):
        if tuple(variable.shape) != tuple(np.shape(weight)):
            return (
                f"Argument `weights`: the optimizer variable {variable.path!r} has shape "
                f"{tuple(variable.shape)}. Received: shape {tuple(np.shape(weight))}."
            )
    return ""


def _goes_back_to_first_batch(optimizer: "MaskedOptimizer", weights: Sequence[Any]) -> bool:
    """Use the update of the first batch again if arrays fit it; return whether they do."""
    if not isinstance(optimizer.update, CompactUpdate) or not optimizer.update.by_first_batch:
        return False
    state, values = optimizer.state, [backend.to_numpy(v) for v in optimizer.variables]
    optimizer.rebuild(State(None, compact=False), optimizer.built_variables)
    if not _problem_with(optimizer, weights):
        return True
    optimizer.rebuild(state, optimizer.built_variables)
    for variable, value in _settable(optimizer, values):
        variable.assign(value)
    return False
