"""Restore the values of all variables of a model from a `.freeze` file."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_freeze import initializers
from keras_freeze._utils.bits import WIDTHS, as_bits, checksum, from_bits, numpy_dtype
from keras_freeze.grids import Placement
from keras_freeze.initializers.of_layers import start_of, versions
from keras_freeze.masks.drawn import Draw
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.parameters import path_of, same_path
from keras_freeze.starts import CONSTANT, INITIALIZER, SEED, Start
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
from keras_freeze.storage.masks import decode_draws
from keras_freeze.storage.origin import regenerate, scaled


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
    sources = [(source, r.shape, r.dtype) for r in header.records for source in r.sources]
    if any(source.kind == SEED for source, _, _ in sources):
        _check_generator(header)
    given = regenerate(sources, base)
    plain, draws = decode_draws(header, container, _starts(header, given))
    entries = [MaskEntry(*entry) for entry in plain]
    mask = FreezeMask(entries, num_rescued=header.num_rescued) if entries else None
    trained = {entry.position: entry.trained.reshape(-1) for entry in entries}
    masks = [None if r.entry is None else trained[r.entry.position] for r in header.records]
    stored, optimizer = _stored_values(header, container, masks)
    sourced = iter(given)
    values: list[np.ndarray] = []
    starts: dict[int, Start] = {}
    placements: list[Placement | None] = []
    for record, chosen, bits in zip(header.records, masks, stored, strict=True):
        rest = None if record.source is None else next(sourced)
        placement = None
        if record.grid is not None:
            origin = rest if record.origin is None else next(sourced)
            placement, first = _placement(record, origin, chosen)
            bits = as_bits(record.grid.values(first, bits))
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


def _placement(
    record: VariableRecord, starts: np.ndarray | None, chosen: np.ndarray | None
) -> tuple[Placement, np.ndarray]:
    """Return the grid of a variable, and the starts of the values that are stored.

    Args:
        record: the variable.
        starts: the starts of all of its values as bit patterns; None for zeros.
        chosen: which of them its mask trains; None without a mask.
    """
    assert record.grid is not None
    if starts is None:
        starts = np.zeros(record.size, f"u{WIDTHS[record.dtype]}")
    indices = None
    if record.source is not None and chosen is not None:
        indices = np.flatnonzero(chosen)
        starts = starts[indices]
    # A copy: mask and values are put into what the source has given.
    values = from_bits(starts.copy(), record.dtype)
    return Placement(record.grid, record.starts_from, indices, values), values


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
    header: Header, container: Container, masks: Sequence[np.ndarray | None]
) -> tuple[list[np.ndarray], Iterator[np.ndarray]]:
    """Return the values in the file, of the model's variables and of the optimizer's."""
    kinds = [
        (
            r.num_stored(0 if m is None else int(np.count_nonzero(m))),
            WIDTHS[r.stored_dtype] if r.grid is None else INTEGERS,
        )
        for r, m in zip(header.records, masks, strict=True)
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


def _check_generator(header: Header) -> None:
    if header.generator != initializers.GENERATOR:
        raise FreezeFileError(
            f"The seeds belong to the generator {header.generator!r:.100}, but this version of "
            f"keras_freeze has {initializers.GENERATOR!r}. Use the version that wrote the file: "
            f"{header.versions.get('keras_freeze', 'unknown')}."
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
