"""Values of variables and tensors, for TensorFlow."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_freeze._utils.aligned import with_entries


def is_dense(value: Any) -> bool:
    """Return whether a value is a dense tensor, not a symbolic, sparse or ragged one."""
    return isinstance(value, tf.Tensor)


def take(tensor: Any, indices: Any, axis: int) -> Any:
    """Return the slices of a tensor at `indices` along an axis."""
    return tf.gather(tensor, tensor_variable(indices), axis=axis)


def tensor_variable(variable: Any) -> Any:
    """Return the `tf.Variable` behind a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def to_dense(gradient: Any) -> Any:
    """Return a gradient as a dense tensor; an Embedding's arrives as `tf.IndexedSlices`."""
    return tf.convert_to_tensor(gradient)


def read(variable: Any) -> Any:
    """Return the variable's value now, which later assignments do not change."""
    return tf.identity(tensor_variable(variable))


def gather(variable: Any, indices: Any) -> Any:
    """Return the entries of a variable or tensor at flat `indices`."""
    # Not tf.gather_nd on the variable itself: it would make TensorFlow copy the whole variable on
    # every later read.
    return tf.gather(tf.reshape(tensor_variable(variable), [-1]), indices)


def _as_bits(value: Any) -> Any:
    # Arithmetic on 16-bit floats goes through float32, which rewrites the bits of a NaN.
    return tf.bitcast(value, tf.int16) if value.dtype.size == 2 else value


def where(condition: Any, yes: Any, no: Any) -> Any:
    """Return `yes` where `condition` holds, else `no`, bit for bit."""
    yes, no = tf.convert_to_tensor(yes), tf.convert_to_tensor(no)
    chosen = tf.where(tensor_variable(condition), _as_bits(yes), _as_bits(no))
    return tf.bitcast(chosen, yes.dtype)


def assign(variable: Any, values: Any) -> None:
    """Assign an array of a variable's shape and dtype, outside compiled functions."""
    # In a third of the time of Keras's, which matters where there are many small variables.
    tensor_variable(variable).assign(tf.constant(values), read_value=False)


def assign_at(variable: Any, indices: np.ndarray, values: np.ndarray) -> None:
    """Assign NumPy values at flat indices, none of them twice, outside compiled functions."""
    # `scatter` is compiled for each number of indices.
    whole = with_entries(_in_memory(variable), indices, values)
    if whole.dtype.isbuiltin == 1:  # NumPy hands over no others
        assign(variable, tf.experimental.dlpack.from_dlpack(whole.__dlpack__()))
    else:
        assign(variable, whole)


def values_at(variable: Any, indices: np.ndarray) -> np.ndarray:
    """Return the entries of a variable at flat indices, as a NumPy array."""
    value = tf.convert_to_tensor(tensor_variable(variable))
    if "CPU" in value.device:
        return _in_memory(value).reshape(-1).take(indices)
    return to_numpy(gather(value, indices))


def to_numpy(value: Any) -> np.ndarray:
    """Return a NumPy copy of a variable or eager tensor."""
    return _in_memory(value).copy()


def _in_memory(value: Any) -> np.ndarray:
    """Return a variable or eager tensor as a NumPy array: a view if it is on a CPU."""
    tensor = tf.convert_to_tensor(tensor_variable(value))
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())  # bfloat16 scalars need it
