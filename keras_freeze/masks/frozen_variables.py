"""A registry of frozen variables: the mask of each variable, and the optimizer that decided it.

A mask belongs to its variables, not to an optimizer: a network may be compiled again, trained as a
part of another model, or trained by two optimizers. Every FreezeOptimizer registers the variables
that it freezes here, and a new one inherits the masks of variables that are frozen already.
Variables are referenced weakly.
"""

import contextlib
import contextvars
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from keras import ops

from keras_freeze import backend
from keras_freeze._utils.by_variable import ByVariable
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.masks.settings import Settings
from keras_freeze.masks.structure import rescued
from keras_freeze.parameters import Parameter, path_of, shorten
from keras_freeze.starts import Start

ReadMask = Callable[[], np.ndarray | None]
"""Returns the mask of one variable; None as long as it is not decided."""


class Decision:
    """A decision about the weights of a network, shared by the optimizers that train with it.

    Attributes:
        settings: the settings that it was made with; None where a file does not say.
        decay_scale: the variable of FreezeNet-WD's scalar; None for other treatments.
        is_superseded: whether a later decision has replaced it.
        owners: the FreezeOptimizers that train with it.
        trained_starts: what their state has of the trained weights before training.
    """

    def __init__(self, settings: Settings | None, decay_scale: Any = None) -> None:
        self.settings = settings
        self.decay_scale = decay_scale
        self.is_superseded = False
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self.trained_starts: Any = None

    def supersede(self, by: Any) -> None:
        """Mark the decision as replaced, so that only optimizer `by` can go on training."""
        self.is_superseded = True
        for owner in list(self.owners):
            if owner is not by:
                owner.refuse_traced_functions()


@dataclass(frozen=True)
class VariableMask:
    """The mask of one variable, as an optimizer or a file gives it.

    Attributes:
        variable: the variable.
        position: its position among the variables of the decision.
        is_weight: whether it counts towards |W|.
        read: returns the mask.
        start: what its values were drawn from, where that is known.
    """

    variable: Any
    position: int
    is_weight: bool
    read: ReadMask
    start: Start | None = None


@dataclass(frozen=True)
class _FrozenVariable:
    """An entry of the registry."""

    owner: Any  # a weak reference; None for a file
    decision: Decision
    position: int
    is_weight: bool
    read: ReadMask
    start: Start | None

    def num_rescued(self, trained: np.ndarray) -> int:
        """Return how many weights are trained if these are what the at-least-one rule adds."""
        settings, count = self.decision.settings, int(np.count_nonzero(trained))
        if settings is None or not self.is_weight or not count:
            return 0
        if count > 1 and settings.structure is None:
            return 0
        added = rescued(settings.structure, trained.shape, settings.seed, self.position)
        return count if np.array_equal(added, trained) else 0


_registry: ByVariable[_FrozenVariable] = ByVariable()
_decisions: weakref.WeakKeyDictionary[Any, list[Decision]] = weakref.WeakKeyDictionary()
# The model that an optimizer was built or frozen for, by optimizer.
_models: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_overwriting = contextvars.ContextVar("overwriting", default=False)


@contextlib.contextmanager
def overwriting() -> Iterator[None]:
    """Return a scope in which optimizers that are built do not inherit masks."""
    token = _overwriting.set(True)
    try:
        yield
    finally:
        _overwriting.reset(token)


def is_overwriting() -> bool:
    """Return whether such a scope is active."""
    return _overwriting.get()


def register(
    owner: Any, masks: Sequence[VariableMask], settings: Settings | None, decay_scale: Any = None
) -> None:
    """Register the masks of variables.

    Where the variables have the same masks already, their decision stands. Otherwise this is a new
    decision, and optimizers with an earlier one about any of these variables stop training. The
    owner is a FreezeOptimizer; None for a file.
    """
    new = Decision(settings, decay_scale)
    entries = [_registry.get(mask.variable) for mask in masks]
    is_same = decay_scale is None and all(
        entry is None or _have_same_values(entry, mask)
        for entry, mask in zip(entries, masks, strict=True)
    )
    decisions = []
    for entry, mask in zip(entries, masks, strict=True):
        decision, position = new, mask.position
        if entry is not None and not entry.decision.is_superseded:
            if is_same:
                decision, position = entry.decision, entry.position
            else:
                entry.decision.supersede(by=owner)
        decisions.append(decision)
        registered = _FrozenVariable(
            owner=None if owner is None else weakref.ref(owner),
            decision=decision,
            position=position,
            is_weight=mask.is_weight,
            read=mask.read,
            start=mask.start,
        )
        _registry.set(mask.variable, registered)
    if owner is not None:
        _decisions[owner] = list(dict.fromkeys(decisions))
        for decision in _decisions[owner]:
            decision.owners.add(owner)


def keep_current_masks(owner: Any) -> None:
    """Copy the masks that an optimizer has registered, before what they are read from changes."""

    def keep(entry: _FrozenVariable) -> _FrozenVariable:
        if entry.owner is None or entry.owner() is not owner:
            return entry
        return replace(entry, read=constant_mask(entry.read()))

    _registry.change(keep)


def zero_frozen_entries(variable: Any, trained: Any) -> None:
    """Set the entries of a variable to zero where the boolean array `trained` is False."""
    zeros = ops.zeros(variable.shape, variable.dtype)
    variable.assign(ops.where(trained, variable.value, zeros))


def constant_mask(trained: np.ndarray | None) -> ReadMask:
    """Return a function that returns this mask; None for one that is never decided."""
    if trained is None:
        return lambda: None
    packed, shape = np.packbits(trained), trained.shape
    return lambda: np.unpackbits(packed, count=math.prod(shape)).view(bool).reshape(shape)


def is_superseded(owner: Any) -> bool:
    """Return whether a later decision has replaced one that an optimizer trains with."""
    return any(decision.is_superseded for decision in _decisions.get(owner, ()))


def remember_model(owner: Any, model: Any) -> None:
    """Remember the model whose weights an optimizer freezes."""
    _models[owner] = weakref.ref(model)


def model_of(owner: Any) -> Any:
    """Return the model whose weights an optimizer freezes; None where that is not known."""
    reference = _models.get(owner)
    return None if reference is None else reference()


def mask_of(variables: Sequence[Any]) -> FreezeMask | None:
    """Return the mask of these variables, each at its index in the list; None if none is frozen."""
    entries, masked, num_rescued = [], [], 0
    for position, variable in enumerate(variables):
        entry = _registry.get(variable)
        trained = None if entry is None else entry.read()
        if entry is None or trained is None:
            continue
        entries.append(MaskEntry(position, path_of(variable), trained, entry.is_weight))
        masked.append(variable)
        num_rescued += entry.num_rescued(trained)
    if all(entry.trained.all() for entry in entries):
        return None
    return FreezeMask(entries, masked, num_rescued)


def num_registered(variables: Iterable[Any]) -> int:
    """Return how many of the variables have a mask, or will have one once it is decided."""
    return sum(_registry.get(variable) is not None for variable in variables)


def decisions_about(variables: Sequence[Any]) -> list[Decision]:
    """Return the decisions about these variables, each once, in order."""
    entries = map(_registry.get, variables)
    return list(dict.fromkeys(entry.decision for entry in entries if entry is not None))


def starts_of(variables: Sequence[Any]) -> dict[int, Start]:
    """Return what variables were drawn from, by their index in the list, where that is known."""
    entries = enumerate(map(_registry.get, variables))
    return {i: e.start for i, e in entries if e is not None and e.start is not None}


def remember_trained_starts(owner: Any, trained_starts: Any) -> None:
    """Remember what an optimizer knows of its trained weights before training."""
    for decision in _decisions.get(owner, ()):
        decision.trained_starts = trained_starts


def trained_starts_of(variables: Sequence[Any]) -> Any:
    """Return what the optimizers of these variables know of that; None if they disagree."""
    found = [decision.trained_starts for decision in decisions_about(variables)]
    return found[0] if len(found) == 1 else None


def decay_scale_of(variables: Sequence[Any]) -> np.ndarray | None:
    """Return FreezeNet-WD's scalar for these variables; None for other treatments.

    Raises:
        ValueError: if they have shrunk by different factors.
    """
    scales = [d.decay_scale for d in decisions_about(variables) if d.decay_scale is not None]
    values = {float(value): value for value in map(backend.to_numpy, scales)}
    if len(values) > 1:
        raise ValueError(
            "With frozen_weights='decay' all frozen weights shrink by one factor, so that one "
            "optimizer cannot train variables that have shrunk by several. "
            f"Received: factors {sorted(values)}"
        )
    return next(iter(values.values()), None)


def check_agrees(mask: FreezeMask, parameters: Sequence[Parameter], settings: Settings) -> None:
    """Check that an optimizer with these variables and settings may inherit their mask.

    Raises:
        ValueError: if the mask was decided with other settings, or if the optimizer excludes
            weights that are frozen.
    """
    frozen = [parameters[entry.position] for entry in mask.entries]
    advice = (
        "Compile the model with the same settings to continue with the same mask, or call "
        "`keras_freeze.freeze(model, ..., overwrite=True)` to compute a new one."
    )
    for decision in decisions_about([p.variable for p in frozen]):
        before = decision.settings
        if before is not None and not before.agrees_with(settings, mask.paths):
            raise ValueError(
                f"The weights {shorten([p.path for p in frozen], limit=3)} are already frozen "
                f"with {before}. {advice} Received: a FreezeOptimizer with {settings}"
            )
    pairs = zip(frozen, mask.entries, strict=True)
    excluded = [p.path for p, entry in pairs if p.excluded and not entry.trained.all()]
    if excluded:
        raise ValueError(
            f"The weights {shorten(excluded, limit=3)} are already frozen. {advice} "
            "Received: a FreezeOptimizer whose `exclude` names them"
        )
    decided = {entry.position for entry in mask.entries}
    others = [p.path for p in parameters if p.is_frozen_candidate and p.position not in decided]
    if others:
        warnings.warn(
            f"The existing mask does not cover the weights {shorten(others, limit=3)}, which are "
            "trained. Call `keras_freeze.freeze(model, ..., overwrite=True)` to compute a mask of "
            "all weights.",
            stacklevel=2,
        )


def _have_same_values(entry: _FrozenVariable, mask: VariableMask) -> bool:
    before, after = entry.read(), mask.read()
    return before is not None and after is not None and np.array_equal(before, after)
