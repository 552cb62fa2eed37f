"""Coded values: the same bits again, in less than their size where exponents are alike."""

import hypothesis.extra.numpy as arrays
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_freeze.storage.coding.entropy import TOTAL, Histogram, probabilities
from keras_freeze.storage.coding.values import decode_values, encode_values
from keras_freeze.storage.errors import FreezeFileError

WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@st.composite
def patterns(draw):
    dtype = WIDTHS[draw(st.sampled_from(list(WIDTHS)))]
    return draw(arrays.arrays(dtype, st.integers(0, 50)))


def kinds(values):
    return [(array.size, array.dtype.itemsize) for array in values]


@given(st.lists(patterns(), max_size=6))
def test_every_bit_pattern_comes_back(values):
    decoded = list(decode_values(*encode_values(values), kinds(values)))
    for array, found in zip(values, decoded, strict=True):
        assert found.dtype == array.dtype
        assert np.array_equal(array, found)


def test_nan_payloads_infinities_denormals_and_signed_zeros_come_back():
    special = np.array([0x7FC00001, 0xFF800000, 0x00000001, 0x80000000, 0, 0x7F7FFFFF], np.uint32)
    assert np.array_equal(next(decode_values(*encode_values([special]), [(6, 4)])), special)


@pytest.mark.parametrize(
    ("dtype", "at_most"),
    [("float32", 0.87), ("bfloat16", 0.72), ("float16", 0.94), ("float64", 0.95)],
)
def test_normally_distributed_values_take_less_than_their_size(dtype, at_most):
    values = np.random.default_rng(0).normal(scale=0.05, size=5000)
    values = values.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
    bits = values.view(WIDTHS[values.dtype.itemsize])
    assert sum(map(len, encode_values([bits]))) < at_most * values.nbytes


def test_random_bits_take_hardly_more_than_their_size():
    bits = np.random.default_rng(0).integers(0, 2**32, 20_000, np.uint32)
    assert sum(map(len, encode_values([bits]))) < 1.005 * bits.nbytes + 200


def test_small_arrays_share_what_they_have_in_common():
    rng = np.random.default_rng(0)
    values = [rng.normal(size=20).astype(np.float32).view(np.uint32) for _ in range(50)]
    together = len(encode_values(values)[0])
    assert together < 0.7 * sum(len(encode_values([array])[0]) for array in values)


@pytest.mark.parametrize("missing", [-1, 1])
def test_another_number_of_mantissas_is_an_error(missing):
    heads, tails = encode_values([np.arange(10, dtype=np.uint32)])
    tails = tails[:missing] if missing < 0 else tails + b"\0"
    with pytest.raises(FreezeFileError, match="instead of the 30 of the header"):
        list(decode_values(heads, tails, [(10, 4)]))


@given(heads=st.binary(max_size=200), count=st.integers(0, 300))
def test_any_bytes_are_values_or_an_error(heads, count):
    try:
        decoded = list(decode_values(heads, bytes(count), [(count, 2)]))
    except FreezeFileError:
        return
    assert decoded[0].size == count


@given(st.lists(st.integers(1, 2**15), min_size=2, max_size=256))
def test_probabilities_are_exact_integers(frequencies):
    result = probabilities(frequencies)
    assert result.sum() == TOTAL
    assert result.min() >= 1
    total = sum(frequencies)
    for p, frequency in zip(result.tolist(), frequencies, strict=True):
        # By Python's integers: rounding moves each end of an interval by less than one.
        assert abs(p - (frequency * (TOTAL - len(frequencies)) / total + 1)) < 1 + 1e-6


def test_a_histogram_is_right_within_a_factor_of_two():
    counts = np.zeros(256, np.int64)
    counts[[3, 100, 101, 250]] = [1, 50, 1000, 7]
    histogram = Histogram.of_counts(counts)
    share = 2.0**histogram.weights / (2.0**histogram.weights).sum()
    exact = counts[histogram.symbols] / counts.sum()
    assert np.all(share < 2 * exact)
    assert np.all(exact < 2 * share)
