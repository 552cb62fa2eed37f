"""Training on a grid: values in full precision, and the points that the model's variables get.

The inner optimizer updates values that a variable of the model does not have: after each step, the
variable gets the point of the grid next to them. A grid is one of differences to the start, so that
a `.freeze` file holds an integer for each trained value.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_freeze import backend
from keras_freeze._utils.typing import Variable
from keras_freeze.grids import Grid
from keras_freeze.initializers.of_layers import drawn_like, initializers_of, source_of
from keras_freeze.masks import frozen_variables
from keras_freeze.parameters import Parameter
from keras_freeze.placements import Placement, may_be_rounded, placements_of, remember_grid
from keras_freeze.starts import Source

if TYPE_CHECKING:
    from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer

# Steps are rounded to so many bits: products with integers of 14 bits are then exact in float32.
_STEP_BITS = 10


def rounded_step(step: float) -> float:
    """Return the step with so few bits that every backend computes the same points, exactly."""
    mantissa, exponent = np.frexp(step)
    return float(np.ldexp(np.rint(mantissa * 2**_STEP_BITS), exponent - _STEP_BITS))


class PreciseValues:
    """The trained entries of one variable of a model in full precision; it gets their points.

    Args:
        variable: the variable; a later `save` finds the grid by it.
        step: the distance between two points of the grid.
        values: the variable of an update that the inner optimizer changes.
        starts: what these entries were before training.
        read_indices: returns the flat indices of the trained entries; None for all.
        number: of the variable, for names.

    Attributes:
        values: the same.
        starts: a variable.
    """

    def __init__(
        self,
        variable: Variable,
        step: float,
        values: Variable,
        starts: np.ndarray,
        read_indices: Callable[[], np.ndarray | None],
        number: int,
    ) -> None:
        self._step = step
        self.values = values
        name = f"grid_starts_{number}"
        self.starts = keras.Variable(starts, dtype=values.dtype, name=name, trainable=False)
        read = functools.partial(_entries, read_indices, self.starts)
        remember_grid(variable, Placement(Grid(step), None, read))

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

    def take_over(self, current: Any) -> None:
        """Set the values that someone has assigned to the variable, whose entries are `current`."""
        self.values.assign(backend.where(current == self.points(), self.values, current))

    def begin_at(self, values: Any, starts: Any) -> None:
        """Set values and starts."""
        self.values.assign(values)
        self.starts.assign(starts)

    def state(self, trained: np.ndarray | None) -> np.ndarray:
        """Return values and starts of the entries that are trained (None: all)."""
        arrays = [backend.to_numpy(v).reshape(-1) for v in self.variables]
        return np.stack([a if trained is None else a[trained.reshape(-1)] for a in arrays])

    def restore(self, state: np.ndarray, trained: np.ndarray | None) -> None:
        """Set what `state` returned, in the entries that are trained (None: all).

        Raises:
            ValueError: if it has another number of entries; nothing has changed then.
        """
        arrays = [backend.to_numpy(v) for v in self.variables]
        chosen = np.ones(arrays[0].size, bool) if trained is None else trained.reshape(-1)
        if state.shape != (2, np.count_nonzero(chosen)):
            raise ValueError(
                f"The values in full precision of {self.values.path!r} that are loaded have the "
                f"shape {state.shape}, and this network has {np.count_nonzero(chosen)} of them."
            )
        for variable, array, values in zip(self.variables, arrays, state, strict=True):
            array.reshape(-1)[chosen] = values.astype(array.dtype)
            variable.assign(array)


def _entries(
    read_indices: Callable[[], np.ndarray | None], starts: Variable
) -> tuple[np.ndarray | None, np.ndarray]:
    """Return the flat indices of trained entries and their starts."""
    indices, found = read_indices(), backend.to_numpy(starts).reshape(-1)
    return indices, found if indices is None or indices.size == found.size else found[indices]


class GridTraining:
    """Which variables of an optimizer are trained on its grid, and where they started.

    Args:
        optimizer: the FreezeOptimizer that is being built.
        parameters: its variables.
    """

    def __init__(self, optimizer: "FreezeOptimizer", parameters: Sequence[Parameter]) -> None:
        self._step = optimizer.grid
        self._optimizer = weakref.ref(optimizer)
        self._parameters = parameters
        # Where another optimizer has decided the mask, biases may have been trained since.
        self._initializers: dict[int, Source] = {}
        model = frozen_variables.model_of(optimizer)
        if self._step is not None and model is not None and optimizer.plan.inherits:
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
        return self._step is not None and may_be_rounded(self._parameters[position].variable)

    def precise_values(
        self,
        position: int,
        values: Variable,
        read_indices: Callable[[], np.ndarray | None],
        indices: np.ndarray | None = None,
    ) -> PreciseValues:
        """Return the `PreciseValues` of the entries at flat `indices`; None for all of them.

        `values` is the variable that the inner optimizer updates; `read_indices` returns the
        indices of those that are trained.
        """
        assert self._step is not None
        variable, starts = self._parameters[position].variable, self.starts_of(position, indices)
        return PreciseValues(variable, self._step, values, starts, read_indices, position)

    def starts_of(self, position: int, indices: np.ndarray | None) -> np.ndarray:
        """Return the starts of the entries of a variable at flat `indices` (None: all)."""
        values = backend.to_numpy(self._parameters[position].variable)
        candidates = self._candidates(position, values)
        found = next((starts for starts in candidates if starts is not None), values)
        return found if indices is None else found.reshape(-1)[indices]

    def _candidates(self, position: int, values: np.ndarray) -> Iterator[np.ndarray | None]:
        """Yield what a variable with these values may have started from, the likeliest first."""
        optimizer = self._optimizer()
        start = None if optimizer is None else optimizer.starts.get(position)
        if start is not None:
            yield drawn_like(start.source, values)
        for placement in placements_of(self._parameters[position].variable):
            yield _placed(placement, values)
        source = self._initializers.get(position)
        yield None if source is None else drawn_like(source, values)


def _placed(placement: Placement, values: np.ndarray) -> np.ndarray | None:
    """Return the starts that were remembered, unless other values have been assigned since."""
    if placement.read is None:
        return None if placement.origin is None else drawn_like(placement.origin, values)
    starts = placement.all_starts(values)
    steps = placement.grid.nearest(values, starts)
    if steps is None or not np.array_equal(placement.grid.values(starts, steps), values):
        return None
    return starts
