"""Which weights leave a mask and which join it: NumPy alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_freeze.masks.changing import distances, keep_largest, regrow
from keras_freeze.masks.distributions import Group

# Few values, so that there are ties.
SCORES = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def best(indices, scores, number):
    """The indices with the largest scores, of equal ones the first."""
    return set(sorted(indices, key=lambda i: (-scores[i], i))[:number])


@given(SCORES, st.data())
def test_the_largest_distances_stay_and_the_largest_scores_join(scores, data):
    size = len(scores)
    bits = st.lists(st.booleans(), min_size=size, max_size=size)
    trained = np.array(data.draw(bits))
    distance = np.array(data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size)))
    number = data.draw(st.integers(0, int(trained.sum())))
    mask = regrow(trained, distance * 1.0, np.array(scores) * 1.0, number)
    inside = set(np.flatnonzero(trained))
    stay = best(inside, distance, len(inside) - number)
    join = best(set(range(size)) - stay, scores, number)
    assert set(np.flatnonzero(mask)) == stay | join


@given(SCORES, st.data())
def test_no_weight_joins_and_the_largest_stay(scores, data):
    size = len(scores)
    trained = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    number = data.draw(st.integers(0, size))
    (mask,) = keep_largest([np.array(scores) * 1.0], [trained], [Group((0,), number, True)])
    inside = set(np.flatnonzero(trained))
    expected = best(inside, scores, number) or best(inside, scores, 1)
    assert set(np.flatnonzero(mask)) == expected


def test_groups_are_compared_among_themselves():
    scores = [np.array([1.0, 2.0]), np.array([[3.0], [4.0]]), np.array([0.5, 0.25])]
    trained = [np.ones((2,), bool), np.ones((2, 1), bool), np.array([True, True])]
    groups = [Group((0, 2), 2, True), Group((1,), 1, True)]
    first, second, third = keep_largest(scores, trained, groups)
    assert first.tolist() == [True, True]
    assert second.tolist() == [[False], [True]]
    assert third.tolist() == [True, False]  # its largest: a layer keeps one


def test_without_the_rule_a_layer_may_lose_all():
    masks = keep_largest([np.ones(3)], [np.ones(3, bool)], [Group((0,), 0, False)])
    assert not masks[0].any()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values_that_are_not_finite_are_the_farthest(dtype):
    values = np.array([np.nan, np.inf, 1.0, -2.0], dtype)
    found = distances(values, np.zeros(4, dtype))
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert found[2:].tolist() == [1.0, 2.0]
    assert (found[:2] > 1e38).all()
