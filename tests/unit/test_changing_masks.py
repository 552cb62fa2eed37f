"""Which weights leave a mask and which join it: NumPy alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_freeze.masks.changing import (
    _scaled,
    distances,
    join_at_random,
    join_largest,
    keep_largest,
    leave,
)
from keras_freeze.masks.distributions import Group
from keras_freeze.masks.structure import Structure

# Few values, so that there are ties.
SCORES = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def best(indices, scores, number):
    """The indices with the largest scores, of equal ones the first."""
    return set(sorted(indices, key=lambda i: (-scores[i], i))[:number])


@given(SCORES, st.data())
def test_the_largest_distances_stay_and_the_largest_scores_join(scores, data):
    size = len(scores)
    trained = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    inside = np.flatnonzero(trained)
    distance = np.array(data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))
    number = data.draw(st.integers(0, inside.size))
    stays = leave(trained, distance[inside] * 1.0, number)
    expected = best(inside, distance, inside.size - number)
    assert set(np.flatnonzero(stays)) == expected
    mask = join_largest(stays, np.array(scores) * 1.0, inside.size)
    expected |= best(set(range(size)) - expected, scores, number)
    assert set(np.flatnonzero(mask)) == expected


@given(SCORES, st.data())
def test_no_weight_joins_and_the_largest_stay(scores, data):
    size = len(scores)
    trained = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    number = data.draw(st.integers(0, size))
    inside = np.flatnonzero(trained)
    (mask,) = keep_largest([np.array(scores)[inside]], [trained], [Group((0,), number, True)])
    expected = best(inside, scores, number) or best(inside, scores, 1)
    assert set(np.flatnonzero(mask)) == expected


def test_groups_are_compared_among_themselves():
    scores = [np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([0.5, 0.25])]
    trained = [np.ones((2,), bool), np.ones((2, 1), bool), np.array([True, True])]
    groups = [Group((0, 2), 2, True), Group((1,), 1, True)]
    first, second, third = keep_largest(scores, trained, groups)
    assert first.tolist() == [True, True]
    assert second.tolist() == [[False], [True]]
    assert third.tolist() == [True, False]  # its largest: a layer keeps one


def test_without_the_rule_a_layer_may_lose_all():
    masks = keep_largest([np.ones(3)], [np.ones(3, bool)], [Group((0,), 0, False)])
    assert not masks[0].any()


@pytest.mark.parametrize(("number", "columns"), [(1, 2), (3, 2), (4, 1), (6, 1), (7, 0)])
def test_whole_columns_leave_and_join(number, columns):
    trained = np.array([[True, True, True, False, False]] * 3)
    distance = np.tile([3.0, 1.0, 2.0], 3)
    stays = leave(trained, distance, number, Structure("column"))
    assert stays.all(axis=0).tolist() == [columns > 0, False, columns > 1, False, False]
    growth = np.tile([0.0, 0.0, 0.0, 1.0, 2.0], (3, 1))
    mask = join_largest(stays, growth, 9, Structure("column"))
    assert mask.sum() == 9
    assert mask[:, 4].all()
    assert (mask.all(axis=0) == mask.any(axis=0)).all()
    assert not (stays & ~mask).any()


def test_two_of_four_stay_two_of_four():
    trained = np.array([[True], [True], [False], [False], [True], [False], [False], [True]])
    stays = leave(trained, np.array([4.0, 1.0, 2.0, 3.0]), 2, Structure("2:4"))
    assert np.flatnonzero(stays).tolist() == [0, 7]
    mask = join_largest(stays, np.arange(8.0)[::-1, None], 4, Structure("2:4"))
    assert np.flatnonzero(mask).tolist() == [0, 1, 4, 7]


def test_a_layer_keeps_its_best_column():
    trained = np.array([[True, True, False]] * 2)
    masks = keep_largest(
        [np.array([1.0, 2.0, 1.0, 2.0])], [trained], [Group((0,), 1, True)], Structure("column")
    )
    assert masks[0].tolist() == [[False, True, False]] * 2


@given(st.integers(1, 40), st.data())
def test_as_many_join_at_random_as_leave(size, data):
    stays = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    num_trained = data.draw(st.integers(int(stays.sum()), size))
    mask = join_at_random(stays, num_trained, data.draw(st.integers(0, 2**64 - 1)), 3)
    assert mask.sum() == num_trained
    assert not (stays & ~mask).any()


def test_the_same_seed_and_position_give_the_same_weights():
    stays = np.arange(200) % 3 == 0
    masks = [join_at_random(stays, 100, *key) for key in ((1, 2), (1, 2), (1, 3), (2, 2))]
    assert np.array_equal(masks[0], masks[1])
    assert all((masks[0] != mask).any() for mask in masks[2:])


def test_every_weight_outside_joins_with_equal_probability():
    stays = np.array([True, False, False, True, False, False])
    counts = sum(join_at_random(stays, 3, seed, 0).astype(int) for seed in range(4000))
    assert (counts[stays] == 4000).all()
    assert (np.abs(counts[~stays] - 1000) < 5 * np.sqrt(4000 * 0.25 * 0.75)).all()


def test_indices_are_products_of_words_and_the_size():
    words = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    for size in (1, 7, 2**31 - 1, 2**32 - 1):
        expected = [(word * size) >> 64 for word in words]
        assert _scaled(np.array(words, np.uint64), size).tolist() == expected


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_an_error(value):
    with pytest.raises(ValueError, match="finite"):
        join_largest(np.array([True, False]), np.array([1.0, value]), 2)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values_that_are_not_finite_are_the_farthest(dtype):
    values = np.array([np.nan, np.inf, 1.0, -2.0], dtype)
    found = distances(values, np.zeros(4, dtype))
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert found[2:].tolist() == [1.0, 2.0]
    assert (found[:2] > 1e38).all()
