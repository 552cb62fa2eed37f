"""Several processes and devices that train one model, for JAX: those of `keras.distribution`."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from keras_freeze import _keras_private


def num_processes() -> int:
    """Return how many processes train together, each with its own part of the data."""
    return int(jax.process_count())


def gather_bytes(content: bytes) -> list[bytes]:
    """Return what each process gives, in the order of their ranks; all give as many bytes."""
    if num_processes() == 1:
        return [content]
    everyone = multihost_utils.process_allgather(np.frombuffer(content, "uint8"))
    return [part.tobytes() for part in everyone]


def sum_over_processes(tensor: Any) -> Any:
    """Return the sum of the processes' tensors, which have one shape."""
    devices = np.array(jax.devices()).reshape(num_processes(), -1)
    mesh = jax.sharding.Mesh(devices, ("processes", "devices"))
    own = np.asarray(tensor)[np.newaxis]
    parts = multihost_utils.host_local_array_to_global_array(own, mesh, PartitionSpec("processes"))
    whole = NamedSharding(mesh, PartitionSpec())
    total = jax.jit(lambda parts: jnp.sum(parts, axis=0), out_shardings=whole)(parts)
    return jnp.asarray(np.asarray(total))


def are_shared(variables: Sequence[Any]) -> bool:
    """Return whether variables are on the devices of all processes, where there are several.

    `fit` then computes their gradients from the batches of all processes, and each process must
    assign the same values to them.
    """
    values = [_keras_private.stored_value(variable) for variable in variables]
    arrays = [value for value in values if isinstance(value, jax.Array)]
    return num_processes() > 1 and any(not array.is_fully_addressable for array in arrays)


def trains_alone(variables: Sequence[Any]) -> bool:
    """Return whether each of several processes computes gradients by its own batches alone."""
    return num_processes() > 1 and not are_shared(variables)


def whole_array(value: Any) -> np.ndarray:
    """Return a NumPy copy of an array.

    Raises:
        ValueError: if no process has all of it.
    """
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    if is_array and not (value.is_fully_addressable or value.is_fully_replicated):
        raise ValueError(
            "In several processes, each must have whole variables, as with "
            "`keras.distribution.DataParallel`. Received: an array of shape "
            f"{value.shape} of which each process has a part, {value.sharding}"
        )
    return np.array(value)


@contextlib.contextmanager
def outside_strategy() -> Iterator[None]:
    """Return a scope in which no distribution over several processes is in force."""
    distribution = keras.distribution.distribution()
    is_left = distribution is not None and num_processes() > 1
    if is_left:
        keras.distribution.set_distribution(None)
    try:
        yield
    finally:
        if is_left:
            keras.distribution.set_distribution(distribution)


@contextlib.contextmanager
def own_values(variables: Sequence[Any]) -> Iterator[None]:
    """Return a scope in which each of several processes computes with its own copy of variables.

    What is assigned to them there is forgotten.
    """
    if num_processes() == 1:
        yield
        return
    values = [(v, jnp.asarray(whole_array(v.value))) for v in variables]
    with outside_strategy(), keras.StatelessScope(state_mapping=values):
        yield


def _data_parallel() -> keras.distribution.DataParallel | None:
    """Return the distribution in force if it splits batches over several devices, and no more."""
    distribution = keras.distribution.distribution()
    if type(distribution) is not keras.distribution.DataParallel:
        return None
    return distribution if distribution.device_mesh.devices.size > 1 else None


def reduces_gradients() -> bool:
    """Return whether devices with parts of a batch exchange the gradients of a training step."""
    return _data_parallel() is not None


def summed_over_devices(function: Callable[..., Any], *tensors: Any) -> Any:
    """Return a function of tensors that is a sum over their examples.

    Each device computes it for its own examples, and no more than these results is exchanged. XLA
    by itself would sum an intermediate result, such as the dense gradient, and then take a part.
    """
    distribution = _data_parallel()
    if distribution is None:
        return function(*tensors)
    mesh = distribution.device_mesh.backend_mesh
    axis = distribution.batch_dim_name
    if any(tensor.shape[0] % mesh.shape[axis] for tensor in tensors):
        return function(*tensors)  # these are no examples

    def compute(*parts: Any) -> Any:
        return jax.lax.psum(function(*parts), axis)

    split = (PartitionSpec(axis),) * len(tensors)
    # With `check_vma`, transposing a convolution within `compute` would sum over the devices, too.
    of_all = jax.shard_map(
        compute, mesh=mesh, in_specs=split, out_specs=PartitionSpec(), check_vma=False
    )
    return of_all(*tensors)
