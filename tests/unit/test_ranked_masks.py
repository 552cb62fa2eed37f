"""Masks that follow from a ranking: the largest scores, which a file need not hold."""

import format_reader
import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracle import brute_force_mask

from keras_freeze.masks.ranked import Ranked, Ranking, random_scores
from keras_freeze.storage.coding.masks import count_masks, decode_masks, encode_masks
from keras_freeze.storage.errors import FreezeFileError

SHAPES = arrays.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=6)
MAGNITUDES = Ranking(None)


@given(arrays.arrays(np.float32, SHAPES, elements=st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.0])))
def test_the_largest_magnitudes_are_trained_and_of_equal_ones_the_first(start):
    for k in range(start.size + 1):
        (expected,) = brute_force_mask([np.abs(start)], k)
        assert np.array_equal(Ranked(k, MAGNITUDES).mask(start.shape, start.reshape(-1)), expected)


@pytest.mark.parametrize("key", [(0, 0), (5, 2**64 - 1), (2**63 + 1, 1), (2**64 - 1, 2**64 - 1)])
def test_scores_are_the_highest_bits_of_philox_with_any_key(key):
    words = format_reader.philox4x64(*key, 21)
    assert (random_scores((3, 7), *key).reshape(-1) * 2**24).tolist() == [w >> 40 for w in words]


@given(SHAPES, st.integers(0, 2**32 - 1), st.integers(0, 100))
def test_the_largest_random_numbers_are_trained(shape, seed, stream):
    scores = random_scores(shape, seed, stream)
    k = scores.size // 2
    (expected,) = brute_force_mask([scores], k)
    assert np.array_equal(Ranked(k, Ranking((seed, stream))).mask(shape, None), expected)


@given(st.lists(SHAPES, max_size=4), st.data())
def test_ranked_and_other_masks_share_a_stream(shapes, data):
    masks, keys = [], []
    for number, shape in enumerate(shapes):
        size = int(np.prod(shape))
        ranking = data.draw(st.sampled_from([None, MAGNITUDES, Ranking((7, number))]))
        count = data.draw(st.integers(0, size))
        mask = (np.arange(size) < count).reshape(shape)
        masks.append(mask if ranking is None else Ranked(count, ranking))
        keys.append(ranking)
    stream = encode_masks(masks)
    found = decode_masks(stream, shapes, keys)
    for before, after in zip(masks, found, strict=True):
        assert np.array_equal(before, after) if isinstance(before, np.ndarray) else before == after
    counts = [m.sum() if isinstance(m, np.ndarray) else m.num_trained for m in masks]
    assert count_masks(stream, shapes, 10**6, keys) == counts


@given(st.binary(max_size=24), SHAPES)
def test_any_bytes_are_a_count_or_an_error(stream, shape):
    try:
        (ranked,) = decode_masks(stream, [shape], [MAGNITUDES])
    except FreezeFileError:
        return
    assert 0 <= ranked.num_trained <= int(np.prod(shape))


def test_starts_that_have_no_order_are_an_error():
    with pytest.raises(ValueError, match="finite"):
        Ranked(1, MAGNITUDES).mask((2,), np.array([1.0, np.nan], "float32"))
