"""What layers compute, as products of matrices whose gradient can be restricted to a block."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_freeze import backend
from keras_freeze.restricted.cost_model import WAYS

# What an unknown size of a matrix product's inputs counts as; it is a length, not a batch.
_UNKNOWN_SIZE = 32

# The axes of a kernel that are places in it, rows of the matrix at each place, and columns.
Axes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def as_matrices(kernel: np.ndarray, axes: Axes) -> np.ndarray:
    """Reshape an array of a kernel's shape to (places, rows, columns)."""
    sizes = [math.prod(kernel.shape[axis] for axis in group) for group in axes]
    return kernel.transpose(sum(axes, ())).reshape(sizes)


class MatrixProduct:
    """What Dense computes, and EinsumDense where its equation is a matrix product.

    Args:
        equation: of inputs and kernel, as of EinsumDense.
        apply: computes it from inputs and kernel as the layer does.

    Attributes:
        axes: which axes of the kernel are places, rows and columns.
        ways: whether some rows, and some columns, can be taken alone: all that is possible.
        costs: as of `cheapest_block`.

    Raises:
        ValueError: if the equation is not a matrix product.
    """

    ways: tuple[tuple[bool, bool], ...] = WAYS
    costs = backend.PRODUCT_COSTS

    def __init__(self, equation: str, apply: Callable[[Any, Any], Any]) -> None:
        self.apply = apply
        # One letter for an ellipsis does until the rank is known.
        both, self._outputs = equation.replace(" ", "").replace("...", ".").split("->")
        self._inputs, self._kernel = both.split(",")
        self._rows = [letter for letter in self._kernel if letter in self._inputs]
        self._columns = [letter for letter in self._kernel if letter not in self._rows]
        terms = (self._inputs, self._kernel, self._outputs)
        kept = [letter for letter in self._inputs if letter not in self._rows]
        if (
            any(len(set(term)) < len(term) for term in terms)
            or [letter for letter in self._outputs if letter not in self._columns] != kept
            or not set(self._columns) <= set(self._outputs)
            # Devices have the examples of the first axis of both.
            or (backend.reduces_gradients() and self._inputs[0] != self._outputs[0])
        ):
            raise ValueError(f"This is not a matrix product. Received: equation={equation!r}")
        rows, columns = (
            tuple(self._kernel.index(letter) for letter in letters)
            for letters in (self._rows, self._columns)
        )
        self.axes: Axes = (), rows, columns

    def matrices(self, trained: np.ndarray) -> np.ndarray:
        """Return a mask of the kernel in the shape of the matrix that is multiplied."""
        return as_matrices(trained, self.axes)

    def places(self, input_shape: Sequence[int | None]) -> tuple[int, int]:
        """Return how many rows the matrices of one example's inputs and outputs have."""
        spread = len(input_shape) - len(self._inputs.replace(".", ""))
        letters = self._inputs.replace(".", "." * spread)
        sizes = [
            size or _UNKNOWN_SIZE
            for letter, size in zip(letters, input_shape, strict=True)
            if letter not in self._rows
        ]
        return math.prod(sizes[1:]), math.prod(sizes[1:])

    def gradient(
        self, inputs: Any, upstream: Any, rows: Any, columns: Any, shape: Sequence[int]
    ) -> Any:
        """Compute the kernel's gradient in some rows and columns (None: all), flat."""
        sizes = dict(zip(self._kernel, shape, strict=True))
        x = _as_matrix(inputs, self._inputs, self._rows, sizes)
        dy = _as_matrix(upstream, self._outputs, self._columns, sizes)
        # Whole rows of a matrix are collected faster than single numbers from each.
        x, dy = (ops.transpose(matrix) for matrix in (x, dy))
        return ops.matmul(take(x, rows, 0), ops.transpose(take(dy, columns, 0)))


def _as_matrix(tensor: Any, term: str, last: Sequence[str], sizes: dict[str, int]) -> Any:
    """Reshape a tensor to the axes `last`, of these sizes, as columns, and all others as rows."""
    spread = len(tensor.shape) - len(term.replace(".", ""))
    letters = [*term.replace(".", "0123456789"[:spread])]
    first = [letter for letter in letters if letter not in last]
    order = [letters.index(letter) for letter in [*first, *last]]
    if order != sorted(order):
        tensor = ops.transpose(tensor, order)
    return ops.reshape(tensor, (-1, math.prod(sizes[letter] for letter in last)))


def take(tensor: Any, indices: Any, axis: int) -> Any:
    """Return some slices of a tensor along an axis (None: all)."""
    return tensor if indices is None else backend.take(tensor, indices, axis)
