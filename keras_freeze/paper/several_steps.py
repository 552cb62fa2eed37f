"""Several training steps in one call on JAX, where small networks wait for Python in between."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras


def steps_together(steps: int, most: int) -> int:
    """Return the largest number of steps, at most `most`, that `steps` is a multiple of."""
    return max(number for number in range(1, most + 1) if steps % number == 0)


@contextlib.contextmanager
def several_steps(network: keras.Model) -> Iterator[None]:
    """Let `fit` on JAX train by several batches at a time, which are compiled as one loop.

    In the `with` block each element of the data is several batches: `data.batch(90)` instead of
    `data`. To Keras and its callbacks they are one batch; the optimizer counts each step.

    Args:
        network: a model that is built, and whose metrics are built.
    """
    before = network.steps_per_execution
    network.train_step = functools.partial(_train_steps, network.train_step)
    network.steps_per_execution = 1  # more would be a loop in Python
    _forget_functions(network)
    try:
        yield
    finally:
        del network.train_step  # of the instance: its class has one
        network.steps_per_execution = before
        _forget_functions(network)


def _train_steps(train_step: Callable[..., Any], state: Any, batches: Any) -> tuple[Any, Any]:
    """Make one step by each of the batches; return the last logs and the state, as one step."""

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        logs, state = train_step(state, batch)
        return state, logs

    state, logs = keras.ops.scan(step, state, batches)
    return {name: values[-1] for name, values in logs.items()}, state


def _forget_functions(network: keras.Model) -> None:
    network.train_function = network.test_function = None
