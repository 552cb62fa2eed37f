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

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, in bytes."""
        places = 0 if self.places is None else self.places.nbytes
        return places + self.before.nbytes + self.after.nbytes

    def is_applicable(self, variables: Sequence[Any], earlier: "Patch | None" = None) -> bool:
        """Return whether the variable has the values that are to be replaced.

        `earlier` is a patch that comes first, is applicable, and gives it some of them.
        """
        given = np.zeros(0, np.int32) if earlier is None else earlier.places
        if given is None:  # all of them
            return True
        differ = bits_at(variables[self.index], self.places) != self.before
        return _are_among(
            np.flatnonzero(differ) if self.places is None else self.places[differ], given
        )


def _are_among(places: np.ndarray, others: np.ndarray) -> bool:
    """Return whether places are among others, which are sorted."""
    at = np.searchsorted(others, places)
    return bool((at < others.size).all()) and np.array_equal(others[at], places)


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


def apply_all(model: keras.Model, variables: Sequence[Any], patches: Sequence[Patch]) -> None:
    """Apply patches to the variables of a model in turn, all of them or, after an error, none."""
    of_variables: dict[int, list[Patch]] = {}
    for patch in patches:
        of_variables.setdefault(patch.index, []).append(patch)
    begun: list[int] = []
    try:
        for index, group in of_variables.items():
            begun.append(index)
            apply(variables[index], group)
        finish_loading(model)
    except BaseException:
        for index in reversed(begun):
            apply(variables[index], [patch.reverse for patch in reversed(of_variables[index])])
        raise


def apply(variable: Any, patches: Sequence[Patch]) -> None:
    """Apply patches of one variable in turn."""
    dtype = dtype_of(variable)
    whole = max((i for i, patch in enumerate(patches) if patch.places is None), default=None)
    if whole is not None:  # earlier ones do not matter
        set_bits(variable, patches[whole].after, dtype)
        patches = patches[whole + 1 :]
    changes = [(p.places, from_bits(p.after, dtype)) for p in patches if p.places is not None]
    if changes:
        backend.assign_at(variable, changes)


def bits_at(variable: Any, places: np.ndarray | None) -> np.ndarray:
    """Return the values at flat indices (None: all) of a variable, as bit patterns."""
    if places is None:
        return bits_of(variable)
    values = backend.values_at(variable, places)
    return as_bits(values.astype(numpy_dtype(dtype_of(variable)), copy=False))
