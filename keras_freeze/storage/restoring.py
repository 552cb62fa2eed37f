"""Restore the values of all variables of a model from a `.freeze` file."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from keras_freeze._utils.bits import WIDTHS, as_bits, checksum, from_bits, rounded_to
from keras_freeze.initializers.of_layers import start_of, versions
from keras_freeze.masks.drawn import Draw
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.parameters import path_of, same_path
from keras_freeze.placements import Placement
from keras_freeze.starts import BASE, CONSTANT, INITIALIZER, SEED, Start
from keras_freeze.storage.coding.differences import values_at
from keras_freeze.storage.coding.masks import CodedMask, count
from keras_freeze.storage.coding.values import INTEGERS, decode_values
from keras_freeze.storage.container import Container
from keras_freeze.storage.errors import FreezeFileError
from keras_freeze.storage.header import Header
from keras_freeze.storage.keras_model import (
    are_integers,
    dtype_of,
    fingerprint,
    is_random_state,
)
from keras_freeze.storage.masks import decode_coded, entries_of
from keras_freeze.storage.origin import check_generator, regenerate, scaled
from keras_freeze.storage.records import VariableRecord

_T = TypeVar("_T")


@dataclass(frozen=True)
class Values:
    """The values of all variables in a file.

    Attributes:
        bits: The values of each variable of the model, as bit patterns.
        mask: The freezing mask; None if there is none.
        starts: What the initial values of variables with a mask were drawn from, by position.
        placements: The grid of each variable of the model, with the starts; None without one.
        draws: What masks of variables were drawn by, by position; only of those that are drawn.
        trained_starts: What the trained weights of variables with a mask started from, by position.
        optimizer: An iterator over the values of each variable of the optimizer, as bit patterns.
    """

    bits: list[np.ndarray]
    mask: FreezeMask | None
    starts: dict[int, Start]
    placements: list[Placement | None]
    draws: dict[int, Draw]
    trained_starts: dict[int, np.ndarray]
    optimizer: Iterator[np.ndarray]


def restored(header: Header, container: Container, base: Sequence[Any] | None) -> Values:
    """Return all values of a file, checked, including those from sources or variables of a base.

    Raises:
        FreezeFileError: If the values cannot be decoded, or do not match their checksums.
    """
    coded = decode_coded(header, container)
    coded, changed = coded[: len(header.mask_parts)], coded[len(header.mask_parts) :]
    stored, optimizer = _stored_values(header, container, _num_chosen(header, coded, changed))
    sources = [(source, r.shape, r.dtype) for r in header.records for source in r.sources]
    if any(source.kind == SEED for source, _, _ in sources):
        check_generator(header)
    given = regenerate(sources, base)
    plain, draws = entries_of(header, coded, _starts(header, given))
    entries = [MaskEntry(*entry) for entry in plain]
    mask = FreezeMask(entries, num_rescued=header.num_rescued) if entries else None
    masks = _chosen(header, entries, changed)
    sourced = iter(given)
    values: list[np.ndarray] = []
    starts: dict[int, Start] = {}
    placements: list[Placement | None] = []
    trained_starts: dict[int, np.ndarray] = {}
    for record, chosen, bits in zip(header.records, masks, stored, strict=True):
        rest = None if record.source is None else next(sourced)
        placement = None
        if record.grid is not None:
            origin = rest if record.origin is None else next(sourced)
            known = _starts_on_grid(record, origin, chosen)
            bits = as_bits(record.grid.values(known[1], bits))
            # A base may not be at hand later.
            read = _returns(known) if record.starts_from.kind == BASE else None
            placement = Placement(record.grid, record.starts_from, read)
        else:
            bits = _decoded(record, bits, None if chosen is None or rest is None else rest[chosen])
        placements.append(placement)
        if rest is not None and record.source is not None:
            if record.entry is not None and record.source.kind in (SEED, INITIALIZER):
                start = start_of(record.source, rest, header.versions)
                starts[record.entry.position] = start
            if chosen is not None:
                if record.entry is not None and record.entry.is_weight and not record.is_changed:
                    trained_starts[record.entry.position] = from_bits(rest[chosen], record.dtype)
                is_scaled = record.source.kind != CONSTANT and not record.is_changed
                if header.decay_scale is not None and is_scaled:
                    rest = scaled(rest, record.dtype, header.decay_scale)
                rest[chosen] = bits
            bits = rest
        if checksum(bits) != record.checksum:
            raise _mismatch(header, record)
        values.append(bits)
    return Values(values, mask, starts, placements, draws, trained_starts, optimizer)


def _starts(header: Header, given: Sequence[np.ndarray]) -> Callable[[int], np.ndarray]:
    """Return a function that returns what the variable at a position of the mask started from.

    `given` are the values of the `sources` of all records, as bit patterns.
    """
    numbers = itertools.accumulate((len(r.sources) for r in header.records), initial=0)
    first = {
        r.entry.position: (given[number], r.dtype)
        for number, r in zip(numbers, header.records, strict=False)
        if r.entry is not None and r.source is not None
    }
    return lambda position: from_bits(*first[position])


def _returns(value: _T) -> Callable[[], _T]:
    return lambda: value


def _starts_on_grid(
    record: VariableRecord, starts: np.ndarray | None, chosen: np.ndarray | None
) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the flat indices of the values on a grid (None: all), and their starts.

    Args:
        record: the variable.
        starts: the starts of all of its values as bit patterns; None for zeros.
        chosen: which of them its mask trains; None without a mask.
    """
    if starts is None:
        starts = np.zeros(record.size, f"u{WIDTHS[record.dtype]}")
    if record.source is None or chosen is None:
        return None, from_bits(starts, record.dtype)
    indices = np.flatnonzero(chosen)
    return indices, from_bits(starts[indices], record.dtype)


def check_variables(header: Header, variables: Sequence[Any]) -> None:
    """Raise FreezeFileError if a model has other variables than those that a file describes."""
    if len(variables) != len(header.records):
        raise FreezeFileError(
            f"The file describes {len(header.records)} variables, and the model has "
            f"{len(variables)}: {', '.join(path_of(v) for v in variables[:12])}, ..."
        )
    for record, variable in zip(header.records, variables, strict=True):
        shape, dtype = tuple(variable.shape), dtype_of(variable)
        is_same_dtype = dtype == record.dtype
        if is_random_state(variable):
            is_same_dtype = are_integers(dtype, record.dtype)
        is_same = shape == record.shape and is_same_dtype
        if not is_same or not same_path(path_of(variable), record.path):
            raise FreezeFileError(
                f"The file describes {record.path!r} of shape {record.shape} and "
                f"{record.dtype}, where the model has {path_of(variable)!r} of shape {shape} and "
                f"{dtype}."
            )


def _num_chosen(
    header: Header, trained: Sequence[CodedMask], changed: Sequence[CodedMask]
) -> list[int]:
    """Return of how many entries of each variable the file says that they are changed or trained.

    `trained` and `changed` are the masks of `header.mask_parts` and of `header.changed`.
    """
    trained_counts, changed_counts = map(count, trained), map(count, changed)
    counts = []
    for record in header.records:
        number = 0 if record.entry is None else next(trained_counts)
        counts.append(next(changed_counts) if record.is_changed else number)
    return counts


def _chosen(
    header: Header, entries: Sequence[MaskEntry], changed: Sequence[CodedMask]
) -> list[np.ndarray | None]:
    """Return which entries of each variable are changed or trained; None if the file says none."""
    trained = {entry.position: entry.trained.reshape(-1) for entry in entries}
    masks, places = [], iter(changed)
    for record in header.records:
        chosen = None if record.entry is None else trained[record.entry.position]
        if record.is_changed:
            changed_here = next(places)
            assert isinstance(changed_here, np.ndarray)  # which are coded entry by entry
            chosen = changed_here.reshape(-1)
        masks.append(chosen)
    return masks


def _stored_values(
    header: Header, container: Container, counts: Sequence[int]
) -> tuple[list[np.ndarray], Iterator[np.ndarray]]:
    """Return the values in the file, of the model's variables and of the optimizer's.

    `counts` are those of `_num_chosen`.
    """
    kinds = [
        (r.num_stored(n), INTEGERS if r.are_integers else WIDTHS[r.stored_dtype])
        for r, n in zip(header.records, counts, strict=True)
    ]
    slots = () if header.optimizer is None else header.optimizer.slots
    kinds += [(slot.size, WIDTHS[slot.dtype]) for slot in slots]
    decoded = decode_values(container.exponents, container.mantissas, kinds)
    return [next(decoded) for _ in header.records], decoded


def _decoded(record: VariableRecord, stored: np.ndarray, starts: np.ndarray | None) -> np.ndarray:
    """Return stored values as bit patterns of the variable's dtype.

    `starts` are the values of the source in their place.
    """
    if record.has_differences:
        assert starts is not None
        stored = values_at(rounded_to(starts, record.dtype, record.stored_dtype), stored)
    return rounded_to(stored, record.stored_dtype, record.dtype)


def check_rest(values: Values) -> None:
    """Read and drop the optimizer's values, so that the file is checked to its end."""
    for _ in values.optimizer:
        pass


def check_fingerprint(header: Header, variables: Sequence[Any]) -> None:
    """Raise FreezeFileError if a file was saved on a base of other variables than these."""
    found = fingerprint(variables)
    if found != header.base:
        raise FreezeFileError(
            "The file was saved on another base, with the fingerprint "
            f"{(header.base or '')[:16]}... Pass that base. Received: a base with the fingerprint "
            f"{found[:16]}..."
        )


def _mismatch(header: Header, record: VariableRecord) -> FreezeFileError:
    what = f"The values of {record.path!r} do not match their checksum."
    if record.source is not None and record.source.kind == INITIALIZER:
        there = ", ".join(f"{name} {version}" for name, version in header.versions.items())
        here = ", ".join(f"{name} {version}" for name, version in versions().items())
        what += (
            " Its frozen weights were drawn by an initializer of Keras, whose numbers may change "
            f"between versions and machines. The file was saved with {there}; this is {here}. Load "
            "it there, and save it with `include_frozen=True`; or call "
            "`keras_freeze.reinitialize` before `freeze` for seeds that are portable."
        )
    return FreezeFileError(what)
