"""The loss that `fit` minimizes and its gradients; the model is left as it was."""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_freeze import _keras_private, backend
from keras_freeze._utils.validation import type_error, value_error
from keras_freeze.gradients.data import Batch
from keras_freeze.gradients.preserve import state_kept
from keras_freeze.gradients.processes import check_alike, failing_together, sum_of_processes

_MAX_CAUSE = 300

# Computes the value of a loss, and something for each variable, such as its gradient.
Compute = Callable[..., tuple[Any, list[Any]]]


def loss_gradients(
    model: keras.Model,
    variables: list[Any],
    batches: Iterable[Batch],
    loss: Any,
    scale: float,
    temperature: float = 1.0,
) -> list[Any]:
    """Compute the float32 gradients of the loss, summed over the batches and over all processes.

    The model's outputs are divided by `temperature` before the loss.
    """
    return _summed(backend.gradients, model, variables, batches, loss, scale, temperature)


def squared_gradients(
    model: keras.Model,
    variables: list[Any],
    groups: Iterable[Iterable[Batch]],
    loss: Any,
    scale: float,
) -> list[Any]:
    """Compute the float32 squares of the gradient of each group of batches, summed over groups.

    The gradient of a group is that of all processes together.

    Raises:
        ValueError: in all processes, if they have different numbers of groups.
    """
    groups = list(groups)
    check_alike("the number of batches", len(groups), variables)
    loss_of = loss_function(model, loss, 1.0)
    numbers = itertools.count()
    total: list[Any] = [None] * len(variables)
    with state_kept(model):
        for group in groups:
            numbered = zip(group, numbers)  # noqa: B905 - the numbers go on in the next group
            with failing_together(variables):
                gradients = _sum_of_batches(backend.gradients, loss_of, variables, numbered, scale)
            for i, gradient in enumerate(sum_of_processes(gradients, variables)):
                if gradient is not None:
                    total[i] = _add(total[i], ops.square(gradient), 1.0)
    return total


def hessian_gradient_products(
    model: keras.Model,
    variables: list[Any],
    batches: Iterable[Batch],
    loss: Any,
    scale: float,
    temperature: float,
) -> list[Any]:
    """Compute the product H g of the loss's Hessian and gradient, summed over all batches.

    g is the gradient that `loss_gradients` gives, and H the Hessian of the same sum. Both passes
    start from the same random state, so that they see the same Dropout.

    Raises:
        ValueError: where the backend has no second derivative of one of the model's operations.
    """
    batches = list(batches)
    gradients = loss_gradients(model, variables, batches, loss, scale, temperature)
    # A vector of about 1 does not underflow in float16; a power of two changes no digits.
    size = max((float(ops.max(ops.abs(g))) for g in gradients if g is not None), default=0.0)
    size = 2.0 ** np.floor(np.log2(size)) if 0.0 < size < np.inf else 1.0
    vectors = [None if g is None else g / size for g in gradients]
    compute = functools.partial(backend.hessian_products, vectors=vectors)
    try:
        products = _summed(compute, model, variables, batches, loss, scale, temperature)
    except LookupError as error:
        if type(error) is not LookupError:
            raise
        raise ValueError(
            'The criterion "grasp" needs second derivatives, and the backend has none for an '
            f"operation of this model or its loss: {error}. Use another one, or another criterion."
        ) from error
    return [None if p is None else p * size for p in products]


def _summed(
    compute: Compute,
    model: keras.Model,
    variables: list[Any],
    batches: Iterable[Batch],
    loss: Any,
    scale: float,
    temperature: float,
) -> list[Any]:
    loss_of = loss_function(model, loss, temperature)
    with failing_together(variables), state_kept(model):
        total = _sum_of_batches(compute, loss_of, variables, zip(batches, itertools.count()), scale)
    return sum_of_processes(total, variables)


def _sum_of_batches(
    compute: Compute,
    loss_of: Callable[[Any, Any, Any], Any],
    variables: list[Any],
    numbered: Iterable[tuple[Batch, int]],
    scale: float,
) -> list[Any]:
    total: list[Any] = [None] * len(variables)
    for (x, y, sample_weight, weight), number in numbered:
        of_batch = functools.partial(
            compute, functools.partial(loss_of, x, y, sample_weight), variables
        )
        results = _finite_results(of_batch, scale, number)
        total = [_add(t, r, weight) for t, r in zip(total, results, strict=True)]
    return total


def _finite_results(compute: Compute, scale: float, number: int) -> list[Any]:
    with data_errors(number):
        value, results = compute(scale=scale)
        # A scale that is too large for float16 is halved, as LossScaleOptimizer does.
        while scale > 1.0 and not _all_finite(results) and np.isfinite(backend.to_numpy(value)):
            scale /= 2.0
            value, results = compute(scale=scale)
    if not np.isfinite(backend.to_numpy(value)).all():
        raise ValueError(
            f"The loss of batch {number} is {backend.to_numpy(value)}: look for NaN or infinite "
            "values in the data, for labels out of range, and for weights that are not finite."
        )
    results = [None if r is None else ops.cast(r, "float32") for r in results]
    if scale == 1.0:  # without a copy of all of them
        return results
    return [None if r is None else r / scale for r in results]


@contextlib.contextmanager
def data_errors(number: int | None = None) -> Iterator[None]:
    """Raise a ValueError where a backend raises an error about the data or one batch of them."""
    try:
        yield
    except backend.DATA_ERRORS as error:
        if backend.is_out_of_memory(error):
            raise
        what = "these data" if number is None else f"batch {number}"
        raise ValueError(
            f"The model or its loss cannot be computed for {what}, for example because labels are "
            f"out of range or dtypes or shapes do not match: {backend.cause_of(error)[:_MAX_CAUSE]}"
        ) from error


def evaluate(model: keras.Model, x: Any, y: Any, batch_size: int | None = None) -> dict[str, Any]:
    """Return loss and metrics, by name, as `model.evaluate` does."""
    with data_errors():
        return model.evaluate(x, y, batch_size=batch_size, verbose=0, return_dict=True)


def _all_finite(results: Iterable[Any]) -> bool:
    return all(bool(ops.all(ops.isfinite(r))) for r in results if r is not None)


def _add(total: Any, result: Any, weight: float) -> Any:
    if result is None:
        return total
    weighted = result if weight == 1.0 else result * weight  # without a copy of a single batch
    return weighted if total is None else total + weighted


def loss_function(
    model: keras.Model, loss: Any, temperature: float
) -> Callable[[Any, Any, Any], Any]:
    """Return the function that computes a batch's loss in training mode, as `fit` does."""
    call_arguments = {"training": True} if takes_training(model.call) else {}
    loss_arguments = {"training": True} if takes_training(model.compute_loss) else {}

    def predict(x: Any) -> Any:
        y_pred = model(x, **call_arguments)
        return y_pred if temperature == 1.0 else _divided(y_pred, temperature)

    if loss is None:
        if not model.compiled:
            raise ValueError("The model is not compiled: compile it with a loss, or pass `loss`.")
        _check_loss_of_fit(model)

        def compiled_loss(x: Any, y: Any, sample_weight: Any) -> Any:
            if y is None and model.loss is not None:
                raise ValueError("The model's loss needs targets. Received: y=None")
            y_pred = predict(x)
            _check_has_loss(model)
            return model.compute_loss(x, y, y_pred, sample_weight, **loss_arguments)

        return compiled_loss
    function = _given_loss(loss)

    def given_loss(x: Any, y: Any, sample_weight: Any) -> Any:
        value = function(y, predict(x), sample_weight=sample_weight)
        return sum(model.losses, start=value)

    return given_loss


def takes_training(function: Callable[..., Any]) -> bool:
    """Return whether a function, such as a model's `call`, has an argument `training`."""
    return "training" in inspect.signature(function).parameters


def _given_loss(loss: Any) -> keras.losses.Loss:
    """Return the loss that the user passes in place of the compiled one."""
    accepted = (
        "one loss: a Keras loss, its name, or a function of `y_true` and `y_pred` (for several "
        "outputs pass such a function, or compile the model)"
    )
    if isinstance(loss, type):
        raise type_error("loss", loss, accepted)
    if isinstance(loss, (dict, list, tuple)):
        raise value_error("loss", loss, accepted)
    try:
        function = keras.losses.get(loss)
    except ValueError:
        raise value_error("loss", loss, accepted) from None
    return function if isinstance(function, keras.losses.Loss) else _mean_loss(function)


def _check_loss_of_fit(model: keras.Model) -> None:
    """Refuse a loss that `fit` computes in a way that is not possible here."""
    own = type(model).stateless_compute_loss is not keras.Model.stateless_compute_loss
    if own and keras.backend.backend() == "jax":
        raise ValueError(
            "The model overrides `stateless_compute_loss`, so that the loss of `fit` cannot be "
            "computed outside of it: override `compute_loss` instead, pass `loss`, or let the "
            f"first batch of `fit` decide. Received: model={model!r}"
        )


def _check_has_loss(model: keras.Model) -> None:
    """Check that a loss depends on the data; otherwise regularizers alone would decide."""
    is_compiled_with_one = any(one is not None for one in tree.flatten(model.loss))
    computes_its_own = (
        "compute_loss" in vars(model) or type(model).compute_loss is not keras.Model.compute_loss
    )
    if is_compiled_with_one or computes_its_own:
        return
    if not _keras_private.has_added_losses(model):  # of `add_loss`
        raise ValueError(
            "The model has no loss that depends on the data, only regularizers or nothing: "
            "compile it with a loss, pass `loss`, or let the model define `train_step` or "
            f"`compute_loss` or call `add_loss`. Received: model={model!r} compiled with "
            f"loss={model.loss!r}"
        )


def _divided(y_pred: Any, temperature: float) -> Any:
    def divide(output: Any) -> Any:
        if keras.backend.standardize_dtype(output.dtype) in ("float16", "bfloat16"):
            output = ops.cast(output, "float32")
        return output / temperature

    return tree.map_structure(divide, y_pred)


def check_takes_logits(model: keras.Model, loss: Any, why: str, instead: str) -> None:
    """Check that a criterion that needs logits is not used with a loss of probabilities.

    Args:
        why: what the criterion does, which is wrong for probabilities.
        instead: another thing to do.

    Raises:
        ValueError: for a loss with `from_logits=False`.
    """
    for one in tree.flatten(getattr(model, "loss", None) if loss is None else loss):
        if _takes_probabilities(one):
            raise ValueError(
                f"{why}, which is wrong for probabilities, and this loss has from_logits=False. "
                "Let the model give logits and the loss take them (from_logits=True), or use "
                f"{instead}. Received: loss={one!r}"
            )


def _takes_probabilities(loss: Any) -> bool:
    if loss is None:
        return False
    if isinstance(loss, str) and loss.lower() in ("crossentropy", "ce"):
        return True  # `compile` makes one of the three from it
    loss = keras.losses.get(loss)
    if not isinstance(loss, keras.losses.Loss):  # a function
        parameter = inspect.signature(loss).parameters.get("from_logits")
        return parameter is not None and parameter.default is False
    return getattr(loss, "from_logits", None) is False


def _mean_loss(function: Callable[[Any, Any], Any]) -> keras.losses.Loss:
    class MeanLoss(keras.losses.Loss):
        def call(self, y_true: Any, y_pred: Any) -> Any:
            return function(y_true, y_pred)

    return MeanLoss()


def loss_scale(optimizer: Any) -> float:
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return float(optimizer.scale_loss(1.0)) if scaled else 1.0
