"""Values of variables that are replaced in place, and put back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_freeze import backend
from keras_freeze._utils.bits import as_bits, from_bits, numpy_dtype
from keras_freeze.grids import DTYPES
from keras_freeze.storage.keras_model import (
    bits_of,
    dtype_of,
    finish_loading,
    is_random_state,
    set_bits,
    values_for,
)


@dataclass(frozen=True)
class Patch:
    """Some values of one variable: where they are, what they were and what they become.

    Attributes:
        index: which of the model's variables it is.
        places: the flat indices of the values; None for all of them.
        before, after: the values as bit patterns.
    """

    index: int
    places: np.ndarray | None
    before: np.ndarray
    after: np.ndarray

    @property
    def reverse(self) -> "Patch":
        """The patch that undoes this one."""
        return Patch(self.index, self.places, self.after, self.before)

    def then(self, second: "Patch") -> "Patch":
        """Return the patch that does what this one and then another one of its variable do.

        Its places are not sorted.
        """
        if self.places is None or second.places is None:
            size = max(self.before.size, second.before.size)
            first_at, second_at = all_or(self.places), all_or(second.places)
            before, after = np.empty((2, size), self.before.dtype)
            before[second_at] = second.before
            before[first_at] = self.before
            after[first_at] = self.after
            after[second_at] = second.after
            return Patch(self.index, None, before, after)
        alone, again = _shared(self.places, second.places)
        before = second.before.copy()
        before[again] = self.before[~alone]  # the first patch has replaced these
        return Patch(
            self.index,
            np.concatenate([self.places[alone], second.places]),
            np.concatenate([self.before[alone], before]),
            np.concatenate([self.after[alone], second.after]),
        )

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, in bytes."""
        places = 0 if self.places is None else self.places.nbytes
        return places + self.before.nbytes + self.after.nbytes

    def is_applicable(self, variables: Sequence[Any]) -> bool:
        """Return whether the variable has the values that are to be replaced."""
        return np.array_equal(bits_at(variables[self.index], self.places), self.before)

    def apply(self, variables: Sequence[Any]) -> None:
        """Replace the values."""
        variable = variables[self.index]
        if self.places is None:
            set_bits(variable, self.after, dtype_of(variable))
            return
        backend.assign_at(variable, self.places, from_bits(self.after, dtype_of(variable)))


def _shared(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which of `first` are not in `second`, and which of `second` are in `first`.

    Both are sorted.
    """
    marks = np.zeros(max((*first[-1:], *second[-1:], -1)) + 1, bool)  # quicker than sorting
    first, second = first.astype(np.intp), second.astype(np.intp)  # int32 takes twice as long
    marks[first] = True
    again = marks[second]
    marks[second] = False
    return marks[first], again


def all_or(places: np.ndarray | None) -> Any:
    """Return the index of the values at `places` in a vector of all of them; None: of all."""
    return slice(None) if places is None else places


def flat_places(chosen: np.ndarray) -> np.ndarray:
    """Return the flat indices of what is True, in the dtype in which backends take them."""
    return np.flatnonzero(chosen).astype(np.int32 if chosen.size < 2**31 else np.int64)


def patches_to(variables: Sequence[Any], values: Sequence[np.ndarray]) -> list[Patch]:
    """Return the patches that give variables these values, except their random states.

    `values` are bit patterns, in the variables' dtypes.

    Raises:
        FreezeFileError: if a variable cannot hold its values.
    """
    patches = []
    for index, (variable, after) in enumerate(zip(variables, values, strict=True)):
        if is_random_state(variable):
            continue
        values_for(variable, after, dtype_of(variable))  # raises before anything is assigned
        before = bits_of(variable)
        places = flat_places(before != after)
        # Backends replace single values of floating-point variables only.
        if places.size > before.size // 2 or (places.size and dtype_of(variable) not in DTYPES):
            patches.append(Patch(index, None, before, after))
        elif places.size:
            patches.append(Patch(index, places, before[places], after[places]))
    return patches


def in_turn(first: Sequence[Patch], second: Sequence[Patch]) -> list[Patch]:
    """Return the patches that do what two sequences, of one patch a variable each, do in turn."""
    found = {patch.index: patch for patch in first}
    for patch in second:
        earlier = found.get(patch.index)
        found[patch.index] = patch if earlier is None else earlier.then(patch)
    return list(found.values())


def apply_all(model: keras.Model, variables: Sequence[Any], patches: Sequence[Patch]) -> None:
    """Apply patches to the variables of a model, all of them or, after an error, none."""
    begun: list[Patch] = []
    try:
        for patch in patches:
            begun.append(patch)
            patch.apply(variables)
        finish_loading(model, [variables[patch.index] for patch in patches])
    except BaseException:
        for patch in reversed(begun):
            patch.reverse.apply(variables)
        raise


def bits_at(variable: Any, places: np.ndarray | None) -> np.ndarray:
    """Return the values at flat indices (None: all) of a variable, as bit patterns."""
    if places is None:
        return bits_of(variable)
    values = backend.values_at(variable, places)
    return as_bits(values.astype(numpy_dtype(dtype_of(variable)), copy=False))
