"""Patches: values of a variable that are replaced, one patch after the other."""

import keras
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keras_freeze.storage.patches import Patch, apply


def applied(values, patch):
    """The values after a patch, in Python."""
    after = list(values)
    for place, new in zip(places_of(patch, values), patch.after, strict=True):
        after[place] = new
    return after


def places_of(patch, values):
    return range(len(values)) if patch.places is None else patch.places.tolist()


@st.composite
def changes(draw, values):
    """A patch of some of the values, or of all of them."""
    places = draw(st.one_of(st.none(), st.sets(st.integers(0, len(values) - 1))))
    flat = np.arange(len(values)) if places is None else np.array(sorted(places), np.int32)
    after = draw(st.lists(st.integers(0, 5), min_size=flat.size, max_size=flat.size))
    before = np.array([values[place] for place in flat], np.uint32)
    return Patch(0, None if places is None else flat, before, np.array(after, np.uint32))


def variable_of(values):
    return keras.Variable(np.array(values, np.uint32).view(np.float32))


def bits_in(variable):
    return keras.ops.convert_to_numpy(variable).view(np.uint32).tolist()


VALUES = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@given(st.data(), VALUES)
def test_patches_are_applied_in_turn_and_taken_back(data, values):
    first = data.draw(changes(values))
    second = data.draw(changes(applied(values, first)))
    variable = variable_of(values)
    apply(variable, [first, second])
    assert bits_in(variable) == applied(applied(values, first), second)
    apply(variable, [second.reverse, first.reverse])
    assert bits_in(variable) == values


@given(st.data(), VALUES)
def test_what_a_patch_replaces_is_there_or_comes_with_an_earlier_one(data, values):
    first = data.draw(changes(values))
    second = data.draw(changes(applied(values, first)))
    assert first.is_applicable([variable_of(values)])
    assert second.is_applicable([variable_of(values)], first)
    place = data.draw(st.integers(0, len(values) - 1))
    changed = [*values[:place], 7, *values[place + 1 :]]
    alone = place in places_of(second, values) and place not in places_of(first, values)
    assert first.is_applicable([variable_of(changed)]) == (place not in places_of(first, values))
    assert second.is_applicable([variable_of(changed)], first) != alone
