"""How much each weight matters: the criteria that decide which weights are trained."""

import functools
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from keras import ops

from keras_freeze._utils.validation import received, type_error, value_error
from keras_freeze.criteria.grasp_criterion import GRASP, GraSP, as_grasp
from keras_freeze.criteria.iterative import SYNFLOW, IterativeCriterion, SynFlow, as_iterative

FISHER = "fisher"
RANDOM = "random"


Criterion = Callable[[Any, Any], Any] | GraSP | IterativeCriterion


def snip(weights: Any, gradients: Any) -> Any:
    """Compute the saliency |dL/dw * w| of SNIP and FreezeNet (equation 1)."""
    return ops.abs(ops.multiply(gradients, weights))


def magnitude(weights: Any, gradients: Any) -> Any:
    """Compute |w|: the largest initial weights are trained."""
    return ops.abs(weights)


def smallest_magnitude(weights: Any, gradients: Any) -> Any:
    """Compute -|w|: the smallest initial weights are trained."""
    return ops.negative(ops.abs(weights))


def fisher(weights: Any, gradients: Any) -> Any:
    """Compute the squared gradient of one batch, the diagonal of its empirical Fisher matrix."""
    return ops.square(gradients)


def gradient(weights: Any, gradients: Any) -> Any:
    """Compute |dL/dw|, by which RigL chooses the weights that it adds."""
    return ops.abs(gradients)


CRITERIA: dict[str, Callable[[Any, Any], Any]] = {
    "snip": snip,
    "gradient": gradient,
    "magnitude": magnitude,
    "smallest_magnitude": smallest_magnitude,
    FISHER: fisher,
}

_WITHOUT_DATA = ("magnitude", "smallest_magnitude", RANDOM)


def check_criterion(criterion: str | Criterion) -> str | Criterion:
    """Check a criterion and return it.

    Args:
        criterion: a name of "snip", "gradient", "magnitude", "smallest_magnitude", "fisher",
            "random", "grasp" and "synflow"; a `GraSP`; an `IterativeCriterion`; or a function of
            the weights and the gradients of one variable, both float32 of the variable's shape,
            that returns scores of that shape. The highest scores are trained. To be used in the
            first batch, while a graph is traced, it must be made of `keras.ops`.

    Raises:
        ValueError: for an unknown name.
        TypeError: for anything else.
    """
    names = sorted([*CRITERIA, GRASP, RANDOM, SYNFLOW])
    accepted = (
        f"one of {', '.join(map(repr, names))}, a GraSP, an IterativeCriterion or a function of "
        "weights and gradients"
    )
    if isinstance(criterion, str):
        if criterion not in names:
            raise value_error("criterion", criterion, accepted)
        return criterion
    is_object = isinstance(criterion, (GraSP, IterativeCriterion))
    if isinstance(criterion, type) or not (is_object or callable(criterion)):
        raise type_error("criterion", criterion, accepted)
    return criterion


def check_gradients_suffice(criterion: str | Criterion, instead: str) -> None:
    """Check that a criterion needs no more than one gradient of each weight.

    Args:
        instead: what to do otherwise.

    Raises:
        ValueError: for GraSP and the criteria in steps.
    """
    if as_grasp(criterion) is not None:
        raise ValueError(f'The criterion "{GRASP}" needs the Hessian of the loss. {instead}')
    if as_iterative(criterion) is not None:
        raise ValueError(
            "A criterion in steps needs passes of its own over the network. "
            f"{instead} Received: criterion={criterion!r}"
        )


def needs_data(criterion: Any) -> bool:
    """Return whether a criterion looks at data; SynFlow, magnitudes and random numbers do not."""
    return not (isinstance(as_iterative(criterion), SynFlow) or criterion in _WITHOUT_DATA)


def in_words(criterion: str | Criterion) -> str:
    """Return a criterion's name with its settings, for a `functools.partial` its arguments.

    A function has its module and name alone, an object those of its class.
    """
    grasp, iterative = as_grasp(criterion), as_iterative(criterion)
    if grasp is not None:
        return repr(grasp)
    if iterative is not None:
        module = type(iterative).__module__
        is_own = module.startswith("keras_freeze.")
        return repr(iterative) if is_own else f"{module}.{iterative!r}"
    if isinstance(criterion, str):
        return criterion
    return _function_in_words(criterion)


def _function_in_words(function: Any) -> str:
    if isinstance(function, functools.partial):
        settings = [
            *map(_setting_in_words, function.args),
            *(f"{name}={_setting_in_words(v)}" for name, v in function.keywords.items()),
        ]
        return f"{_function_in_words(function.func)}({', '.join(settings)})"
    kind = type(function)
    module = getattr(function, "__module__", kind.__module__)
    return f"{module}.{getattr(function, '__qualname__', kind.__qualname__)}"


def _setting_in_words(value: Any) -> str:
    """Return what is the same in each process: an object's `repr` may have its address."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if isinstance(value, np.ndarray) or ops.is_tensor(value):
        bits = np.ascontiguousarray(ops.convert_to_numpy(value)).tobytes()
        return f"array({zlib.crc32(bits):08x})"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_setting_in_words, value))}]"
    return _function_in_words(value) if callable(value) else type(value).__qualname__


def score(criterion: str | Criterion, weights: Any, gradients: Any, path: str) -> Any:
    """Compute the scores of a variable by a name of `CRITERIA` or a function, in float32.

    Args:
        weights, gradients: tensors of one shape and any float dtype; `gradients` may be None where
            the loss does not depend on the weights, and counts as zero.
        path: names the variable in errors.

    Raises:
        TypeError: if a custom criterion returns anything but real numbers.
        ValueError: if it returns another shape, or None.
    """
    function = CRITERIA[criterion] if isinstance(criterion, str) else criterion
    assert not isinstance(function, (GraSP, IterativeCriterion))
    weights = ops.cast(ops.stop_gradient(ops.convert_to_tensor(weights)), "float32")
    gradients = ops.zeros_like(weights) if gradients is None else ops.cast(gradients, "float32")
    scores = function(weights, gradients)
    if scores is None:
        raise ValueError("Argument `criterion` must return scores. Received: None from it")
    scores = _real(scores, path)
    if tuple(scores.shape) != tuple(weights.shape):
        raise ValueError(
            "Argument `criterion` must return one score per weight. For the variable "
            f"{path!r} of shape {tuple(weights.shape)} it returned shape {tuple(scores.shape)}."
        )
    return scores


def _real(scores: Any, path: str) -> Any:
    """Return scores as a tensor in float32."""
    try:
        tensor = ops.convert_to_tensor(scores)
        if not any(kind in str(tensor.dtype) for kind in ("complex", "string")):
            return ops.cast(tensor, "float32")
    except (TypeError, ValueError):
        pass
    raise TypeError(
        "Argument `criterion` must return a tensor of real numbers. "
        + received(f"scores of {path!r}", scores)
    )


def warn_of_zero_scores(stacklevel: int = 2) -> None:
    """Warn that all scores are zero."""
    warnings.warn(
        "All scores are zero, so that the mask depends on position alone: look at the data, the "
        "sample weights and the weights themselves.",
        stacklevel=stacklevel + 1,
    )
