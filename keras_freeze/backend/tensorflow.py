"""The few operations that differ between Keras's backends; here for TensorFlow."""

import contextlib
import math
import platform
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_freeze import _keras_private

VERSION = tf.__version__

# Whether a training step is given a model's state, which Keras asks of built models alone.
STEPS_ARE_STATELESS = False

# What TensorFlow raises where data do not suit a model.
DATA_ERRORS: tuple[Any, ...] = (tf.errors.OpError,)

# Whether `with_gradient` and `CompactGradient` exist.
RESTRICTS_GRADIENTS = True


def is_out_of_memory(error: Any) -> bool:
    """Whether one of `DATA_ERRORS` is about memory and not about the data."""
    return isinstance(error, tf.errors.ResourceExhaustedError)


def cause_of(error: Any) -> str:
    """What was wrong with the data, from one of `DATA_ERRORS`."""
    # In a graph, the cause stands between a stack of calls and the name of a node.
    return re.split(r'  File ".*\n', error.message)[-1].split("\n\t [[")[0].strip()


def eager_scope() -> contextlib.AbstractContextManager[None]:
    """A scope that leaves the graph being traced: what is assigned in it is really assigned."""
    return tf.init_scope()


def check_strategy(variables: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Checks that all was created, and is used, under one `tf.distribute` strategy or under none.

    Raises:
        ValueError: otherwise, or for a strategy that this package was not tested with.
    """
    found = [_strategy_of(v) for v in variables] + [
        _keras_private.optimizer_strategy(o) for o in optimizers
    ]
    if tf.distribute.has_strategy():
        found.append(tf.distribute.get_strategy())
    strategies = {id(strategy): strategy for strategy in found}.values()
    names = [
        "no strategy" if strategy is _NO_STRATEGY else type(strategy).__name__
        for strategy in strategies
    ]
    if not all(s is _NO_STRATEGY or isinstance(s, _STRATEGIES) for s in strategies):
        raise ValueError(
            "Of the strategies of `tf.distribute`, FreezeOptimizer supports "
            f"{' and '.join(s.__name__ for s in _STRATEGIES)}. Received: {', '.join(names)}"
        )
    if len(strategies) > 1:
        raise ValueError(
            "The model, the FreezeOptimizer and the optimizer in it must be created in the scope "
            "of one `tf.distribute` strategy and be used with no other. "
            f"Received: {' and '.join(names)}"
        )


def _strategy_of(variable: Any) -> Any:
    return _keras_private.variable_strategy(tensor_variable(variable)) or _NO_STRATEGY


def outside_strategy() -> contextlib.AbstractContextManager[None]:
    """A scope in which no strategy is in force: the first device computes, for itself alone."""
    with tf.Graph().as_default():  # a new graph knows of no strategy
        return tf.distribute.get_replica_context()


_STRATEGIES = (tf.distribute.MirroredStrategy, tf.distribute.OneDeviceStrategy)
with outside_strategy():
    _NO_STRATEGY = tf.distribute.get_strategy()


def strategy_scope(owner: Any) -> contextlib.AbstractContextManager[Any]:
    """A scope in which variables are created for the devices of a model's, or optimizer's, own."""
    if tf.distribute.has_strategy():  # it is entered already, or `check_strategy` refuses
        return contextlib.nullcontext()
    if isinstance(owner, keras.Model):
        return owner.distribute_strategy.scope()
    return _keras_private.optimizer_strategy(owner).scope()


def replicas_of(model: keras.Model) -> int:
    """How many replicas a model is trained on."""
    return int(model.distribute_strategy.num_replicas_in_sync)


def num_replicas() -> int:
    """How many replicas take part in this step: an optimizer sums their gradients."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def num_processes() -> int:
    """How many processes train together, each with its own part of the data."""
    return 1  # `check_strategy` refuses the strategies of several


def sum_over_replicas(gradients: Sequence[Any]) -> list[Any]:
    """The dense sums of the gradients of all replicas, None where there is none."""
    found = [to_dense(g) for g in gradients if g is not None]
    if num_replicas() > 1:
        found = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, found)
    sums = iter(found)
    return [None if g is None else next(sums) for g in gradients]


def run_if(condition: Any, function: Callable[[list[Any]], None], tensors: list[Any]) -> None:
    """Calls `function(tensors)` if `condition` holds, which must be so on all replicas or on none.

    The replicas may communicate in `function`, as optimizers do.
    """

    def run(strategy: Any, condition: Any, tensors: list[Any]) -> None:
        first = strategy.experimental_local_results(condition)[0]
        keras.ops.cond(first, lambda: strategy.run(function, args=(tensors,)), lambda: None)

    if _keras_private.supports_no_merge_call():  # as without a strategy
        keras.ops.cond(condition, lambda: function(tensors), lambda: None)
    else:
        # They cannot communicate in a condition of their own, so that all enter it together.
        tf.distribute.get_replica_context().merge_call(run, args=(condition, tensors))


def _update(function: Callable[..., None], variable: Any, *arguments: Any) -> None:
    """Calls `function(variable, *arguments)`, for a mirrored variable with each of its copies."""
    variable = tensor_variable(variable)
    if isinstance(variable, tf.distribute.DistributedValues):
        # As tensors: a `tf.function` would take over a mirrored argument that it was traced with.
        values = tuple(tf.convert_to_tensor(argument) for argument in arguments)
        strategy = variable.distribute_strategy
        strategy.extended.update(variable, function, args=values, group=False)
    else:
        function(variable, *arguments)


_passes = threading.local()


@contextlib.contextmanager
def _all_gradients() -> Iterator[None]:
    """In this scope layers compute every gradient, whatever is trained."""
    before = wants_all_gradients()
    _passes.want_all = True
    try:
        yield
    finally:
        _passes.want_all = before


def gradients(
    loss: Callable[[], Any], variables: Sequence[Any], scale: float = 1.0
) -> tuple[Any, list[Any]]:
    """The value of `loss()` and the dense gradients of `scale * loss()`, None where unconnected."""
    with _all_gradients(), tf.GradientTape() as tape:
        value = loss()
        scaled = value * tf.cast(scale, value.dtype)
    grads = tape.gradient(scaled, [tensor_variable(v) for v in variables])
    return value, [None if g is None else to_dense(g) for g in grads]


def hessian_products(
    loss: Callable[[], Any], variables: Sequence[Any], vectors: Sequence[Any], scale: float = 1.0
) -> tuple[Any, list[Any]]:
    """The value of `loss()`, and the product of the Hessian of `scale * loss()` with a vector.

    Args:
        loss: a function of nothing.
        variables: the variables of the Hessian.
        vectors: the vector's parts, one constant tensor for each variable; None means zero.
        scale: multiplies the loss.

    Returns:
        The value, and the dense parts of the product, None where it is zero by construction.

    Raises:
        LookupError: where TensorFlow has no second derivative of an operation.
    """
    tensors = [tensor_variable(v) for v in variables]
    with _all_gradients(), tf.GradientTape() as outer:
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
    """Gives the variance of normalisation layers its second derivative.

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
        """From what TensorFlow takes apart, which need not be tensors."""
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
        """Whether another gradient has the same entries of the same kernel."""
        return (
            isinstance(other, CompactGradient)
            and other._trained is self._trained
            and other.kernel_shape == self.kernel_shape
        )

    def numpy(self) -> np.ndarray:
        """The gradient in the kernel's shape."""
        return tf.convert_to_tensor(self).numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.numpy(), dtype)

    # Arithmetic of people who accumulate, scale or mask gradients by hand. What does not give zero
    # at frozen entries, or is with a tensor in full shape, gives a tensor in full shape.
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


def _in_full_shape_first(name: str) -> Callable[..., Any]:
    def operator(self: CompactGradient, *others: Any) -> Any:
        return getattr(tf.convert_to_tensor(self), name)(*others)

    return operator


for _name in (
    *("__rsub__", "__rtruediv__", "__pow__", "__rpow__", "__matmul__", "__rmatmul__"),
    *("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__getitem__"),
    *("__lt__", "__le__", "__gt__", "__ge__"),
):
    setattr(CompactGradient, _name, _in_full_shape_first(_name))


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


def _in_full_shape(
    gradient: CompactGradient, dtype: Any = None, name: Any = None, as_ref: bool = False
) -> Any:
    flat = tf.math.unsorted_segment_sum(
        gradient.values, gradient.indices, gradient.dense_shape[0], name
    )
    return tf.cast(tf.reshape(flat, gradient.kernel_shape), dtype or flat.dtype)


tf.register_tensor_conversion_function(CompactGradient, _in_full_shape, priority=50)


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
    """A variable's gradient at flat, sorted `indices`, from one in full shape or a compact one."""
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
    """`function(inputs, kernel)`, whose gradient for the kernel another function computes.

    Inside a function, loop or branch of the layer's own, whose gradient TensorFlow derives apart
    and keeps, the kernel gets its ordinary gradient all the same.

    Args:
        function: is linear in `inputs`, and takes a kernel of their dtype.
        inputs: a tensor.
        kernel: a Keras variable.
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


def wants_all_gradients() -> bool:
    """Whether this is a pass of this package's own, which needs those of frozen weights, too."""
    return getattr(_passes, "want_all", False)


def gradient_at_zero(function: Callable[[Any], Any], shape: Sequence[Any], upstream: Any) -> Any:
    """The gradient of a linear function of a tensor of this shape."""
    zeros = tf.zeros(shape, upstream.dtype)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(zeros)
        outputs = function(zeros)
    return tape.gradient(outputs, zeros, upstream)


def is_dense(value: Any) -> bool:
    """Whether a value is a dense tensor with elements, not a symbolic, sparse or ragged one."""
    return isinstance(value, tf.Tensor)


def take(tensor: Any, indices: Any, axis: int) -> Any:
    """The slices of a tensor at `indices` along an axis."""
    return tf.gather(tensor, tensor_variable(indices), axis=axis)


def vector_of_any_length(value: np.ndarray) -> Any:
    """A variable to which vectors of other lengths can be assigned."""
    return tf.Variable(value, trainable=False, shape=tf.TensorShape([None]))


def tensor_variable(variable: Any) -> Any:
    """The `tf.Variable` behind a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def to_dense(gradient: Any) -> Any:
    """A gradient as a dense tensor; an Embedding's arrives as `tf.IndexedSlices`."""
    return tf.convert_to_tensor(gradient)


def read(variable: Any) -> Any:
    """The variable's value now, which later assignments do not change."""
    return tf.identity(tensor_variable(variable))


def gather(variable: Any, indices: Any) -> Any:
    """The entries of a variable or tensor at flat `indices`."""
    # Not tf.gather_nd on the variable itself: it would make TensorFlow copy the whole variable on
    # every later read.
    return tf.gather(tf.reshape(tensor_variable(variable), [-1]), indices)


def _as_bits(value: Any) -> Any:
    # Arithmetic on 16-bit floats goes through float32, which rewrites the bits of a NaN.
    return tf.bitcast(value, tf.int16) if value.dtype.size == 2 else value


def where(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where `condition` holds, else `no`, bit for bit."""
    yes, no = tf.convert_to_tensor(yes), tf.convert_to_tensor(no)
    chosen = tf.where(tensor_variable(condition), _as_bits(yes), _as_bits(no))
    return tf.bitcast(chosen, yes.dtype)


def _scatter(variable: Any, indices: Any, values: Any) -> None:
    _assign_flat(variable, indices, values, variable)


def _scale_and_scatter(variable: Any, indices: Any, values: Any, factor: Any) -> None:
    _assign_flat(variable, indices, values, variable * factor)


def _assign_flat(variable: Any, indices: Any, values: Any, others: Any) -> None:
    flat = tf.reshape(_as_bits(tf.convert_to_tensor(others)), [-1])
    flat = tf.tensor_scatter_nd_update(flat, indices[:, None], _as_bits(values))
    variable.assign(tf.reshape(tf.bitcast(flat, variable.dtype), variable.shape))


# XLA turns the update into one in place: 1 ms instead of 25 ms for 1 % of 4096 x 4096 weights.
# It is missing on macOS with a GPU, where the plain functions do the same with a copy.
if not (platform.system() == "Darwin" and platform.machine() == "arm64"):
    _scatter = tf.function(_scatter, jit_compile=True, autograph=False)
    _scale_and_scatter = tf.function(_scale_and_scatter, jit_compile=True, autograph=False)
    # Each is traced once for each shape of a kernel, as it has to be: without sizes XLA would copy.
    _scatter, _scale_and_scatter = map(
        _keras_private.without_tracing_warning, (_scatter, _scale_and_scatter)
    )


def zero_after(variables: Sequence[Any]) -> Any:
    """An integer 0, which XLA cannot have before the values of `variables`; None where needless.

    Where XLA compiles a whole step, it copies a kernel in which entries are replaced unless all
    that reads the kernel has certainly been computed before. The new values of all that is trained
    follow from all gradients, and these from all that the kernel was read for: adding this to the
    entries' indices settles the order.
    """
    if tf.executing_eagerly() or tf.distribute.has_strategy() or not variables:
        return None
    some = [tf.reshape(tensor_variable(variable), [-1])[:1] for variable in variables]
    values = tf.concat([tf.cast(value, tf.float32) for value in some], 0)
    # Always false, which XLA does not find out.
    never = tf.reduce_any(tf.math.is_nan(values) & tf.math.is_inf(values))
    return tf.cast(never, tf.int32)


def scatter(variable: Any, indices: Any, values: Any) -> None:
    """Assigns `values` to the entries of a variable at flat, sorted `indices`, and nothing else."""
    _update(_scatter, variable, tensor_variable(indices), tf.convert_to_tensor(values))


def scale_and_scatter(variable: Any, indices: Any, values: Any, factor: Any) -> None:
    """Multiplies a variable by `factor`, then assigns `values` at flat, sorted `indices`."""
    factor = tf.cast(factor, variable.dtype)
    values = tf.convert_to_tensor(values)
    _update(_scale_and_scatter, variable, tensor_variable(indices), values, factor)


def top_k_mask(scores: Any, k: int) -> Any:
    """True at the `k` largest of a vector of scores; of equal scores the earlier one counts more.

    The same rule as `mask.select_top`, for use while a graph is traced.
    """
    _, indices = tf.math.top_k(scores, k)
    size = tf.shape(scores)
    return tf.scatter_nd(indices[:, None], tf.ones_like(indices, tf.int32), size) > 0


def require(condition: Any, message: str) -> Any:
    """An operation that fails with `message` unless the boolean `condition` holds.

    Eagerly it raises a ValueError. In a graph it raises when the graph runs; XLA has no way to
    fail, so that a caller must not rely on it alone.
    """
    if tf.executing_eagerly():
        if not bool(condition):
            raise ValueError(message)
        return tf.no_op()
    return tf.debugging.Assert(condition, [message])


def call_if(condition: Any, function: Callable[[], None]) -> None:
    """Calls `function()`, for what it tells the user, if the boolean `condition` holds.

    Not under XLA, nor on several replicas, which cannot call Python.
    """
    if tf.executing_eagerly():
        if bool(condition):
            function()
        return
    is_xla = _keras_private.is_compiled_by_xla(tf.compat.v1.get_default_graph())
    if not is_xla and num_replicas() == 1:
        tf.cond(condition, lambda: tf.py_function(function, [], Tout=[]), tf.no_op)


def after(operations: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """A scope whose operations run after `operations`."""
    return tf.control_dependencies(list(operations))


def is_traced() -> bool:
    """Whether a graph is being built that may be executed when its variables are gone."""
    return not tf.executing_eagerly()


def untrack_built_variables(optimizer: Any) -> None:
    """Keep the variables that an optimizer was built with out of TensorFlow's checkpoints."""
    _keras_private.untrack_built_variables(optimizer)


def trace_markers(generation: int) -> list[Any]:
    """Needless: functions that were traced for an earlier mask fail by themselves."""
    return []


def known_value(variable: Any) -> np.ndarray | None:
    """The value of a variable at present; None in the midst of a graph that computes it."""
    with tf.init_scope():
        return to_numpy(variable) if tf.executing_eagerly() else None


def without_gradients() -> contextlib.AbstractContextManager[None]:
    """A scope in which nothing is recorded for gradients; TensorFlow records only on a tape."""
    return contextlib.nullcontext()


def compiled(function: Callable[..., Any], model: keras.Model) -> Callable[..., Any]:
    """A function that is compiled for each structure and shapes of its arguments.

    Args:
        function: of tensors, or structures of them, to such structures.
        model: the model whose variables it reads or assigns.
    """
    # A smaller last batch costs one more trace, not one each time.
    return tf.function(function, autograph=False, reduce_retracing=True)


def to_numpy(value: Any) -> np.ndarray:
    """A NumPy copy of a variable or eager tensor."""
    return np.array(tf.convert_to_tensor(tensor_variable(value)).numpy())


def sparse_tensor(matrix: Any) -> Any:
    """What `fit` makes of a sparse matrix of scipy, of its COO format with rows in order."""
    return tf.SparseTensor(np.stack([matrix.row, matrix.col], axis=1), matrix.data, matrix.shape)


def rows(tensor: Any, part: slice) -> Any:
    """Some rows of a tensor, dense or sparse."""
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[part]
    start = [part.start] + [0] * (len(tensor.shape) - 1)
    return tf.sparse.slice(tensor, start, [part.stop - part.start, *tensor.shape[1:]])


def is_mutable_tensor(value: Any) -> bool:
    """Whether it is a tensor, of no variable, that can be changed in place: never here."""
    return False


def refill(tensor: Any, content: Any) -> None:
    """Gives such a tensor other values."""
    raise NotImplementedError


def is_plain_variable(value: Any) -> bool:
    """Whether it is a variable of TensorFlow that Keras does not know of."""
    return isinstance(value, tf.Variable)


def keep_gradients(variables: Sequence[Any]) -> list[Any]:
    """Nothing: variables have no gradients of their own."""
    return []


def put_back_gradients(kept: list[Any]) -> None:
    """Needless."""


def random_state() -> Any:
    """The state of TensorFlow's random numbers."""
    generator = _keras_private.global_generator()
    value = None if generator is None else read(generator.state)
    return generator, value, _keras_private.operation_seeds()


def set_random_state(state: Any) -> None:
    """Puts back what `random_state` has found."""
    generator, value, of_operations = state
    _keras_private.set_global_generator(generator)
    if generator is not None:
        generator.state.assign(value)
    _keras_private.set_operation_seeds(of_operations)


def eager_steps() -> contextlib.AbstractContextManager[Any]:
    """A scope in which functions run step by step and layers compute every gradient.

    A `tf.function` then neither keeps a trace of what is done here nor uses one of before.
    """
    return _eager_steps()


@contextlib.contextmanager
def _eager_steps() -> Iterator[None]:
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        with _all_gradients():
            yield
    finally:
        tf.config.run_functions_eagerly(before)


def uncompiled_steps() -> contextlib.AbstractContextManager[Any]:
    """The same: `eager_steps` compiles nothing."""
    return eager_steps()


def is_tracer(value: Any) -> bool:
    """Whether a value is not computed yet: never, where recorded steps run eagerly."""
    return False


def run_train_step(model: keras.Model, data: Any, recorder: Any) -> None:
    """Runs a model's `train_step` once, as `fit` does."""
    model.train_step(data)


def create_variables(model: keras.Model, data: Any) -> None:
    """Builds what a model's training step uses, for a batch of data, without running the step."""
    # Here a layer is whole once it is built, also if the step fails after it, for example because
    # it has listed its variables before. But there are no gradients.
    with contextlib.suppress(Exception):
        _keras_private.compute_output_spec(lambda: model.train_step(data))
    if not all(layer.built for layer in _keras_private.all_layers(model, include_self=False)):
        step = tf.function(lambda data: model.train_step(data), autograph=False)
        step.get_concrete_function(data)
