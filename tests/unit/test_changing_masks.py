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
from keras_freeze.masks.structure import Structure, Units

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
    fraction = data.draw(st.sampled_from([0.0, 0.1, 0.29, 0.5, 0.7, 1.0]))
    stays, number = leave(trained, distance[inside] * 1.0, fraction)
    assert number == round(fraction * 100) * inside.size // 100
    expected = best(inside, distance, inside.size - number)
    assert set(np.flatnonzero(stays)) == expected
    mask = join_largest(stays, np.array(scores) * 1.0, number)
    expected |= best(set(range(size)) - expected, scores, number)
    assert set(np.flatnonzero(mask)) == expected


@given(SCORES, st.data())
def test_no_weight_joins_and_the_largest_stay(scores, data):
    size = len(scores)
    trained = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    number = data.draw(st.integers(0, size))
    inside = np.flatnonzero(trained)
    groups = [Group((0,), number, True)]
    (mask,), num_rescued = keep_largest([np.array(scores)[inside]], [trained], groups)
    assert num_rescued == (number == 0 and inside.size > 0)
    expected = best(inside, scores, number) or best(inside, scores, 1)
    assert set(np.flatnonzero(mask)) == expected


def test_groups_are_compared_among_themselves():
    scores = [np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([0.5, 0.25])]
    trained = [np.ones((2,), bool), np.ones((2, 1), bool), np.array([True, True])]
    groups = [Group((0, 2), 2, True), Group((1,), 1, True)]
    (first, second, third), num_rescued = keep_largest(scores, trained, groups)
    assert num_rescued == 1
    assert first.tolist() == [True, True]
    assert second.tolist() == [[False], [True]]
    assert third.tolist() == [True, False]  # its largest: a layer keeps one


def test_without_the_rule_a_layer_may_lose_all():
    masks, _ = keep_largest([np.ones(3)], [np.ones(3, bool)], [Group((0,), 0, False)])
    assert not masks[0].any()


@pytest.mark.parametrize(("fraction", "columns"), [(0.3, 3), (0.34, 2), (0.7, 1), (1.0, 0)])
def test_whole_columns_leave_and_join(fraction, columns):
    trained = np.array([[True, True, True, False, False]] * 3)
    distance = np.tile([3.0, 1.0, 2.0], 3)
    stays, number = leave(trained, distance, fraction, Structure("column"))
    assert number == 3 - columns
    best = [0, 2, 1][:columns]
    assert np.flatnonzero(stays.all(axis=0)).tolist() == sorted(best)
    assert (stays.all(axis=0) == stays.any(axis=0)).all()
    growth = np.tile([0.0, 0.0, 0.0, 1.0, 2.0], (3, 1))
    mask = join_largest(stays, growth, number, Structure("column"))
    joined = [4, 3, *(i for i in (0, 1, 2) if i not in best)][:number]
    assert np.flatnonzero(mask.all(axis=0)).tolist() == sorted([*best, *joined])
    assert (mask.all(axis=0) == mask.any(axis=0)).all()


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    units=st.sampled_from(["column", "row", (2, 2), (3, 4), (8, 8)]),
    seed=st.integers(0, 1000),
    fraction=st.sampled_from([0.1, 0.3, 0.5, 1.0]),
)
def test_the_number_of_units_stays_where_axes_are_no_multiples(shape, units, seed, fraction):
    rng = np.random.default_rng(seed)
    structure = Structure(units)
    places = Units(structure, shape)
    mask = places.mask(rng.random(places.number) < 0.4)
    number = int((places.sizes(mask) > 0).sum())
    for _ in range(4):
        distance = rng.random(int(mask.sum()))
        stays, left = leave(mask, distance, fraction, structure)
        assert not (stays & ~mask).any()
        mask = join_largest(stays, rng.random(shape), left, structure)
        sizes = places.sizes(mask)
        assert int((sizes > 0).sum()) == number
        assert np.array_equal(places.mask(sizes > 0), mask)


def test_a_mask_of_parts_of_columns_is_compared_by_what_is_trained():
    trained = np.array([[True, True, False], [False, True, False]])
    scores = np.array([5.0, 1.0, 2.0])
    groups = [Group((0,), 2, True)]
    (mask,), _ = keep_largest([scores], [trained], groups, Structure("column"))
    assert mask.tolist() == [[True, False, False], [False, False, False]]
    stays, number = leave(trained, scores, 0.5, Structure("column"))
    assert number == 1
    assert np.array_equal(stays, mask)


def test_two_of_four_stay_two_of_four():
    trained = np.array([[True], [True], [False], [False], [True], [False], [False], [True]])
    stays, number = leave(trained, np.array([4.0, 1.0, 2.0, 3.0]), 0.5, Structure("2:4"))
    assert np.flatnonzero(stays).tolist() == [0, 7]
    mask = join_largest(stays, np.arange(8.0)[::-1, None], number, Structure("2:4"))
    assert np.flatnonzero(mask).tolist() == [0, 1, 4, 7]


@pytest.mark.parametrize("score", ["mean", "sum"])
def test_a_layer_keeps_its_best_column(score):
    trained = np.array([[True, True, False]] * 2)
    scores, groups = np.array([1.0, 2.0, 1.0, 2.0]), [Group((0,), 1, True)]
    (mask,), num_rescued = keep_largest([scores], [trained], groups, Structure("column", score))
    assert mask.tolist() == [[False, True, False]] * 2
    assert num_rescued == 2


@given(st.integers(1, 40), st.data())
def test_as_many_join_at_random_as_leave(size, data):
    stays = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    number = data.draw(st.integers(0, int((~stays).sum())))
    mask = join_at_random(stays, number, data.draw(st.integers(0, 2**64 - 1)), 3)
    assert mask.sum() == stays.sum() + number
    assert not (stays & ~mask).any()


def test_the_same_seed_and_position_give_the_same_weights():
    stays = np.arange(200) % 3 == 0
    masks = [join_at_random(stays, 20, *key) for key in ((1, 2), (1, 2), (1, 3), (2, 2))]
    assert np.array_equal(masks[0], masks[1])
    assert all((masks[0] != mask).any() for mask in masks[2:])


def test_every_weight_outside_joins_with_equal_probability():
    stays = np.arange(18) < 2
    for number in (2, 8):  # by an index for each, and by a number for each outside
        counts = sum(join_at_random(stays, number, seed, 0).astype(int) for seed in range(4000))
        share = number / 16
        assert (counts[stays] == 4000).all()
        deviation = np.sqrt(4000 * share * (1 - share))
        assert (np.abs(counts[~stays] - 4000 * share) < 5 * deviation).all()


def test_the_last_one_of_many_joins_without_being_searched_for():
    stays = np.ones(10**6, bool)
    stays[[5, 7]] = False
    assert join_at_random(stays, 1, 0, 0).sum() == 10**6 - 1


def test_indices_are_products_of_words_and_the_size():
    words = [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 0x123456789ABCDEF0]
    for size in (1, 7, 2**31 - 1, 2**32 - 1):
        expected = [(word * size) >> 64 for word in words]
        assert _scaled(np.array(words, np.uint64), size).tolist() == expected


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_that_are_not_finite_are_an_error(value):
    with pytest.raises(ValueError, match="finite"):
        join_largest(np.array([True, False]), np.array([1.0, value]), 1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values_that_are_not_finite_are_the_farthest(dtype):
    values = np.array([np.nan, np.inf, 1.0, -2.0], dtype)
    found = distances(values, np.zeros(4, dtype))
    assert found.dtype == np.float32
    assert np.isfinite(found).all()
    assert found[2:].tolist() == [1.0, 2.0]
    assert (found[:2] > 1e38).all()
