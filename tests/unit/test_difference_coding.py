"""Differences in units in the last place: exact both ways, and what NumPy counts."""

import hypothesis.extra.numpy as arrays
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_freeze._utils.bits import as_bits
from keras_freeze.grids import LARGEST
from keras_freeze.storage.coding.differences import differences, values_at

WIDTHS = (np.uint16, np.uint32, np.uint64)


@st.composite
def pairs(draw):
    dtype = draw(st.sampled_from(WIDTHS))
    size = draw(st.integers(0, 20))
    return draw(arrays.arrays(dtype, size)), draw(arrays.arrays(dtype, size))


@given(pairs())
def test_values_follow_from_starts_and_differences(pair):
    values, starts = pair
    found = differences(values, starts)
    if found is not None:
        assert found.dtype == np.int64
        assert np.abs(found).max(initial=0) <= LARGEST
        back = values_at(starts, found)
        assert back.dtype == values.dtype
        assert np.array_equal(back, values)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("start", [1.0, -1.0, 0.0, 6e-8, 65504.0])
def test_the_next_numbers_are_one_apart(dtype, start):
    one = np.array([start], dtype)
    up, down = np.nextafter(one, np.inf, dtype=dtype), np.nextafter(one, -np.inf, dtype=dtype)
    # Zero has two patterns, of which the negative one comes first.
    below = 2 if start == 0 else 1
    assert differences(as_bits(up), as_bits(one)) == [1]
    assert differences(as_bits(down), as_bits(one)) == [-below]


def test_bfloat16_counts_its_own_numbers():
    values = np.array([1.0, 1.0078125, 1.015625, -1.0078125], ml_dtypes.bfloat16)
    assert differences(as_bits(values[1:3]), as_bits(values[[0, 0]])).tolist() == [1, 2]
    assert differences(as_bits(values[3:]), as_bits(-values[:1])).tolist() == [-1]


def test_what_is_too_far_apart_has_no_difference():
    halfway = np.array([0], np.uint32), np.array([0xFFFFFFFF], np.uint32)  # 2^31 ranks apart
    assert differences(*halfway) is None
    doubled = np.array([1.0, 2.0])  # 2^52 numbers apart
    assert differences(as_bits(doubled[1:]), as_bits(doubled[:1])) is None
