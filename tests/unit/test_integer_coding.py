"""Coded integers: the same again, in hardly more than their entropy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_freeze.storage.coding.entropy import Decoder, Encoder
from keras_freeze.storage.coding.integers import (
    LARGEST,
    Integers,
    decode_integers,
)
from keras_freeze.storage.coding.values import INTEGERS, decode_values, encode_values
from keras_freeze.storage.errors import FreezeFileError


def encoded(integers):
    encoder = Encoder()
    Integers(np.array(integers, np.int64)).encode(encoder)
    return encoder.finish()


def decoded(stream, count):
    decoder = Decoder(stream, "integers")
    integers = decode_integers(decoder, count)
    decoder.finish()
    return integers


@given(st.lists(st.one_of(st.integers(-3, 3), st.integers(-LARGEST, LARGEST)), max_size=200))
def test_every_integer_comes_back(integers):
    assert decoded(encoded(integers), len(integers)).tolist() == integers


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 30.0, 1e4, 1e8])
def test_many_integers_come_back(scale):
    integers = np.rint(np.random.default_rng(0).normal(0, 1 + scale, 30_000)).astype(np.int64)
    assert np.array_equal(decoded(encoded(integers), integers.size), integers)


def entropy(integers):
    """In bits, of all of them together."""
    counts = np.unique(integers, return_counts=True)[1]
    return -(counts * np.log2(counts / counts.sum())).sum()


@pytest.mark.parametrize("count", [100, 4_000, 100_000])
@pytest.mark.parametrize(
    "draw",
    [
        lambda rng, count: rng.laplace(0, 0.2, count),
        lambda rng, count: rng.laplace(0, 3, count),
        lambda rng, count: rng.normal(0, 1, count),
        lambda rng, count: rng.normal(2, 25, count),
        lambda rng, count: 5 * rng.choice([-1, 1], count) + rng.normal(0, 1, count),
    ],
    ids=["mostly_zero", "wide", "normal", "very_wide", "two_peaks"],
)
def test_integers_take_hardly_more_than_their_entropy(draw, count):
    integers = np.rint(draw(np.random.default_rng(0), count)).astype(np.int64)
    size = len(encoded(integers))
    assert size <= 1.02 * entropy(integers) / 8 + 64
    assert abs(size - Integers(integers).num_bits / 8) <= 8  # whole words, and a word to finish


def test_integers_and_bit_patterns_share_a_stream():
    integers, patterns = np.arange(-5, 5), np.arange(10, dtype=np.uint32)
    values = [patterns, integers, integers[:0], patterns[:0], integers]
    kinds = [(10, 4), (10, INTEGERS), (0, INTEGERS), (0, 4), (10, INTEGERS)]
    for array, found in zip(values, decode_values(*encode_values(values), kinds), strict=True):
        assert np.array_equal(array, found)


@given(stream=st.binary(max_size=200), count=st.integers(0, 300))
def test_any_bytes_are_integers_or_an_error(stream, count):
    try:
        integers = decoded(stream, count)
    except FreezeFileError:
        return
    assert integers.size == count
    assert np.abs(integers).max(initial=0) <= LARGEST
