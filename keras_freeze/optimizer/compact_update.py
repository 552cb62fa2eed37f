"""The compact update strategy: the inner optimizer gets vectors of the trained weights alone."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_freeze import _keras_private, backend
from keras_freeze.masks.frozen_variables import VariableMask
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.optimizer.grid_training import GridTraining
from keras_freeze.optimizer.state import Phase
from keras_freeze.optimizer.update import Step, Update, make_variable
from keras_freeze.parameters import Parameter

if TYPE_CHECKING:
    from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer

# Above so many entries, a copy of a variable takes longer than a few small operations.
_LARGE = 2**18

# Indices are 32-bit integers.
_MOST_ENTRIES = 2**31 - 1


class CompactUpdate(Update):
    """The inner optimizer updates one vector of trained weights per kernel.

    Args:
        optimizer, parameters: as for `Update`.
        trained_counts: how many entries of each variable are trained; None for a variable that has
            no mask and is trained whole.
        mask: the mask with these counts; None if it is loaded later.

    Attributes:
        indices: for the position of each variable that is trained in part, a variable with the
            flat, sorted indices of its trained entries.
        blocks: the restricted weight gradients that follow the mask, by position; set by
            `keras_freeze.restricted`.
        has_dropped_blocks: whether functions that were traced with blocks which are no longer in
            `blocks` may still run.
    """

    def __init__(
        self,
        optimizer: "FreezeOptimizer",
        parameters: Sequence[Parameter],
        trained_counts: Sequence[int | None],
        mask: FreezeMask | None,
    ) -> None:
        super().__init__(optimizer, parameters, mask)
        self.trained_counts = list(trained_counts)
        self._phase = Phase.WAITING if mask is None else Phase.DECIDED
        self.indices: dict[int, Any] = {}
        self.blocks: dict[int, Any] = {}
        self.has_dropped_blocks = False
        self._values: dict[int, Any] = {}
        # By identity: in a layer's call, Keras may substitute the values of variables.
        self._positions = {id(p.variable): p.position for p in parameters}
        chosen = {} if mask is None else {e.position: e.trained for e in mask.entries}
        self._grid = GridTraining(optimizer, parameters)
        variables = []
        for p, count in zip(parameters, self.trained_counts, strict=True):
            if count is None or count == p.size:
                variables.append(self._add_whole(p))
                continue
            indices = np.flatnonzero(chosen[p.position]) if chosen else np.zeros(count)
            self._add_vector(p, indices.astype("int32"))
            if count:
                variables.append(self._values[p.position])
        self._build_inner(variables)
        # Vectors are read from the weights in each step, so that checkpoints do not need them.
        backend.untrack_built_variables(self.inner)

    def _add_whole(self, parameter: Parameter) -> Any:
        """Return what the inner optimizer updates of a variable that is trained whole."""
        position, variable = parameter.position, parameter.variable
        if not self._grid.covers(position):
            return variable
        values = self._stand_in(parameter, backend.to_numpy(variable))
        self.grids[position] = self._grid.precise_values(position, values, lambda: None)
        return values

    def _add_vector(self, parameter: Parameter, indices: np.ndarray) -> None:
        """Create the variables for a variable that is trained in part."""
        position, path, variable = parameter.position, parameter.path, parameter.variable
        if parameter.size > _MOST_ENTRIES:
            raise ValueError(
                f"A variable may have at most {_MOST_ENTRIES} entries. "
                f"Received: {path!r} of shape {tuple(variable.shape)}"
            )
        self.indices[position] = make_variable(indices, "int32", f"trained_indices_{position}")
        # By NumPy: JAX would compile several functions for each number of entries.
        values = backend.to_numpy(variable).reshape(-1)[indices]
        self._values[position] = self._stand_in(parameter, values)
        if self._grid.covers(position):
            read = functools.partial(backend.to_numpy, self.indices[position])
            self.grids[position] = self._grid.precise_values(
                position, self._values[position], read, indices
            )

    def _stand_in(self, parameter: Parameter, values: np.ndarray) -> Any:
        """Create the variable that the inner optimizer updates instead of one of the model."""
        dtype = keras.backend.standardize_dtype(parameter.variable.dtype)
        path = parameter.path
        created = make_variable(values, dtype, path.split("/")[-1], path)
        _keras_private.exclude_from_decay_like(self.inner, parameter.variable, created)
        return created

    @property
    def variables(self) -> list[Any]:
        return [*super().variables, *self.indices.values()]

    @property
    def vectors(self) -> list[Any]:
        """The vectors that stand for the variables that are trained in part."""
        return list(self._values.values())

    @property
    def positions_in_inner(self) -> list[int]:
        """The positions of the variables that the inner optimizer was built for, in order."""
        counted = zip(self.parameters, self.trained_counts, strict=True)
        return [p.position for p, count in counted if count != 0 or p.size == 0]

    def read_vectors(self) -> None:
        """Set the vectors of trained entries to the present weights, as each step does."""
        for position, vector in self._values.items():
            if position not in self.grids:
                variable = self.parameters[position].variable
                vector.assign(backend.gather(variable, self.indices[position]))

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def mask(self) -> FreezeMask | None:
        if self._phase is Phase.WAITING:
            return None
        masked = [p for p, count in enumerate(self.trained_counts) if count is not None]
        return self._make_mask({p: self.trained(p) for p in masked}, self.num_rescued)

    @property
    def variable_masks(self) -> list[VariableMask]:
        if self._phase is Phase.WAITING:
            return []
        return [
            self._variable_mask(position, self._reader(position))
            for position, count in enumerate(self.trained_counts)
            if count is not None
        ]

    def position_of(self, variable: Any) -> int | None:
        """Return a variable's position; None if this does not update it."""
        return self._positions.get(id(variable))

    def trained(self, position: int) -> np.ndarray:
        """Return the mask of the variable at a position."""
        return self._reader(position)()

    def _reader(self, position: int) -> Callable[[], np.ndarray]:
        shape = self.parameters[position].variable.shape
        return _reader_of_indices(self.indices.get(position), shape)

    def accepts(self, mask: FreezeMask, compact: bool) -> bool:
        return compact and self.trained_counts == count_trained(mask, len(self.parameters))

    def replace_mask(self, mask: FreezeMask) -> None:
        chosen = {e.position: e.trained for e in mask.entries}
        for position, indices in self.indices.items():
            indices.assign(np.flatnonzero(chosen[position]).astype("int32"))
        for position, grid in self.grids.items():
            values, entries = backend.to_numpy(self.parameters[position].variable), None
            if position in self.indices:
                entries = np.flatnonzero(chosen[position])
                values = values.reshape(-1)[entries]
            grid.begin_at(values, self._grid.starts_of(position, entries))
        self.num_rescued = mask.num_rescued
        self._phase = Phase.DECIDED

    def grid_state(self) -> dict[int, np.ndarray]:
        return {position: grid.state(None) for position, grid in self.grids.items()}

    def restore_grid(self, state: Mapping[int, np.ndarray]) -> None:
        for position, grid in self.grids.items():
            if position in state:
                grid.restore(state[position], None)

    def drop_blocks(self) -> None:
        """Remove all `blocks`; functions that were traced with them still use them."""
        self.has_dropped_blocks = self.has_dropped_blocks or bool(self.blocks)
        self.blocks.clear()

    def update_blocks(self) -> None:
        """Set the mask in all `blocks`."""
        for position, block in self.blocks.items():
            block.assign(self.trained(position))

    def apply(self, step: Step) -> None:
        if self._phase is Phase.WAITING:
            raise ValueError(
                "This FreezeOptimizer was made from a configuration that says how many weights are "
                "trained but not which. Load the state that was saved with it, or call "
                "`keras_freeze.freeze(model, ...)` first."
            )
        self._check_complete(self.indices, step)
        gradients, variables, positions = [], [], []
        for gradient, variable, position in step:
            if position in self.indices and not self.trained_counts[position]:
                continue
            if gradient is not None and position in self.indices:
                gradient = backend.gather_gradient(gradient, variable, self.indices[position])
            gradients.append(gradient)
            variables.append(self._read(variable, position))
            positions.append(position)
        gradients = self.shared.means(gradients, variables, positions)
        gradients = list(map(self._with_l2, gradients, variables))
        factor = self._update_inner(gradients, variables)
        with_gradient = {p for p, g in zip(positions, gradients, strict=True) if g is not None}
        changed = [
            (variable, position)
            for _, variable, position in step
            if position in with_gradient
            or position in self.grids
            or (factor is not None and position in self.indices)
        ]
        zero, masked = None, [p for _, p in changed if p in self.indices]
        # A kernel of which nothing is trained is scaled by a number that follows from no gradient.
        if any(self.parameters[p].size > _LARGE or not self.trained_counts[p] for p in masked):
            zero = backend.zero_after(gradients, variables)
        for variable, position in changed:
            if position in self.indices:
                self._write_back(variable, position, zero, factor)
            elif position in self.grids:
                variable.assign(self.grids[position].points())

    def _read(self, variable: Any, position: int) -> Any:
        """Return what the inner optimizer updates of a variable, with the values of now."""
        current = variable
        if position in self.indices:
            current = backend.gather(variable, self.indices[position])
        if position in self.grids:
            self.grids[position].take_over(current)
            return self.grids[position].values
        if position not in self.indices:
            return variable
        self._values[position].assign(current)
        return self._values[position]

    def disable(self) -> None:
        # XLA ignores indices outside a variable.
        for position, indices in self.indices.items():
            outside = self.parameters[position].size
            indices.assign(np.full(tuple(indices.shape), outside, "int32"))

    def _write_back(self, variable: Any, position: int, zero: Any, factor: Any) -> None:
        indices, values = self.indices[position], self._values[position]
        if position in self.grids:
            values = self.grids[position].points()
        if zero is not None:
            indices = indices + zero
        if factor is not None:
            backend.scale_and_scatter(variable, indices, values, factor)
        if not self.trained_counts[position]:
            return
        if factor is None:
            backend.scatter(variable, indices, values)
        if getattr(variable, "constraint", None) is not None:
            allowed = variable.constraint(variable)
            backend.scatter(variable, indices, backend.gather(allowed, indices))


def count_trained(mask: FreezeMask, num_variables: int) -> list[int | None]:
    """Return how many entries of each variable a mask trains; None for one without mask."""
    counts = {entry.position: int(np.count_nonzero(entry.trained)) for entry in mask.entries}
    return [counts.get(position) for position in range(num_variables)]


def _reader_of_indices(indices: Any, shape: Sequence[int]) -> Callable[[], np.ndarray]:
    """Return a function that makes a mask of the indices of trained entries; None means all."""

    def read() -> np.ndarray:
        array = np.full(tuple(shape), indices is None)
        if indices is not None:
            array.reshape(-1)[backend.to_numpy(indices)] = True
        return array

    return read
