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

from keras_freeze.masks.drawn import Draw
from keras_freeze.masks.levels import (
    EMPTY,
    LARGEST,
    PROBABILITIES,
    ZERO,
    fitted_levels,
    matrix_shape,
    num_bits,
)
from keras_freeze.masks.ranked import Ranked, Ranking
from keras_freeze.storage.coding.entropy import TOTAL, Decoder, Encoder, Histogram
from keras_freeze.storage.coding.tiles import SINGLE, Tile, largest_tile
from keras_freeze.storage.errors import FreezeFileError

# How the mask of a variable is coded.
_ALL_FROZEN, _ALL_TRAINED, _ONE_RATE, _LEVELS = range(4)
_MODE_BITS = 2

_MOST_BLOCKS = 1 << 16
_BYTES_OF_TILE = 16  # more than the header takes to name the tiles of a mask


CodedMask = np.ndarray | Draw | Ranked
"""A boolean array, True = trained, or what it is drawn by or follows from."""

Key = tuple[int, int] | Ranking | Tile | None
"""What the header says of a mask that is not coded entry by entry; None for others.

Seed and stream of one that is drawn, the ranking that it follows from, or the tiles it consists of.
"""


def count(mask: CodedMask) -> int:
    """Return how many entries a mask trains."""
    return int(np.count_nonzero(mask)) if isinstance(mask, np.ndarray) else mask.num_trained


def encode_masks(masks: Sequence[CodedMask]) -> bytes:
    """Encode the masks of variables; their keys are not part of it.

    In place of a mask with tiles, `masks` has the array that says which of them are trained.
    """
    encoder = Encoder()
    for mask in masks:
        if isinstance(mask, Ranked):
            encoder.number(mask.num_trained)
        elif isinstance(mask, Draw):
            encoder.number(mask.num_trained - 1)
            _encode_levels(encoder, mask.levels)
        else:
            _encode_mask(encoder, mask.reshape(matrix_shape(mask.shape)))
    return encoder.finish()


def tile_of(mask: np.ndarray) -> Tile | None:
    """Return the tiles with which a mask takes fewer bytes; None if it takes fewer without them."""
    tile = largest_tile(mask)
    if tile == SINGLE:
        return None
    saved = len(encode_masks([mask])) - len(encode_masks([tile.tiles(mask)]))
    return tile if saved > _BYTES_OF_TILE else None


def num_bits_of_places(mask: np.ndarray) -> float:
    """Return about how many bits a boolean array takes with one rate for all of it."""
    share = np.count_nonzero(mask) / max(mask.size, 1)
    if share in (0.0, 1.0):
        return 2.0
    return -mask.size * (share * math.log2(share) + (1 - share) * math.log2(1 - share))


def decode_masks(
    stream: bytes, shapes: Sequence[tuple[int, ...]], keys: Sequence[Key] | None = None
) -> list[CodedMask]:
    """Decode the masks of variables of these shapes, given the key of each.

    Raises:
        FreezeFileError: If `encode_masks` does not write such a stream.
    """
    decoder = Decoder(stream, "mask")
    masks: list[CodedMask] = []
    for shape, key in zip(shapes, keys or [None] * len(shapes), strict=True):
        if key is None or isinstance(key, Tile):
            tile = key or SINGLE
            masks.append(tile.mask(_decode_mask(decoder, tile.grid(shape)), shape))
        elif isinstance(key, Ranking):
            masks.append(Ranked(decoder.number(math.prod(shape)), key))
        else:
            num_trained = _decode_num_drawn(decoder, shape)
            levels = tuple(_decode_levels(decoder, matrix_shape(shape)))
            masks.append(Draw(levels, num_trained, *key))
    decoder.finish()
    return masks


def count_masks(
    stream: bytes,
    shapes: Sequence[tuple[int, ...]],
    most: int,
    keys: Sequence[Key] | None = None,
) -> list[int] | None:
    """Count the trained entries in the masks of variables of these shapes.

    Only one mask at a time is in memory; masks that are all frozen or all trained are not decoded.

    Returns:
        The counts; None if more than `most` entries would have to be decoded.

    Raises:
        FreezeFileError: If `encode_masks` does not write such a stream.
    """
    decoder = Decoder(stream, "mask")
    counts = []
    for shape, key in zip(shapes, keys or [None] * len(shapes), strict=True):
        if isinstance(key, Ranking):
            counts.append(decoder.number(math.prod(shape)))
            continue
        if key is not None and not isinstance(key, Tile):
            counts.append(_decode_num_drawn(decoder, shape))
            _decode_levels(decoder, matrix_shape(shape))
            continue
        tile = key or SINGLE
        grid, mode = tile.grid(shape), decoder.bits(_MODE_BITS)
        if mode in (_ALL_FROZEN, _ALL_TRAINED):
            counts.append(math.prod(shape) if mode == _ALL_TRAINED else 0)
            continue
        most -= math.prod(max(length, 1) for length in grid)
        if most < 0:
            return None
        counts.append(tile.num_trained(_decode_entries(decoder, grid, mode), shape))
    decoder.finish()
    return counts


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
    _encode_levels(encoder, levels)
    sorted_mask = mask[np.ix_(*[np.argsort(axis, kind="stable") for axis in levels])]
    for block, probability in _blocks(levels):
        encoder.flags(sorted_mask[block].reshape(-1), probability)


def _encode_levels(encoder: Encoder, levels: Sequence[np.ndarray]) -> None:
    for axis_levels in levels:
        histogram = Histogram.of_counts(np.bincount(axis_levels, minlength=256))
        encoder.histogram(histogram)
        encoder.symbols(axis_levels, histogram)


def _decode_levels(decoder: Decoder, shape: tuple[int, ...]) -> list[np.ndarray]:
    levels = [decoder.symbols(length, decoder.histogram()) for length in shape]
    if any(axis.size and axis.max() > ZERO + LARGEST for axis in levels):
        raise FreezeFileError("The mask cannot be decoded: it has an unknown level.")
    return levels


def _decode_num_drawn(decoder: Decoder, shape: tuple[int, ...]) -> int:
    size = math.prod(shape)
    if not size:
        raise FreezeFileError("The mask cannot be decoded: nothing can be drawn.")
    return decoder.number(size - 1) + 1


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
    levels = _decode_levels(decoder, shape)
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
        axes.append([(v, s) for v, s in zip(values.tolist(), slices, strict=True) if v != EMPTY])
    for lines in itertools.product(*axes):
        level = sum(value - ZERO for value, _ in lines)
        level = min(max(level, -LARGEST), LARGEST)
        yield tuple(s for _, s in lines), int(PROBABILITIES[level + LARGEST])


# How the encoder chooses the levels; the decoder does not need it.


_GRIDS = (2, 4)  # distances of the levels that are tried, in quarters of an octave


def _cheapest_levels(mask: np.ndarray) -> list[np.ndarray] | None:
    """Return levels of each axis as symbols; None if one rate for all takes fewer bits."""
    num_trained, size = int(np.count_nonzero(mask)), mask.size
    rate = num_trained / size
    bits = -num_trained * math.log2(rate) - (size - num_trained) * math.log2(1 - rate)
    cheapest = bits + 2 * math.log2(num_trained) + 1
    found = None
    trained = np.nonzero(mask)
    for grid in _GRIDS:
        for levels in fitted_levels(mask, grid):
            cost = _cost(trained, levels)
            num_blocks = math.prod(np.unique(axis).size for axis in levels)
            if cost < cheapest and num_blocks <= _MOST_BLOCKS:
                cheapest, found = cost, levels
    return found


def _cost(trained: Sequence[np.ndarray], levels: Sequence[np.ndarray]) -> float:
    """Estimate the bits that a mask takes with these levels."""
    side = sum(Histogram.cost(np.bincount(axis, minlength=256)) for axis in levels)
    return num_bits(trained, levels) + side
