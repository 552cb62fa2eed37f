"""Which variables of models are on a grid, and where their trained values started."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_freeze import backend
from keras_freeze._utils.bits import numpy_dtype
from keras_freeze._utils.by_variable import ByVariable
from keras_freeze.grids import DTYPES, Grid
from keras_freeze.starts import Source


@dataclass(frozen=True)
class Placement:
    """The grid that a variable's trained values are on, and where they started.

    Attributes:
        grid: the grid.
        origin: where the starts come from; None if only the starts are known.
        read: returns the flat indices of the trained entries (None: all) and their starts; None if
            `origin` gives these.
    """

    grid: Grid
    origin: Source | None = None
    read: Callable[[], tuple[np.ndarray | None, np.ndarray]] | None = None

    def all_starts(self, values: np.ndarray) -> np.ndarray:
        """Return the known starts of a whole variable, in which other entries are their own."""
        assert self.read is not None
        indices, starts = self.read()
        found = values.copy()
        found.reshape(-1)[slice(None) if indices is None else indices] = starts.reshape(-1)
        return found


def may_be_rounded(variable: Any) -> bool:
    """Return whether trained values of a variable may be on a grid."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if dtype not in DTYPES or backend.held_dtype(numpy_dtype(dtype)) != numpy_dtype(dtype):
        return False  # JAX would round the points
    is_measured = getattr(variable, "overwrite_with_gradient", False)  # scales of float8
    # A constraint may not allow the nearest point.
    return getattr(variable, "constraint", None) is None and not is_measured


_MOST_REMEMBERED = 4  # for each variable

_remembered: ByVariable[tuple[Placement, ...]] = ByVariable()


def remember_grid(variable: Any, placement: Placement) -> None:
    """Remember that trained values of a variable are on a grid, for a later `save`."""
    # An earlier one may be in force again, if its optimizer goes on.
    before = [one for one in placements_of(variable) if one.grid != placement.grid]
    _remembered.set(variable, (placement, *before[: _MOST_REMEMBERED - 1]))


def remember_grids(variables: Sequence[Any], placements: Sequence[Placement | None]) -> None:
    """Do the same for several variables; None is for one without a grid."""
    for variable, placement in zip(variables, placements, strict=True):
        if placement is not None:
            remember_grid(variable, placement)


def placements_of(variable: Any) -> tuple[Placement, ...]:
    """Return what was remembered, the latest first; training may have left the grids since."""
    return _remembered.get(variable) or ()
