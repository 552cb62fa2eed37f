"""Decide which values of variables a file stores as changes of a base."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_freeze._utils.bits import rounded_to
from keras_freeze.grids import DTYPES
from keras_freeze.starts import BASE, Source
from keras_freeze.storage.coding.differences import differences
from keras_freeze.storage.coding.integers import Integers
from keras_freeze.storage.coding.masks import num_bits_of_places
from keras_freeze.storage.coding.values import num_bits_of_patterns
from keras_freeze.storage.keras_model import bits_of, is_random_state
from keras_freeze.storage.saved_variable import SavedVariable
from keras_freeze.storage.sources import align

# What a variable that has changes or differences takes in the header, in bits.
_CHANGES_IN_HEADER = 100
_DIFFERENCES_IN_HEADER = 50


def set_changes(variables: Sequence[SavedVariable], base: Sequence[Any] | None) -> None:
    """Set `changed` and `differences` of variables where this makes the file smaller.

    Args:
        variables: The variables, whose sources and grids are known.
        base: The variables of the base, or None.
    """
    if base is None:
        return
    found = align([saved.variable for saved in variables], base)
    for number, saved in enumerate(variables):
        if saved.on_grid is not None or is_random_state(saved.variable):
            continue
        if saved.source is None and number in found:
            _try_changes(saved, Source(BASE, index=found[number]), bits_of(base[found[number]]))
        elif saved.source is not None and saved.source.kind == BASE and saved.entry is not None:
            _try_differences(saved, bits_of(base[saved.source.index]))


def _try_changes(saved: SavedVariable, source: Source, base: np.ndarray) -> None:
    before = num_bits_of_patterns(saved.rounded())
    saved.source, saved.changed = source, saved.bits != base
    after = _try_differences(saved, base) + num_bits_of_places(saved.changed)
    if after + _CHANGES_IN_HEADER >= before:
        saved.source = saved.changed = saved.differences = None


def _try_differences(saved: SavedVariable, base: np.ndarray) -> float:
    """Set `differences` if they take fewer bits, and return how many the values take."""
    values = saved.rounded()
    plain = num_bits_of_patterns(values)
    if saved.dtype not in DTYPES:
        return plain
    starts = rounded_to(base[saved.is_stored], saved.dtype, saved.stored_dtype)
    found = differences(values, starts)
    if found is None:
        return plain
    integers = Integers(found)
    shorter = integers.num_bits + _DIFFERENCES_IN_HEADER
    if shorter >= plain:
        return plain
    saved.differences = integers
    return shorter
