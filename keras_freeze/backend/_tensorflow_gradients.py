"""Gradients, and those of trained entries alone, for TensorFlow."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_freeze import _keras_private
from keras_freeze.backend._passes import all_gradients, wants_all_gradients
from keras_freeze.backend._tensorflow_values import gather, tensor_variable, to_dense, to_numpy


def gradients(
    loss: Callable[[], Any], variables: Sequence[Any], scale: float = 1.0
) -> tuple[Any, list[Any]]:
    """Return `loss()` and the dense gradients of `scale * loss()`, None where unconnected."""
    with all_gradients(), tf.GradientTape() as tape:
        value = loss()
        # A Python number would be taken for a float32.
        exact = scale if tf.is_tensor(scale) else tf.constant(scale, tf.float64)
        scaled = value * tf.cast(exact, value.dtype)
    grads = tape.gradient(scaled, [tensor_variable(v) for v in variables])
    return value, [None if g is None else to_dense(g) for g in grads]


def hessian_products(
    loss: Callable[[], Any], variables: Sequence[Any], vectors: Sequence[Any], scale: float = 1.0
) -> tuple[Any, list[Any]]:
    """Return `loss()`, and the product of the Hessian of `scale * loss()` with a vector.

    The vector has one constant tensor for each variable; None means zero. The product has dense
    parts, None where one is zero by construction.

    Raises:
        LookupError: where TensorFlow has no second derivative of an operation.
    """
    tensors = [tensor_variable(v) for v in variables]
    with all_gradients(), tf.GradientTape() as outer:
        with _moments_twice_differentiable(), tf.GradientTape() as inner:
            value = loss()
            scaled = value * tf.cast(scale, value.dtype)
        grads = inner.gradient(scaled, tensors)
        # The sum itself is of no interest: a cast rounds it, not its derivative.
        projection = tf.zeros(())
        for gradient, vector in zip(grads, vectors, strict=True):
            if gradient is not None and vector is not None:
                gradient = tf.cast(to_dense(gradient), vector.dtype)
                projection += tf.reduce_sum(gradient * tf.stop_gradient(vector))
    products = outer.gradient(projection, tensors)
    return value, [None if p is None else to_dense(p) for p in products]


@contextlib.contextmanager
def _moments_twice_differentiable() -> Iterator[None]:
    """Give the variance of normalization layers its second derivative.

    `tf.nn.moments` holds the mean constant in the variance. The gradient is right all the same,
    since its part through the mean is zero; the second derivative is wrong, without any error.
    """
    original = tf.nn.moments
    tf.nn.moments = _moments
    try:
        yield
    finally:
        tf.nn.moments = original


def _moments(
    x: Any, axes: Any, shift: Any = None, keepdims: bool = False, name: str | None = None
) -> tuple[Any, Any]:
    mean = tf.reduce_mean(x, axes, keepdims=keepdims)
    return mean, tf.math.reduce_variance(x, axes, keepdims=keepdims)


class CompactGradient(tf.IndexedSlices):
    """The gradient of a kernel at its trained entries alone: rank-1 values at flat, sorted indices.

    An optimizer that knows of it takes the values. To all others it stands for a tensor of the
    kernel's shape, which is zero elsewhere, and becomes one where it has to. Two of them from one
    tape are added up by being joined, as `tf.IndexedSlices` are.
    """

    # NumPy would otherwise compute with one entry of an array at a time.
    __array_ufunc__ = None

    def __init__(self, values: Any, indices: Any, kernel_shape: tuple[int, ...]) -> None:
        # As far as TensorFlow is concerned, this is the gradient of the flat kernel.
        size = tf.constant([math.prod(kernel_shape)], indices.dtype)
        super().__init__(values, tf.convert_to_tensor(tensor_variable(indices)), size)
        self._trained = indices
        self.kernel_shape = kernel_shape

    @classmethod
    def _of_parts(cls, parts: Sequence[Any], kernel_shape: tuple[int, ...]) -> "CompactGradient":
        """Make a gradient of its components, which may be anything that TensorFlow puts there."""
        gradient = cls.__new__(cls)
        tf.IndexedSlices.__init__(gradient, *parts)
        gradient._trained = gradient.indices
        gradient.kernel_shape = kernel_shape
        return gradient

    @property
    def shape(self) -> Any:
        """The kernel's shape."""
        return tf.TensorShape(self.kernel_shape)

    @property
    def _type_spec(self) -> Any:
        return _CompactGradientSpec(*super()._type_spec._serialize(), self.kernel_shape)

    def _with_values(self, values: Any) -> "CompactGradient":
        return CompactGradient(values, self._trained, self.kernel_shape)

    def _is_alike(self, other: Any) -> bool:
        """Return whether another gradient has the same entries of the same kernel."""
        return (
            isinstance(other, CompactGradient)
            and other._trained is self._trained
            and other.kernel_shape == self.kernel_shape
        )

    def numpy(self) -> np.ndarray:
        """Return the gradient in the kernel's shape."""
        return tf.convert_to_tensor(self).numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype)

    # Arithmetic of people who accumulate, scale or mask gradients by hand. What does not give zero
    # at frozen entries, or is with a dense tensor, gives a dense tensor.
    def __add__(self, other: Any) -> Any:
        if self._is_alike(other):
            return self._with_values(self.values + other.values)
        return tf.convert_to_tensor(self) + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if self._is_alike(other):
            return self._with_values(self.values - other.values)
        return tf.convert_to_tensor(self) - other

    def __neg__(self) -> "CompactGradient":
        return self._with_values(-self.values)

    def __abs__(self) -> "CompactGradient":
        return self._with_values(abs(self.values))

    def __mul__(self, factor: Any) -> Any:
        if self._is_alike(factor):
            return self._with_values(self.values * factor.values)
        if _is_scalar(factor):
            return self._with_values(self.values * factor)
        return tf.convert_to_tensor(self) * factor

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if _is_scalar(divisor):
            return self._with_values(self.values / divisor)
        return tf.convert_to_tensor(self) / divisor


def compact_gradient(values: Any, indices: Any, kernel_shape: tuple[int, ...]) -> CompactGradient:
    """Return the gradient of a kernel at its trained entries alone."""
    return CompactGradient(values, indices, kernel_shape)


def _dense_first(name: str) -> Callable[..., Any]:
    def operator(self: CompactGradient, *others: Any) -> Any:
        return getattr(tf.convert_to_tensor(self), name)(*others)

    return operator


for _name in (
    *("__rsub__", "__rtruediv__", "__pow__", "__rpow__", "__matmul__", "__rmatmul__"),
    *("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__getitem__"),
    *("__lt__", "__le__", "__gt__", "__ge__"),
):
    setattr(CompactGradient, _name, _dense_first(_name))


def _is_scalar(value: Any) -> bool:
    shape = value.shape if hasattr(value, "shape") else np.shape(value)
    return tf.TensorShape(shape).rank == 0


class _CompactGradientSpec(tf.IndexedSlicesSpec):
    """Lets a CompactGradient leave a `tf.function`."""

    value_type = property(lambda self: CompactGradient)

    def __init__(self, *arguments: Any) -> None:
        *rest, self._kernel_shape = arguments
        super().__init__(*rest)

    def _serialize(self) -> tuple[Any, ...]:
        return (*super()._serialize(), self._kernel_shape)

    def _from_components(self, parts: Sequence[Any]) -> CompactGradient:
        return CompactGradient._of_parts(parts, self._kernel_shape)


def _as_dense(
    gradient: CompactGradient, dtype: Any = None, name: Any = None, as_ref: bool = False
) -> Any:
    flat = tf.math.unsorted_segment_sum(
        gradient.values, gradient.indices, gradient.dense_shape[0], name
    )
    return tf.cast(tf.reshape(flat, gradient.kernel_shape), dtype or flat.dtype)


tf.register_tensor_conversion_function(CompactGradient, _as_dense, priority=50)


# Functions that make a plain `tf.IndexedSlices`, a gradient of the flat kernel, of every one that
# they are given. `tf.cast` is called by most of `keras.ops`.
@tf.experimental.dispatch_for_api(tf.cast, {"x": CompactGradient})
def _cast(x: Any, dtype: Any, name: Any = None) -> CompactGradient:
    return x._with_values(tf.cast(x.values, dtype, name))


@tf.experimental.dispatch_for_api(tf.clip_by_norm, {"t": CompactGradient})
def _clip_by_norm(t: Any, clip_norm: Any, axes: Any = None, name: Any = None) -> Any:
    return tf.clip_by_norm(tf.convert_to_tensor(t), clip_norm, axes, name)


@tf.experimental.dispatch_for_api(tf.clip_by_value, {"t": CompactGradient})
def _clip_by_value(t: Any, clip_value_min: Any, clip_value_max: Any, name: Any = None) -> Any:
    return tf.clip_by_value(tf.convert_to_tensor(t), clip_value_min, clip_value_max, name)


def gather_gradient(gradient: Any, variable: Any, indices: Any) -> Any:
    """Return a variable's gradient, dense or compact, at flat, sorted `indices`."""
    is_sparse = isinstance(gradient, tf.IndexedSlices)
    if not is_sparse or gradient.values.shape.rank == len(variable.shape):
        gradient = to_dense(gradient)
        if not gradient.shape.is_compatible_with(tuple(variable.shape)):
            raise ValueError(
                f"The gradient of a variable of shape {tuple(variable.shape)} must have that "
                f"shape. Received: a gradient of shape {tuple(gradient.shape)}. If your own step "
                "has made a flat one of a gradient of trained entries alone: call "
                "`keras_freeze.restore_gradients(model)` first."
            )
        return gather(gradient, indices)
    count = tensor_variable(indices).shape[0]
    # Functions that were traced for another mask stop by themselves.
    if tf.executing_eagerly() and not _repeats(gradient.indices, indices):
        raise ValueError(
            "This gradient was computed for another freezing mask. Trace the function that "
            "computes it again: make a new tf.function."
        )
    if gradient.values.shape[0] == count:
        return gradient.values
    # A layer that was used several times: all entries once for each use.
    return tf.reduce_sum(tf.reshape(gradient.values, [-1, count]), 0)


def _repeats(indices: Any, once: Any) -> bool:
    indices, once = indices.numpy(), to_numpy(once)
    uses, rest = divmod(len(indices), len(once))
    return rest == 0 and np.array_equal(indices, np.tile(once, uses))


def with_gradient(
    function: Callable[[Any, Any], Any],
    inputs: Any,
    kernel: Any,
    kernel_gradient: Callable[[Any, Any], Any],
) -> Any:
    """Compute `function(inputs, kernel)` with a custom gradient for the kernel.

    Inside a function, loop or branch of the layer's own, whose gradient TensorFlow derives apart
    and keeps, the kernel gets its ordinary gradient all the same.

    Args:
        function: is linear in `inputs`, and takes a kernel of their dtype.
        kernel_gradient: given `inputs` and the gradient of the result, the kernel's gradient.

    Returns:
        The result; `inputs` get their ordinary gradient.
    """
    graph = tf.compat.v1.get_default_graph()

    @tf.custom_gradient
    def differentiable(inputs: Any, kernel: Any) -> tuple[Any, Callable[[Any], Any]]:
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch([inputs, kernel])
            outputs = function(inputs, tf.cast(kernel, inputs.dtype))

        def gradients(upstream: Any) -> Any:
            if tf.compat.v1.get_default_graph() is not graph:
                return tape.gradient(outputs, [inputs, kernel], upstream)
            return tape.gradient(outputs, inputs, upstream), kernel_gradient(inputs, upstream)

        return outputs, gradients

    # Not cast by Keras, which would make a plain `tf.IndexedSlices` of the gradient.
    with _keras_private.no_autocast():
        value = tf.convert_to_tensor(kernel.value)
    return differentiable(inputs, value)


def is_training(model: keras.Model) -> bool:
    """Return whether the pass in progress trains a model, and nothing else."""
    return not wants_all_gradients() and _keras_private.is_training_call_of(model)


def gradient_at_zero(function: Callable[[Any], Any], shape: Sequence[Any], upstream: Any) -> Any:
    """Return the gradient of a linear function of a tensor of this shape."""
    zeros = tf.zeros(shape, upstream.dtype)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(zeros)
        outputs = function(zeros)
    return tape.gradient(outputs, zeros, upstream)


def convolution_gradient(convolution: Any, inputs: Any, shape: Sequence[Any], upstream: Any) -> Any:
    """Return the gradient of a convolution's kernel of this shape.

    Args:
        convolution: an object whose `apply_to_some` computes it from inputs and kernel.
    """
    return gradient_at_zero(functools.partial(convolution.apply_to_some, inputs), shape, upstream)
