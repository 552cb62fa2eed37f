"""One level for each row, column and position of a weight, and what levels say of its mask.

The odds that an entry is trained are 2^((sum of the levels of its lines) / 4). With fixed levels
the likelihood of a mask depends on how many entries are trained in each line alone, which makes the
best levels quick to find.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

EMPTY = 0
"""The symbol of a line without trained entries."""

ZERO = 97
"""The symbol of level 0: symbols 1 to 193 are levels -96 to 96."""

LARGEST = 96
"""The largest level."""

UNIT = 1 << 24
"""Probabilities are in units of 2^-24."""

_ROOTS = (4294967296, 5107605667, 6074001000, 7223245222)  # round(2^(32 + r / 4)), r = 0, 1, 2, 3
_ROUNDS = 3


def _probability_table() -> np.ndarray:
    """Return P(trained) at levels -96 to 96, in units of 2^-24, from 1 to 2^24 - 1."""
    table = []
    for level in range(-LARGEST, LARGEST + 1):
        octaves, quarter = divmod(level + LARGEST, 4)
        odds, one = _ROOTS[quarter] << octaves, 1 << 32 + LARGEST // 4
        table.append(min(max(UNIT * odds // (odds + one), 1), UNIT - 1))
    return np.array(table)


PROBABILITIES = _probability_table()
"""P(trained) at levels -96 to 96, in units of 2^-24."""

_BITS_IF_FROZEN = -np.log2(1 - PROBABILITIES / UNIT)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the axes with levels: the last two, and all before them as one."""
    if len(shape) <= 2:
        return shape or (1,)
    return (math.prod(shape[:-2]), *shape[-2:])


def fitted_levels(mask: np.ndarray, grid: int) -> Iterator[list[np.ndarray]]:
    """Yield levels of the lines along each axis of a mask, as symbols, better ones later.

    Args:
        mask: a boolean array of a `matrix_shape`.
        grid: the distance between two levels.
    """
    counts = [
        np.count_nonzero(mask, axis=tuple(j for j in range(mask.ndim) if j != i))
        for i in range(mask.ndim)
    ]
    levels = [np.full(length, ZERO) for length in mask.shape]
    for _ in range(_ROUNDS):
        for axis in range(mask.ndim):
            others = _level_sums([one for i, one in enumerate(levels) if i != axis])
            levels[axis] = _fit(counts[axis], others, grid)
        yield list(levels)


def num_bits(trained: Sequence[np.ndarray], levels: Sequence[np.ndarray]) -> float:
    """Return the information in a mask with these levels, without that in the levels.

    `trained` has the indices of its trained entries, as `np.nonzero` gives them.
    """
    if_frozen = _bits_if_frozen(np.zeros(1, int), _level_sums(levels))[0]
    entry_levels = sum(axis[i].astype(int) - ZERO for axis, i in zip(levels, trained, strict=True))
    clipped = np.clip(entry_levels, -LARGEST, LARGEST)
    gain = np.bincount(clipped + LARGEST, minlength=2 * LARGEST + 1)
    odds = np.log2(PROBABILITIES / (UNIT - PROBABILITIES))
    return float(if_frozen - (gain * odds).sum())


def _fit(counts: np.ndarray, others: np.ndarray, grid: int) -> np.ndarray:
    """Return the levels, as symbols, of lines with `counts` trained entries each.

    An entry's level is its line's plus one of the sums that `others` counts. The likelihood of a
    line that has a level is linear in its count, up to what all lines of this level share. Levels
    that few lines have cost more bits, so that choice and cost are computed alternately.
    """
    unique, inverse, lines = np.unique(counts, return_inverse=True, return_counts=True)
    candidates = np.arange(-LARGEST, LARGEST + 1, grid)
    bits = _bits_if_frozen(candidates, others)[None, :] - unique[:, None] * candidates / 4
    # An empty line costs nothing but its symbol.
    bits = np.hstack([np.where(unique == 0, 0.0, np.inf)[:, None], bits])
    symbols = np.concatenate([[EMPTY], candidates + ZERO])
    symbol_cost = np.zeros(symbols.size)
    for _ in range(8):
        chosen = (bits + symbol_cost).argmin(1)
        used = np.bincount(chosen, weights=lines, minlength=symbols.size)
        with np.errstate(divide="ignore"):
            # Its own bits for each line, and about 10 in the histogram.
            cost = np.where(used, np.log2(counts.size / used) + 10 / used, 40.0)
        if np.array_equal(cost, symbol_cost):
            break
        symbol_cost = cost
    return symbols[chosen][inverse]


def _level_sums(levels: Sequence[np.ndarray]) -> np.ndarray:
    """Count the combinations of nonempty lines with each sum of levels.

    Entry i counts the sum i - (the number of axes) * 96.
    """
    sums = np.ones(1)
    for axis_levels in levels:
        counts = np.bincount(axis_levels, minlength=ZERO + LARGEST + 1)[1:]
        sums = np.convolve(sums, counts)
    return sums


def _bits_if_frozen(levels: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the bits of lines with these levels if all their entries are frozen."""
    sums = np.arange(others.size) - (others.size - 1) // 2
    present = np.flatnonzero(others)
    total = levels[:, None] + sums[present]
    return _BITS_IF_FROZEN[total.clip(-LARGEST, LARGEST) + LARGEST] @ others[present]
