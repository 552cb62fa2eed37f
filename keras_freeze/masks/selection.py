"""How many weights are trained and which: exact counts, ties broken by position (NumPy alone)."""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from keras_freeze._utils.validation import check_int, check_number, value_error

# The fourth counter word of the generator in `rescue_index`. It keeps these draws apart from any
# other use of the same seed.
_RESCUE_STREAM = 0x726573637565  # "rescue" in ASCII

_PIECE = 1 << 18  # scores at a time

_SAMPLE = 1 << 16  # scores of which a bound is computed


def check_freeze_rate(freeze_rate: Any) -> float:
    """Return a freezing rate q in [0, 1] as a Python float.

    A NumPy number means the decimal it prints: `np.float32(0.9)` is 0.9, not 0.89999998.

    Raises:
        TypeError: If `freeze_rate` is not a real number; booleans are not numbers here.
        ValueError: If it is NaN or outside [0, 1].

    Example:
        >>> check_freeze_rate(np.float32(0.9))
        0.9
    """
    rate = check_number("freeze_rate", freeze_rate, 0.0, 1.0)
    if isinstance(freeze_rate, np.floating):
        rate = float(str(freeze_rate))
    return rate + 0.0  # -0.0 becomes 0.0


def num_trained_weights(freeze_rate: float, num_weights: int) -> int:
    """Count the weights that a rate leaves trained: floor((1 - q) |W|) (algorithm 1, line 3).

    The rate is taken as the decimal number it prints, so that q = 0.9 of 430,500 weights leaves
    43,050 and not, as in binary floating point, 43,049.

    Raises:
        TypeError: If an argument is not a number.
        ValueError: If the rate is outside [0, 1] or the count negative.

    Example:
        >>> num_trained_weights(0.9, 430_500)
        43050
    """
    rate = Fraction(str(check_freeze_rate(freeze_rate)))
    count = check_int("num_weights", num_weights)
    return math.floor((1 - rate) * count)


def rescue_index(seed: int, position: int, size: int) -> int:
    """Draw the index of the weight that is trained in a layer that would be left without any.

    The index is `(r * size) >> 64` for the first 64-bit word r of Philox 4x64 (ten rounds) with
    the key `(seed, position)` and the counter `(1, 0, 0, 0x726573637565)`: uniform up to
    `size / 2**64`, and the same everywhere.

    `position` is the variable's among those the optimizer is built with, and `size` the number of
    its weights.

    Raises:
        TypeError: If an argument is not an integer.
        ValueError: If an argument is out of range.
    """
    seed = check_int("seed", seed, end=2**64)
    position = check_int("position", position, end=2**64)
    size = check_int("size", size, minimum=1)
    # NumPy steps the counter before it draws, hence the 1 in the docstring.
    counter = np.array([0, 0, 0, _RESCUE_STREAM], np.uint64)
    key = np.array([seed, position], np.uint64)
    word = int(np.random.Philox(counter=counter, key=key).random_raw())
    return (word * size) >> 64


def select_top(scores: Sequence[np.ndarray], k: int) -> list[np.ndarray]:
    """Mark the k largest scores over all arrays together, exactly k of them.

    Ties go to the earlier array, and within an array to the lower flat index. No comparison with
    a threshold alone: where most scores are exactly 0 that would select them all.

    Scores are arrays of any shapes, taken as float32; signed ones are ordered as they are. Each
    has a boolean array of its shape.

    Raises:
        ValueError: If a score is NaN or infinite, or `k` is out of range.

    Example:
        >>> select_top([np.array([1.0, 3.0]), np.array([3.0, 2.0])], 2)
        [array([False,  True]), array([ True, False])]
    """
    arrays = as_float32(scores)
    for index, array in enumerate(arrays):
        if not np.isfinite(array).all():
            raise ValueError(f"Scores must be finite. Received: scores[{index}] has NaN or Inf")
    total = sum(array.size for array in arrays)
    if not 0 <= k <= total:
        raise value_error("k", k, f"between 0 and {total}, the number of scores")
    if k == 0:
        return [np.zeros(array.shape, bool) for array in arrays]

    threshold = _kth_largest(arrays, k)
    selected = [np.greater(array, threshold).reshape(-1) for array in arrays]
    missing = k - sum(int(np.count_nonzero(chosen)) for chosen in selected)
    for array, chosen in zip(arrays, selected, strict=True):
        if missing == 0:
            break
        ties = np.flatnonzero(array.reshape(-1) == threshold)[:missing]
        chosen[ties] = True
        missing -= ties.size
    return [chosen.reshape(array.shape) for array, chosen in zip(arrays, selected, strict=True)]


def indices_of_largest(scores: np.ndarray, allowed: np.ndarray, k: int) -> np.ndarray:
    """Return the flat indices of the k largest among the scores that a boolean array allows.

    Ties go to the lower index. Where k is small, next to no memory is needed.

    Args:
        scores: Finite numbers.
        allowed: A boolean array of the same shape.
        k: How many; at most as many as are allowed.

    Raises:
        ValueError: If `k` is out of range.

    Example:
        >>> indices_of_largest(np.array([5.0, 2.0, 2.0]), np.array([False, True, True]), 1)
        array([1])
    """
    flat, free = scores.reshape(-1), allowed.reshape(-1)
    candidates = None
    if _needs_bound(flat.size, k):
        step = flat.size // _SAMPLE
        sample = flat[::step][free[::step]]
        if sample.size:
            candidates = np.flatnonzero((flat >= _bound(sample, k, step)) & free)
    if candidates is None or candidates.size < k:
        candidates = np.flatnonzero(free)
    return candidates[select_top([flat[candidates]], k)[0]]


def as_float32(scores: Sequence[Any]) -> list[np.ndarray]:
    """Return scores as float32 arrays; infinite where they are too large for that."""
    with np.errstate(over="ignore"):  # the infinities that come of it are refused
        return [np.asarray(score, np.float32) for score in scores]


def _kth_largest(arrays: list[np.ndarray], k: int) -> np.float32:
    arrays = _largest_part(arrays, k)
    # Radix selection: count the upper halves of all keys, then the lower halves of those keys
    # whose upper half is the one looked for. Piece by piece it needs next to no memory, and takes
    # the same time however many ties there are; `np.partition` is slow on halfway tied scores.
    upper_counts = np.zeros(1 << 16, np.int64)
    for keys in _sortable_keys(arrays):
        upper_counts += np.bincount(keys >> 16, minlength=1 << 16)
    upper, remaining = _bin_from_top(upper_counts, k)
    lower_counts = np.zeros(1 << 16, np.int64)
    for keys in _sortable_keys(arrays):
        lower_counts += np.bincount(keys[keys >> 16 == upper] & 0xFFFF, minlength=1 << 16)
    lower, _ = _bin_from_top(lower_counts, remaining)
    key = upper << 16 | lower
    bits = key ^ 0x80000000 if key & 0x80000000 else key ^ 0xFFFFFFFF
    return np.uint32(bits).view(np.float32)


def _largest_part(arrays: list[np.ndarray], k: int) -> list[np.ndarray]:
    """Return the scores above a bound that k of them exceed, where a sample gives one; else all."""
    total = sum(array.size for array in arrays)
    if not _needs_bound(total, k):
        return arrays
    step = total // _SAMPLE
    bound = _bound(np.concatenate([array.reshape(-1)[::step] for array in arrays]), k, step)
    parts = [array[array >= bound] for array in arrays]
    return parts if sum(part.size for part in parts) >= k else arrays


def _needs_bound(total: int, k: int) -> bool:
    """Return whether it is faster to find the k largest of so many scores with a bound."""
    return total >= 4 * _SAMPLE and k <= total // 8


def _bound(sample: np.ndarray, k: int, step: int) -> Any:
    """Return a bound that the k largest scores exceed, very likely, from each `step`-th score."""
    rank = 2 * k // step + 64  # twice the expected rank, and more than its deviation
    return np.sort(sample)[max(sample.size - rank, 0)]


def _sortable_keys(arrays: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield float32 scores piece by piece as unsigned integers of the same order."""
    for array in arrays:
        flat = array.reshape(-1)
        for start in range(0, flat.size, _PIECE):
            bits = (flat[start : start + _PIECE] + np.float32(0)).view(np.uint32)  # no -0.0
            negative = (bits.view(np.int32) >> 31).view(np.uint32)  # all ones, or all zeros
            yield bits ^ (negative | np.uint32(0x80000000))


def _bin_from_top(counts: np.ndarray, k: int) -> tuple[int, int]:
    """Return the bin that holds the k-th largest, and its rank, from 1, within the bin."""
    from_top = np.cumsum(counts[::-1])
    index = int(np.searchsorted(from_top, k))
    above = int(from_top[index - 1]) if index else 0
    return counts.size - 1 - index, k - above
