"""The scores of a model's weights: one pass over data, and a criterion."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import tree

from keras_freeze import backend, criteria
from keras_freeze.criteria.iterative_scoring import iterative_scores
from keras_freeze.gradients.data import Batch, Batches, preprocessed
from keras_freeze.gradients.loss import (
    check_takes_logits,
    hessian_gradient_products,
    loss_gradients,
    loss_scale,
    squared_gradients,
)
from keras_freeze.gradients.processes import alone, failing_together
from keras_freeze.masks.ranked import random_scores
from keras_freeze.model_state import ModelOptimizers, build_model, check_model
from keras_freeze.parameters import WEIGHT, Parameter, classify, shorten


def compute_saliency(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    criterion: str | criteria.Criterion = "snip",
    *,
    loss: Any = None,
) -> dict[str, np.ndarray]:
    """Compute the saliency scores of all weights of a model's trainable layers.

    Of several processes that train a model together, all must call this, as `freeze`: the gradients
    are summed over them.

    Args:
        model: a built model; compiled, unless `loss` is given.
        x, y: one batch of arrays, or a dataset whose first batch is used. Some criteria need none.
        criterion: as in FreezeOptimizer. One in steps gives the scores of its first step, of the
            network before anything is pruned.
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
    batches = None
    if x is not None or criteria.needs_data(criterion):
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
    batches: Batches | None,
    criterion: str | criteria.Criterion,
    *,
    seed: int,
    loss: Any,
    outer: Any,
    masks: Sequence[np.ndarray] | None = None,
) -> list[np.ndarray]:
    """Compute the float32 scores of weights by the loss that `fit` minimizes.

    Args:
        batches: None for a criterion that needs no data.
        loss: one loss, as in `freeze`. None: the one that the model is compiled with.
        outer: the optimizer that gets the model's gradients, which may scale the loss.
        masks: for a criterion in steps, the weights that are in the network; None for all.
    """
    grasp, iterative = criteria.as_grasp(criterion), criteria.as_iterative(criterion)
    variables = [p.variable for p in parameters]
    with backend.outside_strategy(), alone(model):
        scale = loss_scale(outer)
        if iterative is not None:
            return iterative_scores(model, parameters, batches, iterative, masks, loss, scale)
        if batches is None:
            return scores_of_gradients(parameters, [None] * len(parameters), criterion, seed)
        if grasp is not None:
            return _grasp_scores(model, parameters, batches, grasp, loss, scale)
        if criterion == criteria.FISHER:
            return _fisher_scores(model, parameters, batches, loss, scale)
        gradients = loss_gradients(model, variables, batches, loss, scale)
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
    return [_score(criterion, p, gradients.pop()) for p in parameters]


def _score(criterion: str | criteria.Criterion, parameter: Parameter, gradient: Any) -> np.ndarray:
    if criterion == "gradient" and gradient is not None:
        values = backend.to_numpy(gradient).astype(np.float32, copy=False)
        return np.abs(values, out=values)  # a backend takes longer, for the memory of the result
    return backend.to_numpy(criteria.score(criterion, parameter.variable, gradient, parameter.path))


def _fisher_scores(
    model: keras.Model, parameters: list[Parameter], batches: Batches, loss: Any, scale: float
) -> list[np.ndarray]:
    """Return the squared gradients of single batches, summed."""
    variables = [p.variable for p in parameters]
    squares = squared_gradients(model, variables, batches.wholes, loss, scale)
    return [
        np.zeros(tuple(v.shape), np.float32) if square is None else backend.to_numpy(square)
        for v, square in zip(variables, squares, strict=True)
    ]


def _grasp_scores(
    model: keras.Model,
    parameters: list[Parameter],
    batches: Iterable[Batch],
    grasp: criteria.GraSP,
    loss: Any,
    scale: float,
) -> list[np.ndarray]:
    variables = [p.variable for p in parameters]
    if grasp.temperature != 1.0:
        check_takes_logits(
            model,
            loss,
            why='The criterion "grasp" divides the model\'s outputs by '
            f"temperature={grasp.temperature}",
            instead="criterion=GraSP(temperature=1.0)",
        )
    if grasp.samples_per_class is not None:
        with failing_together(variables):
            width = _output_width(model, next(iter(batches))[0])
            batches = criteria.first_of_each_class(batches, grasp.samples_per_class, width)
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
