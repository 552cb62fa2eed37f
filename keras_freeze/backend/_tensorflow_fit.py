"""What `fit` of Keras needs under `tf.distribute.MultiWorkerMirroredStrategy`."""

from typing import Any

import keras
import tensorflow as tf


def prepare_for_fit() -> None:
    """Let `fit`, `evaluate` and `predict` work under the strategy in force, if it has workers.

    Keras 3.15 calls `strategy.reduce` in two lines with what TensorFlow refuses (keras#20585): in
    `TensorFlowTrainer._maybe_symbolic_build`, `reduce("MEAN", batch, axis=None)` with a structure,
    of which it needs nothing but shapes and dtypes; and in `reduce_per_replica`,
    `reduce("MEAN", value, axis=0)` with the scalar loss and metrics of a step. The strategy, and
    no other one, accepts them from now on. For all other values it does what it did.
    """
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return
    if "reduce" in vars(strategy):
        return
    reduce = strategy.reduce

    def reduce_for_keras(reduce_op: Any, value: Any, axis: Any) -> Any:
        if reduce_op == "MEAN" and axis is None and keras.tree.is_nested(value):
            return keras.tree.map_structure(_of_first_device, value)
        if axis == 0 and _of_first_device(value).shape.rank == 0:
            axis = None
        return reduce(reduce_op, value, axis)

    def _of_first_device(value: Any) -> Any:
        return strategy.experimental_local_results(value)[0]

    vars(strategy)["reduce"] = reduce_for_keras
