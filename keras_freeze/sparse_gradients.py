"""Weight gradients only where a weight is trained.

"It is more efficient to not calculate the partial derivative for the weights with mask value 0 than
masking the gradient after its computation" (the paper, after algorithm 1). A kernel's gradient is
a product of what enters its layer and what comes back from the loss, so that the entries in some
rows (input channels) and columns (output channels) cost only the product of those. `install` lets
layers of a frozen model compute just the rows and columns that hold a trained weight, where that
is cheaper, and hand on the gradient at the trained entries alone. The forward pass and the
gradient of a layer's inputs stay what they are.

The layers stay plain Keras layers: what `install` sets on an instance is no part of what Keras
saves, exports or clones, and `restore` takes it away.
"""

import collections
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_freeze import backend
from keras_freeze.optimizer import FreezeOptimizer

# What a restricted gradient costs for one example, in multiplications of the ordinary one: a
# multiplication, a number that is collected from inputs or outputs, and the rest, however small the
# product is. Measured by benchmarks/gradient_rule.py.
_COSTS = (1.0, 250.0, 60_000.0)
# By how much it must be cheaper: these are estimates.
_MARGIN = 0.9


# The axes of a kernel that are places in it, rows of the matrix at each place, and columns.
Axes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def as_matrices(kernel: np.ndarray, axes: Axes) -> np.ndarray:
    """An array of a kernel's shape as one of shape (places, rows, columns)."""
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
        ValueError: if the equation is no matrix product.
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
            raise ValueError(f"This is no matrix product. Received: equation={equation!r}")
        rows, columns = (
            tuple(self._kernel.index(letter) for letter in letters)
            for letters in (self._rows, self._columns)
        )
        self.axes: Axes = (), rows, columns

    def places(self, input_shape: Sequence[int | None]) -> tuple[int, int]:
        """How many rows the matrices of one example's inputs and outputs have."""
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
        """The kernel's gradient in some rows and columns, None meaning all, flat."""
        sizes = dict(zip(self._kernel, shape, strict=True))
        x = _as_matrix(inputs, self._inputs, self._rows, sizes)
        dy = _as_matrix(upstream, self._outputs, self._columns, sizes)
        # Whole rows of a matrix are collected faster than single numbers from each.
        x, dy = (ops.transpose(matrix) for matrix in (x, dy))
        return ops.matmul(_take(x, rows, 0), ops.transpose(_take(dy, columns, 0)))


def _as_matrix(tensor: Any, term: str, last: Sequence[str], sizes: dict[str, int]) -> Any:
    """A tensor with the axes `last`, of these sizes, as columns, and all others as rows."""
    spread = len(tensor.shape) - len(term.replace(".", ""))
    letters = [*term.replace(".", "0123456789"[:spread])]
    first = [letter for letter in letters if letter not in last]
    order = [letters.index(letter) for letter in [*first, *last]]
    if order != sorted(order):
        tensor = ops.transpose(tensor, order)
    return ops.reshape(tensor, (-1, math.prod(sizes[letter] for letter in last)))


class Convolution:
    """What Conv1D, Conv2D and Conv3D without groups compute: a matrix at each place of the kernel.

    Args:
        layer: the layer.

    Attributes:
        axes: which axes of the kernel are places, rows and columns.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        rank = layer.rank
        self._channels = rank + 1 if layer.data_format == "channels_last" else 1
        self.axes: Axes = tuple(range(rank)), (rank,), (rank + 1,)

    def apply(self, inputs: Any, kernel: Any) -> Any:
        """The convolution of inputs with a kernel, as the layer computes it."""
        if self._layer.padding == "causal":  # only Conv1D has it
            return self._apply_padded(inputs, kernel)
        return self._layer.convolution_op(inputs, kernel)

    def _apply_padded(self, inputs: Any, kernel: Any) -> Any:
        """The convolution where padding is done apart."""
        layer = self._layer
        return ops.conv(
            ops.pad(inputs, self._paddings()),
            kernel,
            list(layer.strides),
            "valid",
            layer.data_format,
            layer.dilation_rate,
        )

    def _paddings(self) -> Any:
        layer = self._layer
        if layer.padding == "causal":
            return layer._compute_causal_padding()
        # Of dilated convolutions, whose strides are 1.
        spread = [
            (size - 1) * dilation
            for size, dilation in zip(layer.kernel_size, layer.dilation_rate, strict=True)
        ]
        paddings = [[total // 2, total - total // 2] for total in spread]
        paddings.insert(self._channels - 1, [0, 0])
        return [[0, 0], *paddings]

    def places(self, input_shape: Sequence[int | None]) -> tuple[int, int]:
        """How many places the inputs and the outputs of one example have."""
        outputs = self._layer.compute_output_shape(input_shape)
        return self._num_places(input_shape), self._num_places(outputs)

    def _num_places(self, shape: Sequence[int | None]) -> int:
        sizes = [size or 1 for axis, size in enumerate(shape) if axis not in (0, self._channels)]
        return math.prod(sizes)

    def gradient(
        self, inputs: Any, upstream: Any, rows: Any, columns: Any, shape: Sequence[int]
    ) -> Any:
        """The kernel's gradient in some rows and columns, None meaning all."""
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


class Block:
    """The rows and columns of a kernel that hold its trained weights, and the gradient in them.

    Args:
        operation: what the kernel's layer computes.
        kernel: the kernel.
        trained: the kernel's mask.
        takes_rows, takes_columns: whether only some rows, or columns, are multiplied.
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
        self._num_trained = int(np.count_nonzero(trained))
        self._takes_rows = takes_rows
        self._takes_columns = takes_columns
        # Another mask may have as many trained entries in more rows.
        self.variables = [backend.vector_of_any_length(part) for part in self._parts(trained)]
        self._indices, self._rows, self._columns, self._inside = self.variables

    def assign(self, trained: np.ndarray) -> None:
        """Takes over another mask with as many trained weights."""
        for variable, part in zip(self.variables, self._parts(trained), strict=True):
            variable.assign(part)

    def gradient(self, inputs: Any, upstream: Any) -> Any:
        """The kernel's gradient at its trained entries, from inputs and the outputs' gradient."""
        if self._num_trained == 0:
            values = ops.zeros((0,), self._dtype)
            return backend.CompactGradient(values, self._indices, self._shape)
        rows = self._rows if self._takes_rows else None
        columns = self._columns if self._takes_columns else None
        product = self.operation.gradient(inputs, upstream, rows, columns, self._shape)
        values = ops.cast(backend.gather(product, self._inside), self._dtype)
        return backend.CompactGradient(values, self._indices, self._shape)

    def _parts(self, trained: np.ndarray) -> list[np.ndarray]:
        """The trained entries, their rows and columns, and where in the block they are."""
        axes = self.operation.axes
        matrices = as_matrices(trained, axes)
        rows, columns = _active(matrices)
        entries = np.nonzero(trained)
        place, row, column = (_numbers(entries, trained.shape, group) for group in axes)
        _, num_rows, num_columns = matrices.shape
        if self._takes_rows:
            row, num_rows = np.searchsorted(rows, row), len(rows)
        if self._takes_columns:
            column, num_columns = np.searchsorted(columns, column), len(columns)
        inside = (place * num_rows + row) * num_columns + column
        parts = (np.flatnonzero(trained), rows, columns, inside)
        return [part.astype("int32") for part in parts]


def _numbers(entries: Sequence[np.ndarray], shape: Sequence[int], axes: tuple[int, ...]) -> Any:
    """The numbers of entries along some axes taken together; 0 along none."""
    if not axes:
        return 0
    sizes = tuple(shape[axis] for axis in axes)
    return np.ravel_multi_index(tuple(entries[axis] for axis in axes), sizes)


def _active(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows and the columns that hold a trained weight."""
    rows, columns = matrices.any(axis=(0, 2)), matrices.any(axis=(0, 1))
    return np.flatnonzero(rows), np.flatnonzero(columns)


def cheapest_block(matrices: np.ndarray, places: tuple[int, int]) -> tuple[bool, bool] | None:
    """Whether to take only some rows, and only some columns, of a kernel; None to leave it alone.

    Args:
        matrices: a mask of shape (places, rows, columns).
        places: how many places inputs and outputs have; each brings one number for a channel.

    Returns:
        The cheapest way, by the measured costs above.
    """
    if not matrices.any():
        return True, True
    costs = {way: float(np.dot(work, _COSTS)) for way, work in works(matrices, places).items()}
    best = min(costs, key=lambda way: costs[way])
    return best if costs[best] < _MARGIN * places[1] * matrices.size else None


def works(
    matrices: np.ndarray, places: tuple[int, int]
) -> dict[tuple[bool, bool], tuple[int, int, int]]:
    """What a restricted gradient does for one example, as counted in `_COSTS`.

    Args:
        matrices, places: as of `cheapest_block`.

    Returns:
        For each choice of taking only the active rows and only the active columns: how many
        multiplications, how many numbers that are collected first, and 1.
    """
    active_rows, active_columns = (len(active) for active in _active(matrices))
    inputs, outputs = places
    num_matrices, rows, columns = matrices.shape
    return {
        (True, False): (
            outputs * num_matrices * active_rows * columns,
            inputs * active_rows,
            1,
        ),
        (False, True): (
            outputs * num_matrices * rows * active_columns,
            outputs * active_columns,
            1,
        ),
        (True, True): (
            outputs * num_matrices * active_rows * active_columns,
            inputs * active_rows + outputs * active_columns,
            1,
        ),
    }


def install(
    model: keras.Model,
    optimizer: FreezeOptimizer,
    find_optimizer: Callable[[keras.Model], FreezeOptimizer | None],
) -> list[str]:
    """Lets the layers of a frozen model compute weight gradients only where they are needed.

    They do so while the model itself is trained with this optimizer, and in no other pass. Left
    alone are layers with a regulariser on the kernel, with LoRA or quantization, of other classes
    than Dense, EinsumDense, Conv1D, Conv2D and Conv3D, and those where it would not be faster.

    Args:
        model: a built model.
        optimizer: its FreezeOptimizer. Without a mask, or where it updates in full shape, nothing
            is done.
        find_optimizer: gives the FreezeOptimizer that trains a model at present.

    Returns:
        The names of the layers that do so.
    """
    restore(model, optimizer)
    update, restricted = optimizer.compact_update, []
    if update is None or not backend.RESTRICTS_GRADIENTS:
        return []
    with backend.strategy_scope(optimizer):
        for layer, operation in _operations(model):
            position = update.position_of(layer._kernel)
            if position is None or position not in update.indices:
                continue
            trained = update.trained(position)
            matrices = as_matrices(trained, operation.axes)
            way = cheapest_block(matrices, operation.places(_input_shape(layer)))
            if way is not None:
                block = Block(operation, layer._kernel, trained, *way)
                update.blocks[position] = block
                call = _restricted_call(layer, operation, weakref.ref(model), find_optimizer)
                vars(layer)["call"] = call
                restricted.append(layer.name)
    return restricted


def restore(model: keras.Model, optimizer: FreezeOptimizer | None = None) -> None:
    """Undoes `install`, which `optimizer` was given."""
    for layer in model._flatten_layers():
        if is_restricted(layer):
            del vars(layer)["call"]
    if optimizer is not None and optimizer.compact_update is not None:
        # Someone may have wrapped a layer's `call` since: without its block it is as before.
        optimizer.compact_update.drop_blocks()


def is_restricted(layer: Any) -> bool:
    """Whether `install` has changed a layer."""
    call = vars(layer).get("call")
    return call is not None and getattr(call, _MARK, None) is call


_MARK = "restricts_weight_gradient"


def _operations(model: keras.Model) -> list[tuple[Any, Any]]:
    """The layers whose gradient can be restricted, and what they compute."""
    found = [(layer, _operation_of(layer)) for layer in model._flatten_layers()]
    found = [(layer, operation) for layer, operation in found if operation is not None]
    # Two layers with one kernel may compute different things with it.
    uses = collections.Counter(id(layer._kernel) for layer, _ in found)
    return [pair for pair in found if uses[id(pair[0]._kernel)] == 1]


def _operation_of(layer: Any) -> Any:
    """What a layer computes, if its gradient can be restricted, else None."""
    kind = type(layer)  # not a subclass, which may compute anything
    if kind not in _CLASSES or not layer.built or "call" in vars(layer):
        return None
    if layer.kernel_regularizer is not None or not _is_plain(layer):
        return None
    if _input_shape(layer) is None:
        return None
    if kind is keras.layers.Dense:
        return MatrixProduct("...x,xy->...y", ops.matmul)
    if kind is keras.layers.EinsumDense:
        try:
            return MatrixProduct(layer.equation, functools.partial(ops.einsum, layer.equation))
        except ValueError:
            return None
    return Convolution(layer) if layer.groups == 1 else None


_CLASSES = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
)


def _is_plain(layer: Any) -> bool:
    return not layer.lora_enabled and layer.quantization_mode is None


def _input_shape(layer: Any) -> tuple[int | None, ...] | None:
    """None of a layer that was not built by Keras."""
    return (layer.get_build_config() or {}).get("input_shape")


def _restricted_call(
    layer: Any,
    operation: Any,
    model: Callable[[], keras.Model | None],
    find_optimizer: Callable[[keras.Model], FreezeOptimizer | None],
) -> Callable[..., Any]:
    """A layer's `call` that restricts the gradient while its model is trained."""
    ordinary = layer.call

    @functools.wraps(ordinary)
    def call(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = find_optimizer(model()) if _is_trained(layer, model()) else None
        block = None if optimizer is None else _block_of(layer._kernel, optimizer)
        if (
            block is None
            or block.operation is not operation  # but another layer's with the same kernel
            or not _is_tensor(inputs, layer.compute_dtype)
        ):
            return ordinary(inputs, *args, **kwargs)
        outputs = backend.with_gradient(operation.apply, inputs, layer._kernel, block.gradient)
        if layer.bias is not None:
            outputs = ops.add(outputs, _broadcast_bias(layer))
        return outputs if layer.activation is None else layer.activation(outputs)

    setattr(call, _MARK, call)
    return call


def _is_trained(layer: Any, model: keras.Model | None) -> bool:
    """Whether a layer is being called to train this model, and nothing else."""
    context = keras.src.backend.common.global_state.get_global_attribute("current_call_ctx")
    return (
        context is not None
        and context.entry_layer is model
        and context.get_value("training", False) is True
        and not backend.wants_all_gradients()
        and _is_plain(layer)
    )


def _block_of(kernel: Any, optimizer: FreezeOptimizer) -> Block | None:
    update = optimizer.compact_update
    position = None if update is None else update.position_of(kernel)
    return None if update is None or position is None else update.blocks.get(position)


def _is_tensor(inputs: Any, dtype: str) -> bool:
    return backend.is_dense(inputs) and keras.backend.standardize_dtype(inputs.dtype) == dtype


def _broadcast_bias(layer: Any) -> Any:
    if getattr(layer, "data_format", "channels_last") == "channels_last":
        return layer.bias
    return ops.reshape(layer.bias, (1, -1) + (1,) * layer.rank)
