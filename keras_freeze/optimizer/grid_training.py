"""Training on a grid: values in full precision, and the points that the model's variables get.

The inner optimizer updates values that a variable of the model does not have: after each step, the
variable gets the point of the grid next to them. A grid is one of differences to the start, so that
a `.freeze` file holds an integer for each trained value.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_freeze import backend
from keras_freeze._utils.bits import as_bits, from_bits
from keras_freeze._utils.typing import Variable
from keras_freeze.grids import (
    DTYPES,
    Grid,
    Placement,
    may_be_rounded,
    placements_of,
    remember_grid,
)
from keras_freeze.initializers.of_layers import draw, initializers_of, source_of
from keras_freeze.masks import frozen_variables
from keras_freeze.parameters import Parameter
from keras_freeze.starts import CONSTANT, Source

if TYPE_CHECKING:
    from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer

# Steps are rounded to so many bits: products with integers of 14 bits are then exact in float32.
_STEP_BITS = 10


def rounded_step(step: float) -> float:
    """Return the step with so few bits that every backend computes the same points, exactly."""
    mantissa, exponent = np.frexp(step)
    return float(np.ldexp(np.rint(mantissa * 2**_STEP_BITS), exponent - _STEP_BITS))


class GridValues:
    """The trained entries of one variable of a model in full precision.

    Args:
        variable: the variable, which gets the points; a later `save` finds the grid by it.
        step: the distance between two points of the grid.
        values: the variable of an update that the inner optimizer changes.
        indices: the flat indices of the trained entries; None for all.
        starts: what these entries were before training.

    Attributes:
        values: the same.
        starts: a variable.
    """

    def __init__(
        self,
        variable: Variable,
        step: float,
        values: Variable,
        indices: np.ndarray | None,
        starts: np.ndarray,
    ) -> None:
        self._variable = variable
        self._step = step
        self._indices = indices
        self.values = values
        self.starts = keras.Variable(
            starts, dtype=values.dtype, name="grid_starts", trainable=False
        )
        self._remember(starts)

    def _remember(self, starts: np.ndarray) -> None:
        placement = Placement(Grid(self._step), None, self._indices, starts.reshape(-1))
        remember_grid(self._variable, placement)

    @property
    def variables(self) -> list[Variable]:
        """The variables of the state."""
        return [self.values, self.starts]

    def points(self) -> Any:
        """Return the points of the grid next to the values, in the variable's dtype."""
        dtype = keras.backend.standardize_dtype(self.values.dtype)
        precise = "float64" if dtype == "float64" else "float32"
        starts = ops.cast(self.starts, precise)
        step = ops.cast(self._step, precise)
        steps = ops.round((ops.cast(self.values, precise) - starts) / step)
        return ops.cast(starts + steps * step, dtype)

    def follow(self, current: Any) -> None:
        """Take over what someone has assigned to the variable, whose entries are `current`."""
        self.values.assign(backend.where(current == self.points(), self.values, current))

    def move(self, indices: np.ndarray | None, starts: np.ndarray) -> None:
        """Stand for other entries, as many (None: all), with the values that the variable has."""
        self._indices = indices
        values = backend.to_numpy(self._variable)
        self.values.assign(values if indices is None else values.reshape(-1)[indices])
        self.starts.assign(starts)
        self._remember(starts)

    def state(self, trained: np.ndarray | None) -> np.ndarray:
        """Return values and starts of the entries that are trained (None: all) as bit patterns."""
        arrays = [backend.to_numpy(v).reshape(-1) for v in self.variables]
        if trained is not None:
            arrays = [array[trained.reshape(-1)] for array in arrays]
        return np.stack([as_bits(array) for array in arrays])

    def restore(self, state: np.ndarray, trained: np.ndarray | None) -> None:
        """Set what `state` returned, in the entries that are trained (None: all)."""
        dtype = keras.backend.standardize_dtype(self.values.dtype)
        for variable, bits in zip(self.variables, state, strict=True):
            array = backend.to_numpy(variable)
            chosen = slice(None) if trained is None else trained.reshape(-1)
            array.reshape(-1)[chosen] = from_bits(np.ascontiguousarray(bits), dtype)
            variable.assign(array)
        self._remember(backend.to_numpy(self.starts))


class GridStarts:
    """Where the trained values of a network started, as far as one can know.

    Args:
        optimizer: the FreezeOptimizer that is being built.
        parameters: its variables.
    """

    def __init__(self, optimizer: "FreezeOptimizer", parameters: Sequence[Parameter]) -> None:
        self._step = optimizer.grid
        self._parameters = parameters
        self._drawn_from = {p: start.source for p, start in optimizer.starts.items()}
        # Where another optimizer has decided the mask, biases may have been trained since.
        self._initializers: dict[int, Source] = {}
        model = frozen_variables.model_of(optimizer)
        if model is not None and optimizer.plan.inherits:
            held = initializers_of(model)
            others = [p for p in parameters if not p.is_frozen_candidate and not p.excluded]
            sources = {
                p.position: source_of(*held[id(p.variable)])
                for p in others
                if id(p.variable) in held
            }
            self._initializers = {p: source for p, source in sources.items() if source}

    def covers(self, position: int) -> bool:
        """Return whether a variable is trained on the grid."""
        variable = self._parameters[position].variable
        dtype = keras.backend.standardize_dtype(variable.dtype)
        return self._step is not None and dtype in DTYPES and may_be_rounded(variable)

    def place(self, position: int, indices: np.ndarray | None, values: Variable) -> GridValues:
        """Return the `GridValues` of the entries at flat `indices`; None for all of them.

        `values` is the variable that the inner optimizer updates.
        """
        assert self._step is not None
        variable = self._parameters[position].variable
        return GridValues(variable, self._step, values, indices, self.of(position, indices))

    def of(self, position: int, indices: np.ndarray | None) -> np.ndarray:
        """Return the starts of the entries of a variable at flat `indices` (None: all)."""
        variable = self._parameters[position].variable
        values = backend.to_numpy(variable)
        candidates = itertools.chain(
            [_drawn(self._drawn_from.get(position), values)],
            (_placed(placement, values) for placement in placements_of(variable)),
            [_drawn(self._initializers.get(position), values)],
        )
        found = next((starts for starts in candidates if starts is not None), values)
        return found if indices is None else found.reshape(-1)[indices]


def _placed(placement: Placement, values: np.ndarray) -> np.ndarray | None:
    """Return the starts that were remembered, unless other values have been assigned since."""
    if placement.starts is None:
        return _drawn(placement.origin, values)
    starts = placement.all_starts(values)
    steps = placement.grid.nearest(values, starts)
    if steps is None or not np.array_equal(placement.grid.values(starts, steps), values):
        return None
    return starts


def _drawn(source: Source | None, values: np.ndarray) -> np.ndarray | None:
    """Return what a source gives for a variable with these values; None if it gives none."""
    if source is None:
        return None
    if source.kind == CONSTANT:
        bits = as_bits(values)
        return np.full_like(bits, source.pattern).view(values.dtype).reshape(values.shape)
    try:
        return draw(source, values.shape, values.dtype.name)
    except ValueError:  # a base, which is not at hand, or an initializer of another version
        return None
