"""The loss that `fit` minimises and its gradients, with the model left as it was."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from keras_freeze import backend
from keras_freeze.batches import Batches


def loss_gradients(
    model: keras.Model, variables: list[Any], batches: Batches, loss: Any, scale: float
) -> list[Any]:
    """The float32 gradients of the loss, summed over the batches."""
    loss_of = _loss_function(model, loss)
    total: list[Any] = [None] * len(variables)
    with state_kept(model):
        for number, (x, y, sample_weight, weight) in enumerate(batches):
            gradients = _batch_gradients(
                functools.partial(loss_of, x, y, sample_weight), variables, scale, number
            )
            total = [_add(t, g, weight) for t, g in zip(total, gradients, strict=True)]
    return total


def _batch_gradients(
    loss: Callable[[], Any], variables: list[Any], scale: float, number: int
) -> list[Any]:
    with data_errors(number):
        value, gradients = backend.gradients(loss, variables, scale)
        # A scale that is too large for float16 is halved, as LossScaleOptimizer does.
        while scale > 1.0 and not _all_finite(gradients) and np.isfinite(backend.to_numpy(value)):
            scale /= 2.0
            value, gradients = backend.gradients(loss, variables, scale)
    if not np.isfinite(backend.to_numpy(value)).all():
        raise ValueError(
            f"The loss of batch {number} is {backend.to_numpy(value)}: look for NaN or infinite "
            "values in the data, for labels out of range, and for weights that are not finite."
        )
    return [None if g is None else ops.cast(g, "float32") / scale for g in gradients]


@contextlib.contextmanager
def data_errors(number: int) -> Iterator[None]:
    """Turns TensorFlow's errors about the data of a batch into a ValueError."""
    try:
        yield
    except tf.errors.OpError as error:
        raise ValueError(
            f"The model or its loss cannot be computed for batch {number}, for example because "
            f"labels are out of range or dtypes or shapes do not match: {error.message}"
        ) from error


def _all_finite(gradients: Iterable[Any]) -> bool:
    return all(bool(ops.all(ops.isfinite(g))) for g in gradients if g is not None)


def _add(total: Any, gradient: Any, weight: float) -> Any:
    if gradient is None:
        return total
    return gradient * weight if total is None else total + gradient * weight


def _loss_function(model: keras.Model, loss: Any) -> Callable[[Any, Any, Any], Any]:
    """The loss of a batch in training mode, as `fit` computes it."""
    call_arguments = {"training": True} if model._call_has_training_arg else {}
    if loss is None:
        if not model.compiled:
            raise ValueError("The model is not compiled: compile it with a loss, or pass `loss`.")

        def compiled_loss(x: Any, y: Any, sample_weight: Any) -> Any:
            if y is None and model._compile_loss is not None:
                raise ValueError("The model's loss needs targets. Received: y=None")
            return model._compute_loss(
                x=x,
                y=y,
                y_pred=model(x, **call_arguments),
                sample_weight=sample_weight,
                training=True,
            )

        return compiled_loss
    if isinstance(loss, (dict, list, tuple)):
        raise ValueError(
            "Argument `loss` must be one loss: a Keras loss, its name, or a function of `y_true` "
            "and `y_pred`. For several outputs give it such a function, or compile the model. "
            f"Received: loss={loss!r}"
        )
    function = keras.losses.get(loss)
    if not isinstance(function, keras.losses.Loss):
        function = _mean_loss(function)

    def given_loss(x: Any, y: Any, sample_weight: Any) -> Any:
        value = function(y, model(x, **call_arguments), sample_weight=sample_weight)
        return sum(model.losses, start=value)

    return given_loss


def _mean_loss(function: Callable[[Any, Any], Any]) -> keras.losses.Loss:
    class MeanLoss(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return function(y_true, y_pred)

    return MeanLoss()


def loss_scale(optimizer: Any) -> float:
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return float(optimizer.scale_loss(1.0)) if scaled else 1.0


@contextlib.contextmanager
def state_kept(model: keras.Model) -> Iterator[None]:
    """Puts moving statistics, seed generators and metrics back to what they were."""
    generator = keras.src.backend.common.global_state.get_global_attribute("global_seed_generator")
    variables = [*model.non_trainable_variables, *model.metrics_variables]
    if generator is not None:
        variables.append(generator.state)
    values = [backend.read(v) for v in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
