"""The entropy coder of the `.freeze` file: numbers, flags and bytes in one range-coded stream.

The coder is constriction's range coder: 32-bit words, a state of 64 bits, probabilities in units of
2^-24. Every probability is an integer before it gets there, so that encoder and decoder agree on
every machine. docs/file_format.md describes all of it without reference to this code.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import constriction
import numpy as np

from keras_freeze.storage.errors import FreezeFileError

TOTAL = 1 << 24
"""The sum of the probabilities of all symbols of a model."""

_LARGEST_TOTAL = 1 << 39  # of frequencies, so that its product with TOTAL fits into 63 bits
_LARGEST_WEIGHT = 15
_WEIGHT_BITS = 4
_PIECE = 1 << 22  # symbols at a time: the coder takes 32-bit integers
HALF = TOTAL // 2
"""The probability of a flag that is True as often as False."""

_GROUP = 64


def probabilities(frequencies: Sequence[int] | np.ndarray) -> np.ndarray:
    """Scale positive integer frequencies, along the last axis, to integers that sum to 2^24.

    They are at least 1. The cumulative probability before symbol i is
    floor(C_i (2^24 - n) / T) + i, for n symbols whose frequencies are C_i before symbol i and T in
    all.
    """
    *rows, n = np.shape(frequencies)
    before = np.zeros((*rows, n + 1), np.int64)
    np.cumsum(frequencies, axis=-1, out=before[..., 1:])
    # Products of large counts do not fit into 64 bits, but into Python's integers.
    counts = before if before.max() < _LARGEST_TOTAL else before.astype(object)
    cumulative = (counts * (TOTAL - n) // counts[..., -1:]).astype(np.int64) + np.arange(n + 1)
    return np.diff(cumulative)


class Encoder:
    """An encoder of one stream."""

    def __init__(self) -> None:
        self._coder = constriction.stream.queue.RangeEncoder()

    def bits(self, value: int, width: int) -> None:
        """Write an unsigned integer in `width` bits, each of probability 1/2, highest first."""
        flags = [(value >> place) & 1 for place in range(width - 1, -1, -1)]
        self.flags(np.array(flags, bool), HALF)

    def number(self, value: int) -> None:
        """Write an integer of at least 0, in 2 log2(value + 1) + 1 bits (Elias gamma)."""
        width = (value + 1).bit_length()
        self.bits(0, width - 1)
        self.bits(value + 1, width)

    def flags(self, flags: np.ndarray, probability: int) -> None:
        """Write booleans that are True with `probability` / 2^24.

        Each symbol costs about 10^-4 bits more than it should, which counts where nearly all flags
        are False. So rare ones are written in groups: which groups hold any, the place of the first
        one in these, and the flags behind it.
        """
        grouped = _num_grouped(flags.size, probability)
        groups = flags[:grouped].reshape(-1, _GROUP)
        if grouped:
            any_true, first_true = _group_models(probability)
            active: Any = groups.any(axis=1)
            self._encode(active, any_true)
            first = groups[active].argmax(1)
            self._encode(first, first_true)
            groups = groups[active][np.arange(_GROUP) > first[:, None]]
        model = _flag_model(probability)
        self._encode(groups.reshape(-1), model)
        self._encode(flags[grouped:], model)

    def symbols(self, symbols: np.ndarray, histogram: "Histogram") -> None:
        """Write bytes that all occur in the histogram."""
        if histogram.model is not None:
            self._encode(np.searchsorted(histogram.symbols, symbols), histogram.model)

    def frequent(self, pieces: Iterable[np.ndarray], frequencies: np.ndarray) -> None:
        """Write pieces of symbols 0, 1, ..., each with its row of frequencies.

        The decoder knows the frequencies.
        """
        for piece, row in zip(pieces, probabilities(frequencies), strict=True):
            self._encode(piece, _model(row))

    def histogram(self, histogram: "Histogram") -> None:
        """Write which bytes occur and, if there are several, how often."""
        symbols = histogram.symbols.astype(int).tolist()
        self.number(len(symbols) - 1)
        self.bits(symbols[0], 8)
        for symbol, following in itertools.pairwise(symbols):
            self.number(following - symbol - 1)
        for weight in histogram.weights.tolist() if len(symbols) > 1 else ():
            self.bits(weight, _WEIGHT_BITS)

    def finish(self) -> bytes:
        """Return the stream as bytes: the words, lowest byte first."""
        return self._coder.get_compressed().astype("<u4").tobytes()

    def _encode(self, symbols: np.ndarray, model: Any) -> None:
        for start in range(0, symbols.size, _PIECE):
            self._coder.encode(symbols[start : start + _PIECE].astype(np.int32), model)


class Decoder:
    """A decoder of what an `Encoder` wrote.

    Args:
        stream: The bytes.
        what: What they are, for error messages.

    Raises:
        FreezeFileError: Here and in the methods, if no encoder writes such a stream.
    """

    def __init__(self, stream: bytes, what: str) -> None:
        self._what = what
        if len(stream) % 4:
            raise self.error("its length is not a multiple of 4")
        self._coder = constriction.stream.queue.RangeDecoder(
            np.frombuffer(stream, "<u4").astype(np.uint32)
        )

    def bits(self, width: int) -> int:
        """Read an unsigned integer of `width` bits."""
        value = 0
        for flag in self.flags(width, HALF).tolist():
            value = value << 1 | flag
        return value

    def number(self, largest: int) -> int:
        """Read an integer from 0 to `largest`."""
        width = 1
        while not self.bits(1):
            width += 1
            if width > largest.bit_length() + 1:
                raise self.error(f"a number is larger than {largest}")
        value = (1 << width - 1 | self.bits(width - 1)) - 1
        if value > largest:
            raise self.error(f"a number is larger than {largest}")
        return value

    def flags(self, count: int, probability: int) -> np.ndarray:
        """Read `count` booleans that are True with `probability` / 2^24."""
        flags = np.zeros(count, bool)
        grouped = _num_grouped(count, probability)
        model = _flag_model(probability)
        if grouped:
            any_true, first_true = _group_models(probability)
            active = np.flatnonzero(self._decode(any_true, grouped // _GROUP, bool))
            first = self._decode(first_true, active.size, np.uint8)
            groups = np.arange(_GROUP) == first[:, None]
            behind = np.arange(_GROUP) > first[:, None]
            groups[behind] = self._decode(model, int(np.count_nonzero(behind)), bool)
            flags[:grouped].reshape(-1, _GROUP)[active] = groups
        flags[grouped:] = self._decode(model, count - grouped, bool)
        return flags

    def symbols(self, count: int, histogram: "Histogram") -> np.ndarray:
        """Read `count` bytes."""
        if histogram.model is None:
            return np.full(count, histogram.symbols[0], np.uint8)
        return histogram.symbols[self._decode(histogram.model, count, np.uint8)]

    def frequent(self, count: int, frequencies: np.ndarray) -> np.ndarray:
        """Read `count` symbols 0, 1, ... that occur with these frequencies."""
        return self._decode(_model(probabilities(frequencies)), count, np.int64)

    def histogram(self) -> "Histogram":
        """Read a histogram."""
        count = self.number(255) + 1
        symbols = [self.bits(8)]
        for _ in range(count - 1):
            symbols.append(symbols[-1] + 1 + self.number(255))
        if symbols[-1] > 255:
            raise self.error("a histogram has a symbol above 255")
        weights = [self.bits(_WEIGHT_BITS) for _ in range(count if count > 1 else 0)]
        return Histogram(np.array(symbols, np.uint8), np.array(weights, int))

    def finish(self) -> None:
        """Check that the stream has ended."""
        if not self._coder.maybe_exhausted():
            raise self.error("it is longer than its content")

    def _decode(self, model: Any, count: int, dtype: Any) -> np.ndarray:
        decoded = np.empty(count, dtype)
        for start in range(0, count, _PIECE):
            piece = decoded[start : start + _PIECE]
            try:
                piece[:] = self._coder.decode(model, piece.size)
            except (AssertionError, ValueError) as error:
                raise self.error(f"the range coder says {error}") from error
        return decoded

    def error(self, problem: str) -> FreezeFileError:
        """Return an error about the stream."""
        return FreezeFileError(f"The {self._what} cannot be decoded: {problem}.")


class Histogram:
    """Which bytes occur and how often, to the next power of two.

    Args:
        symbols: The bytes that occur, ascending, uint8.
        weights: An integer w from 0 to 15 for each of them, which is coded as if it occurred 2^w
            times. Not used for a single symbol.
    """

    def __init__(self, symbols: np.ndarray, weights: np.ndarray) -> None:
        self.symbols = symbols
        self.weights = weights
        self.probabilities = probabilities(1 << weights) if len(symbols) > 1 else np.array([TOTAL])
        self.model = _model(self.probabilities) if len(symbols) > 1 else None

    @classmethod
    def of_counts(cls, counts: np.ndarray) -> "Histogram":
        """Return the histogram of bytes, of which `counts` has the 256 frequencies."""
        symbols = np.flatnonzero(counts)
        share = counts[symbols] / counts.max()
        weights = np.rint(_LARGEST_WEIGHT + np.log2(share)).clip(0, _LARGEST_WEIGHT)
        return cls(symbols.astype(np.uint8), weights.astype(int))

    @classmethod
    def cost(cls, counts: np.ndarray) -> float:
        """Estimate the bits that bytes with these 256 frequencies and their histogram take."""
        histogram = cls.of_counts(counts)
        symbols = histogram.symbols.astype(int)
        if len(symbols) == 1:
            return 9.0
        gaps = 2 * np.floor(np.log2(np.diff(symbols))) + 1
        table = 2 * np.log2(len(symbols)) + 9 + gaps.sum() + _WEIGHT_BITS * len(symbols)
        shares = histogram.probabilities / TOTAL
        return float(table - (counts[symbols] * np.log2(shares)).sum())


def _num_grouped(count: int, probability: int) -> int:
    """Return how many flags are written in groups; the others follow one by one."""
    return count - count % _GROUP if probability < TOTAL // _GROUP else 0


def _group_models(probability: int) -> tuple[Any, Any]:
    """Return the models of whether a group has a True flag, and of the index of the first."""
    none, frequencies = TOTAL, []
    for _ in range(_GROUP):
        frequencies.append(none * probability >> 24)
        none = none * (TOTAL - probability) >> 24
    none = min(max(none, 1), TOTAL - 1)
    first = probabilities([max(frequency, 1) for frequency in frequencies])
    return _flag_model(TOTAL - none), _model(first)


def _flag_model(probability: int) -> Any:
    return _model(np.array([TOTAL - probability, probability]))


def _model(chosen: np.ndarray) -> Any:
    """Return the coder's model of symbols 0, 1, ... with probabilities that sum to 2^24.

    constriction adds 1 to what is left after giving each symbol 1; of integers that sum up to the
    rest exactly, its arithmetic rounds nothing.
    """
    weights = (chosen - 1).astype(np.float64)
    return constriction.stream.model.Categorical(weights, perfect=False)
