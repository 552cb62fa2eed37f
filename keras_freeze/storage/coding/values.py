"""Lossless coding of values: the exponents of a layer's weights have low entropy.

The bits of a float32 are rotated so that its exponent is the first of four bytes. This byte is
entropy-coded, and the other three are stored as they are. The same rule holds for every dtype.
Values on a grid are integers, which are entropy-coded whole.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from keras_freeze.storage.coding.entropy import Decoder, Encoder, Histogram
from keras_freeze.storage.coding.integers import Integers, decode_integers
from keras_freeze.storage.errors import FreezeFileError

INTEGERS = 0
"""What `decode_values` takes for the bytes of a value that is an integer."""


def encode_values(values: Sequence[np.ndarray | Integers]) -> tuple[bytes, bytes]:
    """Encode one-dimensional arrays of bit patterns (uint8 to uint64) and integers (also int64).

    Returns:
        The encoded top bytes of all values and the integers, and the other bytes as they are.
    """
    heads: list[np.ndarray | Integers] = []
    tails = []
    for one in values:
        head, tail = _head_and_tail(one)
        heads.append(head)
        tails.append(tail)
    encoder = Encoder()
    groups, histograms = _group(
        [np.bincount(() if isinstance(head, Integers) else head, minlength=256) for head in heads]
    )
    num_known = 0
    for head, group in zip(heads, groups, strict=True):
        if isinstance(head, Integers):
            head.encode(encoder)
            continue
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
    """Iterate over arrays, of which `kinds` has the numbers of values and their bytes.

    These are 1 to 8 for bit patterns, or `INTEGERS`.

    An array takes memory only when the iterator comes to it. After the last one, the iterator
    checks that nothing is left over.

    Raises:
        FreezeFileError: If `encode_values` does not write such bytes.
    """
    expected = sum(count * (width - 1) for count, width in kinds if width != INTEGERS)
    if len(tails) != expected:
        raise FreezeFileError(
            f"The mantissas have {len(tails)} bytes instead of the {expected} of the header."
        )
    decoder = Decoder(heads, "exponents")
    histograms: list[Histogram] = []
    start = 0
    for count, width in kinds:
        if width == INTEGERS:
            yield decode_integers(decoder, count)
            continue
        end = start + count * (width - 1)
        tail = np.frombuffer(tails, np.uint8)[start:end]
        head = _decode_head(decoder, histograms, count) if count else np.zeros(0, np.uint8)
        yield _join(head, tail, width)
        start = end
    decoder.finish()


def num_bits_of_patterns(array: np.ndarray) -> float:
    """Return about how many bits `encode_values` takes for bit patterns."""
    head, tail = _split(array)
    return Histogram.cost(np.bincount(head, minlength=256)) + 8.0 * tail.size if head.size else 0.0


def _head_and_tail(values: np.ndarray | Integers) -> tuple[np.ndarray | Integers, bytes]:
    """Return what is entropy-coded of values, and the other bytes."""
    if isinstance(values, Integers):
        return values, b""
    if values.dtype.kind == "i":
        return Integers(values), b""
    head, tail = _split(values)
    return head, tail.tobytes()


def _decode_head(decoder: Decoder, histograms: list[Histogram], count: int) -> np.ndarray:
    group = decoder.number(len(histograms))
    if group == len(histograms):
        histograms.append(decoder.histogram())
    return decoder.symbols(count, histograms[group])


def _split(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return top bytes and the rest, lowest byte first, after rotating the sign to the end."""
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
    """Return which arrays share a histogram: each joins the group in which it costs least.

    The decoder does not need it.
    """
    groups: list[int] = []
    sums: list[np.ndarray] = []
    for array_counts in counts:
        if not array_counts.any():
            groups.append(0)
            continue
        costs = [Histogram.cost(total + array_counts) - Histogram.cost(total) for total in sums]
        costs.append(Histogram.cost(array_counts) + 2.0)
        group = int(np.argmin(costs))
        if group == len(sums):
            sums.append(array_counts.copy())
        else:
            sums[group] += array_counts
        groups.append(group)
    return groups, [Histogram.of_counts(total) for total in sums]
