"""Differences of floating-point values to their starts, in units in the last place.

Values that moved little are few representable numbers away from where they were, and the integers
that count these take fewer bits than the values.
"""

import numpy as np

from keras_freeze.grids import LARGEST


def differences(bits: np.ndarray, starts: np.ndarray) -> np.ndarray | None:
    """Return how many representable numbers values are above their starts, int64.

    Args:
        bits: the values as bit patterns of floating-point numbers.
        starts: as many patterns of the same dtype.

    Returns:
        The integers, negative for values below their starts; None if one is too large for a file.
    """
    steps = (_ranks(bits) - _ranks(starts)).view(f"i{bits.itemsize}").astype(np.int64)
    return steps if (steps >= -LARGEST).all() and (steps <= LARGEST).all() else None


def values_at(starts: np.ndarray, integers: np.ndarray) -> np.ndarray:
    """Return the bit patterns that are so many representable numbers above their starts."""
    return _patterns(_ranks(starts) + integers.astype(starts.dtype))


def _ranks(bits: np.ndarray) -> np.ndarray:
    """Return unsigned integers in the order of the values: negative ones count backwards."""
    return bits ^ np.where(bits & _top(bits), _all(bits), _top(bits))


def _patterns(ranks: np.ndarray) -> np.ndarray:
    return ranks ^ np.where(ranks & _top(ranks), _top(ranks), _all(ranks))


def _top(bits: np.ndarray) -> np.unsignedinteger:
    return bits.dtype.type(1 << 8 * bits.itemsize - 1)


def _all(bits: np.ndarray) -> np.unsignedinteger:
    return bits.dtype.type((1 << 8 * bits.itemsize) - 1)
