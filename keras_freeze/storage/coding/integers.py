"""Adaptive coding of integers that are mostly near zero: values on a grid.

The probabilities of the integers follow from those before them, so that no table is written. They
change after pieces of growing size, each of which the coder takes at once. Of integers that are
spread widely, the lowest bits are written as they are.
"""

import functools
from collections.abc import Iterator

import numpy as np

from keras_freeze.grids import LARGEST
from keras_freeze.storage.coding.entropy import HALF, Decoder, Encoder

_PARAMETER_BITS = 5  # of the number of lowest bits, and of the decay
_LARGEST_SYMBOL = 20  # of magnitude; larger integers are written one by one
_ESCAPE = 2 * _LARGEST_SYMBOL + 1
_NUM_SYMBOLS = _ESCAPE + 1
_DECAYS = range(32)
_FEW_DECAYS = range(0, 32, 4)
_UNIT = 1 << 13  # of one occurrence, beside the frequencies before any occurred
_SMALLEST_PIECE = 8


class Integers:
    """A vector of integers of at most `LARGEST` in magnitude, and how to write it."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    @functools.cached_property
    def _parameters(self) -> tuple[float, int, int]:
        return _cheapest_parameters(self.values)

    @property
    def num_bits(self) -> float:
        """About how many bits `encode` takes."""
        return 2 * _PARAMETER_BITS + self._parameters[0] if self.values.size else 0.0

    def encode(self, encoder: Encoder) -> None:
        """Write the integers."""
        if not self.values.size:
            return
        _, shift, decay = self._parameters
        encoder.bits(shift, _PARAMETER_BITS)
        encoder.bits(decay, _PARAMETER_BITS)
        high = self.values >> shift
        symbols = _symbols(high)
        frequencies = _first_frequencies()[decay] + _before_each(_counts(symbols))
        encoder.frequent((symbols[piece] for piece in _pieces(symbols.size)), frequencies)
        for escaped in high[symbols == _ESCAPE].tolist():
            encoder.number(abs(escaped) - _LARGEST_SYMBOL - 1)
            encoder.bits(int(escaped < 0), 1)
        for place in range(shift):
            encoder.flags(self.values >> place & 1 == 1, HALF)


def decode_integers(decoder: Decoder, count: int) -> np.ndarray:
    """Read `count` integers, int64.

    Raises:
        FreezeFileError: If `Integers.encode` does not write such a stream.
    """
    if not count:
        return np.zeros(0, np.int64)
    shift = decoder.bits(_PARAMETER_BITS)
    frequencies = _first_frequencies()[decoder.bits(_PARAMETER_BITS)].copy()
    symbols = np.empty(count, np.int64)
    for piece in _pieces(count):
        symbols[piece] = decoder.frequent(piece.stop - piece.start, frequencies)
        frequencies += _UNIT * np.bincount(symbols[piece], minlength=_NUM_SYMBOLS)
    integers = symbols - _LARGEST_SYMBOL
    for place in np.flatnonzero(symbols == _ESCAPE).tolist():
        magnitude = decoder.number(LARGEST) + _LARGEST_SYMBOL + 1
        integers[place] = -magnitude if decoder.bits(1) else magnitude
    integers <<= shift
    for place in range(shift):
        integers += decoder.flags(count, HALF).astype(np.int64) << place
    if np.abs(integers).max() > LARGEST:
        raise decoder.error(f"an integer is larger than {LARGEST}")
    return integers


def _pieces(count: int) -> Iterator[slice]:
    """Yield the pieces after each of which the probabilities change."""
    start = 0
    while start < count:
        stop = min(start + max(_SMALLEST_PIECE, start // 8), count)
        yield slice(start, stop)
        start = stop


def _counts(symbols: np.ndarray) -> np.ndarray:
    """Return how often each symbol occurs in each piece."""
    sizes = [piece.stop - piece.start for piece in _pieces(symbols.size)]
    piece_of = np.repeat(np.arange(len(sizes)), sizes)
    counts = np.bincount(_NUM_SYMBOLS * piece_of + symbols, minlength=_NUM_SYMBOLS * len(sizes))
    return counts.reshape(len(sizes), _NUM_SYMBOLS)


def _before_each(counts: np.ndarray) -> np.ndarray:
    """Return what the symbols before each piece add to the frequencies."""
    return _UNIT * (np.cumsum(counts, axis=0) - counts)


def _symbols(high: np.ndarray) -> np.ndarray:
    return np.where(np.abs(high) <= _LARGEST_SYMBOL, high + _LARGEST_SYMBOL, _ESCAPE)


@functools.cache
def _first_frequencies() -> np.ndarray:
    """Return the frequencies of symbols before any has occurred, a row for each decay.

    Each next magnitude is `decay` / 32 times as frequent as the one before.
    """
    rows = []
    for decay in _DECAYS:
        magnitudes = [max((decay**k << 16) >> 5 * k, 1) for k in range(_LARGEST_SYMBOL + 1)]
        rows.append([*magnitudes[:0:-1], *magnitudes, magnitudes[-1]])
    return np.array(rows)


def _cheapest_parameters(integers: np.ndarray) -> tuple[float, int, int]:
    """Return the least cost in bits, how many lowest bits to write as they are, and the decay."""
    size = int(np.abs(integers).mean())
    widest = max(size.bit_length() - 1, 0)
    found = []
    for shift in range(max(widest - 2, 0), widest + 1):
        cost, decay = _cheapest_decay(integers >> shift)
        found.append((shift * integers.size + cost, shift, decay))
    return min(found)


def _cheapest_decay(high: np.ndarray) -> tuple[float, int]:
    """Return about how many bits integers take with the decay that suits them, and this decay."""
    symbols = _symbols(high)
    counts = _counts(symbols)
    escaped = np.abs(high[symbols == _ESCAPE]) - _LARGEST_SYMBOL
    escapes = float((2 * np.floor(np.log2(escaped)) + 2).sum())
    # The cost falls and then rises with the decay, nearly always.
    before = _before_each(counts)
    _, near = min(_costs(counts, before, _FEW_DECAYS))
    cost, decay = min(_costs(counts, before, _DECAYS[max(near - 3, 0) : near + 4]))
    return escapes + cost, decay


def _costs(counts: np.ndarray, before: np.ndarray, decays: range) -> list[tuple[float, int]]:
    """Return what symbols take with each decay.

    `counts` and `before` are how often they occur in each piece, and what `_before_each` gives.
    """
    first = _first_frequencies()[list(decays)]
    occurring = counts > 0
    frequencies = first[:, np.nonzero(occurring)[1]] + before[occurring]
    totals = first.sum(axis=1, keepdims=True) + before.sum(axis=1)
    costs = np.log2(totals) @ counts.sum(axis=1) - np.log2(frequencies) @ counts[occurring]
    return list(zip(costs.tolist(), decays, strict=True))
