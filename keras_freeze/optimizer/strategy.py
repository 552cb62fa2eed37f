"""The choice of an update strategy: compact or dense."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_freeze._keras_private import public_optimizer_class
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.optimizer.compact_update import CompactUpdate, count_trained
from keras_freeze.optimizer.dense_update import DenseUpdate
from keras_freeze.optimizer.state import State, relabel
from keras_freeze.optimizer.update import Update
from keras_freeze.parameters import Parameter

if TYPE_CHECKING:
    from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer

# Optimizers that treat every coordinate alike, so that training a vector of the trained entries
# is the same as training the whole variable with a masked gradient. Exact classes: a subclass may
# do anything.
COORDINATE_WISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    keras.optimizers.ScheduleFreeAdamW,
)


def suits_compact(inner: Any, mask: FreezeMask) -> bool:
    """Return whether an inner optimizer gives the same result with the trained weights alone."""
    return all(entry.trained.all() for entry in mask.entries) or is_coordinate_wise(inner)


def is_coordinate_wise(inner: Any) -> bool:
    """Return whether an inner optimizer is known to update each coordinate by itself."""
    return public_optimizer_class(inner) in COORDINATE_WISE and not inner.use_ema


def has_uniform_slots(inner: Any) -> bool:
    """Return whether all entries of each of an inner optimizer's slots are known to start alike."""
    # This one has a momentum that starts at the weights.
    starts_at_weights = public_optimizer_class(inner) is keras.optimizers.ScheduleFreeAdamW
    return is_coordinate_wise(inner) and not starts_at_weights


def make_update(optimizer: "FreezeOptimizer", parameters: Sequence[Parameter]) -> Update:
    """Return the update for a FreezeOptimizer that is being built, and build its inner optimizer.

    It starts from the state or the counts in the optimizer's `plan`; with neither, the first batch
    decides.

    Raises:
        ValueError: if the state belongs to another network.
    """
    state, counts = optimizer.plan.state, optimizer.plan.trained_counts
    if state is None:
        # Keras builds the optimizer of a legacy `.h5` file for no variables.
        if parameters and counts is not None and _counts_fit(counts, parameters):
            return CompactUpdate(optimizer, parameters, counts, None)
        is_all_trained = optimizer.trains_everything
        mask = _everything_trained(parameters) if is_all_trained else None
        state = State(mask, compact=is_all_trained)
    mask = None if state.mask is None else relabel(state.mask, parameters)
    update: Update
    if mask is not None and state.compact:
        update = CompactUpdate(optimizer, parameters, count_trained(mask, len(parameters)), mask)
    else:
        update = DenseUpdate(optimizer, parameters, mask)
    update.by_first_batch = mask is None or state.by_first_batch
    if state.decay_scale is not None and update.decay_scale is not None:
        update.decay_scale.assign(state.decay_scale)
    update.restore_grid(state.grid)
    return update


def _counts_fit(counts: Sequence[int | None], parameters: Sequence[Parameter]) -> bool:
    return len(counts) == len(parameters) and all(
        c is None or c <= p.size for c, p in zip(counts, parameters, strict=True)
    )


def _everything_trained(parameters: Sequence[Parameter]) -> FreezeMask:
    return FreezeMask(
        [
            MaskEntry(p.position, p.path, np.ones(tuple(p.variable.shape), bool))
            for p in parameters
            if p.is_frozen_candidate
        ]
    )
