"""The state that a stream moves on: the values that training may change, part by part."""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_freeze import backend
from keras_freeze._utils.bits import as_bits, from_bits, little_endian, rounded_to
from keras_freeze.grids import DTYPES, Grid
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.storage.header import Header
from keras_freeze.storage.keras_model import bits_of, is_random_state
from keras_freeze.storage.patches import Patch, all_or, bits_at, flat_places


@dataclass(frozen=True)
class Part:
    """The values of one variable that training may change.

    Attributes:
        index, path: which of the model's variables it is.
        shape: that of the variable, or of a vector of some of its values.
        places: the flat indices of the values; None for all of them.
        dtype: the dtype of the variable.
        starts: the values of the base in these places, as bit patterns.
        stored_dtype: the dtype in which updates hold the values.
        grid: the grid of differences to `starts` that the values are on; None for none.
    """

    index: int
    path: str
    shape: tuple[int, ...]
    places: np.ndarray | None
    dtype: str
    starts: np.ndarray
    stored_dtype: str
    grid: Grid | None = None

    def of(self, bits: np.ndarray) -> np.ndarray:
        """Return the values of the part, given those of the whole variable: a copy."""
        return bits[all_or(self.places)].copy()

    def read(self, variables: Sequence[Any]) -> np.ndarray:
        """Return the values of the part as bit patterns."""
        return bits_at(variables[self.index], self.places)

    def patch(self, before: np.ndarray, after: np.ndarray) -> Patch:
        """Return the patch that replaces the values of the part."""
        return Patch(self.index, self.places, before, after)

    def stored(self, bits: np.ndarray) -> np.ndarray:
        """Return values in the dtype in which updates hold them."""
        return rounded_to(bits, self.dtype, self.stored_dtype)

    def loaded(self, stored: np.ndarray) -> np.ndarray:
        """Return the values that a follower has for values in `stored_dtype`."""
        return rounded_to(stored, self.stored_dtype, self.dtype)

    def integers(self, bits: np.ndarray) -> np.ndarray | None:
        """Return the points of the grid next to values; None without a grid, or far outside."""
        if self.grid is None:
            return None
        return self.grid.nearest(from_bits(bits, self.dtype), from_bits(self.starts, self.dtype))

    def at(self, integers: np.ndarray) -> np.ndarray:
        """Return the values at points of the grid."""
        assert self.grid is not None
        return as_bits(self.grid.values(from_bits(self.starts, self.dtype), integers))

    def exact_integers(self, bits: np.ndarray) -> np.ndarray | None:
        """Return the points of the grid that values are; None if they are not on it."""
        points = self.integers(bits)
        return points if points is not None and np.array_equal(self.at(points), bits) else None

    def on_grid(self, bits: np.ndarray) -> np.ndarray:
        """Return the values next to others on the grid; the others where there is none."""
        points = self.integers(bits)
        if points is None:
            return bits
        values = self.at(points)
        is_finite = np.isfinite(from_bits(values, self.dtype).astype(np.float64)).all()
        return values if is_finite else bits


def parts_of(
    header: Header,
    mask: FreezeMask | None,
    base: Sequence[Any],
    dtypes: Sequence[str] | None = None,
    steps: Sequence[float] | None = None,
) -> list[Part]:
    """Return the parts of the state that follows a complete file.

    Args:
        header: The header of the file.
        mask: The freezing mask, or None.
        base: The variables of the base, or snapshots of them.
        dtypes, steps: As in `StreamRecord`; None for those of the variables, and no grids.

    Raises:
        ValueError: If there are not as many `dtypes` and `steps` as parts.
    """
    trained = {} if mask is None else {entry.position: entry.trained for entry in mask.entries}
    parts = []
    for index, (record, variable) in enumerate(zip(header.records, base, strict=True)):
        if is_random_state(variable):
            continue
        shape, places, starts = record.shape, None, bits_of(variable)
        if record.entry is not None:
            places = flat_places(trained[record.entry.position])
            shape, starts = (places.size,), starts[places]
        parts.append(Part(index, record.path, shape, places, record.dtype, starts, record.dtype))
    if dtypes is None or steps is None:
        return parts
    described = zip(parts, dtypes, steps, strict=True)
    return [_described(part, dtype, step) for part, dtype, step in described]


def _described(part: Part, stored_dtype: str, step: float) -> Part:
    if stored_dtype != part.dtype and part.dtype != "float32":
        raise ValueError(f"values of {part.dtype} are stored as {stored_dtype}")
    if step and part.dtype not in DTYPES:
        raise ValueError(f"values of {part.dtype} are on a grid")
    return dataclasses.replace(part, stored_dtype=stored_dtype, grid=Grid(step) if step else None)


class State:
    """The values of all parts.

    Attributes:
        bits: those of each part, as bit patterns.
        digest: 128 bits of SHA-256 of all of them, in hexadecimal.
    """

    def __init__(self, bits: Sequence[np.ndarray]) -> None:
        digest = hashlib.sha256()
        for values in bits:
            digest.update(little_endian(values))
        self.bits = list(bits)
        self.digest = digest.hexdigest()[:32]


def read_parts(parts: Sequence[Part], variables: Sequence[Any]) -> list[np.ndarray]:
    """Return the state that a model is in."""
    with backend.eager_scope():
        return [part.read(variables) for part in parts]
