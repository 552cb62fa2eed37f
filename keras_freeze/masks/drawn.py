"""Masks that are drawn: by levels of rows and columns, from a seed, so that no entry is stored.

Each entry of a weight has a rate that follows from the levels of its lines, and exactly so many
entries as wanted are drawn by these rates without replacement. The same levels, number and seed
give the same mask on every machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_freeze._utils.by_variable import ByVariable
from keras_freeze._utils.portable import natural_log, split_words
from keras_freeze.masks.levels import (
    EMPTY,
    LARGEST,
    PROBABILITIES,
    UNIT,
    ZERO,
    fitted_levels,
    matrix_shape,
    num_bits,
)

_GRID = 4  # the distance of levels: rates are powers of two
_FIRST_STREAM = 1 << 32  # of the generator; those below are for the values of weights
_BITS_OF_LEVEL = 10  # in a file, for each that occurs along an axis
_PIECE = 1 << 20  # entries at a time


@dataclass(frozen=True, eq=False)
class Draw:
    """What a mask is drawn by.

    Attributes:
        levels: for each axis of the `matrix_shape` the levels of its lines, as symbols.
        num_trained: how many entries are trained, at least 1.
        seed, stream: the key of the generator, each a 64-bit integer.
    """

    levels: tuple[np.ndarray, ...]
    num_trained: int
    seed: int
    stream: int

    def mask(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draw the mask of a variable of this shape.

        Raises:
            ValueError: if the levels leave fewer entries than are to be trained.
        """
        size = math.prod(shape)
        waiting = np.empty(size)
        generator = np.random.Philox(key=np.array([self.seed, self.stream], np.uint64))
        for start in range(0, size, _PIECE):
            # The words are in C order, one for each entry, also for those that cannot be trained.
            piece = slice(start, min(start + _PIECE, size))
            _, fractions = split_words(generator.random_raw(piece.stop - start))
            with np.errstate(divide="ignore"):
                waiting[piece] = -natural_log(fractions) / self._rates(piece)
        if np.count_nonzero(np.isfinite(waiting)) < self.num_trained:
            raise ValueError(f"fewer than {self.num_trained} entries can be trained")
        last = np.partition(waiting, self.num_trained - 1)[self.num_trained - 1]
        mask = waiting < last
        ties = np.flatnonzero(waiting == last)
        mask[ties[: self.num_trained - np.count_nonzero(mask)]] = True
        return mask.reshape(shape)

    def _rates(self, piece: slice) -> np.ndarray:
        """Return the rates of entries with these flat indices; 0 on empty lines."""
        lengths = tuple(axis.size for axis in self.levels)
        lines = np.unravel_index(np.arange(piece.start, piece.stop), lengths)
        symbols = [axis.astype(int)[i] for axis, i in zip(self.levels, lines, strict=True)]
        level = sum(symbol - ZERO for symbol in symbols)
        rates = _RATES[np.clip(level, -LARGEST, LARGEST) + LARGEST]
        for symbol in symbols:
            rates[symbol == EMPTY] = 0.0
        return rates


def _rate_table() -> np.ndarray:
    """Return -ln(1 - P(trained)) at levels -96 to 96.

    With these rates, an entry whose exponential waiting time is less than 1 has this probability.
    """
    return -natural_log((UNIT - PROBABILITIES) / UNIT)


_RATES = _rate_table()


_remembered: ByVariable[Draw] = ByVariable()


def remember_draw(variable: Any, draw: Draw) -> None:
    """Remember what the mask of a variable was drawn by, for a later `save`."""
    _remembered.set(variable, draw)


def draw_of(variable: Any) -> Draw | None:
    """Return what was remembered; the variable may have another mask since."""
    return _remembered.get(variable)


def fit_draw(mask: np.ndarray, seed: int, position: int) -> Draw:
    """Return the draw whose rates are those of the rows and columns of a mask.

    Args:
        mask: a boolean array with a trained entry.
        seed: of the FreezeOptimizer.
        position: the variable's position among those that the optimizer is built with.
    """
    matrix = mask.reshape(matrix_shape(mask.shape))
    trained = np.nonzero(matrix)
    candidates = [*fitted_levels(matrix, _GRID), [np.full(n, ZERO) for n in matrix.shape]]
    levels = min(candidates, key=lambda one: _cost(trained, one))
    symbols = tuple(axis.astype(np.uint8) for axis in levels)
    return Draw(symbols, int(np.count_nonzero(mask)), seed, _FIRST_STREAM + position)


def _cost(trained: Sequence[np.ndarray], levels: Sequence[np.ndarray]) -> float:
    """Return about how many bits mask and levels would take.

    What a level saves there tells whether it says something, or rather repeats an accident.
    """
    counts = [np.unique(axis, return_counts=True)[1] for axis in levels]
    side = sum(-(n * np.log2(n / n.sum())).sum() + _BITS_OF_LEVEL * n.size for n in counts)
    return num_bits(trained, levels) + float(side)
