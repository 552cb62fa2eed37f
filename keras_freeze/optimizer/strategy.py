"""The choice of an update strategy: compact or dense."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_freeze._keras_private import public_optimizer_class
from keras_freeze.criteria.criteria import Criterion
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.optimizer.checkpoint import State, relabel
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.optimizer.dense_update import DenseUpdate
from keras_freeze.optimizer.phase import BuildPlan
from keras_freeze.optimizer.update import Update
from keras_freeze.parameters import Parameter

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
    everything_trained = all(entry.trained.all() for entry in mask.entries)
    can_be_compact = public_optimizer_class(inner) in COORDINATE_WISE and not inner.use_ema
    return everything_trained or can_be_compact


def make_update(
    inner: Any,
    parameters: Sequence[Parameter],
    plan: BuildPlan,
    *,
    freeze_rate: float,
    criterion: str | Criterion,
    frozen_weights: str,
    l2: float,
    seed: int,
) -> Update:
    """Return the update for a FreezeOptimizer that is being built, and build the inner optimizer.

    Args:
        inner: the inner optimizer.
        parameters: the variables, classified.
        plan: the state or the counts to start from; with neither, the first batch decides.
        freeze_rate, criterion, frozen_weights, l2, seed: as for the FreezeOptimizer.

    Raises:
        ValueError: if the state belongs to another network.
    """
    state = plan.state
    # Keras builds the optimizer of a legacy `.h5` file for no variables.
    if state is None and parameters and _counts_fit(plan, parameters):
        assert plan.trained_counts is not None
        return CompactUpdate(inner, parameters, frozen_weights, l2, plan.trained_counts, None)
    if state is None and freeze_rate == 0.0:
        state = State(_everything_trained(parameters), compact=True)
    mask = None
    if state is not None and state.mask is not None:
        mask = relabel(state.mask, parameters)
    update: Update
    if mask is not None and state is not None and state.compact:
        counts = _count_trained(mask, len(parameters))
        update = CompactUpdate(inner, parameters, frozen_weights, l2, counts, mask)
    else:
        update = DenseUpdate(
            inner, parameters, frozen_weights, l2, mask, freeze_rate, criterion, seed
        )
        update.by_first_batch = mask is None or (state is not None and state.by_first_batch)
    if state is not None and state.decay_scale is not None and update.decay_scale is not None:
        update.decay_scale.assign(state.decay_scale)
    return update


def _counts_fit(plan: BuildPlan, parameters: Sequence[Parameter]) -> bool:
    """Return whether a configuration gave counts of trained entries that fit these variables."""
    counts = plan.trained_counts
    return (
        counts is not None
        and len(counts) == len(parameters)
        and all(c is None or c <= p.size for c, p in zip(counts, parameters, strict=True))
    )


def _everything_trained(parameters: Sequence[Parameter]) -> FreezeMask:
    return FreezeMask(
        [
            MaskEntry(p.position, p.path, np.ones(tuple(p.variable.shape), bool))
            for p in parameters
            if p.is_frozen_candidate
        ]
    )


def _count_trained(mask: FreezeMask, num_variables: int) -> list[int | None]:
    counts: list[int | None] = [None] * num_variables
    for entry in mask.entries:
        counts[entry.position] = int(entry.trained.sum())
    return counts
