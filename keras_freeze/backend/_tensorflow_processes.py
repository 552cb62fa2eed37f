"""Processes that train together, for TensorFlow: the workers of a `tf.distribute` strategy."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_freeze.backend._tensorflow_distribution import outside_strategy, strategy_of

# Whether a variable gets the value that the first process gives it.
CREATES_VARIABLES_TOGETHER = True


@contextlib.contextmanager
def across_processes(variables: Sequence[Any]) -> Iterator[None]:
    """Return a scope in which the processes that train some variables can communicate.

    All of them have to enter it, eagerly or while they trace a function, in the same order.
    """
    strategies = map(strategy_of, variables)
    found = [s for s in strategies if isinstance(s, tf.distribute.MultiWorkerMirroredStrategy)]
    if not found:
        yield
        return
    with tf.init_scope(), outside_strategy(), found[0].scope():
        yield


def num_processes() -> int:
    """Return how many processes train together under the strategy in force."""
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 1
    return int(strategy.num_replicas_in_sync) // len(strategy.extended.worker_devices)


def gather_bytes(content: bytes) -> list[bytes]:
    """Return what each process gives, in the order of their ranks; all give as many bytes."""
    count = num_processes()
    if count == 1:
        return [content]

    def table(rank: int) -> np.ndarray:
        rows = np.zeros((count, len(content)), "int32")
        rows[rank] = np.frombuffer(content, "uint8")
        return rows

    return [row.astype("uint8").tobytes() for row in _sum(table).numpy()]


def sum_over_processes(tensor: Any) -> Any:
    """Return the sum of the processes' tensors, which have one shape."""
    return tensor if num_processes() == 1 else _sum(lambda rank: tensor)


def _sum(value_of: Callable[[int], Any]) -> Any:
    """Return the sum of what each process computes from its rank."""
    strategy = tf.distribute.get_strategy()
    num_devices = len(strategy.extended.worker_devices)

    def of_device(context: tf.distribute.experimental.ValueContext) -> Any:
        rank, device = divmod(context.replica_id_in_sync_group, num_devices)
        value = tf.convert_to_tensor(value_of(rank))
        return tf.zeros_like(value) if device else value

    values = strategy.experimental_distribute_values_from_function(of_device)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, values, axis=None)
