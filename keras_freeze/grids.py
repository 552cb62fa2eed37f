"""Values on a grid: a start, and an integer number of steps from it."""

from dataclasses import dataclass

import numpy as np

from keras_freeze._utils.bits import as_bits
from keras_freeze._utils.validation import check_number
from keras_freeze.starts import CONSTANT, Source

LARGEST = 2**31 - 1
"""The largest distance from the start, in steps."""

DTYPES = ("float64", "float32", "float16", "bfloat16")
"""The dtypes of values that may be on a grid."""


STORED_DTYPES = ("float32", "float16", "bfloat16")
"""The dtypes in which values of float32 parameters may be stored, off a grid."""


@dataclass(frozen=True)
class Grid:
    """A uniform grid of differences to the start, for `save(..., values=Grid(step))`.

    Each trained value is rounded to its start plus an integer number of steps, of which the file
    holds the integers, entropy-coded. Starts are the values before training where a seed or a base
    gives them, and 0 or 1 elsewhere, as for biases and the scales of normalizations.

    Args:
        step: the distance between two points of the grid, a number above 0.

    Raises:
        TypeError: If `step` is not a number.
        ValueError: If it is not finite, or not above 0.

    Example:

    ```python
    keras_freeze.save(model, "digits.freeze", values=keras_freeze.storage.Grid(0.05))
    ```
    """

    step: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", check_number("step", self.step, positive=True))

    def nearest(self, values: np.ndarray, starts: np.ndarray) -> np.ndarray | None:
        """Return the integers of the points next to `values`; None if one is out of range."""
        with np.errstate(all="ignore"):
            steps = np.rint((values.astype(np.float64) - starts.astype(np.float64)) / self.step)
        return steps.astype(np.int64) if (np.abs(steps) <= LARGEST).all() else None

    def values(self, starts: np.ndarray, integers: np.ndarray) -> np.ndarray:
        """Return the values that are `integers` steps from `starts`, in their dtype."""
        with np.errstate(over="ignore"):
            values = starts.astype(np.float64) + integers * self.step
            if starts.dtype != np.float64:
                values = values.astype(np.float32)
            return values.astype(starts.dtype, copy=False)


@dataclass(frozen=True)
class Bits:
    """A size for `save(..., values=Bits(per_value))`, which chooses the step of the grid.

    All variables have the same step. Steps from twice the largest difference down to 2^-23 of it
    are tried, each 2^(1/4) times the next, and the shortest is taken with which the trained values
    need no more than so many bits each; the longest if none does. Values that are on a grid already
    do not count, nor do mask and header. The choice looks at no data: `keras_freeze.quantize` does.

    Args:
        per_value: the mean size of a trained value in the file, in bits, above 0.

    Raises:
        TypeError: If `per_value` is not a number.
        ValueError: If it is not finite, or not above 0.

    Example:

    ```python
    keras_freeze.save(model, "digits.freeze", values=keras_freeze.storage.Bits(3))
    ```
    """

    per_value: float

    def __post_init__(self) -> None:
        checked = check_number("per_value", self.per_value, positive=True)
        object.__setattr__(self, "per_value", checked)


@dataclass(frozen=True)
class OnGrid:
    """Some values of a variable on a grid.

    Attributes:
        grid: the grid.
        origin: where the starts come from.
        starts: the starts of these values.
        integers: how many steps each is from its start, int64.
    """

    grid: Grid
    origin: Source
    starts: np.ndarray
    integers: np.ndarray

    @property
    def bits(self) -> np.ndarray:
        """The values as bit patterns."""
        return as_bits(self.grid.values(self.starts, self.integers))


def default_origin(source: Source | None) -> Source:
    """Return where starts come from, unless a file says so, of a variable with this source."""
    return Source(CONSTANT) if source is None else source
