"""Patches: replaced values of a variable, one after another as one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keras_freeze.storage.patches import Patch, in_turn


def applied(values, patch):
    """The values after a patch, in Python."""
    after = list(values)
    places = range(len(after)) if patch.places is None else patch.places
    for place, old, new in zip(places, patch.before, patch.after, strict=True):
        assert after[place] == old
        after[place] = new
    return after


@st.composite
def changes(draw, values):
    """A patch of some of the values, or of all of them."""
    places = draw(st.one_of(st.none(), st.sets(st.integers(0, len(values) - 1))))
    flat = np.arange(len(values)) if places is None else np.array(sorted(places), np.int32)
    after = draw(st.lists(st.integers(0, 5), min_size=flat.size, max_size=flat.size))
    before = np.array([values[place] for place in flat], np.uint32)
    return Patch(3, None if places is None else flat, before, np.array(after, np.uint32))


@given(st.data(), st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_two_patches_in_turn_are_one(data, values):
    first = data.draw(changes(values))
    between = applied(values, first)
    second = data.draw(changes(between))
    (both,) = in_turn([first], [second])
    assert applied(values, both) == applied(between, second)
    assert both.places is None or len(set(both.places.tolist())) == both.places.size
    assert applied(applied(values, both), both.reverse) == values


def test_patches_of_different_variables_stay_apart():
    one, other = (Patch(index, None, np.zeros(2), np.ones(2)) for index in (0, 1))
    assert in_turn([one], [other]) == [one, other]
    assert in_turn([], [one]) == [one] == in_turn([one], [])
