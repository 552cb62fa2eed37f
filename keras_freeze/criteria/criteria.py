"""How much each weight matters: the criteria that decide which weights are trained."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops

from keras_freeze import backend
from keras_freeze.criteria.grasp import GRASP, GraSP, as_grasp

RANDOM = "random"


Criterion = Callable[[Any, Any], Any] | GraSP


def snip(weights: Any, gradients: Any) -> Any:
    """SNIP's and FreezeNet's saliency |dL/dw * w| (equation 1)."""
    return ops.abs(ops.multiply(gradients, weights))


def magnitude(weights: Any, gradients: Any) -> Any:
    """|w|: the weights that are largest at the start."""
    return ops.abs(weights)


def random_scores(shape: tuple[int, ...], seed: int, position: int) -> np.ndarray:
    """Uniform scores in [0, 1) for the weight at `position`, which depend on nothing else.

    24 random bits each, from Philox's raw words, so that float32 holds them exactly.
    """
    words = np.random.Philox(key=[seed, position]).random_raw(int(np.prod(shape, dtype=np.int64)))
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)).reshape(shape)


CRITERIA: dict[str, Callable[[Any, Any], Any]] = {"snip": snip, "magnitude": magnitude}


def check_criterion(criterion: str | Criterion) -> str | Criterion:
    """`criterion` itself if it can be used.

    Args:
        criterion: "snip", "grasp", "magnitude", "random", a `GraSP`, or a function of the weights
            and the gradients of one variable, both float32 of the variable's shape, that returns
            scores of that shape. The highest scores are trained. To be used in the first batch,
            while a graph is traced, it must be made of `keras.ops`.

    Raises:
        ValueError: for an unknown name.
        TypeError: for anything else.
    """
    names = sorted([*CRITERIA, GRASP, RANDOM])
    accepted = (
        f"one of {', '.join(map(repr, names))}, a GraSP or a function of weights and gradients"
    )
    if isinstance(criterion, str):
        if criterion not in names:
            raise ValueError(
                f"Argument `criterion` must be {accepted}. Received: criterion={criterion!r}"
            )
    elif isinstance(criterion, type) or not (isinstance(criterion, GraSP) or callable(criterion)):
        raise TypeError(
            f"Argument `criterion` must be {accepted}. "
            f"Received: criterion={criterion!r} of type {type(criterion)}"
        )
    return criterion


def in_words(criterion: str | Criterion) -> str:
    """A criterion's name, with its settings; of a function where it is defined."""
    if isinstance(criterion, str) and criterion != GRASP:
        return criterion
    grasp = as_grasp(criterion)
    if grasp is not None:
        return repr(grasp)
    name = getattr(criterion, "__qualname__", type(criterion).__qualname__)
    return f"{criterion.__module__}.{name}"


def score(criterion: str | Criterion, weights: Any, gradients: Any, path: str) -> Any:
    """The scores of one variable's weights by "snip", "magnitude" or a function, in float32.

    Args:
        weights, gradients: tensors of one shape and any float dtype; `gradients` may be None where
            the loss does not depend on the weights, and counts as zero.
        path: names the variable in errors.

    Raises:
        ValueError: where a criterion of the user's own returns another shape.
    """
    function = CRITERIA[criterion] if isinstance(criterion, str) else criterion
    assert not isinstance(function, GraSP)
    weights = ops.cast(ops.stop_gradient(ops.convert_to_tensor(weights)), "float32")
    gradients = ops.zeros_like(weights) if gradients is None else ops.cast(gradients, "float32")
    scores = function(weights, gradients)
    if scores is None:
        raise ValueError("Argument `criterion` must return scores. Received: None from it")
    scores = ops.cast(scores, "float32")
    if tuple(scores.shape) != tuple(weights.shape):
        raise ValueError(
            "Argument `criterion` must return one score per weight. For the variable "
            f"{path!r} of shape {tuple(weights.shape)} it returned shape {tuple(scores.shape)}."
        )
    return scores


def warn_of_zero_scores(stacklevel: int = 2) -> None:
    """Warns that no score tells one weight from another."""
    warnings.warn(
        "All scores are zero, so that the mask goes by position alone: look at the data, the "
        "sample weights and the weights themselves.",
        stacklevel=stacklevel + 1,
    )


def check_one_process() -> None:
    """Refuses to decide a mask in one of several processes that train together.

    Raises:
        ValueError: if there are several, each of which would choose by its own batch.
    """
    count = backend.num_processes()
    if count > 1:
        raise ValueError(
            "Each of several processes that train together would decide by its own batch, so that "
            "their masks would differ. Decide in a program of one process and save the mask there, "
            "`keras_freeze.freeze(model, x, y).save(path)`; then give it to all processes, "
            "`keras_freeze.freeze(model, mask=keras_freeze.FreezeMask.load(path))`. "
            f"Received: {count} processes"
        )
