"""Strategies of `tf.distribute` and their replicas, for TensorFlow."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_freeze import _keras_private
from keras_freeze.backend._tensorflow_values import tensor_variable


def check_strategy(variables: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Check that all was created, and is used, under one `tf.distribute` strategy or under none.

    Raises:
        ValueError: otherwise, or for a strategy that this package was not tested with.
    """
    found = [strategy_of(v) for v in variables] + [
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
            f"{', '.join(s.__name__ for s in _STRATEGIES)}. Received: {', '.join(names)}"
        )
    if len(strategies) > 1:
        raise ValueError(
            "The model, the FreezeOptimizer and the optimizer in it must be created in the scope "
            "of one `tf.distribute` strategy and be used with no other. "
            f"Received: {' and '.join(names)}"
        )


def strategy_of(variable: Any) -> Any:
    """Return the strategy that a variable was created under; the default one for none."""
    return _keras_private.variable_strategy(tensor_variable(variable)) or _NO_STRATEGY


def outside_strategy() -> contextlib.AbstractContextManager[None]:
    """Return a scope without any strategy, in which the first device computes alone."""
    with tf.Graph().as_default():  # a new graph knows of no strategy
        return tf.distribute.get_replica_context()


_STRATEGIES = (
    tf.distribute.MirroredStrategy,
    tf.distribute.MultiWorkerMirroredStrategy,
    tf.distribute.OneDeviceStrategy,
)
with outside_strategy():
    _NO_STRATEGY = tf.distribute.get_strategy()


def strategy_scope(owner: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a scope that creates variables under the strategy of a model or an optimizer."""
    if tf.distribute.has_strategy():  # it is entered already, or `check_strategy` refuses
        return contextlib.nullcontext()
    if isinstance(owner, keras.Model):
        return owner.distribute_strategy.scope()
    return _keras_private.optimizer_strategy(owner).scope()


def replicas_of(model: keras.Model) -> int:
    """Return how many replicas a model is trained on."""
    return int(model.distribute_strategy.num_replicas_in_sync)


def num_replicas() -> int:
    """Return how many replicas take part in this step, whose gradients an optimizer sums."""
    return int(tf.distribute.get_strategy().num_replicas_in_sync)


def sum_over_replicas(gradients: Sequence[Any]) -> Sequence[Any]:
    """Return the sums of the dense gradients of all replicas, None where there is none."""
    if num_replicas() == 1:
        return gradients
    found = [g for g in gradients if g is not None]
    context = tf.distribute.get_replica_context()
    sums = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, found))
    return [None if g is None else next(sums) for g in gradients]


def run_if(condition: Any, function: Callable[[list[Any]], None], tensors: list[Any]) -> None:
    """Call `function(tensors)` if `condition` holds, which must be so on all replicas or on none.

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
    """Call `function(variable, *arguments)`, for a mirrored variable with each of its copies."""
    variable = tensor_variable(variable)
    if isinstance(variable, tf.distribute.DistributedValues):
        # As tensors: a `tf.function` would take over a mirrored argument that it was traced with.
        values = tuple(tf.convert_to_tensor(argument) for argument in arguments)
        strategy = variable.distribute_strategy
        strategy.extended.update(variable, function, args=values, group=False)
    else:
        function(variable, *arguments)
