"""The rows and columns of a kernel that hold its trained weights, and the gradient in them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_freeze import backend


class Block:
    """The rows and columns of a kernel that hold its trained weights, and the gradient in them.

    `operation` is what the kernel's layer computes; `takes_rows` and `takes_columns` tell whether
    only some rows, or columns, are multiplied. `indices` holds the flat indices of the trained
    weights.
    """

    def __init__(
        self,
        operation: Any,
        kernel: Any,
        trained: np.ndarray,
        takes_rows: bool,
        takes_columns: bool,
    ) -> None:
        self.operation = operation
        self._dtype = kernel.dtype
        self._shape = trained.shape
        self.num_trained = int(np.count_nonzero(trained))
        self._takes_rows = takes_rows
        self._takes_columns = takes_columns
        # Another mask may have as many trained entries in more rows.
        self.variables = [backend.vector_of_any_length(part) for part in self._parts(trained)]
        self.indices, self._rows, self._columns, self._inside = self.variables

    def assign(self, trained: np.ndarray) -> None:
        """Set another mask with as many trained weights."""
        for variable, part in zip(self.variables, self._parts(trained), strict=True):
            variable.assign(part)

    def gradient(self, inputs: Any, upstream: Any) -> Any:
        """Compute the kernel's gradient at its trained entries."""
        if self.num_trained == 0:
            values = ops.zeros((0,), self._dtype)
            return backend.compact_gradient(values, self.indices, self._shape)
        rows = self._rows if self._takes_rows else None
        columns = self._columns if self._takes_columns else None
        product = self.operation.gradient(inputs, upstream, rows, columns, self._shape)
        values = ops.cast(backend.gather(product, self._inside), self._dtype)
        return backend.compact_gradient(values, self.indices, self._shape)

    def _parts(self, trained: np.ndarray) -> list[np.ndarray]:
        """Return the trained entries, their rows and columns, and where in the block they are."""
        indices = np.flatnonzero(trained)
        entries = np.unravel_index(indices, trained.shape)
        numbers = [_numbers(entries, trained.shape, group) for group in self.operation.axes]
        (place, row, column), (_, num_rows, num_columns) = zip(*numbers, strict=True)
        rows, columns = _active(row, num_rows), _active(column, num_columns)
        if self._takes_rows:
            row, num_rows = np.searchsorted(rows, row), len(rows)
        if self._takes_columns:
            column, num_columns = np.searchsorted(columns, column), len(columns)
        inside = (place * num_rows + row) * num_columns + column
        return [part.astype("int32") for part in (indices, rows, columns, inside)]


def _numbers(
    entries: Sequence[np.ndarray], shape: Sequence[int], axes: tuple[int, ...]
) -> tuple[np.ndarray, int]:
    """Return the indices of entries along some axes taken together, and how many there may be."""
    if not axes:
        return np.zeros(entries[0].shape, np.intp), 1
    sizes = tuple(shape[axis] for axis in axes)
    return np.ravel_multi_index(tuple(entries[axis] for axis in axes), sizes), math.prod(sizes)


def _active(numbers: np.ndarray, length: int) -> np.ndarray:
    """Return which numbers below a length there are, each once, in order."""
    is_active = np.zeros(length, bool)
    is_active[numbers] = True
    return np.flatnonzero(is_active)
