"""Gradients of trained entries alone, for PyTorch: sparse tensors of the kernel's shape."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch

from keras_freeze import _keras_private

_passes = threading.local()


@contextlib.contextmanager
def all_gradients() -> Iterator[None]:
    """Let layers compute every gradient, whatever is trained."""
    before = getattr(_passes, "want_all", False)
    _passes.want_all = True
    try:
        yield
    finally:
        _passes.want_all = before


def is_training(model: keras.Model) -> bool:
    """Return whether the pass in progress trains a model, and nothing else."""
    return (
        torch.is_grad_enabled()
        and not getattr(_passes, "want_all", False)
        and not torch.compiler.is_compiling()
        # `DistributedDataParallel` sums dense gradients.
        and not (torch.distributed.is_available() and torch.distributed.is_initialized())
        and _keras_private.is_training_call_of(model)
    )


def compact_gradient(values: Any, indices: Any, kernel_shape: tuple[int, ...]) -> Any:
    """Return the gradient of a kernel at its trained entries alone: a sparse tensor."""
    coordinates = indices.coordinates(kernel_shape)
    return torch.sparse_coo_tensor(coordinates, values, kernel_shape, is_coalesced=True)


class Indices:
    """A vector of indices to which one of another length can be assigned."""

    def __init__(self, value: np.ndarray) -> None:
        self.assign(value)

    def assign(self, value: np.ndarray) -> None:
        """Set other indices."""
        self._indices = value
        self._coordinates = None
        self.value = keras.ops.convert_to_tensor(value)

    def coordinates(self, shape: tuple[int, ...]) -> Any:
        """Return what sparse tensors of this shape have of flat indices."""
        if self._coordinates is None:
            parts = np.stack(np.unravel_index(self._indices, shape))
            self._coordinates = torch.as_tensor(parts, device=self.value.device)
        return self._coordinates


def vector_of_any_length(value: np.ndarray) -> Indices:
    """Return an object to which vectors of other lengths can be assigned."""
    return Indices(value)


def entries_of_sparse(gradient: Any, indices: Any) -> Any:
    """Return the entries of a sparse gradient at flat, sorted `indices`, of which it has no others.

    None if it has others, such as the sparse gradient of an Embedding.
    """
    if gradient.sparse_dim() < gradient.dim():
        return None
    gradient = gradient.coalesce()  # a kernel that was used several times
    coordinates, values = gradient.indices(), gradient.values()
    if values.shape != indices.shape:
        return None
    # Once compared, they need not be read from the device again.
    known, version = getattr(indices, _COORDINATES, (None, None))
    if known is not None and version == indices._version:
        if known.data_ptr() == coordinates.data_ptr():
            return values
    place = coordinates[0]
    for axis, size in enumerate(gradient.shape[1:], 1):
        place = place * size + coordinates[axis]
    if not torch.equal(place, indices.long()):
        return None
    setattr(indices, _COORDINATES, (coordinates, indices._version))
    return values


_COORDINATES = "coordinates_of_trained_entries"


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
    def backward(ctx: Any, *upstream: Any) -> Any:
        (upstream,) = upstream
        inputs, kernel = ctx.saved_tensors
        if torch.is_grad_enabled():  # this gradient is differentiated, too
            wanted = [t for t, need in zip((inputs, kernel), ctx.needs_input_grad) if need]
            outputs = ctx.function(inputs, kernel)
            found = torch.autograd.grad(outputs, wanted, upstream, create_graph=True)
            to_inputs, to_kernel = found if len(found) == 2 else (None, *found)
            return to_inputs, to_kernel, None, None
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


def take(tensor: Any, indices: Any, axis: int) -> Any:
    """Return the slices of a tensor at `indices` along an axis."""
    return tensor.index_select(axis, indices.value)


def is_dense(value: Any) -> bool:
    """Return whether a value is an ordinary tensor."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided
