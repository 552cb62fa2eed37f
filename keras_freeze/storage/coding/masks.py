"""The mask in few bytes: one level for each row, column and position of a weight.

Saliency prefers some inputs and outputs of a layer to others, so that a mask is far from random.
Each line of a weight along each axis has a level; the odds that an entry is trained are
2^((sum of the levels of its lines) / 4). With fixed levels the likelihood of a mask depends on how
many entries are trained in each line alone, which makes the best levels quick to find.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from keras_freeze.storage.coding.entropy import TOTAL, Decoder, Encoder, Histogram
from keras_freeze.storage.errors import FreezeFileError

# How the mask of a variable is coded.
_ALL_FROZEN, _ALL_TRAINED, _ONE_RATE, _LEVELS = range(4)
_MODE_BITS = 2

_EMPTY = 0  # the symbol of a line without trained entries, which are not coded at all
_ZERO = 97  # the symbol of level 0: symbols 1 to 193 are levels -96 to 96
_LARGEST = 96
_MOST_BLOCKS = 1 << 16
_ROOTS = (4294967296, 5107605667, 6074001000, 7223245222)  # round(2^(32 + r / 4)), r = 0, 1, 2, 3


def _probability_table() -> np.ndarray:
    """Return P(trained) at levels -96 to 96, in units of 2^-24, from 1 to 2^24 - 1."""
    table = []
    for level in range(-_LARGEST, _LARGEST + 1):
        octaves, quarter = divmod(level + _LARGEST, 4)
        odds, one = _ROOTS[quarter] << octaves, 1 << 32 + _LARGEST // 4
        table.append(min(max(TOTAL * odds // (odds + one), 1), TOTAL - 1))
    return np.array(table)


_PROBABILITIES = _probability_table()
_BITS_IF_FROZEN = -np.log2(1 - _PROBABILITIES / TOTAL)


def encode_masks(masks: Sequence[np.ndarray]) -> bytes:
    """Encode boolean arrays, True = trained."""
    encoder = Encoder()
    for mask in masks:
        _encode_mask(encoder, mask.reshape(matrix_shape(mask.shape)))
    return encoder.finish()


def decode_masks(stream: bytes, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Decode the masks of variables of these shapes.

    Raises:
        FreezeFileError: If `encode_masks` does not write such a stream.
    """
    decoder = Decoder(stream, "mask")
    masks = [_decode_mask(decoder, matrix_shape(shape)).reshape(shape) for shape in shapes]
    decoder.finish()
    return masks


def count_masks(stream: bytes, shapes: Sequence[tuple[int, ...]], most: int) -> list[int] | None:
    """Count the trained entries in the masks of variables of these shapes.

    Only one mask at a time is in memory; masks that are all frozen or all trained are not decoded.

    Returns:
        The counts; None if more than `most` entries would have to be decoded.

    Raises:
        FreezeFileError: If `encode_masks` does not write such a stream.
    """
    decoder = Decoder(stream, "mask")
    counts = []
    for shape in map(matrix_shape, shapes):
        mode = decoder.bits(_MODE_BITS)
        if mode in (_ALL_FROZEN, _ALL_TRAINED):
            counts.append(math.prod(shape) if mode == _ALL_TRAINED else 0)
            continue
        most -= math.prod(max(length, 1) for length in shape)
        if most < 0:
            return None
        counts.append(int(np.count_nonzero(_decode_entries(decoder, shape, mode))))
    decoder.finish()
    return counts


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the axes with levels: the last two, and all before them as one."""
    if len(shape) <= 2:
        return shape or (1,)
    return (math.prod(shape[:-2]), *shape[-2:])


def _encode_mask(encoder: Encoder, mask: np.ndarray) -> None:
    num_trained = int(np.count_nonzero(mask))
    if num_trained in (0, mask.size):
        encoder.bits(_ALL_TRAINED if num_trained else _ALL_FROZEN, _MODE_BITS)
        return
    levels = _cheapest_levels(mask)
    if levels is None:
        encoder.bits(_ONE_RATE, _MODE_BITS)
        encoder.number(num_trained - 1)
        encoder.flags(mask.reshape(-1), _rate(num_trained, mask.size))
        return
    encoder.bits(_LEVELS, _MODE_BITS)
    for axis_levels in levels:
        histogram = Histogram.of_counts(np.bincount(axis_levels, minlength=256))
        encoder.histogram(histogram)
        encoder.symbols(axis_levels, histogram)
    sorted_mask = mask[np.ix_(*[np.argsort(axis, kind="stable") for axis in levels])]
    for block, probability in _blocks(levels):
        encoder.flags(sorted_mask[block].reshape(-1), probability)


def _decode_mask(decoder: Decoder, shape: tuple[int, ...]) -> np.ndarray:
    mode = decoder.bits(_MODE_BITS)
    if mode in (_ALL_FROZEN, _ALL_TRAINED):
        return np.full(shape, mode == _ALL_TRAINED)
    return _decode_entries(decoder, shape, mode)


def _decode_entries(decoder: Decoder, shape: tuple[int, ...], mode: int) -> np.ndarray:
    size = math.prod(shape)
    if mode == _ONE_RATE:
        num_trained = decoder.number(max(size - 2, 0)) + 1
        return decoder.flags(size, _rate(num_trained, size)).reshape(shape)
    levels = [decoder.symbols(length, decoder.histogram()) for length in shape]
    if any(axis.size and axis.max() > _ZERO + _LARGEST for axis in levels):
        raise FreezeFileError("The mask cannot be decoded: it has an unknown level.")
    if math.prod(np.unique(axis).size for axis in levels) > _MOST_BLOCKS:
        raise FreezeFileError("The mask cannot be decoded: it has too many levels.")
    sorted_mask = np.zeros(shape, bool)
    for block, probability in _blocks(levels):
        cells = sorted_mask[block]
        cells[:] = decoder.flags(cells.size, probability).reshape(cells.shape)
    mask = np.empty(shape, bool)
    mask[np.ix_(*[np.argsort(axis, kind="stable") for axis in levels])] = sorted_mask
    return mask


def _rate(num_trained: int, size: int) -> int:
    return min(max(TOTAL * num_trained // max(size, 1), 1), TOTAL - 1)


def _blocks(levels: Sequence[np.ndarray]) -> Iterator[tuple[tuple[slice, ...], int]]:
    """Iterate over the blocks of equal levels in a sorted variable, and P(trained) in each."""
    axes = []
    for axis_levels in levels:
        values, counts = np.unique(axis_levels, return_counts=True)
        ends = np.cumsum(counts).tolist()
        slices = [slice(end - n, end) for end, n in zip(ends, counts.tolist(), strict=True)]
        axes.append([(v, s) for v, s in zip(values.tolist(), slices, strict=True) if v != _EMPTY])
    for lines in itertools.product(*axes):
        level = sum(value - _ZERO for value, _ in lines)
        level = min(max(level, -_LARGEST), _LARGEST)
        yield tuple(s for _, s in lines), int(_PROBABILITIES[level + _LARGEST])


# How the encoder chooses the levels; the decoder does not need it.


_GRIDS = (2, 4)  # distances of the levels that are tried, in quarters of an octave
_ROUNDS = 3


def _cheapest_levels(mask: np.ndarray) -> list[np.ndarray] | None:
    """Return levels of each axis as symbols; None if one rate for all takes fewer bits."""
    num_trained, size = int(np.count_nonzero(mask)), mask.size
    rate = num_trained / size
    bits = -num_trained * math.log2(rate) - (size - num_trained) * math.log2(1 - rate)
    cheapest = bits + 2 * math.log2(num_trained) + 1
    found = None
    counts = [
        np.count_nonzero(mask, axis=tuple(j for j in range(mask.ndim) if j != i))
        for i in range(mask.ndim)
    ]
    trained = np.nonzero(mask)
    for grid in _GRIDS:
        levels = [np.full(length, _ZERO) for length in mask.shape]
        for _ in range(_ROUNDS):
            for axis in range(mask.ndim):
                others = _level_sums([one for i, one in enumerate(levels) if i != axis])
                levels[axis] = _fit(counts[axis], others, grid)
            cost = _cost(trained, levels)
            num_blocks = math.prod(np.unique(axis).size for axis in levels)
            if cost < cheapest and num_blocks <= _MOST_BLOCKS:
                cheapest, found = cost, list(levels)
    return found


def _fit(counts: np.ndarray, others: np.ndarray, grid: int) -> np.ndarray:
    """Return the levels, as symbols, of lines with `counts` trained entries each.

    An entry's level is its line's plus one of the sums that `others` counts. The likelihood of a
    line that has a level is linear in its count, up to what all lines of this level share. Levels
    that few lines have cost more bits, so that choice and cost are computed alternately.
    """
    unique, inverse, lines = np.unique(counts, return_inverse=True, return_counts=True)
    candidates = np.arange(-_LARGEST, _LARGEST + 1, grid)
    bits = _bits_if_frozen(candidates, others)[None, :] - unique[:, None] * candidates / 4
    # An empty line costs nothing but its symbol.
    bits = np.hstack([np.where(unique == 0, 0.0, np.inf)[:, None], bits])
    symbols = np.concatenate([[_EMPTY], candidates + _ZERO])
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
        counts = np.bincount(axis_levels, minlength=_ZERO + _LARGEST + 1)[1:]
        sums = np.convolve(sums, counts)
    return sums


def _bits_if_frozen(levels: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the bits of lines with these levels if all their entries are frozen."""
    sums = np.arange(others.size) - (others.size - 1) // 2
    present = np.flatnonzero(others)
    total = levels[:, None] + sums[present]
    return _BITS_IF_FROZEN[total.clip(-_LARGEST, _LARGEST) + _LARGEST] @ others[present]


def _cost(trained: tuple[np.ndarray, ...], levels: Sequence[np.ndarray]) -> float:
    """Estimate the bits that a mask takes with these levels."""
    if_frozen = _bits_if_frozen(np.zeros(1, int), _level_sums(levels))[0]
    entry_levels = sum(axis[i] - _ZERO for axis, i in zip(levels, trained, strict=True))
    clipped = np.clip(entry_levels, -_LARGEST, _LARGEST)
    gain = np.bincount(clipped + _LARGEST, minlength=2 * _LARGEST + 1)
    odds = np.log2(_PROBABILITIES / (TOTAL - _PROBABILITIES))
    side = sum(Histogram.cost(np.bincount(axis, minlength=256)) for axis in levels)
    return float(if_frozen - (gain * odds).sum() + side)
