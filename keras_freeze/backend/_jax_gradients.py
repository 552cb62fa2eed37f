"""Gradients of trained entries alone, for JAX.

JAX's gradient of an array has the array's shape. A kernel that is trained in part is therefore
handed to a function that is differentiated together with a vector, which stands for its trained
entries (`PartlyTrained`). Layers that restrict their gradient give that of the trained entries to
the vector and none to the kernel; whatever else the kernel is used for gives the kernel its
ordinary gradient. Where there is none, XLA computes nothing for the zeros.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_freeze import _keras_private
from keras_freeze._utils.overrides import override
from keras_freeze.backend._jax_processes import summed_over_devices

# Whether functions that are traced keep a mask as a constant.
TRACES_MASKS = True

# XLA multiplies all input channels with all output channels, on a CPU.
DEPTHWISE_GRADIENTS_ARE_DENSE = True

PRODUCT_COSTS = (1.0, 130.0, 25_000.0)
CONVOLUTION_COSTS = (1.0, 100.0, 60_000.0)

_differentiated = threading.local()


@jax.tree_util.register_pytree_node_class
class PartlyTrained:
    """A kernel and a vector that stands for its trained entries; or the gradients of the two."""

    def __init__(self, kernel: Any, vector: Any) -> None:
        self.kernel = kernel
        self.vector = vector

    def tree_flatten(self) -> tuple[tuple[Any, Any], None]:
        """Return the two arrays, as JAX asks."""
        return (self.kernel, self.vector), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> "PartlyTrained":
        """Return the object that was flattened."""
        return cls(*children)


def value_and_grad(
    function: Callable[..., Any],
    kernels: Callable[[], Mapping[int, tuple[Any, Any]]],
    has_aux: bool,
) -> Callable[..., Any]:
    """Return what `jax.value_and_grad(function)` does, with some gradients as `PartlyTrained`.

    Args:
        function: of the values of the trainable variables and anything else.
        kernels: returns the variables that are trained in part, by position among those, and the
            flat indices of their trained entries.
        has_aux: as of JAX.
    """

    def compute(values: Any, *args: Any, **kwargs: Any) -> Any:
        with _differentiated_with(values, kernels()):
            return function(whole(values), *args, **kwargs)

    differentiate = jax.value_and_grad(compute, has_aux=has_aux)

    def call(values: Any, *args: Any, **kwargs: Any) -> Any:
        return differentiate(_with_vectors(values, kernels()), *args, **kwargs)

    return call


def restrict_train_step(
    model: keras.Model,
    kernels: Callable[[], Mapping[int, tuple[Any, Any]]],
) -> None:
    """Let a model differentiate as `value_and_grad` does, where its training step is Keras's own.

    Args:
        model: the model.
        kernels: as of `value_and_grad`.
    """
    kind, names = type(model), ("train_step", "compute_loss_and_updates")
    if any(getattr(kind, n) is not getattr(keras.Model, n) or n in vars(model) for n in names):
        return
    reference = weakref.ref(model)
    outer = getattr(model, "optimizer", None)
    takes_arrays = isinstance(outer, keras.optimizers.LossScaleOptimizer)

    def train_step(state: Any, data: Any) -> Any:
        values, *rest = state
        if not takes_arrays:
            state = (_with_vectors(values, kernels()), *rest)
        return kind.train_step(reference(), state, data)

    def compute_loss_and_updates(values: Any, *args: Any, **kwargs: Any) -> Any:
        if takes_arrays and kwargs.get("training"):
            values = _with_own_vectors(values, kernels())
        with _differentiated_with(values, kernels()):
            return kind.compute_loss_and_updates(reference(), whole(values), *args, **kwargs)

    override(model, "train_step", train_step)
    override(model, "compute_loss_and_updates", compute_loss_and_updates)


def _with_vectors(values: Sequence[Any], kernels: Mapping[int, tuple[Any, Any]]) -> list[Any]:
    values = list(values)
    for position, (_, indices) in kernels.items():
        kernel = values[position]
        values[position] = PartlyTrained(kernel, jnp.zeros(indices.value.shape, kernel.dtype))
    return values


def _with_own_vectors(values: Sequence[Any], kernels: Mapping[int, tuple[Any, Any]]) -> list[Any]:
    """Return kernels with vectors that pass their gradients on to the kernels, which are dense."""
    values = list(values)
    for position, (_, indices) in kernels.items():
        entries = jnp.reshape(values[position], -1)[indices.value]
        vector = entries - jax.lax.stop_gradient(entries)
        values[position] = PartlyTrained(values[position], vector)
    return values


def whole(values: Any) -> Any:
    """Return the values of variables, where some are `PartlyTrained`."""
    return [value.kernel if isinstance(value, PartlyTrained) else value for value in values]


@contextlib.contextmanager
def _differentiated_with(
    values: Sequence[Any], kernels: Mapping[int, tuple[Any, Any]]
) -> Iterator[None]:
    """Let layers give the gradients of trained entries to the vectors among `values`."""
    before = _vectors()
    _differentiated.vectors = {
        id(kernel): values[position].vector
        for position, (kernel, _) in kernels.items()
        if isinstance(values[position], PartlyTrained)
    }
    try:
        yield
    finally:
        _differentiated.vectors = before


def _vectors() -> dict[int, Any]:
    vectors: dict[int, Any] = getattr(_differentiated, "vectors", {})
    return vectors


def is_training(model: keras.Model) -> bool:
    """Return whether the pass in progress trains a model, and nothing else."""
    return bool(_vectors())


def with_gradient(
    function: Callable[[Any, Any], Any],
    inputs: Any,
    kernel: Any,
    kernel_gradient: Callable[[Any, Any], Any],
) -> Any:
    """Compute `function(inputs, kernel)` with a custom gradient for the kernel.

    Args:
        function: is linear in `inputs`, and takes a kernel of their dtype.
        inputs: an array.
        kernel: a Keras variable.
        kernel_gradient: given `inputs` and the gradient of the result, the kernel's gradient.

    Returns:
        The result; `inputs` get their ordinary gradient.
    """
    with _keras_private.no_autocast():
        value = jnp.asarray(kernel.value)
    vector = _vectors().get(id(kernel))
    if vector is None:
        return function(inputs, value.astype(inputs.dtype))

    @jax.custom_vjp
    def restricted(inputs: Any, value: Any, vector: Any) -> Any:
        return function(inputs, value.astype(inputs.dtype))

    def forward(inputs: Any, value: Any, vector: Any) -> tuple[Any, Any]:
        return restricted(inputs, value, vector), (inputs, value)

    def backward(residuals: Any, upstream: Any) -> tuple[Any, None, Any]:
        inputs, value = residuals
        transposed = jax.linear_transpose(lambda x: function(x, value.astype(x.dtype)), inputs)
        gradient = summed_over_devices(kernel_gradient, inputs, upstream)
        return transposed(upstream)[0], None, gradient

    restricted.defvjp(forward, backward)
    return restricted(inputs, value, vector)


def gradient_at_zero(function: Callable[[Any], Any], shape: Sequence[Any], upstream: Any) -> Any:
    """Return the gradient of a linear function of an array of this shape."""
    zeros = jax.ShapeDtypeStruct(tuple(shape), upstream.dtype)
    return jax.linear_transpose(function, zeros)(upstream)[0]


def convolution_gradient(convolution: Any, inputs: Any, shape: Sequence[Any], upstream: Any) -> Any:
    """Return the gradient of a convolution's kernel of this shape.

    Args:
        convolution: an object whose `apply_to_some` computes it from inputs and kernel.
    """
    return gradient_at_zero(functools.partial(convolution.apply_to_some, inputs), shape, upstream)


def zero_after(gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
    """Return a 0 that XLA cannot have before the gradients.

    XLA copies a kernel in which entries are replaced unless all that reads the kernel has certainly
    been computed before; the gradients follow from all that. Added to the entries' indices, this
    settles the order. Of the new values instead, XLA would fuse reading a small kernel into the
    update of others, and copy a large one.
    """
    known = [g for g in gradients if isinstance(g, jax.core.Tracer)]
    if not known:
        return None
    # In one vector, which takes half as much to compile as a sum for each gradient.
    number = jnp.sum(jnp.isnan(jnp.concatenate([jnp.ravel(g) for g in known])))
    return jnp.minimum(number.astype("int32"), 0)  # always 0, which XLA does not find out


def take(tensor: Any, indices: Any, axis: int) -> Any:
    """Return the slices of an array at `indices` along an axis."""
    chosen = (slice(None),) * (axis % tensor.ndim) + (indices.value,)
    return tensor.at[chosen].get(
        mode="promise_in_bounds",
        unique_indices=True,
        indices_are_sorted=True,
        wrap_negative_indices=False,
    )


def compact_gradient(values: Any, indices: Any, kernel_shape: tuple[int, ...]) -> Any:
    """Return the gradient of a kernel at its trained entries alone: the gradient of its vector."""
    return values


class Constant:
    """An array that functions which are traced keep."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def assign(self, value: Any) -> None:
        """Set another array; functions that have been traced keep the one before."""
        self.value = value


def vector_of_any_length(value: np.ndarray) -> Constant:
    """Return an object to which vectors of other lengths can be assigned."""
    return Constant(value)


def is_dense(value: Any) -> bool:
    """Return whether a value is an ordinary array."""
    return isinstance(value, jax.Array) and not isinstance(value, keras.KerasTensor)
