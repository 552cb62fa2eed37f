"""What layers compute, as products of matrices whose gradient can be restricted to a block."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_freeze import backend

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

    Raises:
        ValueError: if the equation is not a matrix product.
    """

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
        ):
            raise ValueError(f"This is not a matrix product. Received: equation={equation!r}")
        rows, columns = (
            tuple(self._kernel.index(letter) for letter in letters)
            for letters in (self._rows, self._columns)
        )
        self.axes: Axes = (), rows, columns

    def places(self, input_shape: Sequence[int | None]) -> tuple[int, int]:
        """Return how many rows the matrices of one example's inputs and outputs have."""
        spread = len(input_shape) - len(self._inputs.replace(".", ""))
        letters = self._inputs.replace(".", "." * spread)
        sizes = [
            size or 1
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
        return ops.matmul(_take(x, rows, 0), ops.transpose(_take(dy, columns, 0)))


def _as_matrix(tensor: Any, term: str, last: Sequence[str], sizes: dict[str, int]) -> Any:
    """Reshape a tensor to the axes `last`, of these sizes, as columns, and all others as rows."""
    spread = len(tensor.shape) - len(term.replace(".", ""))
    letters = [*term.replace(".", "0123456789"[:spread])]
    first = [letter for letter in letters if letter not in last]
    order = [letters.index(letter) for letter in [*first, *last]]
    if order != sorted(order):
        tensor = ops.transpose(tensor, order)
    return ops.reshape(tensor, (-1, math.prod(sizes[letter] for letter in last)))


class Convolution:
    """What Conv1D, Conv2D and Conv3D without groups compute: a matrix at each place of the kernel.

    Attributes:
        axes: which axes of the kernel are places, rows and columns.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        rank = layer.rank
        self._channels = rank + 1 if layer.data_format == "channels_last" else 1
        self.axes: Axes = tuple(range(rank)), (rank,), (rank + 1,)

    def apply(self, inputs: Any, kernel: Any) -> Any:
        """Compute the convolution of inputs with a kernel, as the layer does."""
        if self._layer.padding == "causal":  # only Conv1D has it
            return self._apply_padded(inputs, kernel)
        return self._layer.convolution_op(inputs, kernel)

    def _apply_padded(self, inputs: Any, kernel: Any) -> Any:
        """Compute the convolution with a separate padding."""
        layer = self._layer
        padded = ops.pad(inputs, self._paddings())
        strides = list(layer.strides)
        return ops.conv(padded, kernel, strides, "valid", layer.data_format, layer.dilation_rate)

    def _paddings(self) -> list[list[int]]:
        """Return the paddings of a causal convolution, or of a dilated one, whose strides are 1."""
        layer = self._layer
        is_causal = layer.padding == "causal"
        spread = [
            (size - 1) * dilation
            for size, dilation in zip(layer.kernel_size, layer.dilation_rate, strict=True)
        ]
        paddings = [[s, 0] if is_causal else [s // 2, s - s // 2] for s in spread]
        paddings.insert(self._channels - 1, [0, 0])
        return [[0, 0], *paddings]

    def places(self, input_shape: Sequence[int | None]) -> tuple[int, int]:
        """Return how many places the inputs and the outputs of one example have."""
        outputs = self._layer.compute_output_shape(input_shape)
        return self._num_places(input_shape), self._num_places(outputs)

    def _num_places(self, shape: Sequence[int | None]) -> int:
        sizes = [size or 1 for axis, size in enumerate(shape) if axis not in (0, self._channels)]
        return math.prod(sizes)

    def gradient(
        self, inputs: Any, upstream: Any, rows: Any, columns: Any, shape: Sequence[int]
    ) -> Any:
        """Compute the kernel's gradient in some rows and columns (None: all)."""
        x = _take(inputs, rows, self._channels)
        dy = _take(upstream, columns, self._channels)
        channels = [ops.shape(tensor)[self._channels] for tensor in (x, dy)]
        # TensorFlow cannot pad for a dilated kernel of which it does not know the channels.
        is_dilated = self._layer.padding == "same" and max(self._layer.dilation_rate) > 1
        apply = self._apply_padded if is_dilated else self.apply
        kernel_shape = [*shape[:-2], *channels]
        return backend.gradient_at_zero(functools.partial(apply, x), kernel_shape, dy)


def _take(tensor: Any, indices: Any, axis: int) -> Any:
    return tensor if indices is None else backend.take(tensor, indices, axis)
