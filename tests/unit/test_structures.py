"""Masks with a structure: whole units, exact numbers, the largest scores first, n of each m."""

import doctest
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from structures import budget_of, mask_by_hand, place_in_pattern, sum_of_pairs, units_of

import keras_freeze as kf
from keras_freeze.masks import Structure, structure
from keras_freeze.masks.selection import rescue_index
from keras_freeze.masks.settings import Settings
from keras_freeze.masks.structure import check_structure, rescued

RATES = st.integers(0, 100).map(lambda hundredths: hundredths / 100)
SHAPES = st.lists(
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=1, max_side=6), min_size=1, max_size=4
)
BLOCKS = st.tuples(st.integers(1, 4), st.integers(1, 4))
UNITS = st.sampled_from(["column", "row"]) | BLOCKS
PATTERNS = st.integers(1, 5).flatmap(lambda m: st.integers(1, m).map(lambda n: f"{n}:{m}"))
FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5])  # many ties
ANY = st.floats(-4, 4, width=32)


def draw_scores(data, elements=None):
    elements = elements or data.draw(st.sampled_from([FEW, ANY]))
    return [data.draw(hnp.arrays(np.float32, s, elements=elements)) for s in data.draw(SHAPES)]


def masks_of(scores, rate, structure, **arguments):
    mask = kf.FreezeMask.from_scores(scores, rate, structure=structure, **arguments)
    return mask, [entry.trained for entry in mask.entries]


def units_in(mask, structure):
    """How many entries of each unit of a mask are trained, and how many it has."""
    units = units_of(mask.shape, structure).values()
    return [(sum(bool(mask[i]) for i in indices), len(indices)) for indices in units]


@given(st.data())
def test_masks_are_those_of_brute_force(data):
    scores, rate, units = draw_scores(data), data.draw(RATES), data.draw(UNITS)
    score, seed = data.draw(st.sampled_from(["mean", "sum"])), data.draw(st.integers(0, 9))
    mask, found = masks_of(scores, rate, Structure(units, score), seed=seed)
    budget = budget_of(rate, [array.shape for array in scores])
    expected, num_rescued = mask_by_hand(scores, budget, units, score), 0
    for position, chosen in enumerate(expected):
        if rate < 1 and not chosen.any():
            own = sorted(units_of(chosen.shape, units).items())
            for index in own[rescue_index(seed, position, len(own))][1]:
                chosen[index] = True
            num_rescued += int(chosen.sum())
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert mask.num_rescued == num_rescued
    assert mask.num_trained - num_rescued <= budget


@given(st.data())
def test_n_of_m_are_those_of_brute_force(data):
    scores, rate, pattern = draw_scores(data), data.draw(RATES), data.draw(PATTERNS)
    mask, found = masks_of(scores, rate, pattern)
    n, m = map(int, pattern.split(":"))
    budget = budget_of(rate, [array.shape for array in scores])
    expected = mask_by_hand(scores, budget, pattern)
    for position, (one, other) in enumerate(zip(found, expected, strict=True)):
        if rate < 1 and not other.any():
            other.reshape(-1)[rescue_index(0, position, other.size)] = True
        np.testing.assert_array_equal(one, other)
        places = [place_in_pattern(index, m) for index in np.ndindex(one.shape) if one[index]]
        assert all(places.count(place) <= n for place in places)
    lengths = [(1, *array.shape)[-2] if array.ndim > 1 else array.size for array in scores]
    capacity = sum(
        array.size // length * (length // m * n + min(length % m, n))
        for array, length in zip(scores, lengths, strict=True)
    )
    assert mask.num_trained - mask.num_rescued == min(budget, capacity)


@given(st.data())
def test_units_are_whole_and_no_more_would_fit(data):
    scores, rate, units = draw_scores(data, ANY), data.draw(RATES), data.draw(UNITS)
    mask, found = masks_of(scores, rate, units)
    counts = [pair for trained in found for pair in units_in(trained, units)]
    assert all(number in (0, size) for number, size in counts)
    frozen = [size for number, size in counts if number == 0]
    if frozen and mask.num_rescued == 0:
        budget = budget_of(rate, [array.shape for array in scores])
        assert mask.num_trained <= budget
        assert mask.num_trained + max(frozen) > budget


@given(st.data())
def test_blocks_of_one_entry_are_single_weights(data):
    scores, rate = draw_scores(data), data.draw(RATES)
    expected = kf.FreezeMask.from_scores(scores, rate)
    for same in ((1, 1), Structure((1, 1), "sum"), "1:1", "3:3"):
        found = kf.FreezeMask.from_scores(scores, rate, structure=same)
        assert found == expected
        assert found.num_rescued == expected.num_rescued


@pytest.mark.parametrize(("pattern", "rate"), [("2:4", 0.5), ("1:4", 0.75), ("1:2", 0.5)])
def test_at_the_rate_of_a_pattern_each_m_weights_have_n_trained(pattern, rate):
    scores = [np.random.default_rng(0).random((3, 8, 5)), np.random.default_rng(1).random((12, 7))]
    _, masks = masks_of(scores, rate, pattern)
    n, m = map(int, pattern.split(":"))
    for trained in masks:
        groups = trained.reshape(-1, trained.shape[-2] // m, m, trained.shape[-1])
        assert (groups.sum(2) == n).all()


def test_a_pattern_limits_the_number_at_low_rates():
    mask = kf.FreezeMask.from_scores([np.arange(24.0).reshape(6, 4)], 0, structure="1:3")
    assert np.argwhere(mask["0"])[:, 0].tolist() == [2] * 4 + [5] * 4


@given(st.data())
def test_each_variable_has_its_own_share_of_a_distribution(data):
    scores, rate, units = draw_scores(data), data.draw(RATES), data.draw(UNITS)
    distribution = data.draw(st.sampled_from([{"*": rate}, {"0": 0.5}]))
    _, found = masks_of(scores, rate, units, distribution=distribution)
    if "*" in distribution:
        alone = [
            kf.FreezeMask.from_scores([array], rate, structure=units, positions=[i])[str(i)]
            for i, array in enumerate(scores)
        ]
    else:
        first = kf.FreezeMask.from_scores(scores[:1], 0.5, structure=units)["0"]
        positions = list(range(1, len(scores)))
        rest = kf.FreezeMask.from_scores(scores[1:], rate, structure=units, positions=positions)
        alone = [first, *(entry.trained for entry in rest.entries)]
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_array_equal(one, other)


def test_columns_by_hand():
    small = np.array([[3.0, 1.0], [3.0, 1.0]])  # columns of two weights with the means 3 and 1
    large = np.full((4, 3), 2.0)  # columns of four weights with the mean 2
    assert [m.sum(0).tolist() for m in masks_of([small, large], 0.5, "column")[1]] == [
        [2, 0],
        [4, 0, 0],  # 8 of 16 weights: 2 + 4, and another 4 are too many
    ]
    by_sum = Structure("column", score="sum")
    first, second = masks_of([small, large], 0.3, by_sum)[1]
    assert second.sum(0).tolist() == [4, 4, 0]  # of 11 weights; the third does not fit
    assert first.sum(0)[rescue_index(0, 0, 2)] == first.sum() == 2


def test_a_channel_of_a_convolution_is_one_unit():
    scores = np.zeros((3, 3, 4, 5), np.float32)
    scores[1, 2, 3, 4] = 1.0
    (column,) = masks_of([scores], 0.8, "column")[1]
    assert column[..., 4].all()
    assert column.sum() == 36
    (row,) = masks_of([scores], 0.75, "row")[1]
    assert row[:, :, 3].all()
    assert row.sum() == 45
    (block,) = masks_of([scores], 1 - 4 / 180, (2, 2))[1]
    assert np.argwhere(block).tolist() == [[1, 2, 2, 4], [1, 2, 3, 4]]  # at the edge


def test_weights_of_one_axis_or_none():
    scores = [np.array([1.0, 5.0, 2.0, 4.0])]
    assert masks_of(scores, 0.5, "column")[1][0].tolist() == [False, True, False, True]
    assert masks_of(scores, 0.5, "row")[0].num_rescued == 4  # one row, which does not fit
    assert masks_of(scores, 0.5, (1, 2))[1][0].tolist() == [True, True, False, False]
    assert masks_of(scores, 0.5, (3, 2))[1][0].sum() == 2
    assert masks_of(scores, 0.5, "1:2")[1][0].tolist() == [False, True, False, True]
    for units in ("column", "row", (2, 2), "2:4"):
        assert masks_of([np.float32(3)], 0.5, units)[0].num_rescued == 1


def test_empty_variables_change_nothing():
    scores = [np.zeros((0, 3)), np.arange(6.0).reshape(2, 3), np.zeros((2, 0))]
    for units in ("column", "row", (2, 2), "1:2"):
        _, found = masks_of(scores, 0.5, units)
        assert np.array_equal(found[1], masks_of(scores[1:2], 0.5, units, positions=[1])[1][0])
    assert kf.FreezeMask.from_scores([], 0.5, structure="row") == kf.FreezeMask([])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_sums_are_those_of_pairs(size):
    values = np.random.default_rng(size).normal(size=(2, size)).astype(np.float32)
    found = structure._sum_of_pairs(values, np)
    assert found.dtype == np.float32
    assert found.tolist() == [float(sum_of_pairs(row)) for row in values]
    exact = values.astype(np.float64).sum(1)
    bound = np.abs(values).sum(1) * 2.0**-24 * (math.log2(size) + 1)
    assert (np.abs(found - exact) <= bound).all()


def test_what_the_rule_adds_is_one_unit():
    added = rescued(Structure("column"), (3, 4, 5), 7, 2)
    assert added.sum() == 12
    assert added[:, :, rescue_index(7, 2, 5)].all()
    assert rescued(None, (3, 4), 7, 2).sum() == rescued(Structure("1:2"), (3, 4), 7, 2).sum() == 1


def test_the_examples_of_the_docstrings_run():
    results = doctest.testmod(structure)
    assert results.attempted >= 3
    assert results.failed == 0


# What is accepted


def test_structures_have_a_final_form_that_is_accepted_again():
    for given_form, final in [
        ("column", Structure("column")),
        ("row", Structure("row")),
        ("2:4", Structure("2:4")),
        ((4, 8), Structure((4, 8))),
        ([np.int64(4), 8], Structure((4, 8))),
        (["column", "sum"], Structure("column", score="sum")),
        (((4, 8), "mean"), Structure((4, 8))),
    ]:
        assert check_structure(given_form) == check_structure(final) == final
        assert check_structure(final.to_json()) == final
    assert check_structure(None) is None
    assert str(Structure((4, 8))) == "(4, 8)"
    assert str(Structure("row", "sum")) == "Structure(units='row', score='sum')"


@pytest.mark.parametrize(
    ("bad", "error", "shown"),
    [
        ("columns", ValueError, "'column', 'row', 'n:m' .*structure='columns'"),
        ("4:2", ValueError, "1 <= n <= m.*'4:2'"),
        ("0:4", ValueError, "'0:4'"),
        ("2:", ValueError, "'2:'"),
        ("2:4:8", ValueError, "'2:4:8'"),
        ("٢:٤", ValueError, "n:m"),
        ("2:9999999999", ValueError, "9999999999"),
        (" 2:4", ValueError, "' 2:4'"),
        ((0, 4), ValueError, r"pair of positive ints.*structure=\(0, 4\)"),
        ((4, 2**31), ValueError, "2147483648"),
        ((True, 4), TypeError, "True"),
        ((2.0, 4), TypeError, "2.0"),
        ((4,), TypeError, r"None, 'column'.*\(4,\)"),
        ((4, 4, 4), TypeError, "a Structure.*4, 4, 4"),
        (4, TypeError, "structure=4"),
        ({"column": 1}, TypeError, "column"),
        (Structure, TypeError, "a class"),
    ],
)
def test_wrong_structures_are_named(bad, error, shown):
    with pytest.raises(error, match=f"`structure` must .*{shown}"):
        check_structure(bad)
    with pytest.raises(error, match="`structure` must"):
        kf.FreezeMask.from_scores([np.ones(3)], 0.5, structure=bad)


def test_wrong_scores_are_named():
    with pytest.raises(ValueError, match=r"`score` must be one of 'mean', 'sum'.*'max'"):
        Structure("column", score="max")
    with pytest.raises(ValueError, match=r"`score` must be 'mean' with single weights .*'sum'"):
        Structure("2:4", score="sum")


def test_infinite_scores_are_refused_and_infinite_sums_are_the_largest():
    with pytest.raises(ValueError, match="not finite"):
        masks_of([np.array([[1.0, np.inf]])], 0.5, "column")
    scores = [np.array([[1.0, 3e38, 2.0], [1.0, 3e38, 2.0]])]
    assert masks_of(scores, 0.6, Structure("column", "sum"))[1][0].sum(0).tolist() == [0, 2, 0]


# Settings and steps


def settings(structure=None, distribution="global"):
    return Settings(0.9, "snip", "keep", 0, distribution, check_structure(structure))


def test_settings_agree_on_the_structure():
    different = [None, "column", "row", "2:4", "1:2", (4, 4), (4, 8), ("column", "sum")]
    for one in different:
        for other in different:
            assert settings(one).agrees_with(settings(other), []) == (one == other)


def test_settings_show_and_store_a_structure():
    assert str(settings("column")).endswith("frozen_weights='keep', structure='column'")
    assert str(settings((4, 8), "erk")).endswith(", distribution='erk', structure=(4, 8)")
    assert settings().to_json() == [0.9, "snip", "keep", 0]
    assert settings("2:4").to_json() == [0.9, "snip", "keep", 0, "global", ["2:4", "mean"]]
    assert settings((4, 8), "erk").to_json() == [0.9, "snip", "keep", 0, "erk", [[4, 8], "mean"]]


def test_patterns_are_approached_in_steps():
    four = [Structure("1:8").loosened(lambda q, t=t: 1 - (1 - q) ** (t / 4)) for t in range(1, 5)]
    assert [one.units for one in four] == ["5:8", "3:8", "2:8", "1:8"]
    assert Structure("2:4").loosened(lambda q: 0.0).units == "4:4"
    assert Structure("2:4").loosened(lambda q: 1.0).units == "2:4"
    assert Structure((2, 2)).loosened(lambda q: 0.0).units == (2, 2)
