"""The scores of a model's weights: one pass over data, and a criterion."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_freeze import backend, criteria
from keras_freeze.gradients.data import Batch, Batches, preprocessed
from keras_freeze.gradients.loss import (
    check_takes_logits,
    hessian_gradient_products,
    loss_gradients,
    loss_scale,
)
from keras_freeze.gradients.processes import alone
from keras_freeze.masks.ranked import random_scores
from keras_freeze.model_state import ModelOptimizers, build_model, check_model
from keras_freeze.parameters import WEIGHT, Parameter, classify, shorten


def compute_saliency(
    model: keras.Model,
    x: Any,
    y: Any = None,
    criterion: str | criteria.Criterion = "snip",
    *,
    loss: Any = None,
) -> dict[str, np.ndarray]:
    """Compute the saliency scores of all weights of a model's trainable layers.

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
    batches = Batches(*preprocessed(model, x, y, None), 1, None)
    build_model(model, batches)
    parameters = [p for p in classify(model.trainable_variables) if p.kind == WEIGHT]
    paths = [p.path for p in parameters]
    if len(set(paths)) < len(paths):
        raise ValueError(f"Several weights share a path: {shorten(sorted(paths))}.")
    outer = ModelOptimizers(model).outer
    scores = scores_of_loss(model, parameters, batches, criterion, seed=0, loss=loss, outer=outer)
    return dict(zip(paths, scores, strict=True))


def scores_of_loss(
    model: keras.Model,
    parameters: list[Parameter],
    batches: Batches,
    criterion: str | criteria.Criterion,
    *,
    seed: int,
    loss: Any,
    outer: Any,
) -> list[np.ndarray]:
    """Compute the float32 scores of weights by the loss that `fit` minimizes.

    Args:
        loss: one loss, as in `freeze`. None: the one that the model is compiled with.
        outer: the optimizer that gets the model's gradients, which may scale the loss.
    """
    grasp = criteria.as_grasp(criterion)
    with backend.outside_strategy(), alone(model):
        scale = loss_scale(outer)
        if grasp is not None:
            return _grasp_scores(model, parameters, batches, grasp, loss, scale)
        gradients = loss_gradients(model, [p.variable for p in parameters], batches, loss, scale)
        return scores_of_gradients(parameters, gradients, criterion, seed)


def scores_of_gradients(
    parameters: list[Parameter],
    gradients: list[Any],
    criterion: str | criteria.Criterion,
    seed: int,
) -> list[np.ndarray]:
    """Compute the scores of weights by their gradients, and empty the list of these."""
    if criterion == criteria.RANDOM:
        shapes = [tuple(p.variable.shape) for p in parameters]
        return [
            random_scores(shape, seed, p.position)
            for p, shape in zip(parameters, shapes, strict=True)
        ]
    gradients.reverse()  # so that the memory of each is free once its scores are computed
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
    """Return the last dimension of a model's output; None for several outputs."""
    inputs = tree.map_structure(lambda part: keras.KerasTensor(part.shape, part.dtype), x)
    outputs = model.compute_output_spec(inputs)
    return None if tree.is_nested(outputs) else outputs.shape[-1]
