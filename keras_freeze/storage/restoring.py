"""Restore the values of all variables of a model from a `.freeze` file."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from keras_freeze._utils.bits import WIDTHS, as_bits, checksum, from_bits, numpy_dtype
from keras_freeze.initializers.of_layers import start_of, versions
from keras_freeze.masks.drawn import Draw
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.parameters import path_of, same_path
from keras_freeze.placements import Placement
from keras_freeze.starts import BASE, CONSTANT, INITIALIZER, SEED, Start
from keras_freeze.storage.coding.masks import count
from keras_freeze.storage.coding.values import INTEGERS, decode_values
from keras_freeze.storage.container import Container
from keras_freeze.storage.errors import FreezeFileError
from keras_freeze.storage.header import Header, VariableRecord
from keras_freeze.storage.keras_model import (
    are_integers,
    dtype_of,
    fingerprint,
    is_random_state,
)
from keras_freeze.storage.masks import decode_coded, entries_of
from keras_freeze.storage.origin import check_generator, regenerate, scaled

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
        optimizer: An iterator over the values of each variable of the optimizer, as bit patterns.
    """

    bits: list[np.ndarray]
    mask: FreezeMask | None
    starts: dict[int, Start]
    placements: list[Placement | None]
    draws: dict[int, Draw]
    optimizer: Iterator[np.ndarray]


def restored(header: Header, container: Container, base: Sequence[Any] | None) -> Values:
    """Return all values of a file, checked, including those from sources or variables of a base.

    Raises:
        FreezeFileError: If the values cannot be decoded, or do not match their checksums.
    """
    coded = decode_coded(header, container)
    positions = [part.position for part in header.mask_parts]
    counts = dict(zip(positions, map(count, coded), strict=True))
    stored, optimizer = _stored_values(header, container, counts)
    sources = [(source, r.shape, r.dtype) for r in header.records for source in r.sources]
    if any(source.kind == SEED for source, _, _ in sources):
        check_generator(header)
    given = regenerate(sources, base)
    plain, draws = entries_of(header, coded, _starts(header, given))
    entries = [MaskEntry(*entry) for entry in plain]
    mask = FreezeMask(entries, num_rescued=header.num_rescued) if entries else None
    trained = {entry.position: entry.trained.reshape(-1) for entry in entries}
    masks = [None if r.entry is None else trained[r.entry.position] for r in header.records]
    sourced = iter(given)
    values: list[np.ndarray] = []
    starts: dict[int, Start] = {}
    placements: list[Placement | None] = []
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
        placements.append(placement)
        if rest is not None and record.source is not None:
            if record.entry is not None and record.source.kind in (SEED, INITIALIZER):
                start = start_of(record.source, rest, header.versions)
                starts[record.entry.position] = start
            if chosen is not None:
                if header.decay_scale is not None and record.source.kind != CONSTANT:
                    rest = scaled(rest, record.dtype, header.decay_scale)
                rest[chosen] = bits
            bits = rest
        if checksum(bits) != record.checksum:
            raise _mismatch(header, record)
        values.append(bits)
    return Values(values, mask, starts, placements, draws, optimizer)


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


def _stored_values(
    header: Header, container: Container, counts: Mapping[int, int]
) -> tuple[list[np.ndarray], Iterator[np.ndarray]]:
    """Return the values in the file, of the model's variables and of the optimizer's.

    `counts` are how many entries the masks train, by position.
    """
    kinds = [
        (
            r.num_stored(0 if r.entry is None else counts[r.entry.position]),
            WIDTHS[r.stored_dtype] if r.grid is None else INTEGERS,
        )
        for r in header.records
    ]
    slots = () if header.optimizer is None else header.optimizer.slots
    kinds += [(slot.size, WIDTHS[slot.dtype]) for slot in slots]
    decoded = decode_values(container.exponents, container.mantissas, kinds)
    stored = []
    for record in header.records:
        bits = next(decoded)
        if record.stored_dtype != record.dtype:
            rounded = from_bits(bits, record.stored_dtype)
            bits = as_bits(rounded.astype(numpy_dtype(record.dtype)))
        stored.append(bits)
    return stored, decoded


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
