"""A mask belongs to its variables: which entries of a variable are frozen, and who decided it.

Optimizers come and go while a network lives: it is compiled again, trained as a part of another
model, or by two optimizers. Every FreezeOptimizer registers what it freezes here, and one that is
new takes over what it finds. Variables are held weakly.
"""

import contextlib
import contextvars
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keras_freeze import backend
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.masks.selection import rescue_index
from keras_freeze.masks.settings import Settings
from keras_freeze.parameters import Parameter, path_of, shorten
from keras_freeze.starts import Start

ReadMask = Callable[[], np.ndarray | None]
"""Gives the mask of one variable; None as long as it is not decided."""


class Decision:
    """One decision about the weights of a network, shared by the optimizers that keep to it.

    Attributes:
        settings: what it followed; None where a file does not say.
        decay_scale: the variable of FreezeNet-WD's scalar; None for other treatments.
        is_overruled: whether another one has taken its place.
        owners: the FreezeOptimizers that keep to it.
    """

    def __init__(self, settings: Settings | None, decay_scale: Any = None) -> None:
        self.settings = settings
        self.decay_scale = decay_scale
        self.is_overruled = False
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()

    def overrule(self, by: Any) -> None:
        """Lets no optimizer but `by` train on with this decision."""
        self.is_overruled = True
        for owner in list(self.owners):
            if owner is not by:
                owner.refuse_traced_functions()


@dataclass(frozen=True)
class Claim:
    """What an optimizer, or a file, says of one variable.

    Attributes:
        variable: the variable.
        position: its position among those that the decision was about.
        is_weight: whether it counts towards |W|.
        read: gives its mask.
        start: what it was drawn from, where that is known.
    """

    variable: Any
    position: int
    is_weight: bool
    read: ReadMask
    start: Start | None = None


@dataclass(frozen=True)
class _Record:
    variable: Any  # a weak reference
    owner: Any  # likewise; None of a file
    decision: Decision
    position: int
    is_weight: bool
    read: ReadMask
    start: Start | None

    def is_rescued(self, trained: np.ndarray) -> bool:
        """Whether the at-least-one rule chose the only trained weight."""
        settings = self.decision.settings
        if settings is None or not self.is_weight or np.count_nonzero(trained) != 1:
            return False
        only = int(trained.reshape(-1).argmax())
        return only == rescue_index(settings.seed, self.position, trained.size)


_records: dict[int, _Record] = {}
_decisions: weakref.WeakKeyDictionary[Any, list[Decision]] = weakref.WeakKeyDictionary()
# The models that `freeze` was called with, by optimizer.
_models: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_overwriting = contextvars.ContextVar("overwriting", default=False)


@contextlib.contextmanager
def overwriting() -> Iterator[None]:
    """A scope in which optimizers that are built take nothing over."""
    token = _overwriting.set(True)
    try:
        yield
    finally:
        _overwriting.reset(token)


def is_overwriting() -> bool:
    """Whether this is in such a scope."""
    return _overwriting.get()


def register(
    owner: Any, claims: Sequence[Claim], settings: Settings | None, decay_scale: Any = None
) -> None:
    """Says which variables are frozen from now on.

    Where the variables have the same masks already, their decision stands. Otherwise this is a new
    one, and optimizers that keep to an earlier one about any of these variables train no more.

    Args:
        owner: the FreezeOptimizer; None for a file.
        claims: one for each variable.
        settings, decay_scale: as of `Decision`.
    """
    new = Decision(settings, decay_scale)
    records = [_record_of(claim.variable) for claim in claims]
    is_same = decay_scale is None and all(
        record is None or _reads_the_same(record, claim)
        for record, claim in zip(records, claims, strict=True)
    )
    decisions = []
    for record, claim in zip(records, claims, strict=True):
        decision, position = new, claim.position
        if record is not None and not record.decision.is_overruled:
            if is_same:
                decision, position = record.decision, record.position
            else:
                record.decision.overrule(by=owner)
        decisions.append(decision)
        key = id(claim.variable)
        _records[key] = _Record(
            variable=weakref.ref(claim.variable, functools.partial(_forget, key)),
            owner=None if owner is None else weakref.ref(owner),
            decision=decision,
            position=position,
            is_weight=claim.is_weight,
            read=claim.read,
            start=claim.start,
        )
    if owner is not None:
        _decisions[owner] = list(dict.fromkeys(decisions))
        for decision in _decisions[owner]:
            decision.owners.add(owner)


def settle(owner: Any, variables: Iterable[Any]) -> None:
    """Keeps what an optimizer has said of variables as it is now, whatever it reads it from."""
    for variable in variables:
        record = _record_of(variable)
        if record is not None and record.owner is not None and record.owner() is owner:
            trained = record.read()
            _records[id(variable)] = replace(record, read=constant(trained))


def constant(trained: np.ndarray | None) -> ReadMask:
    """What reads a mask that does not change; None is one that is never decided."""
    if trained is None:
        return lambda: None
    packed, shape = np.packbits(trained), trained.shape
    return lambda: np.unpackbits(packed, count=math.prod(shape)).view(bool).reshape(shape)


def is_overruled(owner: Any) -> bool:
    """Whether another decision has taken the place of the one that an optimizer keeps to."""
    return any(decision.is_overruled for decision in _decisions.get(owner, ()))


def remember_model(owner: Any, model: Any) -> None:
    """Keeps in mind whose weights an optimizer has frozen."""
    _models[owner] = weakref.ref(model)


def model_of(owner: Any) -> Any:
    """The model whose weights an optimizer has frozen; None where that is not known."""
    reference = _models.get(owner)
    return None if reference is None else reference()


def mask_of(variables: Sequence[Any]) -> FreezeMask | None:
    """The mask of these variables, each at its place among them; None where nothing is frozen."""
    entries, found, num_rescued = [], [], 0
    for position, variable in enumerate(variables):
        record = _record_of(variable)
        trained = None if record is None else record.read()
        if record is None or trained is None:
            continue
        entries.append(MaskEntry(position, path_of(variable), trained, record.is_weight))
        found.append(variable)
        num_rescued += record.is_rescued(trained)
    if all(entry.trained.all() for entry in entries):
        return None
    return FreezeMask(entries, found, num_rescued)


def num_registered(variables: Iterable[Any]) -> int:
    """Of how many variables there is, or will be, a mask."""
    return sum(_record_of(variable) is not None for variable in variables)


def decisions_about(variables: Sequence[Any]) -> list[Decision]:
    """The decisions about variables that have one, in order."""
    records = map(_record_of, variables)
    return list(dict.fromkeys(r.decision for r in records if r is not None))


def starts_of(variables: Sequence[Any]) -> dict[int, Start]:
    """What variables were drawn from, by their places among them, where that is known."""
    records = enumerate(map(_record_of, variables))
    return {i: r.start for i, r in records if r is not None and r.start is not None}


def decay_scale_of(variables: Sequence[Any]) -> np.ndarray | None:
    """FreezeNet-WD's scalar for these variables; None for other treatments.

    Raises:
        ValueError: if they have shrunk by different factors.
    """
    scales = [d.decay_scale for d in decisions_about(variables) if d.decay_scale is not None]
    values = {float(value): value for value in map(backend.to_numpy, scales)}
    if len(values) > 1:
        raise ValueError(
            "With frozen_weights='decay' all frozen weights shrink by one factor. Received: "
            f"variables that have shrunk by {sorted(values)}, which one optimizer cannot go on "
            "with."
        )
    return next(iter(values.values()), None)


def check_agrees(mask: FreezeMask, parameters: Sequence[Parameter], settings: Settings) -> None:
    """Refuses a mask that an optimizer of these settings would not have decided.

    Args:
        mask: of the parameters, as `mask_of` gives it.
        parameters: all variables of the optimizer, classified.
        settings: its settings.

    Raises:
        ValueError: for other settings, or where the optimizer excludes weights that are frozen.
    """
    frozen = [parameters[entry.position] for entry in mask.entries]
    advice = (
        "Compile the model with the same settings to train on with the same mask, or call "
        "`keras_freeze.freeze(model, ..., overwrite=True)` to decide anew."
    )
    for decision in decisions_about([p.variable for p in frozen]):
        if decision.settings is not None and not decision.settings.agrees_with(settings):
            raise ValueError(
                f"The weights {shorten([p.path for p in frozen], limit=3)} are frozen already, "
                f"with {decision.settings}. {advice} Received: a FreezeOptimizer with {settings}"
            )
    pairs = zip(frozen, mask.entries, strict=True)
    excluded = [p.path for p, entry in pairs if p.excluded and not entry.trained.all()]
    if excluded:
        raise ValueError(
            f"The weights {shorten(excluded, limit=3)} are frozen already. {advice} Received: a "
            "FreezeOptimizer whose `exclude` names them"
        )
    decided = {entry.position for entry in mask.entries}
    others = [p.path for p in parameters if p.is_frozen_candidate and p.position not in decided]
    if others:
        warnings.warn(
            f"The mask that this model brings along knows nothing of {shorten(others, limit=3)}, "
            "which are trained. Call `keras_freeze.freeze(model, ..., overwrite=True)` to decide "
            "about all weights.",
            stacklevel=2,
        )


def _record_of(variable: Any) -> _Record | None:
    record = _records.get(id(variable))
    return record if record is not None and record.variable() is variable else None


def _forget(key: int, dead: Any) -> None:
    record = _records.get(key)
    if record is not None and record.variable is dead:  # not of a new object with this id
        del _records[key]


def _reads_the_same(record: _Record, claim: Claim) -> bool:
    before, after = record.read(), claim.read()
    return before is not None and after is not None and np.array_equal(before, after)
