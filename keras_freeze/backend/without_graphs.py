"""What JAX and PyTorch have in common: no `tf.distribute`, and no graph that outlives it."""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras

from keras_freeze import _keras_private

RESTRICTS_GRADIENTS = False


def cause_of(error: Any) -> str:
    """Return what was wrong with the data, from one of `DATA_ERRORS`."""
    return str(error).strip()


def eager_scope() -> contextlib.AbstractContextManager[None]:
    """Return a scope that does nothing: Keras builds optimizers before it traces."""
    return contextlib.nullcontext()


def check_strategy(variables: Sequence[Any], optimizers: Sequence[Any]) -> None:
    """Do nothing: `tf.distribute` and its strategies are TensorFlow's."""


def outside_strategy() -> contextlib.AbstractContextManager[None]:
    """Return a scope in which no strategy of `tf.distribute` is in force."""
    return contextlib.nullcontext()


def strategy_scope(owner: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a scope that creates variables under the strategy of a model or an optimizer."""
    return contextlib.nullcontext()


def replicas_of(model: keras.Model) -> int:
    """Return how many replicas a model is trained on."""
    return 1


def num_replicas() -> int:
    """Return how many replicas there are whose gradients an optimizer sums."""
    return 1


def zero_after(variables: Sequence[Any]) -> None:
    """Return None: there is no need for an order."""


def after(operations: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Return a scope that does nothing: `operations` have run already."""
    return contextlib.nullcontext()


def is_traced() -> bool:
    """Return whether a graph is being built that may be executed when its variables are gone."""
    return False


def is_plain_variable(value: Any) -> bool:
    """Return whether it is a variable of the backend that Keras does not know of."""
    return False


def create_variables(model: keras.Model, data: Any) -> None:
    """Build what a model's training step uses, for a batch of data, as `fit` does."""
    _keras_private.build_symbolically(model, data)


def untrack_built_variables(optimizer: Any) -> None:
    """Do nothing: only TensorFlow's checkpoints contain the attributes of objects."""
