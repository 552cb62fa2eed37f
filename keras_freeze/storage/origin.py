"""Regenerate values that are not in the file from their source."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from keras_freeze._utils.bits import WIDTHS, as_bits, from_bits
from keras_freeze.initializers.generator import GENERATOR
from keras_freeze.initializers.of_layers import draw
from keras_freeze.starts import BASE, CONSTANT, Source
from keras_freeze.storage.errors import FreezeFileError
from keras_freeze.storage.header import Header
from keras_freeze.storage.keras_model import bits_of, dtype_of

Wanted = tuple[Source, tuple[int, ...], str]
"""A source, and the shape and dtype of the variable."""


def regenerate(wanted: Sequence[Wanted], base: Sequence[Any] | None) -> list[np.ndarray]:
    """Return the values that come from sources or the variables of a base, as bit patterns.

    Raises:
        FreezeFileError: If a source cannot provide such values.
    """
    with ThreadPoolExecutor() as executor:
        return list(executor.map(lambda one: _regenerate(one, base), wanted))


def check_generator(header: Header) -> None:
    """Refuse seeds of another generator."""
    if header.generator != GENERATOR:
        raise FreezeFileError(
            f"The seeds belong to the generator {header.generator!r:.100}, but this version of "
            f"keras_freeze has {GENERATOR!r}. Use the version that wrote the file: "
            f"{header.versions.get('keras_freeze', 'unknown')}."
        )


def guess(wanted: Sequence[Wanted], base: Sequence[Any] | None) -> list[np.ndarray | None]:
    """Do the same as `regenerate`, with None for a source that cannot provide such values."""

    def attempt(one: Wanted) -> np.ndarray | None:
        try:
            return _regenerate(one, base)
        except FreezeFileError:
            return None

    with ThreadPoolExecutor() as executor:
        return list(executor.map(attempt, wanted))


def scaled(bits: np.ndarray, dtype: str, factor: float) -> np.ndarray:
    """Return values times FreezeNet-WD's factor, rounded once; all as bit patterns."""
    values = from_bits(bits, dtype)
    return as_bits(values * values.dtype.type(factor))


def _regenerate(wanted: Wanted, base: Sequence[Any] | None) -> np.ndarray:
    source, shape, dtype = wanted
    if source.kind == CONSTANT:
        return np.full(math.prod(shape), source.pattern, f"u{WIDTHS[dtype]}")
    if source.kind == BASE:
        return _from_base(source.index, shape, dtype, base or ())
    try:
        return as_bits(draw(source, shape, dtype))
    except ValueError as error:
        raise FreezeFileError(f"A source cannot provide its values: {error}") from error


def _from_base(index: int, shape: tuple[int, ...], dtype: str, base: Sequence[Any]) -> np.ndarray:
    if index >= len(base) or (tuple(base[index].shape), dtype_of(base[index])) != (shape, dtype):
        raise FreezeFileError(f"The base has no variable {index} of shape {shape} and {dtype}.")
    return bits_of(base[index])
