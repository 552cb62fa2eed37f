"""Gradients of trained entries alone, for PyTorch."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import torch

from keras_freeze import _keras_private
from keras_freeze.backend._passes import wants_all_gradients

PRODUCT_COSTS = (0.8, 230.0, 70_000.0)
CONVOLUTION_COSTS = (0.8, 400.0, 60_000.0)


def is_training(model: keras.Model) -> bool:
    """Return whether the pass in progress trains a model, and nothing else."""
    return (
        torch.is_grad_enabled()
        and not wants_all_gradients()
        and not torch.compiler.is_compiling()
        # `DistributedDataParallel` sums dense gradients.
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
        and _keras_private.is_training_call_of(model)
    )


class Indices:
    """A vector of indices to which one of another length can be assigned."""

    def __init__(self, value: np.ndarray) -> None:
        self.assign(value)

    def assign(self, value: np.ndarray) -> None:
        """Set other indices."""
        self.value = keras.ops.convert_to_tensor(value)
        self._equal: tuple[Any, int] = None, 0

    def are(self, indices: Any) -> bool:
        """Return whether they are equal to the tensor `indices`, which is compared only once."""
        tensor, num_changes = self._equal
        if tensor is indices and num_changes == _keras_private.num_changes(indices):
            return True
        is_equal = torch.equal(self.value, indices)
        if is_equal:
            self._equal = indices, _keras_private.num_changes(indices)
        return is_equal


def vector_of_any_length(value: np.ndarray) -> Indices:
    """Return an object to which vectors of other lengths can be assigned."""
    return Indices(value)


class _Entries:
    """What a `CompactGradient` and its aliases share: entries, or all of a tensor once needed."""

    def __init__(self, values: Any, indices: Indices) -> None:
        self.values = values
        self.indices = indices
        self.dense: Any = None


class CompactGradient(torch.Tensor):
    """The gradient of a kernel at its trained entries alone.

    A FreezeOptimizer takes the entries. For all others it is a tensor of the kernel's shape that is
    zero elsewhere, and becomes one where it has to: what only scales it, adds up two of them or
    takes its norm does not need that.
    """

    entries: _Entries

    @staticmethod
    def __new__(cls, entries: _Entries, shape: Sequence[int]) -> "CompactGradient":
        """Make a tensor of the kernel's shape, without memory for its values."""
        gradient: CompactGradient
        gradient = _keras_private.tensor_without_memory(cls, shape, entries.values)
        gradient.entries = entries
        return gradient

    def __init__(self, entries: _Entries, shape: Sequence[int]) -> None:
        pass

    def to_dense(self, *args: Any, **kwargs: Any) -> Any:
        """Return an ordinary tensor, which this one is from then on."""
        entries = self.entries
        if entries.dense is None:
            flat = torch.zeros(self.shape.numel(), dtype=self.dtype, device=self.device)
            flat[entries.indices.value.long()] = entries.values
            entries.dense = flat.reshape(self.shape)
        return entries.dense

    def numpy(self, *args: Any, **kwargs: Any) -> np.ndarray:
        """Return the values of the whole tensor."""
        values: np.ndarray = self.to_dense().numpy(*args, **kwargs)
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype)

    def tolist(self) -> Any:
        """Return the values of the whole tensor."""
        return self.to_dense().tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CompactGradient(values={self.entries.values}, shape={tuple(self.shape)})"

    __torch_function__ = staticmethod(_keras_private.call_as_plain_tensors)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation of PyTorch, on the entries alone where that is enough."""
        compact = _ON_ENTRIES.get(function)
        if compact is not None and not kwargs:
            result = compact(*args)
            if result is not None:
                return result
        args, kwargs = keras.tree.map_structure(_whole, (args, kwargs or {}))
        return function(*args, **kwargs)


def _whole(value: Any) -> Any:
    return value.to_dense() if isinstance(value, CompactGradient) else value


def _alike(values: Any, like: CompactGradient) -> CompactGradient:
    return CompactGradient(_Entries(values, like.entries.indices), like.shape)


def _is_compact(value: Any) -> bool:
    return isinstance(value, CompactGradient) and value.entries.dense is None


def _detach(gradient: CompactGradient) -> CompactGradient:
    return CompactGradient(gradient.entries, gradient.shape)


def _clone(gradient: CompactGradient) -> Any:
    return _alike(gradient.entries.values.clone(), gradient) if _is_compact(gradient) else None


def _norm(gradient: CompactGradient, order: Any = 2, *rest: Any) -> Any:
    if rest or order <= 0 or not _is_compact(gradient):
        return None
    return torch.linalg.vector_norm(gradient.entries.values, order)


def _add(first: Any, second: Any) -> Any:
    if not (_is_compact(first) and _is_compact(second)):
        return None
    if first.entries.indices is not second.entries.indices:
        return None
    return _alike(first.entries.values + second.entries.values, first)


def _scaled(function: Any) -> Any:
    def compute(gradient: Any, factor: Any) -> Any:
        if function is torch.mul and not _is_compact(gradient):
            gradient, factor = factor, gradient
        if not _is_compact(gradient) or np.ndim(factor):
            return None
        return _alike(function(gradient.entries.values, factor), gradient)

    return compute


def _scaled_in_place(function: Any) -> Any:
    def compute(gradient: Any, factor: Any) -> Any:
        if not _is_compact(gradient) or np.ndim(factor):
            return None
        gradient.entries.values = function(gradient.entries.values, factor)
        return gradient

    return compute


_ATEN = torch.ops.aten
_ON_ENTRIES = {
    _ATEN.detach.default: _detach,
    _ATEN.clone.default: _clone,
    _ATEN.linalg_vector_norm.default: _norm,
    _ATEN.add.Tensor: _add,
    _ATEN.mul.Tensor: _scaled(torch.mul),
    _ATEN.mul.Scalar: _scaled(torch.mul),
    _ATEN.div.Tensor: _scaled(torch.div),
    _ATEN.div.Scalar: _scaled(torch.div),
    _ATEN.mul_.Tensor: _scaled_in_place(torch.mul),
    _ATEN.mul_.Scalar: _scaled_in_place(torch.mul),
    _ATEN.div_.Tensor: _scaled_in_place(torch.div),
    _ATEN.div_.Scalar: _scaled_in_place(torch.div),
}


def compact_gradient(values: Any, indices: Any, kernel_shape: tuple[int, ...]) -> Any:
    """Return the gradient of a kernel at its trained entries alone."""
    return CompactGradient(_Entries(values, indices), kernel_shape)


def entries_of(gradient: Any, indices: Any) -> Any:
    """Return the entries of a gradient that has those at flat, sorted `indices` alone, or None."""
    if not _is_compact(gradient) or not gradient.entries.indices.are(indices):
        return None
    return gradient.entries.values


class _Restricted(torch.autograd.Function):
    """A function that is linear in its inputs, with a gradient of the kernel that is given."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, kernel: Any, function: Any, kernel_gradient: Any) -> Any:
        ctx.function, ctx.kernel_gradient = function, kernel_gradient
        ctx.save_for_backward(inputs, kernel)
        # The graph of the inputs' gradient alone.
        with torch.enable_grad():
            ctx.x = inputs.detach().requires_grad_(ctx.needs_input_grad[0])
            ctx.outputs = function(ctx.x, kernel.detach())
        return ctx.outputs.detach()

    @staticmethod
    def backward(ctx: Any, *of_outputs: Any) -> Any:
        (upstream,) = of_outputs
        inputs, kernel = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient is differentiated, too
            needed = [i for i in (0, 1) if ctx.needs_input_grad[i]]
            tensors = [ctx.saved_tensors[i] for i in needed]
            outputs = ctx.function(inputs, kernel)
            found = torch.autograd.grad(outputs, tensors, upstream, create_graph=True)
            gradients = dict(zip(needed, found, strict=True))
            return gradients.get(0), gradients.get(1), None, None
        to_inputs = None
        if ctx.needs_input_grad[0]:
            (to_inputs,) = torch.autograd.grad(ctx.outputs, ctx.x, upstream, retain_graph=True)
        return to_inputs, ctx.kernel_gradient(inputs.to(upstream.dtype), upstream), None, None


def with_gradient(
    function: Callable[[Any, Any], Any],
    inputs: Any,
    kernel: Any,
    kernel_gradient: Callable[[Any, Any], Any],
) -> Any:
    """Compute `function(inputs, kernel)` with a custom gradient for the kernel.

    Args:
        function: is linear in `inputs`, and takes a kernel of their dtype.
        inputs: a tensor.
        kernel: a Keras variable.
        kernel_gradient: given `inputs` and the gradient of the result, the kernel's gradient.

    Returns:
        The result; `inputs` get their ordinary gradient.
    """
    with _keras_private.no_autocast():
        value = kernel.value

    def cast(inputs: Any, kernel: Any) -> Any:
        return function(inputs, kernel.to(inputs.dtype))

    if not value.requires_grad or _keras_private.is_transformed_by_torch(inputs):
        return cast(inputs, value)
    return _Restricted.apply(inputs, value, cast, kernel_gradient)


def gradient_at_zero(function: Callable[[Any], Any], shape: Sequence[Any], upstream: Any) -> Any:
    """Return the gradient of a linear function of a tensor of this shape."""
    with torch.enable_grad():
        zeros = torch.zeros(
            tuple(shape), dtype=upstream.dtype, device=upstream.device, requires_grad=True
        )
        (gradient,) = torch.autograd.grad(function(zeros), zeros, upstream)
    return gradient


def convolution_gradient(convolution: Any, inputs: Any, shape: Sequence[Any], upstream: Any) -> Any:
    """Return the gradient of a convolution's kernel of this shape, without convolving.

    Args:
        convolution: an object with `channels`, `strides`, `dilation_rate` and `paddings`.
    """
    x, dy = (tensor.movedim(convolution.channels, 1) for tensor in (inputs, upstream))
    paddings = convolution.paddings(x.shape[2:])
    if any(before != after for before, after in paddings):
        x = torch.nn.functional.pad(x, [n for pair in reversed(paddings) for n in pair])
        paddings = [(0, 0)] * len(paddings)
    # Only its shape counts, and where its channels lie.
    *sizes, num_inputs, num_outputs = shape
    kernel = x.new_empty((num_outputs, *sizes, num_inputs)).movedim(-1, 1)
    zeros = [0] * len(sizes)
    _, gradient, _ = _ATEN.convolution_backward(
        *(dy, x, kernel, None, convolution.strides, [before for before, _ in paddings]),
        *(convolution.dilation_rate, False, zeros, 1, [False, True, False]),
    )
    return gradient.movedim((1, 0), (-2, -1))


def take(tensor: Any, indices: Any, axis: int) -> Any:
    """Return the slices of a tensor at `indices` along an axis."""
    return tensor.index_select(axis, indices.value)


def is_dense(value: Any) -> bool:
    """Return whether a value is an ordinary tensor."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided
