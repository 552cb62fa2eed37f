"""Changes of the mask in training that goes on: the weights, and the inner optimizer's slots.

A weight that leaves the mask is frozen again: it gets the value that it had before training, or
zero in a pruned network. One that joins the mask goes on from its frozen value, with slots like
those of the first step. All other weights and slots stay, and so do counts of steps and rates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze import _keras_private, backend
from keras_freeze._utils.bits import as_bits
from keras_freeze._utils.threads import exclusive
from keras_freeze.initializers.of_layers import draw
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.optimizer.dense_update import DenseUpdate
from keras_freeze.optimizer.inner_optimizer import fresh_copies, slots_of
from keras_freeze.optimizer.state import relabel
from keras_freeze.optimizer.update import Update

if TYPE_CHECKING:
    from keras_freeze.optimizer.masked_optimizer import MaskedOptimizer

_AVERAGES = "_model_variables_moving_average"
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
        return _replace(optimizer, before, mask, compact)


def change_update(optimizer: "MaskedOptimizer", compact: bool) -> None:
    """Change to the compact or the dense update, with the same mask, slots and weights."""
    with exclusive(optimizer):
        mask = optimizer.mask
        assert mask is not None
        _replace(optimizer, mask, mask, compact)


def decide_at_rate(optimizer: "MaskedOptimizer", freeze_rate: float) -> None:
    """Let the first batch decide at another rate than the optimizer's own, in all layers alike.

    At a rate of 0 everything is trained, and this is decided now.
    """
    with exclusive(optimizer):
        distribution = optimizer.distribution
        if isinstance(distribution, tuple):
            distribution = tuple((pattern, freeze_rate) for pattern, _ in distribution)
        own = {name: getattr(optimizer, name) for name in ("freeze_rate", "distribution")}
        # Past the check that refuses to change settings of an optimizer that is built.
        optimizer.__dict__.update(freeze_rate=freeze_rate, distribution=distribution)
        try:
            optimizer.rebuild(None, optimizer.built_variables)
        finally:
            optimizer.__dict__.update(own)
        optimizer.set_starts(optimizer.starts)  # registers the optimizer's own settings again


def has_known_slots(optimizer: "MaskedOptimizer") -> bool:
    """Return whether it is known what the inner optimizer keeps for which weight."""
    return slots_of(optimizer.inner_optimizer) is not None


def know_trained_starts(
    optimizer: "MaskedOptimizer", snapshot: Mapping[int, np.ndarray] | None = None
) -> bool:
    """Set the optimizer's `trained_starts` to what trained entries were before training.

    Args:
        optimizer: a FreezeOptimizer that is built and has a mask.
        snapshot: the variables before the first step, by position; None if this comes later.

    Returns:
        Whether they are known. Otherwise nothing has changed.
    """
    mask = optimizer.mask
    assert mask is not None
    if optimizer.trained_starts:
        return True
    starts: dict[int, np.ndarray] = {}
    is_before = optimizer.decided_at == int(backend.to_numpy(optimizer.iterations))
    for entry in mask.entries:
        values = backend.to_numpy(optimizer.parameters[entry.position].variable)
        if snapshot is not None:
            found: np.ndarray | None = snapshot[entry.position]
        else:
            found = values if is_before else _drawn(optimizer, entry.position, values)
        if found is None or not _agree(found, values, ~entry.trained):
            return False
        starts[entry.position] = found[entry.trained]
    optimizer.__dict__["trained_starts"] = starts
    return True


def _drawn(optimizer: "MaskedOptimizer", position: int, values: np.ndarray) -> np.ndarray | None:
    """Return what a variable was drawn as, if that is recorded and can be drawn again."""
    start = optimizer.starts.get(position)
    if start is None:
        return None
    try:
        return draw(start.source, values.shape, values.dtype.name)
    except ValueError:  # an initializer of another version
        return None


def _agree(one: np.ndarray, other: np.ndarray, where: np.ndarray) -> bool:
    return np.array_equal(as_bits(one[where]), as_bits(other[where]))


def _freeze_what_leaves(optimizer: "MaskedOptimizer", before: FreezeMask, mask: FreezeMask) -> None:
    """Set weights that are frozen from now on to their starts or to zero."""
    new_starts = {}
    for old, new in zip(before.entries, mask.entries, strict=True):
        variable = optimizer.parameters[old.position].variable
        values = backend.to_numpy(variable)
        flat, was_trained = values.reshape(-1), np.flatnonzero(old.trained)
        stays = new.trained.reshape(-1)[was_trained]
        starts = np.zeros(was_trained.size, flat.dtype)
        if optimizer.frozen_weights == "keep":
            starts = optimizer.trained_starts[old.position]
            is_trained = np.flatnonzero(new.trained)
            new_starts[old.position] = flat[is_trained]  # of those that join, they are frozen yet
            new_starts[old.position][old.trained.reshape(-1)[is_trained]] = starts[stays]
        if not stays.all():
            flat[was_trained[~stays]] = starts[~stays]
            variable.assign(values)
    optimizer.__dict__["trained_starts"] = new_starts


def _replace(
    optimizer: "MaskedOptimizer", before: FreezeMask, mask: FreezeMask, compact: bool
) -> bool:
    """Set a mask and its update, with the slots and values on a grid of what stays trained."""
    update = optimizer.update
    assert update is not None
    slots, grid = _values_of_slots(update), update.grid_state()
    is_new = isinstance(update, CompactUpdate) != compact or not update.accepts(mask, compact)
    if is_new:
        state = replace(optimizer.state, mask=mask, compact=compact, grid={})
        optimizer.rebuild(state, optimizer.built_variables)
        update = optimizer.update
        assert update is not None
        fresh = _values_of_slots(update)
    else:
        frozen_variables.keep_current_masks(optimizer)
        update.replace_mask(mask)
        optimizer.propagate_mask(before)
        fresh = _fresh_slots(optimizer, update)
    places = _Places(update, before, mask)
    for name, slot in (slots_of(update.inner) or {}).items():
        if isinstance(slot, list):
            _write_slots(slot, places, slots[name], fresh[name], name == _AVERAGES)
        elif is_new:
            slot.assign(slots[name])
    _restore_grid(update, grid, places)
    if isinstance(update, DenseUpdate):
        update.copy_frozen_entries_to_averages()
    return is_new


class _Places:
    """Where the entries that stay trained are, in arrays of before and after a change."""

    def __init__(self, update: Update, before: FreezeMask, mask: FreezeMask) -> None:
        self.update = update
        self._shapes = {entry.position: entry.trained.shape for entry in mask.entries}
        self._before, self._after, self._kept = {}, {}, {}
        for old, new in zip(before.entries, mask.entries, strict=True):
            position, trained = old.position, np.flatnonzero(old.trained)
            self._before[position] = trained
            self._after[position] = np.flatnonzero(new.trained)
            self._kept[position] = trained[new.trained.reshape(-1)[trained]]

    def carry_over(self, position: int, old: np.ndarray, new: np.ndarray) -> np.ndarray:
        """Return `new` with the values of `old` for what stays trained.

        Either array is of the shape of a variable, or a vector of its trained entries. Where it is
        something else, such as one of Adafactor's factors, or where the variable has no mask, this
        is `old` if it fits.
        """
        from_places = self._places(position, old, self._before)
        to_places = self._places(position, new, self._after)
        if from_places is None or to_places is None:
            return old if old.shape == new.shape else new
        merged = new.reshape(-1).copy()
        merged[to_places] = old.reshape(-1)[from_places]
        return merged.reshape(new.shape)

    def _places(
        self, position: int, array: np.ndarray, trained: Mapping[int, np.ndarray]
    ) -> np.ndarray | None:
        """Return the flat indices of what stays trained in an array; None if it has none."""
        if position not in trained:
            return None
        if array.shape == self._shapes[position]:
            return self._kept[position]
        if array.shape != trained[position].shape:
            return None
        return np.searchsorted(trained[position], self._kept[position])

    def renew_joining(self, position: int, state: np.ndarray, values: np.ndarray) -> None:
        """Set what has just joined the mask to its present values, in a vector of what is trained.

        `values` are those of the whole variable.
        """
        joins = np.isin(self._after[position], self._before[position], invert=True)
        state[joins] = values.reshape(-1)[self._after[position][joins]]

    def has_mask(self, position: int) -> bool:
        """Return whether the variable at a position has a mask."""
        return position in self._shapes


def _values_of_slots(update: Update) -> dict[str, Any]:
    """Return the values of the inner optimizer's slots, by attribute and position."""
    keys = _keys(update)
    return {
        name: {
            key: backend.to_numpy(one)
            for key, one in zip(keys, slot, strict=True)
            if one is not None
        }
        if isinstance(slot, list)
        else backend.to_numpy(slot)
        for name, slot in (slots_of(update.inner) or {}).items()
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
    with backend.strategy_scope(optimizer):
        ((_, fresh),) = fresh_copies(update.inner)
        with backend.slots_of_zeros(fresh):
            fresh.build(_keras_private.built_variables(update.inner))
    keys = _keys(update)
    return {
        name: {k: backend.to_numpy(v) for k, v in zip(keys, slot, strict=True) if v is not None}
        for name, slot in (slots_of(fresh) or {}).items()
        if isinstance(slot, list)
    }


def _write_slots(
    slots: Sequence[Any],
    places: _Places,
    old: Mapping[int, np.ndarray],
    fresh: Mapping[int, np.ndarray],
    is_average: bool,
) -> None:
    for key, slot in zip(_keys(places.update), slots, strict=True):
        if slot is not None and key in old:  # else nothing of the variable was trained before
            # The average of a frozen weight is the weight, so that it goes on from there.
            slot.assign(old[key] if is_average else places.carry_over(key, old[key], fresh[key]))


def _restore_grid(update: Update, old: Mapping[int, np.ndarray], places: _Places) -> None:
    """Set the values in full precision of what stays trained, and the present ones of the rest."""
    new = update.grid_state()
    for position, state in new.items():
        if not places.has_mask(position):
            new[position] = old[position]
            continue
        values = backend.to_numpy(update.parameters[position].variable)
        places.renew_joining(position, state[0], values)
        new[position] = np.stack(
            [places.carry_over(position, *pair) for pair in zip(old[position], state, strict=True)]
        )
    update.restore_grid(new)
