import copy
import gc
import hashlib
import json
import pickle
from decimal import ROUND_FLOOR, Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from oracle import brute_force_mask

import keras_freeze as kf
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.masks.selection import (
    check_freeze_rate,
    num_trained_weights,
    rescue_index,
    select_top,
)
from keras_freeze.storage.container import write_container
from keras_freeze.storage.errors import FreezeFileError

# No test is about time, not even on a busy machine.

HEAVY_TIES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-40, -1e-40])
ANY_SCORE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def score_arrays(elements):
    shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
    return st.lists(hnp.arrays(np.float32, shapes, elements=elements), min_size=1, max_size=5)


class Variable:
    """Something that can be referred to weakly, and must never be compared or hashed."""

    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("variables are looked up by identity")


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


# What a mask offers


@pytest.fixture
def mask():
    generator = np.random.default_rng(1)
    return FreezeMask(
        [
            MaskEntry(4, "net/b/fc1/kernel", generator.random((3, 4)) < 0.5),
            MaskEntry(0, "net/a/fc1/kernel", generator.random((5, 3)) < 0.5),
            MaskEntry(2, "net/a/fc2/bias", np.ones(3, bool), is_weight=False),
        ],
        num_rescued=1,
    )


def test_entries_are_sorted_by_position(mask):
    assert [entry.position for entry in mask.entries] == [0, 2, 4]
    assert mask.paths == tuple(mask) == ("net/a/fc1/kernel", "net/a/fc2/bias", "net/b/fc1/kernel")
    assert len(mask) == 3


def test_only_weights_are_counted(mask):
    trained = mask["net/a/fc1/kernel"].sum() + mask["net/b/fc1/kernel"].sum()
    assert mask.num_weights == 27
    assert mask.num_trained == trained
    assert mask.freeze_rate == pytest.approx(1 - trained / 27)


def test_the_rate_of_lenet_5_caffe_comes_out_exactly():
    scores = [np.arange(500), np.arange(25_000), np.arange(400_000), np.arange(5_000)]
    mask = FreezeMask.from_scores(scores, 0.9)
    assert (mask.num_trained - mask.num_rescued, mask.num_weights) == (43_050, 430_500)
    assert mask.num_rescued == 3  # everything but the big layer, whose scores are the largest
    assert FreezeMask.from_scores(scores[2:3], 0.9).freeze_rate == 0.9


def test_a_mask_without_weights_has_rate_zero():
    assert FreezeMask([]).freeze_rate == 0.0
    assert FreezeMask.from_scores([], 0.9) == FreezeMask([])


def test_arrays_are_read_only_copies():
    given_array = np.array([True, False])
    mask = FreezeMask([MaskEntry(0, "a", given_array)])
    given_array[0] = False
    assert mask["a"][0]
    with pytest.raises(ValueError, match="read-only"):
        mask["a"][0] = False


def test_repr_is_short(mask):
    assert repr(FreezeMask.from_scores([np.arange(1000)], 0.99)) == (
        "FreezeMask(num_weights=1000, num_trained=10, freeze_rate=0.99)"
    )


def test_paths_may_leave_out_the_model(mask):
    np.testing.assert_array_equal(mask["b/fc1/kernel"], mask["net/b/fc1/kernel"])
    np.testing.assert_array_equal(mask["fc2/bias"], mask["net/a/fc2/bias"])


def test_a_complete_path_wins_over_a_longer_one():
    mask = FreezeMask(
        [
            MaskEntry(0, "fc/kernel", np.array([True])),
            MaskEntry(1, "net/fc/kernel", np.array([False])),
        ]
    )
    assert mask["fc/kernel"].all()


@pytest.mark.parametrize("key", ["fc1/kernel", "kernel"])
def test_ambiguous_paths_are_refused(mask, key):
    with pytest.raises(ValueError, match=r"ambiguous.*position 0.*position 4"):
        mask[key]


def test_variables_that_share_a_path_are_found_by_identity():
    variables = [Variable(), Variable()]
    mask = FreezeMask(
        [
            MaskEntry(1, "fc1/kernel", np.array([True])),
            MaskEntry(0, "fc1/kernel", np.array([False])),
        ],
        variables=variables,
    )
    assert mask[variables[0]].all()
    assert not mask[variables[1]].any()
    with pytest.raises(ValueError, match="ambiguous"):
        mask["fc1/kernel"]


@pytest.mark.parametrize("key", ["nothing", "c1/kernel", "", "kernel/"])
def test_unknown_paths_are_key_errors_that_list_the_paths(mask, key):
    with pytest.raises(KeyError, match="net/a/fc1/kernel"):
        mask[key]


def test_long_lists_of_paths_are_shortened():
    mask = FreezeMask(MaskEntry(i, f"layer_{i}", np.array([True])) for i in range(100))
    with pytest.raises(KeyError, match=r"\(100 in all\)") as error:
        mask["nothing"]
    assert len(str(error.value)) < 400


def test_unknown_variables_are_key_errors(mask):
    with pytest.raises(KeyError, match="no entry for this object"):
        mask[Variable()]


def test_variables_are_held_weakly():
    variable = Variable()
    mask = FreezeMask([MaskEntry(0, "a", np.array([True]))], variables=[variable])
    assert mask[variable].all()
    old_id = id(variable)
    del variable
    gc.collect()
    others = [Variable() for _ in range(1000)]  # one of them usually gets the old address
    others.sort(key=lambda other: id(other) != old_id)
    with pytest.raises(KeyError):
        mask[others[0]]


def test_equality_is_about_positions_shapes_and_bits(mask):
    relabelled = FreezeMask(
        MaskEntry(entry.position, f"other/{entry.path}", entry.trained) for entry in mask.entries
    )
    assert mask == relabelled
    assert hash(mask) == hash(relabelled)
    assert mask.fingerprint == relabelled.fingerprint
    first = mask.entries[0]
    for changed in (
        MaskEntry(1, first.path, first.trained),
        MaskEntry(0, first.path, first.trained.reshape(3, 5)),
        MaskEntry(0, first.path, ~first.trained),
    ):
        other = FreezeMask([changed, *mask.entries[1:]])
        assert mask != other
        assert mask.fingerprint != other.fingerprint
    assert mask != FreezeMask(mask.entries[1:])
    assert mask != "mask"


def test_fingerprints_are_the_same_on_every_machine():
    trained = np.array([[True, False, True]])
    mask = FreezeMask([MaskEntry(0, "a", trained), MaskEntry(2, "b", np.arange(9) == 8)])
    expected = hashlib.sha256(b"0 (1, 3)\n\xa02 (9,)\n\x00\x80").hexdigest()
    assert mask.fingerprint == expected
    assert FreezeMask([]).fingerprint == hashlib.sha256().hexdigest()


def test_entries_are_checked():
    with pytest.raises(TypeError, match=r"'fc/kernel' must be boolean.*dtype=float64"):
        MaskEntry(0, "fc/kernel", np.ones(3))
    with pytest.raises(ValueError, match="position=-1"):
        MaskEntry(-1, "fc/kernel", np.ones(3, bool))
    entry = MaskEntry(0, "fc/kernel", np.ones(3, bool))
    with pytest.raises(ValueError, match="different positions"):
        FreezeMask([entry, entry])
    with pytest.raises(ValueError, match="2 variables for 1 entries"):
        FreezeMask([entry], variables=[Variable(), Variable()])


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda mask: pickle.loads(pickle.dumps(mask))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_are_equal_and_read_only_and_know_no_variables(copied):
    variable = Variable()
    mask = FreezeMask([MaskEntry(3, "a", np.array([True, False]))], [variable], num_rescued=1)
    other = copied(mask)
    assert other == mask
    assert (other.paths, other.num_rescued) == (mask.paths, 1)
    assert not other["a"].flags.writeable
    with pytest.raises(KeyError):
        other[variable]


# Files


@given(data=st.data())
def test_files_bring_everything_back(tmp_path_factory, data):
    arrays = data.draw(
        st.lists(
            hnp.arrays(np.bool_, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)), max_size=4
        )
    )
    entries = [
        MaskEntry(
            3 * index + 1,
            data.draw(st.sampled_from(["", "fc/kernel", "größe/\ud800"])),
            array,
            data.draw(st.booleans()),
        )
        for index, array in enumerate(arrays)
    ]
    mask = FreezeMask(entries, num_rescued=data.draw(st.integers(0, 9)))
    path = tmp_path_factory.mktemp("masks") / "network.mask"
    mask.save(path)
    loaded = FreezeMask.load(path)
    assert loaded == mask
    assert (loaded.paths, loaded.num_rescued) == (mask.paths, mask.num_rescued)
    assert [entry.is_weight for entry in loaded.entries] == [e.is_weight for e in mask.entries]
    assert all(not entry.trained.flags.writeable for entry in loaded.entries)


def test_saving_leaves_one_file_and_replaces_an_older_one(mask, tmp_path):
    path = tmp_path / "network.mask"
    FreezeMask([]).save(path)
    mask.save(str(path))
    assert list(tmp_path.iterdir()) == [path]
    assert FreezeMask.load(str(path)) == mask


def test_a_failed_save_keeps_the_older_file_and_leaves_no_other(mask, tmp_path, monkeypatch):
    path = tmp_path / "network.mask"
    mask.save(path)

    def no_space(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", no_space)
    with pytest.raises(OSError, match="No space"):
        FreezeMask([]).save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert FreezeMask.load(path) == mask


def test_the_file_is_small(tmp_path):
    FreezeMask.from_scores([np.arange(80_000)], 0.9).save(tmp_path / "network.mask")
    assert (tmp_path / "network.mask").stat().st_size < 10_000 + 300


@pytest.fixture
def small_file(tmp_path):
    path = tmp_path / "small.mask"
    FreezeMask([MaskEntry(0, "a", np.array([True, False, True]))], num_rescued=1).save(path)
    return path


def test_damage_of_any_byte_is_noticed(small_file):
    content = small_file.read_bytes()
    for index in range(len(content)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(content)
            damaged[index] ^= flip
            small_file.write_bytes(damaged)
            with pytest.raises(FreezeFileError, match=r"small\.mask"):
                FreezeMask.load(small_file)


def test_truncation_anywhere_is_noticed(small_file):
    content = small_file.read_bytes()
    for length in range(len(content)):
        small_file.write_bytes(content[:length])
        with pytest.raises(FreezeFileError, match=r"small\.mask"):
            FreezeMask.load(small_file)


@pytest.mark.parametrize("extra", [b"\0", b"more"])
def test_bytes_at_the_end_are_noticed(small_file, extra):
    small_file.write_bytes(small_file.read_bytes() + extra)
    with pytest.raises(FreezeFileError, match="made longer"):
        FreezeMask.load(small_file)


def test_foreign_files_are_named(tmp_path):
    path = tmp_path / "weights.npz"
    np.savez(path, np.ones(3))
    with pytest.raises(ValueError, match=r"weights\.npz.* is not a valid `.freeze` file"):
        FreezeMask.load(path)
    with pytest.raises(FileNotFoundError):
        FreezeMask.load(tmp_path / "nothing")


def test_another_version_is_named(small_file):
    content = small_file.read_bytes()
    small_file.write_bytes(content[:8] + b"\3" + content[9:])
    with pytest.raises(FreezeFileError, match=r"version 3.*upgrade"):
        FreezeMask.load(small_file)


# Files that keras_freeze 0.1.0 wrote before masks became `.freeze` files


def with_valid_checksum(header, bits=b"\xa0"):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = b"keras_freeze mask 1\n" + len(encoded).to_bytes(8, "little") + encoded + bits
    return content + hashlib.sha256(content).digest()


def header_with(**changes):
    entry = {"position": 0, "path": "a", "shape": [3], "is_weight": True}
    return {"entries": [{**entry, **changes}], "num_rescued": 0}


def test_old_files_are_read(small_file):
    saved = FreezeMask.load(small_file)
    small_file.write_bytes(with_valid_checksum({**header_with(), "num_rescued": 1}))
    loaded = FreezeMask.load(small_file)
    assert loaded == saved
    assert (loaded.paths, loaded.num_rescued) == (saved.paths, 1)


def test_damage_of_an_old_file_is_noticed(small_file):
    content = with_valid_checksum(header_with())
    changed = [content[:length] for length in range(len(content))] + [content + b"\0"]
    for index in range(len(content)):
        changed.append(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
    for damaged in changed:
        small_file.write_bytes(damaged)
        with pytest.raises(FreezeFileError, match=r"small\.mask"):
            FreezeMask.load(small_file)


@pytest.mark.parametrize(
    "header",
    [
        header_with(shape=[2**62]),
        header_with(shape=[10**30, 10**30]),
        header_with(shape=[-3]),
        header_with(shape=["3"]),
        header_with(shape=3),
        header_with(shape=[3] + [1] * 100),
        header_with(position=-1),
        header_with(position="0"),
        {"entries": [{"position": 0}], "num_rescued": 0},
        {"entries": header_with()["entries"] * 2, "num_rescued": 0},
        {"entries": header_with()["entries"]},
        {"entries": header_with()["entries"], "num_rescued": "1"},
        [],
        b"no json",
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_headers_that_make_no_sense_are_refused(small_file, header):
    small_file.write_bytes(with_valid_checksum(header))
    with pytest.raises(FreezeFileError, match=r"small\.mask.*header of the file is not valid"):
        FreezeMask.load(small_file)


# What a `.freeze` file with a mask only may say


def described(**changes):
    variable = {"path": "a", "shape": [3], "mask": [0, 1]}
    return {"versions": {}, "content": "mask", "variables": [{**variable, **changes}]}


@pytest.mark.parametrize(
    "header",
    [
        described(shape=[2**62]),
        described(shape=[-3]),
        described(shape=["3"]),
        described(shape=3),
        described(shape=[1] * 33),
        described(mask=[-1, 1]),
        described(mask=[2**31, 1]),
        described(mask=[0, 2]),
        described(mask=[0]),
        described(mask=[0, 1, 0]),
        described(path=None),
        {**described(), "num_rescued": "1"},
        {**described(), "num_rescued": -1},
        {**described(), "versions": []},
        {**described(), "variables": {}},
        {**described(), "variables": described()["variables"] * 2},
        {**described(), "content": "masks"},
        {**described(), "content": ["mask"]},
        {"content": "mask"},
        {},
    ],
)
def test_headers_of_masks_are_checked(tmp_path, header):
    path = tmp_path / "hostile.freeze"
    write_container(path, header, b"\0\0\0\x80" * 2, b"", b"")
    for read in (FreezeMask.load, kf.storage.inspect):
        with pytest.raises(FreezeFileError, match=r"hostile\.freeze.*header .* not valid"):
            read(path)


@pytest.mark.parametrize(
    "sections",
    [(b"", b"\0" * 4, b""), (b"", b"", b"\0"), (b"\0", b"", b""), (b"\xff" * 64, b"", b"")],
)
def test_sections_of_masks_are_checked(tmp_path, sections):
    path = tmp_path / "hostile.freeze"
    write_container(path, described(), *sections)
    for read in (FreezeMask.load, kf.storage.inspect):
        with pytest.raises(FreezeFileError, match=r"hostile\.freeze"):
            read(path)


def test_masks_larger_than_the_memory_are_refused(tmp_path):
    path = tmp_path / "hostile.freeze"
    write_container(path, described(shape=[2**40]), b"", b"", b"")  # a terabyte of masks
    for read in (FreezeMask.load, kf.storage.inspect):
        with pytest.raises(FreezeFileError, match="more than the limit"):
            read(path)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (FreezeMask([MaskEntry(2**31, "a", np.ones(2, bool))]), "position is"),
        (FreezeMask([MaskEntry(0, "a", np.ones([1] * 33, bool))]), "shape is"),
        (FreezeMask([], num_rescued=-1), "num_rescued is"),
    ],
)
def test_masks_that_could_not_be_loaded_are_not_saved(tmp_path, mask, message):
    with pytest.raises(ValueError, match=f"does not fit into a `.freeze` file.*{message}"):
        mask.save(tmp_path / "mask.freeze")
    assert not list(tmp_path.iterdir())


def test_a_file_with_a_mask_only_is_not_a_model(mask, tmp_path):
    path = tmp_path / "mask.freeze"
    mask.save(path)
    with pytest.raises(FreezeFileError, match=r"mask\.freeze.*holds a mask only.*FreezeMask\.load"):
        kf.load(path)


def test_a_file_with_a_mask_only_is_described(mask, tmp_path):
    path = tmp_path / "mask.freeze"
    mask.save(path)
    found = kf.storage.inspect(path)
    assert found.model is None
    assert found.freeze_rate == mask.freeze_rate
    assert found.real_freeze_rate is None
    assert found.total_bytes == path.stat().st_size
    assert [row.path for row in found.rows] == list(mask.paths)
    assert [row.num_trained for row in found.rows] == [mask[p].sum() for p in mask.paths]
    printed = str(found)
    assert "a mask only, saved with keras_freeze" in printed
    assert f"q = {mask.freeze_rate:.6g}\n" in printed
    assert f"{found.rows[0].num_trained} trained" in printed
