"""Values in fewer bytes, exactly: what the top byte of a float shows is far from random.

Of a float32 the sign goes behind the mantissa; the exponent is then the first of four bytes. It is
entropy-coded, since weights of a layer are of similar size, and the other three are kept as they
are. The same rule does for every dtype.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from keras_freeze.storage.coding.entropy import Decoder, Encoder, Histogram
from keras_freeze.storage.errors import FreezeFileError


def encode_values(patterns: Sequence[np.ndarray]) -> tuple[bytes, bytes]:
    """Codes one-dimensional arrays of bit patterns (uint8, uint16, uint32 or uint64).

    Returns:
        The coded top bytes of all values, and the other bytes as they are.
    """
    heads, tails = [], []
    for array in patterns:
        head, tail = _split(array)
        heads.append(head)
        tails.append(tail.tobytes())
    encoder = Encoder()
    groups, histograms = _group([np.bincount(head, minlength=256) for head in heads])
    num_known = 0
    for head, group in zip(heads, groups, strict=True):
        if not head.size:
            continue
        encoder.number(group)
        if group == num_known:
            encoder.histogram(histograms[group])
            num_known += 1
        encoder.symbols(head, histograms[group])
    return encoder.finish(), b"".join(tails)


def decode_values(
    heads: bytes, tails: bytes, kinds: Sequence[tuple[int, int]]
) -> Iterator[np.ndarray]:
    """Reads arrays of which `kinds` gives the count of values and the bytes of each (1, 2, 4, 8).

    One after the other: none takes memory before it is asked for. That nothing is left over is
    checked after the last one.

    Raises:
        FreezeFileError: for bytes that `encode_values` does not write.
    """
    expected = sum(count * (width - 1) for count, width in kinds)
    if len(tails) != expected:
        raise FreezeFileError(
            f"The mantissas have {len(tails)} bytes where the header announces {expected}."
        )
    decoder = Decoder(heads, "exponents")
    histograms: list[Histogram] = []
    start = 0
    for count, width in kinds:
        end = start + count * (width - 1)
        tail = np.frombuffer(tails, np.uint8)[start:end]
        head = _decode_head(decoder, histograms, count) if count else np.zeros(0, np.uint8)
        yield _join(head, tail, width)
        start = end
    decoder.finish()


def _decode_head(decoder: Decoder, histograms: list[Histogram], count: int) -> np.ndarray:
    group = decoder.number(len(histograms))
    if group == len(histograms):
        histograms.append(decoder.histogram())
    return decoder.symbols(count, histograms[group])


def _split(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The top bytes and the rest, lowest byte first, after the sign has gone to the lowest bit."""
    bits = 8 * array.dtype.itemsize
    rotated = (array << array.dtype.type(1)) | (array >> array.dtype.type(bits - 1))
    as_bytes = rotated.astype(rotated.dtype.newbyteorder("<")).view(np.uint8)
    as_bytes = as_bytes.reshape(-1, array.dtype.itemsize)
    return as_bytes[:, -1], as_bytes[:, :-1]


def _join(head: np.ndarray, tail: np.ndarray, width: int) -> np.ndarray:
    as_bytes = np.empty((head.size, width), np.uint8)
    as_bytes[:, -1] = head
    as_bytes[:, :-1] = tail.reshape(head.size, width - 1)
    rotated = as_bytes.reshape(-1).view(f"<u{width}").astype(f"u{width}", copy=False)
    kind = rotated.dtype.type
    signs = rotated << kind(8 * width - 1)
    rotated >>= kind(1)
    rotated |= signs
    return rotated


def _group(counts: Sequence[np.ndarray]) -> tuple[list[int], list[Histogram]]:
    """Which arrays share a histogram: each joins the group where it costs least, or opens one.

    A reader needs none of it.
    """
    groups: list[int] = []
    sums: list[np.ndarray] = []
    for array_counts in counts:
        if not array_counts.any():
            groups.append(0)
            continue
        costs = [_cost(total + array_counts) - _cost(total) for total in sums]
        costs.append(_cost(array_counts) + 2.0)
        group = int(np.argmin(costs))
        if group == len(sums):
            sums.append(array_counts.copy())
        else:
            sums[group] += array_counts
        groups.append(group)
    return groups, [Histogram.of_counts(total) for total in sums]


def _cost(counts: np.ndarray) -> float:
    return Histogram.of_counts(counts).cost(counts)
