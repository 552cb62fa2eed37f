"""How much each weight matters: the criteria that decide which weights are trained."""

from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops

Criterion = Callable[[Any, Any], Any]

RANDOM = "random"


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


CRITERIA: dict[str, Criterion] = {"snip": snip, "magnitude": magnitude}


def check_criterion(criterion: str | Criterion) -> str | Criterion:
    """`criterion` itself if it can be used.

    Args:
        criterion: "snip", "magnitude", "random", or a function of the weights and the gradients
            of one variable, both float32 of the variable's shape, that returns scores of that
            shape. The highest scores are trained. To be used in the first batch, while a graph is
            traced, it must be made of `keras.ops`.

    Raises:
        ValueError: for an unknown name.
        TypeError: for anything else.
    """
    names = sorted([*CRITERIA, RANDOM])
    if isinstance(criterion, str):
        if criterion not in names:
            raise ValueError(
                f"Argument `criterion` must be one of {', '.join(map(repr, names))} or a function "
                f"of weights and gradients. Received: criterion={criterion!r}"
            )
    elif not callable(criterion):
        raise TypeError(
            f"Argument `criterion` must be one of {', '.join(map(repr, names))} or a function of "
            f"weights and gradients. Received: criterion={criterion!r} of type {type(criterion)}"
        )
    return criterion


def score(criterion: str | Criterion, weights: Any, gradients: Any, path: str) -> Any:
    """The scores of one variable's weights by any criterion but "random", in float32.

    Args:
        weights, gradients: tensors of one shape and any float dtype; `gradients` may be None where
            the loss does not depend on the weights, and counts as zero.
        path: names the variable in errors.

    Raises:
        ValueError: where a criterion of the user's own returns another shape.
    """
    function = CRITERIA[criterion] if isinstance(criterion, str) else criterion
    weights = ops.cast(weights, "float32")
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
