"""The operations that differ between Keras's backends; here for TensorFlow."""

import contextlib
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_freeze import _keras_private
from keras_freeze._utils.typing import Method
from keras_freeze.backend._passes import all_gradients
from keras_freeze.backend._tensorflow_distribution import *  # noqa: F403
from keras_freeze.backend._tensorflow_distribution import _update, num_replicas
from keras_freeze.backend._tensorflow_fit import *  # noqa: F403
from keras_freeze.backend._tensorflow_gradients import *  # noqa: F403
from keras_freeze.backend._tensorflow_processes import *  # noqa: F403
from keras_freeze.backend._tensorflow_values import *  # noqa: F403
from keras_freeze.backend._tensorflow_values import _as_bits, read, tensor_variable, to_numpy

VERSION = tf.__version__

# Whether other optimizers, such as a LossScaleOptimizer, can compute with a compact gradient.
COMPACT_GRADIENTS_ARE_TENSORS = True

# What TensorFlow raises where data do not suit a model.
DATA_ERRORS: tuple[Any, ...] = (tf.errors.OpError,)


def is_out_of_memory(error: Any) -> bool:
    """Return whether one of `DATA_ERRORS` is about memory and not about the data."""
    return isinstance(error, tf.errors.ResourceExhaustedError)


def cause_of(error: Any) -> str:
    """Return what was wrong with the data, from one of `DATA_ERRORS`."""
    # In a graph, the cause stands between a stack of calls and the name of a node.
    return re.split(r'  File ".*\n', error.message)[-1].split("\n\t [[")[0].strip()


def not_converted(function: Method) -> Method:
    """Return a method that AutoGraph does not rewrite where a user's function calls it."""
    unconverted: Method = tf.autograph.experimental.do_not_convert(function)
    return unconverted


def eager_scope() -> contextlib.AbstractContextManager[None]:
    """Return a scope that leaves the graph being traced, so that assignments are executed."""
    return tf.init_scope()


def vector_of_any_length(value: np.ndarray) -> Any:
    """Return a variable to which vectors of other lengths can be assigned."""
    return tf.Variable(value, trainable=False, shape=tf.TensorShape([None]))


def _scatter(variable: Any, indices: Any, values: Any) -> None:
    _assign_flat(variable, indices, values, variable)


def _scale_and_scatter(variable: Any, indices: Any, values: Any, factor: Any) -> None:
    _assign_flat(variable, indices, values, variable * factor)


def _assign_flat(variable: Any, indices: Any, values: Any, others: Any) -> None:
    flat = tf.reshape(_as_bits(tf.convert_to_tensor(others)), [-1])
    flat = tf.tensor_scatter_nd_update(flat, indices[:, None], _as_bits(values))
    variable.assign(tf.reshape(tf.bitcast(flat, variable.dtype), variable.shape))


# XLA makes the update in place: 1 ms instead of 25 ms for 1 % of 4096 x 4096 weights.
# It is missing on macOS with a GPU, where the plain functions do the same with a copy.
if not (platform.system() == "Darwin" and platform.machine() == "arm64"):
    _scatter = tf.function(_scatter, jit_compile=True, autograph=False)
    _scale_and_scatter = tf.function(_scale_and_scatter, jit_compile=True, autograph=False)
    # Each is traced once for each shape of a kernel, as it has to be: without sizes XLA would copy.
    _scatter, _scale_and_scatter = map(
        _keras_private.without_tracing_warning, (_scatter, _scale_and_scatter)
    )


def zero_after(gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
    """Return a 0 that cannot be there before the values of `variables`; None where not needed.

    TensorFlow's graph optimizer may lose the order of a read and an assignment that only control
    dependencies tell: a kernel would be scaled before the loss is computed with it. And where XLA
    compiles a whole step, it copies a kernel in which entries are replaced unless all that reads
    the kernel has certainly been computed before. The new values of all that is trained follow from
    all gradients, and these from all that the kernel was read for: adding this to the entries'
    indices settles the order.
    """
    if tf.executing_eagerly() or tf.distribute.has_strategy() or not variables:
        return None
    some = [tf.reshape(tensor_variable(variable), [-1])[:1] for variable in variables]
    values = tf.concat([tf.cast(value, tf.float32) for value in some], 0)
    # Always false, which XLA does not find out.
    never = tf.reduce_any(tf.math.is_nan(values) & tf.math.is_inf(values))
    return tf.cast(never, tf.int32)


def scatter(variable: Any, indices: Any, values: Any) -> None:
    """Assign `values` to the entries of a variable at flat, sorted `indices`, and nothing else."""
    _update(_scatter, variable, tensor_variable(indices), tf.convert_to_tensor(values))


def scale_and_scatter(variable: Any, indices: Any, values: Any, factor: Any) -> None:
    """Multiply a variable by `factor`, then assigns `values` at flat, sorted `indices`."""
    factor = tf.cast(factor, variable.dtype)
    values = tf.convert_to_tensor(values)
    _update(_scale_and_scatter, variable, tensor_variable(indices), values, factor)


def top_k_mask(scores: Any, k: int) -> Any:
    """Return a mask of the `k` largest of a vector of scores; of equal scores, the earlier wins.

    The same rule as `masks.selection.select_top`, for use while a graph is traced.
    """
    _, indices = tf.math.top_k(scores, k)
    size = tf.shape(scores)
    return tf.scatter_nd(indices[:, None], tf.ones_like(indices, tf.int32), size) > 0


def require(condition: Any, message: str) -> Any:
    """Return an operation that fails with `message` unless the boolean `condition` holds.

    Eagerly it raises a ValueError. In a graph it raises when the graph runs; XLA has no way to
    fail, so that a caller must not rely on it alone.
    """
    if tf.executing_eagerly():
        if not bool(condition):
            raise ValueError(message)
        return tf.no_op()
    return tf.debugging.Assert(condition, [message])


def call_if(condition: Any, function: Callable[[], None]) -> None:
    """Call `function()`, for what it tells the user, if the boolean `condition` holds.

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
    """Return a scope whose operations run after `operations`."""
    return tf.control_dependencies(list(operations))


def is_traced() -> bool:
    """Return whether a graph is being built that may be executed when its variables are gone."""
    return not tf.executing_eagerly()


def model_being_traced() -> Any:
    """Return the model whose train function is traced; None if something else is."""
    return _keras_private.model_being_traced()


def untrack_built_variables(optimizer: Any) -> None:
    """Keep the variables that an optimizer was built with out of TensorFlow's checkpoints."""
    _keras_private.untrack_built_variables(optimizer)


def known_value(variable: Any) -> np.ndarray | None:
    """Return the value of a variable at present; None in the midst of a graph that computes it."""
    with tf.init_scope():
        return to_numpy(variable) if tf.executing_eagerly() else None


def compiled(function: Callable[..., Any], model: keras.Model) -> Callable[..., Any]:
    """Return a function that is compiled for each structure and shapes of its arguments.

    It is of tensors, or structures of them, and reads or assigns variables of this model alone.
    """
    # A smaller last batch costs one more trace, not one each time.
    return tf.function(function, autograph=False, reduce_retracing=True)


def sparse_tensor(matrix: Any) -> Any:
    """Return what `fit` makes of a sparse matrix of scipy, of its COO format with rows in order."""
    return tf.SparseTensor(np.stack([matrix.row, matrix.col], axis=1), matrix.data, matrix.shape)


def rows(tensor: Any, part: slice) -> Any:
    """Return some rows of a tensor, dense or sparse."""
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[part]
    start = [part.start] + [0] * (len(tensor.shape) - 1)
    return tf.sparse.slice(tensor, start, [part.stop - part.start, *tensor.shape[1:]])


def is_plain_variable(value: Any) -> bool:
    """Return whether it is a variable of TensorFlow that Keras does not know of."""
    return isinstance(value, tf.Variable)


def random_state() -> Any:
    """Return the state of TensorFlow's random numbers."""
    generator = _keras_private.global_generator()
    value = None if generator is None else read(generator.state)
    return generator, value, _keras_private.operation_seeds()


def set_random_state(state: Any) -> None:
    """Restore what `random_state` returned."""
    generator, value, of_operations = state
    _keras_private.set_global_generator(generator)
    if generator is not None:
        generator.state.assign(value)
    _keras_private.set_operation_seeds(of_operations)


@contextlib.contextmanager
def eager_steps() -> Iterator[None]:
    """Return a scope in which functions run step by step and layers compute every gradient.

    A `tf.function` then neither keeps a trace of what is done here nor uses one of before.
    """
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        with all_gradients():
            yield
    finally:
        tf.config.run_functions_eagerly(before)


def uncompiled_steps() -> contextlib.AbstractContextManager[Any]:
    """Return the same: `eager_steps` compiles nothing."""
    return eager_steps()


def run_train_step(model: keras.Model, data: Any, recorder: Any) -> None:
    """Run a model's `train_step` once, as `fit` does."""
    model.train_step(data)


def create_variables(model: keras.Model, data: Any) -> None:
    """Build what a model's training step uses, for a batch of data, without running the step."""
    # Here a layer is whole once it is built, also if the step fails after it, for example because
    # it has listed its variables before. But there are no gradients.
    with contextlib.suppress(Exception):
        _keras_private.compute_output_spec(lambda: model.train_step(data))
    if not all(layer.built for layer in _keras_private.all_layers(model, include_self=False)):
        step = tf.function(lambda data: model.train_step(data), autograph=False)
        step.get_concrete_function(data)
