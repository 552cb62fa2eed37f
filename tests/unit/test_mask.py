"""FreezeMask: its entries, the paths and variables that find them, equality and copies."""

import copy
import gc
import hashlib
import pickle

import numpy as np
import pytest
from mask_cases import mask_of_two_weights

from keras_freeze.masks.mask import FreezeMask, MaskEntry


class Variable:
    """Something that can be referred to weakly, and must never be compared or hashed."""

    __hash__ = None

    def __eq__(self, other):
        raise AssertionError("variables are looked up by identity")


@pytest.fixture
def mask():
    return mask_of_two_weights()


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
