"""Masks of whole tiles: of all entries of a tile, either each one is trained or none.

A tile is a block of rows and columns at one position of a weight. One entry for each of them says
the same as the mask. Needs NumPy alone.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np

from keras_freeze.masks.levels import matrix_shape


class Tile(NamedTuple):
    """How many rows and columns a tile has; fewer where an axis ends.

    A variable of one axis is one row.
    """

    height: int
    width: int

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if a file has no such tiles of a variable of this shape."""
        rows, columns = (1, 1, *shape)[-2:]
        is_within = 1 <= self.height <= rows and 1 <= self.width <= columns
        if not is_within or self == SINGLE:
            raise ValueError(f"there are no tiles of {self.height} x {self.width} in {shape}")

    def grid(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an array with one entry for each tile of a variable."""
        lengths = matrix_shape(shape)
        return tuple(-(-n // step) for n, step in zip(lengths, self._steps(lengths), strict=True))

    def tiles(self, mask: np.ndarray) -> np.ndarray:
        """Return which tiles are trained, given a mask that consists of whole ones."""
        mask = mask.reshape(matrix_shape(mask.shape))
        return mask[tuple(slice(None, None, step) for step in self._steps(mask.shape))]

    def mask(self, tiles: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Return the mask of a variable of this shape from which of its tiles are trained."""
        lengths = matrix_shape(shape)
        for axis, step in enumerate(self._steps(lengths)):
            if step > 1:
                kept = (*[slice(None)] * axis, slice(lengths[axis]))
                tiles = np.repeat(tiles, step, axis)[kept]
        return np.ascontiguousarray(tiles).reshape(shape)

    def num_trained(self, tiles: np.ndarray, shape: tuple[int, ...]) -> int:
        """Return how many entries are trained in a variable of this shape."""
        lengths, total = matrix_shape(shape), 0
        axes = [
            _parts(length, step) for length, step in zip(lengths, self._steps(lengths), strict=True)
        ]
        for parts in itertools.product(*axes):
            chosen = tiles[tuple(part for part, _ in parts)]
            total += int(np.count_nonzero(chosen)) * math.prod(size for _, size in parts)
        return total

    def _steps(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """Return the length of a tile along each axis of a `matrix_shape`."""
        return (1, *self)[-len(lengths) :]


SINGLE = Tile(1, 1)
"""The tiles of a mask that is coded entry by entry."""


def largest_tile(mask: np.ndarray) -> Tile:
    """Return the largest tiles that a mask consists of.

    Each row from which the next one differs ends a tile, so that the height divides the numbers of
    rows before all of these places; and likewise the width.
    """
    if not mask.size:
        return SINGLE
    rows, columns = (1, 1, *mask.shape)[-2:]
    matrices = mask.reshape(-1, rows, columns)
    return Tile(*(_largest_step(matrices, axis) for axis in (1, 2)))


def _largest_step(matrices: np.ndarray, axis: int) -> int:
    others = tuple({0, 1, 2} - {axis})
    ends = np.flatnonzero(np.diff(matrices, axis=axis).any(others)) + 1
    return int(np.gcd.reduce(ends)) or matrices.shape[axis]


def _parts(length: int, step: int) -> list[tuple[slice, int]]:
    """Return the whole tiles along an axis, and the rest if there is one, with their lengths."""
    whole, rest = divmod(length, step)
    parts = [(slice(whole), step)]
    return [*parts, (slice(whole, None), rest)] if rest else parts
