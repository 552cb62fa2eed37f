"""The scores of a model's weights: one pass over data, and a criterion."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_freeze import backend, criteria
from keras_freeze.gradients.data import Batch, Batches
from keras_freeze.gradients.loss import (
    check_takes_logits,
    hessian_gradient_products,
    loss_gradients,
    loss_scale,
)
from keras_freeze.model_state import (
    build_model,
    check_model,
    optimizer_of,
)
from keras_freeze.parameters import (
    WEIGHT,
    Parameter,
    classify,
    shorten,
)


def compute_saliency(
    model: keras.Model,
    x: Any,
    y: Any = None,
    criterion: str | criteria.Criterion = "snip",
    *,
    loss: Any = None,
) -> dict[str, np.ndarray]:
    """The saliency scores of all weights of a model's trainable layers, to look at.

    Args:
        model: a built model; compiled, unless `loss` is given.
        x, y: one batch of arrays, or a dataset whose first batch is used.
        criterion: as in FreezeOptimizer.
        loss: one loss, as in `freeze`, instead of the compiled one.

    Returns:
        Scores in float32 by the path of the variable, of its shape. Equation 1's for "snip".

    Raises:
        ValueError: as in `freeze`; or if two variables have the same path.

    Example:

    ```python
    scores = keras_freeze.compute_saliency(model, x[:100], y[:100])
    ```
    """
    check_model(model)
    criterion = criteria.check_criterion(criterion)
    batches = Batches(x, y, None, 1, None)
    build_model(model, batches)
    parameters = [p for p in classify(model.trainable_variables) if p.kind == WEIGHT]
    paths = [p.path for p in parameters]
    if len(set(paths)) < len(paths):
        raise ValueError(f"Several weights share a path: {shorten(sorted(paths))}.")
    scale = loss_scale(optimizer_of(model))
    with backend.outside_strategy():
        scores = _scores(model, parameters, batches, criterion, 0, loss, scale)
    return dict(zip(paths, scores, strict=True))


def _random_scores(parameters: list[Parameter], seed: int) -> list[np.ndarray]:
    return [criteria.random_scores(tuple(p.variable.shape), seed, p.position) for p in parameters]


def _scores(
    model: keras.Model,
    parameters: list[Parameter],
    batches: Batches,
    criterion: str | criteria.Criterion,
    seed: int,
    loss: Any,
    scale: float,
) -> list[np.ndarray]:
    grasp = criteria.as_grasp(criterion)
    if grasp is not None:
        return _grasp_scores(model, parameters, batches, grasp, loss, scale)
    variables = [p.variable for p in parameters]
    gradients = loss_gradients(model, variables, batches, loss, scale)
    if criterion == criteria.RANDOM:
        return _random_scores(parameters, seed)
    gradients.reverse()  # so that each is let go once its scores are there
    return [
        backend.to_numpy(criteria.score(criterion, p.variable, gradients.pop(), p.path))
        for p in parameters
    ]


def _grasp_scores(
    model: keras.Model,
    parameters: list[Parameter],
    batches: Iterable[Batch],
    grasp: criteria.GraSP,
    loss: Any,
    scale: float,
) -> list[np.ndarray]:
    if grasp.temperature != 1.0:
        check_takes_logits(model, loss, grasp.temperature)
    if grasp.samples_per_class is not None:
        width = _output_width(model, next(iter(batches))[0])
        batches = criteria.first_of_each_class(batches, grasp.samples_per_class, width)
    variables = [p.variable for p in parameters]
    products = hessian_gradient_products(model, variables, batches, loss, scale, grasp.temperature)
    return [
        backend.to_numpy(criteria.score(criteria.grasp, p.variable, product, p.path))
        for p, product in zip(parameters, products, strict=True)
    ]


def _output_width(model: keras.Model, x: Any) -> int | None:
    """The last dimension of a model's output; None of several outputs."""
    inputs = tree.map_structure(lambda part: keras.KerasTensor(part.shape, part.dtype), x)
    outputs = model.compute_output_spec(inputs)
    return None if tree.is_nested(outputs) else outputs.shape[-1]
