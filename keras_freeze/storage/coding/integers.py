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
_UNIT = 1 << 13  # of one occurrence, beside the frequencies before any occurred
_SMALLEST_PIECE = 8


def encode_integers(encoder: Encoder, integers: np.ndarray) -> None:
    """Write a vector of integers of at most `LARGEST` in magnitude."""
    if not integers.size:
        return
    _, shift, decay = _cheapest_parameters(integers)
    encoder.bits(shift, _PARAMETER_BITS)
    encoder.bits(decay, _PARAMETER_BITS)
    high = integers >> shift
    symbols, frequencies = _symbols(high), _first_frequencies(decay).copy()
    for piece in _pieces(symbols.size):
        encoder.frequent(symbols[piece], frequencies)
        frequencies += _UNIT * np.bincount(symbols[piece], minlength=_NUM_SYMBOLS)
    for escaped in high[symbols == _ESCAPE].tolist():
        encoder.number(abs(escaped) - _LARGEST_SYMBOL - 1)
        encoder.bits(int(escaped < 0), 1)
    for place in range(shift):
        encoder.flags(integers >> place & 1 == 1, HALF)


def decode_integers(decoder: Decoder, count: int) -> np.ndarray:
    """Read `count` integers, int64.

    Raises:
        FreezeFileError: If `encode_integers` does not write such a stream.
    """
    if not count:
        return np.zeros(0, np.int64)
    shift = decoder.bits(_PARAMETER_BITS)
    frequencies = _first_frequencies(decoder.bits(_PARAMETER_BITS)).copy()
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


def num_bits(integers: np.ndarray) -> float:
    """Return about how many bits `encode_integers` takes."""
    if not integers.size:
        return 0.0
    return 2 * _PARAMETER_BITS + _cheapest_parameters(integers)[0]


def _pieces(count: int) -> Iterator[slice]:
    """Yield the pieces after each of which the probabilities change."""
    start = 0
    while start < count:
        stop = min(start + max(_SMALLEST_PIECE, start // 8), count)
        yield slice(start, stop)
        start = stop


def _symbols(high: np.ndarray) -> np.ndarray:
    return np.where(np.abs(high) <= _LARGEST_SYMBOL, high + _LARGEST_SYMBOL, _ESCAPE)


@functools.cache
def _first_frequencies(decay: int) -> np.ndarray:
    """Return frequencies of symbols before any has occurred.

    Each next magnitude is `decay` / 32 times as frequent as the one before.
    """
    magnitudes = [max((decay**k << 16) >> 5 * k, 1) for k in range(_LARGEST_SYMBOL + 1)]
    return np.array([*magnitudes[:0:-1], *magnitudes, magnitudes[-1]])


def _cheapest_parameters(integers: np.ndarray) -> tuple[float, int, int]:
    """Return the least cost in bits, how many lowest bits to write as they are, and the decay."""
    size = int(np.abs(integers).mean())
    widest = max(size.bit_length() - 1, 0)
    return min(
        (shift * integers.size + cost, shift, decay)
        for shift in range(max(widest - 2, 0), widest + 1)
        for decay, cost in enumerate(_costs(integers >> shift))
    )


def _costs(high: np.ndarray) -> list[float]:
    """Return about how many bits integers take with each decay."""
    symbols = _symbols(high)
    counts = np.array([np.bincount(symbols[p], minlength=_NUM_SYMBOLS) for p in _pieces(high.size)])
    before = _UNIT * (np.cumsum(counts, axis=0) - counts)
    escaped = np.abs(high[symbols == _ESCAPE]) - _LARGEST_SYMBOL
    escapes = float((2 * np.floor(np.log2(escaped)) + 2).sum())
    first = np.array([_first_frequencies(decay) for decay in _DECAYS])
    occurring = counts > 0
    frequencies = first[:, np.nonzero(occurring)[1]] + before[occurring]
    totals = first.sum(axis=1, keepdims=True) + before.sum(axis=1)
    costs = np.log2(totals) @ counts.sum(axis=1) - np.log2(frequencies) @ counts[occurring]
    return (escapes + costs).tolist()
