"""Which weights a freezing rate trains: their count, the largest scores, at least one."""

from decimal import ROUND_FLOOR, Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracle import brute_force_mask

from keras_freeze.masks.mask import FreezeMask
from keras_freeze.masks.selection import (
    check_freeze_rate,
    indices_of_largest,
    num_trained_weights,
    rescue_index,
    select_top,
)

HEAVY_TIES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-40, -1e-40])
ANY_SCORE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def score_arrays(elements):
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
    return st.lists(hnp.arrays(np.float32, shapes, elements=elements), min_size=1, max_size=5)


# Rates and counts


def test_count_is_exact_in_decimal_for_lenet_5_caffe():
    assert num_trained_weights(0.9, 430_500) == 43_050
    assert int((1 - 0.9) * 430_500) == 43_049  # what binary floating point makes of it


@given(digits=st.integers(0, 10**6), num_weights=st.integers(0, 2 * 10**8))
def test_count_is_the_floor_of_the_decimal_product(digits, num_weights):
    expected = (1 - Decimal(digits) / 10**6) * num_weights
    freeze_rate = digits / 10**6
    count = num_trained_weights(freeze_rate, num_weights)
    assert count == int(expected.to_integral_value(ROUND_FLOOR))


@given(freeze_rate=st.floats(0, 1), num_weights=st.integers(0, 10**9))
def test_count_is_exact_for_every_float(freeze_rate, num_weights):
    trained = (1 - Fraction(repr(freeze_rate))) * num_weights
    assert num_trained_weights(freeze_rate, num_weights) == trained.numerator // trained.denominator


@pytest.mark.parametrize("one", [1, 1.0, np.int64(1), np.float32(1)])
def test_rate_one_trains_nothing(one):
    assert num_trained_weights(one, 1000) == 0


@pytest.mark.parametrize(
    ("given_rate", "rate"),
    [(0, 0.0), (1, 1.0), (0.9, 0.9), (np.float32(0.9), 0.9), (np.float16(0.995), 0.995)],
)
def test_rates_mean_the_decimal_they_print(given_rate, rate):
    assert check_freeze_rate(given_rate) == rate
    assert type(check_freeze_rate(given_rate)) is float


def test_single_precision_rate_gives_the_same_count():
    assert num_trained_weights(np.float32(0.9), 430_500) == 43_050


@pytest.mark.parametrize("bad", [-0.1, 1.0001, float("nan"), float("inf"), np.float32("nan"), 2])
def test_rates_outside_the_unit_interval_are_refused(bad):
    with pytest.raises(ValueError, match=r"`freeze_rate` must be .*Received: freeze_rate="):
        check_freeze_rate(bad)


@pytest.mark.parametrize("bad", [True, np.True_, "0.9", None, [0.9], np.array([0.9]), 1j])
def test_rates_that_are_no_numbers_are_refused(bad):
    with pytest.raises(TypeError, match=r"`freeze_rate` must be .*Received: freeze_rate="):
        check_freeze_rate(bad)


def test_negative_count_is_refused():
    with pytest.raises(ValueError, match="num_weights=-1"):
        num_trained_weights(0.5, -1)


# The k largest


@given(data=st.data())
def test_top_agrees_with_a_stable_sort(data):
    scores = data.draw(score_arrays(st.one_of(HEAVY_TIES, ANY_SCORE)))
    k = data.draw(st.integers(0, sum(score.size for score in scores)))
    selected = select_top(scores, k)
    assert sum(int(chosen.sum()) for chosen in selected) == k
    for chosen, expected in zip(selected, brute_force_mask(scores, k), strict=True):
        assert chosen.dtype == np.bool_
        np.testing.assert_array_equal(chosen, expected)


@given(data=st.data())
def test_top_of_heavily_tied_scores_agrees_with_a_stable_sort(data):
    scores = data.draw(score_arrays(HEAVY_TIES))
    k = data.draw(st.integers(0, sum(score.size for score in scores)))
    for chosen, expected in zip(select_top(scores, k), brute_force_mask(scores, k), strict=True):
        np.testing.assert_array_equal(chosen, expected)


def test_ties_go_to_the_earlier_position():
    first, second = select_top([np.zeros((2, 2)), np.zeros(3)], 5)
    np.testing.assert_array_equal(first, [[True, True], [True, True]])
    np.testing.assert_array_equal(second, [True, False, False])


def test_negative_zero_ties_with_zero():
    (chosen,) = select_top([np.array([-0.0, 0.0, -0.0, -1.0], np.float32)], 2)
    np.testing.assert_array_equal(chosen, [True, True, False, False])


def test_scores_that_single_precision_cannot_tell_apart_are_ties():
    (chosen,) = select_top([np.array([1.0, 1.0 + 1e-12])], 1)
    np.testing.assert_array_equal(chosen, [True, False])


def test_noncontiguous_scores_are_ordered_by_their_index():
    scores = np.arange(12, dtype=np.float32).reshape(3, 4).T
    (chosen,) = select_top([scores], 5)
    np.testing.assert_array_equal(chosen, scores >= 7)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_scores_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match=r"finite.*scores\[1\]"):
        select_top([np.ones(2), np.array([1.0, bad])], 1)


@pytest.mark.parametrize("k", [-1, 4])
def test_impossible_numbers_of_trained_weights_are_refused(k):
    with pytest.raises(ValueError, match="between 0 and 3"):
        select_top([np.ones(3)], k)


def test_fifteen_million_half_tied_scores():
    generator = np.random.default_rng(0)
    scores = generator.random(15_000_000, np.float32)
    scores[generator.random(scores.size, np.float32) < 0.5] = 0.0
    parts = [scores[:4_000_000].reshape(2000, 2000), scores[4_000_000:]]
    for k in (15_000, 9_000_000):
        chosen = np.concatenate([part.reshape(-1) for part in select_top(parts, k)])
        assert chosen.sum() == k
        assert scores[chosen].min() >= scores[~chosen].max()
        border = scores == scores[chosen].min()
        if (border & ~chosen).any():
            assert np.flatnonzero(border & chosen).max() < np.flatnonzero(border & ~chosen).min()


@pytest.mark.parametrize("share", [0.0001, 0.5, 0.999])
@pytest.mark.parametrize("k", [0, 1, 3000])
def test_the_largest_of_many_that_are_allowed_agree_with_a_stable_sort(share, k):
    generator = np.random.default_rng(1)
    scores = generator.integers(0, 3000, (700, 1000)).astype(np.float32)  # with ties
    allowed = generator.random(scores.shape) < share
    allowed[:3] = True
    indices = np.flatnonzero(allowed)
    expected = indices[np.argsort(-scores.reshape(-1)[indices], kind="stable")[:k]]
    chosen = indices_of_largest(scores, allowed, k)
    np.testing.assert_array_equal(chosen, np.sort(expected))


def test_no_more_can_be_chosen_than_are_allowed():
    with pytest.raises(ValueError, match="between 0 and 1"):
        indices_of_largest(np.ones(3), np.array([False, True, False]), 2)


# At least one


def philox(counter, key):
    """Philox 4x64 with ten rounds, from its definition (Salmon et al., 2011)."""
    mask = 2**64 - 1
    for _ in range(10):
        product_0, product_1 = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [
            (product_1 >> 64) ^ counter[1] ^ key[0],
            product_1 & mask,
            (product_0 >> 64) ^ counter[3] ^ key[1],
            product_0 & mask,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 1000), size=st.integers(1, 2**40))
def test_rescue_index_is_philox_as_documented(seed, position, size):
    word = philox([1, 0, 0, int.from_bytes(b"rescue", "big")], [seed, position])[0]
    assert rescue_index(seed, position, size) == word * size // 2**64


def test_rescue_index_is_uniform():
    counts = np.bincount([rescue_index(seed, 3, 10) for seed in range(5000)], minlength=10)
    assert ((counts - 500) ** 2 / 500).sum() < 27.9  # chi-squared, 9 degrees of freedom, 0.1 %


def test_rescue_index_depends_on_the_position():
    assert len({rescue_index(0, position, 10**9) for position in range(50)}) == 50


@pytest.mark.parametrize("arguments", [(-1, 0, 5), (2**64, 0, 5), (0, -1, 5), (0, 0, 0)])
def test_rescue_index_refuses_what_is_out_of_range(arguments):
    with pytest.raises(ValueError, match="Received"):
        rescue_index(*arguments)


def test_every_layer_keeps_a_trained_weight():
    scores = [np.full((4, 5), 9.0), np.ones((3, 7)), np.ones(11)]
    mask = FreezeMask.from_scores(scores, 0.5, seed=7, positions=[0, 2, 5])
    assert mask.num_rescued == 1
    assert mask.num_trained == 26 + 1  # floor(0.5 * 52), and one on top
    assert (mask["0"].sum(), mask["2"].sum()) == (20, 6)
    (index,) = np.flatnonzero(mask["5"])
    assert index == rescue_index(7, 5, 11)


def test_rescued_weights_come_on_top():
    scores = [np.arange(1, 101, dtype=np.float32), np.zeros((2, 3)), np.zeros(4)]
    mask = FreezeMask.from_scores(scores, 0.9, seed=3)
    assert mask.num_trained == 11 + 2
    assert mask.num_rescued == 2
    np.testing.assert_array_equal(mask["0"], scores[0] > 89)
    for position, size in ((1, 6), (2, 4)):
        np.testing.assert_array_equal(
            np.flatnonzero(mask[str(position)]), [rescue_index(3, position, size)]
        )


def test_rate_one_rescues_nothing():
    mask = FreezeMask.from_scores([np.ones(3), np.ones(4)], 1)
    assert (mask.num_trained, mask.num_rescued, mask.freeze_rate) == (0, 0, 1.0)


def test_a_rate_just_below_one_still_rescues():
    mask = FreezeMask.from_scores([np.ones(3), np.ones(4)], 1 - 1e-12)
    assert (mask.num_trained, mask.num_rescued) == (2, 2)


def test_rate_zero_trains_everything():
    mask = FreezeMask.from_scores([np.zeros((2, 2)), np.ones(3)], 0)
    assert (mask.num_trained, mask.num_weights, mask.freeze_rate) == (7, 7, 0.0)


def test_empty_and_scalar_variables_have_masks():
    mask = FreezeMask.from_scores([np.zeros((0, 3)), np.float32(2.0)], 0.5)
    assert mask["0"].shape == (0, 3)
    assert mask["1"].shape == ()
    assert (mask.num_trained, mask.num_rescued) == (1, 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_score_that_is_not_finite_names_the_layer(bad):
    with pytest.raises(ValueError, match=r"'net/fc2/kernel'.*1 NaN or infinite scores of 2"):
        FreezeMask.from_scores(
            [np.ones(2), np.array([bad, 1])], 0.5, paths=["net/fc1/kernel", "net/fc2/kernel"]
        )


def test_scores_paths_and_positions_must_have_one_length():
    with pytest.raises(ValueError, match="`paths`"):
        FreezeMask.from_scores([np.ones(2)], 0.5, paths=["a", "b"])
    with pytest.raises(ValueError, match="`positions`"):
        FreezeMask.from_scores([np.ones(2)], 0.5, positions=[])


@given(scores=score_arrays(HEAVY_TIES), freeze_rate=st.floats(0, 1), seed=st.integers(0, 2**64 - 1))
def test_masks_from_scores_agree_with_the_rules(scores, freeze_rate, seed):
    mask = FreezeMask.from_scores(scores, freeze_rate, seed=seed)
    total = sum(score.size for score in scores)
    k = num_trained_weights(freeze_rate, total)
    rescued = 0
    for position, expected in enumerate(brute_force_mask(scores, k)):
        if freeze_rate < 1 and expected.size and not expected.any():
            expected.flat[rescue_index(seed, position, expected.size)] = True
            rescued += 1
        np.testing.assert_array_equal(mask[str(position)], expected)
    assert mask.num_rescued == rescued
    assert mask.num_trained == k + rescued
    assert mask.num_weights == total
    assert mask == FreezeMask.from_scores(scores, freeze_rate, seed=seed)
