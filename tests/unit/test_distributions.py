"""Where a freezing rate applies: exact numbers of trained weights, patterns, and the choice."""

import doctest
import fnmatch
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import keras_freeze as kf
from keras_freeze.masks import distributions, patterns
from keras_freeze.masks.distributions import (
    check_distribution,
    erk_shares,
    groups_of,
    round_to_sum,
)
from keras_freeze.masks.patterns import pattern_without_name, rates_of_paths
from keras_freeze.masks.selection import rescue_index
from keras_freeze.masks.settings import Settings

RATES = st.integers(0, 1000).map(lambda thousandths: thousandths / 1000)
SHAPES = st.lists(
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5), min_size=1, max_size=6
)
LENET_5_CAFFE = [(5, 5, 1, 20), (5, 5, 20, 50), (800, 500), (500, 10)]


def counts_of(distribution, rate, shapes):
    groups = groups_of(distribution, rate, shapes, [str(i) for i in range(len(shapes))])
    assert [group.members for group in groups] == [(i,) for i in range(len(shapes))]
    return [group.num_trained for group in groups]


def density_by_the_published_algorithm(rate, shapes):
    """RigL's loop: the kernels of the largest raw density become dense one after the other."""
    sizes = [math.prod(shape) for shape in shapes]
    raw = [Fraction(sum(s), n) if s else Fraction(1) for s, n in zip(shapes, sizes, strict=True)]
    dense = set()
    while True:
        rest = [i for i in range(len(shapes)) if i not in dense]
        if not rest:
            return [Fraction(1)] * len(shapes)
        wanted = sum((1 - Fraction(str(rate))) * n for n in sizes) - sum(sizes[i] for i in dense)
        epsilon = wanted / sum(raw[i] * sizes[i] for i in rest)
        largest = max(raw[i] for i in rest)
        if epsilon * largest <= 1:
            return [Fraction(1) if i in dense else epsilon * raw[i] for i in range(len(shapes))]
        dense |= {i for i in rest if raw[i] == largest}


def largest_remainders(shares, total):
    """One weight after the other goes to the variable that lacks the most of its share."""
    counts = [math.floor(share) for share in shares]
    while sum(counts) < total:
        lacking = [share - count for share, count in zip(shares, counts, strict=True)]
        counts[lacking.index(max(lacking))] += 1
    return counts


# Numbers


@given(RATES, SHAPES)
def test_uniform_counts_are_those_of_largest_remainders(rate, shapes):
    sizes = [math.prod(shape) for shape in shapes]
    shares = [(1 - Fraction(Decimal(str(rate)))) * size for size in sizes]
    total = math.floor((1 - Fraction(str(rate))) * sum(sizes))
    counts = counts_of("uniform", rate, shapes)
    assert counts == largest_remainders(shares, total)
    assert all(abs(count - share) < 1 for count, share in zip(counts, shares, strict=True))


@given(RATES, SHAPES.map(lambda shapes: [tuple(max(n, 1) for n in s) for s in shapes]))
def test_erk_counts_are_those_of_the_published_formula(rate, shapes):
    sizes = [math.prod(shape) for shape in shapes]
    densities = density_by_the_published_algorithm(rate, shapes)
    shares = [density * size for density, size in zip(densities, sizes, strict=True)]
    assert erk_shares(rate, shapes) == shares
    total = math.floor((1 - Fraction(str(rate))) * sum(sizes))
    counts = counts_of("erk", rate, shapes)
    assert counts == largest_remainders(shares, total)
    assert all(count <= size for count, size in zip(counts, sizes, strict=True))


@pytest.mark.cases(1)
@pytest.mark.parametrize("distribution", ["uniform", "erk"])
@given(rate=RATES, shapes=SHAPES)
def test_empty_variables_change_nothing(distribution, rate, shapes):
    filled = [shape for shape in shapes if math.prod(shape)]
    found = counts_of(distribution, rate, shapes)
    kept = [count for count, s in zip(found, shapes, strict=True) if math.prod(s)]
    assert kept == counts_of(distribution, rate, filled)
    assert sum(found) == sum(kept)


def test_erk_of_lenet_5_caffe():
    # The sums of dimensions are 31, 80, 1,300 and 510. At q = 0.98, of 8,610 weights, the scale is
    # 8,610 / 1,921 = 4.48204: 138.94, 358.56, 5,826.65 and 2,285.84 weights.
    assert counts_of("erk", 0.98, LENET_5_CAFFE) == [139, 358, 5_827, 2_286]
    # At q = 0.95, the last kernel would have 5,714.6 weights of 5,000: the scale of the others is
    # (21,525 - 5,000) / 1,411 = 11.71155.
    assert counts_of("erk", 0.95, LENET_5_CAFFE) == [363, 937, 15_225, 5_000]


def test_kernels_that_would_be_more_than_dense_are_dense():
    # At q = 0.5 the scale would be 112.05: 3,474 weights of the first kernel, which has 500.
    counts = counts_of("erk", 0.5, LENET_5_CAFFE)
    assert (counts[0], counts[3], sum(counts)) == (500, 5_000, 215_250)
    assert counts[1] == 80 * (215_250 - 5_500) // 1380


def test_rates_are_the_decimals_they_print():
    # In binary floating point, (1 - 0.9) * 430,500 is less than 43,050.
    assert sum(counts_of("uniform", 0.9, LENET_5_CAFFE)) == 43_050
    assert counts_of("uniform", 0.9, LENET_5_CAFFE) == [50, 2_500, 40_000, 500]
    assert counts_of("uniform", np.float32(0.9), LENET_5_CAFFE) == [50, 2_500, 40_000, 500]


def test_equal_fractions_are_rounded_up_in_order():
    assert counts_of("uniform", 0.5, [(3,), (3,), (3,), (3,)]) == [2, 2, 1, 1]
    assert round_to_sum([Fraction(1, 3)] * 3) == [1, 0, 0]
    assert round_to_sum([]) == []


# Patterns

PATHS = ["net/conv1/kernel", "net/conv2/kernel", "net/fc1/kernel", "net/block/fc2/kernel"]


def rates(*pairs, paths=PATHS):
    found = rates_of_paths(pairs, paths)
    return {path.removeprefix("net/"): rate for path, rate in found.items()}


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("conv*", {"conv1/kernel", "conv2/kernel"}),
        ("conv1", {"conv1/kernel"}),
        ("fc?/kernel", {"fc1/kernel", "block/fc2/kernel"}),
        ("fc[!1]", {"block/fc2/kernel"}),
        ("block", {"block/fc2/kernel"}),
        ("block/*", {"block/fc2/kernel"}),
        ("b*/kernel", {"block/fc2/kernel"}),
        ("*", {path.removeprefix("net/") for path in PATHS}),
        ("net/conv1/kernel", {"conv1/kernel"}),
    ],
)
def test_patterns_match_whole_components_of_paths(pattern, matched):
    assert rates((pattern, 0.5)) == dict.fromkeys(matched, 0.5)


@given(st.lists(st.sampled_from(["a", "b", "ab", "c1"]), min_size=1, max_size=4), st.data())
def test_patterns_match_what_fnmatch_matches(parts, data):
    pattern = data.draw(st.text("abc1*?/[]!", min_size=1, max_size=5))
    path = "/".join(parts)
    runs = ["/".join(parts[i:j]) for j in range(len(parts) + 1) for i in range(j)]
    if any(fnmatch.fnmatchcase(run, pattern) for run in runs):
        assert rates_of_paths(((pattern, 0.5),), [path, "other/kernel"])[path] == 0.5
    else:
        with pytest.raises(ValueError, match="distribution"):
            rates_of_paths(((pattern, 0.5),), [path])


def test_the_name_of_the_model_is_no_part_of_the_paths():
    paths = ["conv_net/conv1/kernel", "conv_net/fc1/kernel"]
    for prefix in ("conv_net/", ""):
        found = rates_of_paths((("conv*", 0.5),), [p.replace("conv_net/", prefix) for p in paths])
        assert found == {f"{prefix}conv1/kernel": 0.5}


def test_the_only_layer_is_not_taken_for_the_model():
    assert rates_of_paths((("fc", 0.5),), ["fc/kernel"]) == {"fc/kernel": 0.5}


def test_the_first_pattern_that_matches_counts():
    found = rates(("conv2", 0.9), ("conv*", 0.5), ("*", 0.1))
    assert found == {
        "conv2/kernel": 0.9,
        "conv1/kernel": 0.5,
        "fc1/kernel": 0.1,
        "block/fc2/kernel": 0.1,
    }


@pytest.mark.parametrize("pattern", ["conv", "fc3", "FC1", "kernel/fc1", "onv1", "fc1/bias", "met"])
def test_a_pattern_without_a_match_is_named(pattern):
    match = r"`distribution` must match .*'conv1/kernel'.*Received: .* pattern '"
    with pytest.raises(ValueError, match=match + pattern):
        rates((pattern, 0.5))


def test_a_pattern_that_earlier_ones_leave_nothing_is_named():
    with pytest.raises(ValueError, match=r"no earlier pattern .*'conv1'"):
        rates(("conv*", 0.5), ("conv1", 0.9))


def test_patterns_need_not_match_what_is_loaded():
    patterns = (("fc9", 0.5), ("conv1", 0.9))
    assert rates_of_paths(patterns, PATHS, must_match=False) == {"net/conv1/kernel": 0.9}


NAMES = st.sampled_from(["net", "a", "b", "ab", "*", "?"])


@given(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join),
    st.lists(st.lists(NAMES, min_size=1, max_size=3).map("/".join), min_size=1, max_size=3),
)
def test_patterns_for_files_match_the_same_without_the_name_of_the_model(pattern, short):
    paths = [f"net/{path}/kernel" for path in short]
    matched = rates_of_paths(((pattern, 0.5),), paths, must_match=False)
    stored = pattern_without_name(pattern, "net", paths)
    assert rates_of_paths(((stored, 0.5),), paths, must_match=False) == matched
    assert stored in (pattern, pattern.removeprefix("net/"))


def test_a_pattern_keeps_a_layer_that_is_called_as_the_model():
    paths = ["net/net/kernel", "net/fc/kernel"]
    for pattern in ("net/kernel", "net", "fc/kernel", "other/fc"):
        assert pattern_without_name(pattern, "net", paths) == pattern
    assert pattern_without_name("net/fc/*", "net", paths) == "fc/*"


def test_what_no_pattern_matches_has_one_threshold():
    shapes = [(10,), (20,), (30,), (40,)]
    groups = groups_of((("conv*", 0.75),), 0.9, shapes, PATHS)
    assert [(g.members, g.num_trained, g.rescues) for g in groups] == [
        ((0,), 2, True),
        ((1,), 5, True),
        ((2, 3), 7, True),
    ]


def test_patterns_may_match_weights_without_scores():
    with pytest.raises(ValueError, match="'conv1'"):
        groups_of((("conv1", 0.5),), 0.9, [(10,)], PATHS[2:3])
    (group,) = groups_of((("conv1", 0.5),), 0.9, [(10,)], PATHS[2:3], PATHS)
    assert group.members == (0,)
    assert group.num_trained == 1


# Masks


@given(st.data())
def test_masks_have_the_largest_scores_of_each_layer(data):
    shapes = data.draw(SHAPES)
    elements = st.sampled_from([0.0, 1.0, -1.0, 2.5])
    scores = [data.draw(hnp.arrays(np.float32, shape, elements=elements)) for shape in shapes]
    distribution, rate = data.draw(st.sampled_from(["uniform", "erk"])), data.draw(RATES)
    seed = data.draw(st.integers(0, 9))
    mask = kf.FreezeMask.from_scores(scores, rate, distribution=distribution, seed=seed)
    counts, rescued = counts_of(distribution, rate, shapes), 0
    for position, (array, count) in enumerate(zip(scores, counts, strict=True)):
        expected = np.zeros(array.size, bool)
        expected[np.argsort(-array.reshape(-1), kind="stable")[:count]] = True
        if rate < 1 and array.size and count == 0:
            expected[rescue_index(seed, position, array.size)] = True
            rescued += 1
        np.testing.assert_array_equal(mask[str(position)], expected.reshape(array.shape))
    assert mask.num_rescued == rescued
    assert mask.num_trained == sum(counts) + rescued


def test_masks_by_patterns():
    scores = [np.arange(n, dtype=np.float32) for n in (10, 20, 30, 40)]
    mask = kf.FreezeMask.from_scores(
        scores, 0.9, paths=PATHS, distribution={"conv1": 1.0, "conv2": 0.999}, seed=4
    )
    assert not mask["conv1/kernel"].any()  # the at-least-one rule does not apply at rate 1
    assert np.flatnonzero(mask["conv2/kernel"]).tolist() == [rescue_index(4, 1, 20)]
    assert np.flatnonzero(mask["fc2/kernel"]).tolist() == [33, 34, 35, 36, 37, 38, 39]
    assert np.flatnonzero(mask["fc1/kernel"]).tolist() == [rescue_index(4, 2, 30)]
    assert mask.num_rescued == 2


@given(st.data())
def test_one_pattern_for_all_is_a_rate_for_each(data):
    shapes, rate = data.draw(SHAPES), data.draw(RATES)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    scores = [rng.random(shape, np.float32) for shape in shapes]
    mask = kf.FreezeMask.from_scores(scores, 0.5, distribution={"*": rate})
    for position, array in enumerate(scores):
        alone = kf.FreezeMask.from_scores([array], rate, positions=[position])
        np.testing.assert_array_equal(mask[str(position)], alone[str(position)])


def test_global_is_the_default():
    scores = [np.arange(9.0).reshape(3, 3), np.arange(20.0)]
    mask = kf.FreezeMask.from_scores(scores, 0.5, distribution="global")
    assert mask == kf.FreezeMask.from_scores(scores, 0.5)
    assert mask != kf.FreezeMask.from_scores(scores, 0.5, distribution="uniform")


def test_the_examples_of_the_docstrings_run():
    for module, number in ((distributions, 4), (patterns, 3)):
        results = doctest.testmod(module)
        assert results.attempted >= number
        assert results.failed == 0


# What is accepted


def test_distributions_have_a_final_form_that_is_accepted_again():
    pairs = (("conv*", 0.5), ("fc?/kernel", 0.9))
    for given_form in (
        {"conv*": 0.5, "fc?/kernel": np.float32(0.9)},
        list(map(list, pairs)),
        pairs,
    ):
        assert check_distribution(given_form) == pairs
    assert [check_distribution(name) for name in ("global", "uniform", "erk")] == [
        "global",
        "uniform",
        "erk",
    ]


@pytest.mark.parametrize(
    ("bad", "error", "shown"),
    [
        ("ERK", ValueError, "'global', 'uniform', 'erk', or a mapping .*distribution='ERK'"),
        ({}, ValueError, "one or more patterns .*distribution={}"),
        ({"": 0.5}, ValueError, "without empty components"),
        ({"fc//kernel": 0.5}, ValueError, "fc//kernel"),
        ({"conv*": 1.5}, ValueError, r"number in \[0, 1\] .*distribution\['conv\*'\]=1.5"),
        ({"conv*": -0.1}, ValueError, r"-0.1"),
        ({"conv*": float("nan")}, ValueError, "nan"),
        ({"conv*": "0.5"}, TypeError, r"number in \[0, 1\] .*'0.5' \(of type str\)"),
        ({"conv*": True}, TypeError, "True"),
        ({"conv*": None}, TypeError, "None"),
        ({3: 0.5}, TypeError, "a mapping from patterns of paths .*3: 0.5"),
        (0.5, TypeError, "distribution=0.5"),
        (None, TypeError, "None"),
        (["conv*"], TypeError, "a mapping"),
        ([("a", 0.5), ("a", 0.5)], ValueError, "different patterns"),
        (dict, TypeError, "a class"),
    ],
)
def test_wrong_distributions_are_named(bad, error, shown):
    with pytest.raises(error, match=f"`distribution` must .*{shown}"):
        check_distribution(bad)


# Settings


def settings(distribution="global"):
    return Settings(0.9, "snip", "keep", 0, distribution)


def agree(one, other, paths=PATHS):
    first, second = settings(one), settings(other)
    assert first.agrees_with(second, paths) == second.agrees_with(first, paths)
    return first.agrees_with(second, paths)


def test_settings_agree_on_the_distribution():
    different = [
        "global",
        "uniform",
        "erk",
        (("conv1", 0.5),),
        (("conv1", 0.6),),
        (("conv*", 0.5),),
    ]
    different.append((("conv1", 0.5), ("fc1", 0.5)))
    for one in different:
        for other in different:
            assert agree(one, other) == (one == other)


def test_settings_agree_whatever_the_model_is_called():
    network = ["conv1/kernel", "block/conv1/kernel", "fc1/kernel"]
    for name in ("", "net/", "b/"):
        paths = [name + path for path in network]
        for pattern in ("conv1/kernel", "block/*", "fc?", "*"):
            assert agree(((f"net/{pattern}", 0.5),), ((f"net_1/{pattern}", 0.5),), paths)
        assert agree((("net/fc1/kernel", 0.5),), (("fc1", 0.5),), paths)


def test_a_layer_in_a_pattern_is_not_taken_for_the_model():
    for paths in (PATHS, [path.removeprefix("net/") for path in PATHS]):
        assert not agree((("conv1/kernel", 0.5),), (("kernel", 0.5),), paths)
        assert not agree((("conv1/kernel", 0.5),), (("fc1/kernel", 0.5),), paths)
        assert not agree((("block/fc2/kernel", 0.5),), (("*/kernel", 0.5),), paths)
        assert not agree((("net/conv1", 0.5),), (("net/conv2", 0.5),), paths)
    for path in ("fc/kernel", "net/fc/kernel"):
        assert agree((("fc/kernel", 0.5),), (("net/fc/kernel", 0.5),), [path])
        assert not agree((("fc/kernel", 0.5),), (("fc9/kernel", 0.5),), [path])


def test_settings_show_and_store_only_other_distributions_than_global():
    assert str(settings()) == "freeze_rate=0.9, criterion='snip', frozen_weights='keep'"
    assert str(settings("erk")).endswith(", distribution='erk'")
    assert str(settings((("a*", 0.5),))).endswith(", distribution={'a*': 0.5}")
    assert settings().to_json() == [0.9, "snip", "keep", 0]
    assert settings("erk").to_json() == [0.9, "snip", "keep", 0, "erk"]
