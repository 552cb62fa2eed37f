"""Changes of the mask in training that goes on: the weights, and the inner optimizer's slots.

A weight that leaves the mask is frozen again: it gets the value that it had before training, or
zero in a pruned network. One that joins the mask goes on from its frozen value, with slots like
those of the first step. All other weights and slots stay, and so do counts of steps and rates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_freeze import _keras_private, backend
from keras_freeze._utils.bits import numpy_dtype
from keras_freeze._utils.threads import exclusive
from keras_freeze._utils.typing import Optimizer
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.optimizer.dense_update import DenseUpdate
from keras_freeze.optimizer.inner_optimizer import averaging_optimizers, fresh_copies, slots_of
from keras_freeze.optimizer.state import relabel
from keras_freeze.optimizer.strategy import has_uniform_slots
from keras_freeze.optimizer.trained_starts import weights_in
from keras_freeze.optimizer.update import Update, make_variable
from keras_freeze.parameters import path_of

if TYPE_CHECKING:
    from keras_freeze.optimizer.masked_optimizer import MaskedOptimizer

_SCALAR = -1


def change_mask(optimizer: "MaskedOptimizer", mask: FreezeMask, compact: bool) -> bool:
    """Set another mask of the same variables, and change to the compact or the dense update.

    For `frozen_weights="keep"` the optimizer must know its `trained_starts`.

    Args:
        optimizer: a FreezeOptimizer that is built and has a mask.
        mask: the mask.
        compact: whether the update is compact from now on.

    Returns:
        Whether functions that were traced before are no longer valid, because the inner optimizer
        has variables of other shapes.
    """
    with exclusive(optimizer):
        before = optimizer.mask
        assert before is not None
        mask = relabel(mask, optimizer.parameters)
        _freeze_what_leaves(optimizer, before, mask)
        # Even where the first batch has decided, it is not why a dense update is dense now.
        return _replace(optimizer, before, mask, compact, by_first_batch=False)


def change_update(optimizer: "MaskedOptimizer", compact: bool) -> None:
    """Change to the compact or the dense update, with the same mask, slots and weights."""
    with exclusive(optimizer):
        mask, update = optimizer.mask, optimizer.update
        assert mask is not None
        assert update is not None
        _replace(optimizer, mask, mask, compact, by_first_batch=update.by_first_batch)


def decide_at_rate(optimizer: "MaskedOptimizer", freeze_rate: float) -> None:
    """Let the first batch decide at another rate than the optimizer's own, in all layers alike.

    At a rate of 0 everything is trained, and this is decided now.
    """
    with exclusive(optimizer):
        optimizer.plan = replace(optimizer.plan, first_rate=freeze_rate)
        optimizer.rebuild(None, optimizer.built_variables)


def has_known_slots(optimizer: "MaskedOptimizer") -> bool:
    """Return whether it is known what the inner optimizer keeps for which weight."""
    return slots_of(optimizer.inner_optimizer) is not None


def _freeze_what_leaves(optimizer: "MaskedOptimizer", before: FreezeMask, mask: FreezeMask) -> None:
    """Set weights that are frozen from now on to their starts or to zero."""
    known = optimizer.trained_starts
    values_before = {}
    for old, new in zip(weights_in(before), weights_in(mask), strict=True):
        variable = optimizer.parameters[old.position].variable
        was_trained = np.flatnonzero(old.trained)
        stays = new.trained.reshape(-1)[was_trained]
        starts = np.zeros(was_trained.size, numpy_dtype(variable.dtype))
        if optimizer.frozen_weights == "keep":
            starts = known.values[old.position].astype(starts.dtype, copy=False)
            is_trained = np.flatnonzero(new.trained)
            of_trained = backend.values_at(variable, is_trained)  # what joins is frozen yet
            of_trained[old.trained.reshape(-1)[is_trained]] = starts[stays]
            values_before[old.position] = of_trained
        if not stays.all():
            backend.assign_at(variable, was_trained[~stays], starts[~stays])
    optimizer.set_trained_starts(replace(known, digest=None, values=values_before))


def _replace(
    optimizer: "MaskedOptimizer",
    before: FreezeMask,
    mask: FreezeMask,
    compact: bool,
    *,
    by_first_batch: bool,
) -> bool:
    """Set a mask and its update, with the slots and values on a grid of what stays trained."""
    update = optimizer.update
    assert update is not None
    grid, was_compact = update.grid_state(), isinstance(update, CompactUpdate)
    is_new = was_compact != compact or not update.accepts(mask, compact)
    slots = _slot_values(update, update.inner) if is_new else {}
    if is_new:
        state = replace(
            optimizer.state, mask=mask, compact=compact, by_first_batch=by_first_batch, grid={}
        )
        optimizer.rebuild(state, optimizer.built_variables)
        update = optimizer.update
        assert update is not None
        fresh = _slot_values(update, update.inner)
    else:
        frozen_variables.keep_current_masks(optimizer)
        update.replace_mask(mask)
        optimizer.propagate_mask(before)
        fresh = _fresh_slots(optimizer, update)
    places = _Places(before, mask, was_compact, compact)
    averages = {
        id(average)
        for inner in averaging_optimizers(update.inner)
        for _, average in _keras_private.moving_averages(inner)
    }
    for name, slot in (slots_of(update.inner) or {}).items():
        if isinstance(slot, list):
            is_average = any(id(one) in averages for one in slot)
            pairs = list(zip(_keys(update), slot, strict=True))
            old = slots[name] if is_new else None
            _write_slots(pairs, places, old, fresh[name], is_average)
        elif is_new:
            slot.assign(slots[name])
    _restore_grid(update, grid, places)
    if isinstance(update, DenseUpdate):
        update.copy_frozen_entries_to_averages()
    return is_new


class _Places:
    """Where the entries that stay trained are, in arrays of before and after a change.

    Attributes:
        trained_after: the flat indices of what is trained after it, by position.
    """

    def __init__(
        self, before: FreezeMask, mask: FreezeMask, was_compact: bool, is_compact: bool
    ) -> None:
        self._was_compact, self._is_compact = was_compact, is_compact
        self._shapes = {entry.position: entry.trained.shape for entry in mask.entries}
        self.trained_after: dict[int, np.ndarray] = {}
        self._trained_before, self._kept = {}, {}
        for old, new in zip(before.entries, mask.entries, strict=True):
            position, trained = old.position, np.flatnonzero(old.trained)
            self._trained_before[position] = trained
            self.trained_after[position] = np.flatnonzero(new.trained)
            self._kept[position] = trained[new.trained.reshape(-1)[trained]]

    def carry_over(self, position: int, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Return `new` with the values of `old` for what stays trained.

        Of a dense update an array is of the shape of a variable, of a compact one it is a vector of
        its trained entries. Where it is something else, such as one of Adafactor's factors, or
        where the variable has no mask, this is `old` if it fits.
        """
        if position not in self._shapes:
            return old
        before, after = self._trained_before[position], self.trained_after[position]
        from_places = self._places(position, old, before, self._was_compact)
        to_places = self._places(position, new, after, self._is_compact)
        if from_places is None or to_places is None:
            return old if old.shape == new.shape else new
        return _merged(old, from_places, new, to_places)

    def carry_over_trained(self, position: int, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Return what `carry_over` does for vectors of trained entries, whatever the updates."""
        kept = self._kept[position]
        from_places = np.searchsorted(self._trained_before[position], kept)
        return _merged(old, from_places, new, np.searchsorted(self.trained_after[position], kept))

    def _places(
        self, position: int, array: np.ndarray, trained: np.ndarray, is_compact: bool
    ) -> np.ndarray | None:
        """Return the flat indices of what stays trained in an array; None if it has none."""
        shape, kept = self._shapes[position], self._kept[position]
        is_whole = not is_compact or trained.size == math.prod(shape)
        if array.shape != (shape if is_whole else trained.shape):
            return None
        return kept if is_whole else np.searchsorted(trained, kept)


def _merged(
    old: np.ndarray, from_places: np.ndarray, new: np.ndarray, to_places: np.ndarray
) -> np.ndarray:
    """Return `new` with entries of `old`; places are flat indices."""
    merged = np.array(new, order="C")
    merged.reshape(-1)[to_places] = old.reshape(-1)[from_places]
    return merged


def _slot_values(update: Update, inner: Optimizer) -> dict[str, Any]:
    """Return the values of an optimizer's slots, by attribute and by what the update gives it."""
    keys = _keys(update)
    return {
        name: {k: backend.to_numpy(v) for k, v in zip(keys, slot, strict=True) if v is not None}
        if isinstance(slot, list)
        else backend.to_numpy(slot)
        for name, slot in (slots_of(inner) or {}).items()
    }


def _keys(update: Update) -> list[int]:
    """Return the positions of what the inner optimizer updates, in order.

    FreezeNet-WD's scalar, which comes last, has the number -1.
    """
    positions = [p.position for p in update.parameters]
    if isinstance(update, CompactUpdate):
        positions = update.positions_in_inner
    return positions if update.decay_scale is None else [*positions, _SCALAR]


def _fresh_slots(optimizer: "MaskedOptimizer", update: Update) -> dict[str, Any]:
    """Return the values that slots have before the first step, of the present weights."""
    if isinstance(update, CompactUpdate):
        update.read_vectors()
    variables = _keras_private.built_variables(update.inner)
    is_uniform = has_uniform_slots(update.inner)
    with backend.strategy_scope(optimizer):
        ((_, fresh),) = fresh_copies(update.inner)
        with backend.slots_of_zeros(fresh):
            # Slots of one entry tell the others without the memory of all.
            fresh.build(list(map(_with_one_entry, variables)) if is_uniform else variables)
    slots = _slot_values(update, fresh)
    if is_uniform:
        shapes = dict(zip(_keys(update), [tuple(v.shape) for v in variables], strict=True))
        for name, values in slots.items():
            if isinstance(values, dict):
                slots[name] = {k: np.broadcast_to(v[0], shapes[k]) for k, v in values.items()}
    return slots


def _with_one_entry(variable: Any) -> Any:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    return make_variable(np.zeros(1), dtype, variable.name, path_of(variable))


def _write_slots(
    slots: Sequence[tuple[int, Any]],
    places: _Places,
    old: Mapping[int, np.ndarray] | None,
    fresh: Mapping[int, np.ndarray],
    is_average: bool,
) -> None:
    """Set slots to the values of before for what stays trained, and to fresh ones elsewhere.

    `old` has the values of before; None if the slots themselves still do.
    """
    for key, slot in slots:
        if slot is None or (old is not None and key not in old):
            continue  # nothing of the variable was trained before
        before = backend.to_numpy(slot) if old is None else old[key]
        # The average of a frozen weight is the weight, so that it goes on from there.
        slot.assign(before if is_average else places.carry_over(key, before, fresh[key]))


def _restore_grid(update: Update, old: Mapping[int, np.ndarray], places: _Places) -> None:
    """Set the values in full precision of what stays trained, and the present ones of the rest."""
    new = update.grid_state()
    for position, state in new.items():
        trained = places.trained_after.get(position)
        if trained is None:
            new[position] = old[position]
            continue
        values = backend.to_numpy(update.parameters[position].variable)
        state[0] = values.reshape(-1)[trained]
        new[position] = np.stack(
            [
                places.carry_over_trained(position, *pair)
                for pair in zip(old[position], state, strict=True)
            ]
        )
    update.restore_grid(new)
