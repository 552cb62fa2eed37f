"""The checks of what a FreezeOptimizer is given: its settings and its variables."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_freeze._keras_private import public_optimizer_class
from keras_freeze._utils.validation import (
    check_instance,
    check_int,
    check_number,
    check_one_of,
    value_error,
)
from keras_freeze.criteria.criteria import check_criterion
from keras_freeze.masks.distributions import check_distribution
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.masks.patterns import model_name, pattern_without_name
from keras_freeze.masks.selection import check_freeze_rate
from keras_freeze.masks.settings import Distribution
from keras_freeze.masks.structure import check_structure
from keras_freeze.optimizer.delegation import DelegatingOptimizer
from keras_freeze.optimizer.grid_training import rounded_step
from keras_freeze.optimizer.inner_optimizer import averaging_optimizers, walk
from keras_freeze.parameters import Parameter, exclude_without_name, normalize_exclude

_STEPS = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

_ADAFACTOR_EPSILON = 1e-18  # whose square is a float32 number

FROZEN_WEIGHTS = ("keep", "decay", "zero")


def check_decay(frozen_weights: str, l2: float, inner: Any) -> None:
    """Check the arguments that FreezeNet-WD depends on.

    Raises:
        ValueError: for settings with which frozen weights do not all shrink by one factor.
    """
    if frozen_weights == "decay":
        if l2 == 0.0:
            raise ValueError(
                "frozen_weights='decay' shrinks frozen weights by the coupled weight decay, so "
                f"that it needs l2 > 0. Received: l2={l2}"
            )
        refused = ("clipnorm", "clipvalue", "global_clipnorm", "use_ema", "weight_decay")
        used = [name for name in refused if getattr(inner, name)]
        if public_optimizer_class(inner) is not keras.optimizers.SGD or used:
            raise ValueError(
                "With frozen_weights='decay', argument `inner_optimizer` must be "
                f"keras.optimizers.SGD without {', '.join(refused)}: only then do all frozen "
                "weights shrink by one factor. "
                f"Received: inner_optimizer={type(inner).__name__}"
                + (f" with {', '.join(used)}" if used else "")
            )


def check_grid(grid: float | None, inner: Any) -> None:
    """Check that an inner optimizer can train on a grid.

    Raises:
        ValueError: with moving averages, which would replace the points of the grid.
    """
    if grid is not None and averaging_optimizers(inner):
        raise ValueError(
            "Argument `grid` must be None where the inner optimizer has `use_ema=True`: averages "
            "are not on the grid. Train without it, and call `keras_freeze.quantize`. "
            f"Received: grid={grid!r}"
        )


def _grid_step(grid: Any) -> float | None:
    if grid is None:
        return None
    step = rounded_step(check_number("grid", grid, positive=True))
    smallest, largest = _STEPS
    if not smallest <= step <= largest:
        raise value_error("grid", grid, f"a float32 number between {smallest:g} and {largest:g}")
    return step


def check_inner_optimizer(inner: Any) -> Any:
    """Return `inner_optimizer` as an optimizer.

    Raises:
        TypeError: unless it is a Keras optimizer or the name of one.
        ValueError: for a LossScaleOptimizer, a FreezeOptimizer, or an optimizer that is built.
    """
    accepted = "a Keras optimizer or the name of one"
    if isinstance(inner, str):
        try:
            inner = keras.optimizers.get(inner)
        except ValueError:
            raise value_error("inner_optimizer", inner, accepted) from None
    check_instance("inner_optimizer", inner, keras.optimizers.Optimizer, accepted)
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "Argument `inner_optimizer` must not be a LossScaleOptimizer, with which a scaled "
            "gradient would decide the mask. Use `LossScaleOptimizer(FreezeOptimizer(...))`. "
            f"Received: inner_optimizer={inner!r}"
        )
    if isinstance(inner, DelegatingOptimizer):
        raise ValueError(
            "Argument `inner_optimizer` must not be a FreezeOptimizer itself. "
            f"Received: inner_optimizer={inner!r}"
        )
    if inner.built:
        raise ValueError(
            "Argument `inner_optimizer` must be new: this one is already built for a model. "
            f"Received: inner_optimizer={inner!r}"
        )
    return inner


def check_precision(parameters: Sequence[Parameter], frozen_weights: str) -> None:
    """Check that weights can be multiplied by factors close to 1, as "decay" does.

    Raises:
        ValueError: for "decay" with weights of less than 32 bits.
    """
    for p in parameters if frozen_weights == "decay" else ():
        dtype = keras.backend.standardize_dtype(p.variable.dtype)
        if p.is_frozen_candidate and dtype not in ("float32", "float64"):
            raise ValueError(
                "frozen_weights='decay' multiplies weights by factors close to 1: they must be "
                "float32, as they are with mixed precision, or float64. "
                f"Received: {p.path!r} of dtype {dtype}"
            )


def warn_of_constraints(
    parameters: Sequence[Parameter], frozen_weights: str, mask: FreezeMask | None
) -> None:
    """Warn of constraints that cannot hold, since frozen entries keep their values."""
    if frozen_weights == "zero":  # trained entries can comply with a constraint among zeros
        return
    partly = [p.position for p in parameters if p.is_frozen_candidate]
    if mask is not None:
        partly = [entry.position for entry in mask.entries if not entry.trained.all()]
    constrained = [
        f"{type(constraint).__name__} of {parameters[position].path!r}"
        for position in partly
        if (constraint := getattr(parameters[position].variable, "constraint", None))
    ]
    if constrained:
        warnings.warn(
            "Constraints cannot hold where entries are frozen, since those keep their values; "
            "they are applied to the trained entries alone. Remove the constraint, "
            "`exclude` the layer, or use frozen_weights='zero'. "
            f"Received: {', '.join(constrained)}",
            stacklevel=3,
        )


def warn_of_adafactor(inner: Any, mask: FreezeMask | None) -> None:
    """Warn of masks with which Adafactor divides zero by zero: a row and a column are frozen."""
    factored = [
        one
        for one in walk(inner)
        if isinstance(one, keras.optimizers.Adafactor) and one.epsilon_1 < _ADAFACTOR_EPSILON
    ]
    if mask is None or not factored:
        return
    for entry in mask.entries:
        trained = entry.trained
        if trained.ndim >= 2 and not (trained.any(axis=-1).all() or trained.any(axis=-2).all()):
            warnings.warn(
                f"In {entry.path!r} a row and a column are frozen whole. There Adafactor divides "
                "zero by zero, and all that is trained becomes NaN. Use "
                f"`Adafactor(..., epsilon_1={_ADAFACTOR_EPSILON})`.",
                stacklevel=3,
            )
            return


def names_for_config(
    exclude: Sequence[str], distribution: Distribution, parameters: Sequence[Parameter]
) -> tuple[list[str], str | list[list[Any]]]:
    """Return `exclude` and `distribution` as a config has them, without the model's name.

    The variables of a loaded model no longer have it in their paths.

    Args:
        exclude, distribution: the settings.
        parameters: what the optimizer was built with; none if it is not built.
    """
    paths = [p.first_path for p in parameters]
    name = model_name(paths)
    excluded = [exclude_without_name(entry, name, paths) for entry in exclude]
    if isinstance(distribution, str):
        return excluded, distribution
    weights = [p.first_path for p in parameters if p.is_frozen_candidate]
    # Pairs keep their order wherever the configuration is stored.
    return excluded, [
        [pattern_without_name(pattern, name, weights), rate] for pattern, rate in distribution
    ]


def may_change_in_loading(paths: Sequence[str]) -> bool:
    """Return whether a layer is in another one in paths; see `Parameter.first_path`."""
    num_outer = 2 if model_name(paths) else 1  # of a layer's own variables
    return any(path.count("/") > num_outer for path in paths)


CHECKS: dict[str, Callable[[Any], Any]] = {
    "freeze_rate": check_freeze_rate,
    "criterion": check_criterion,
    "l2": functools.partial(check_number, "l2", minimum=0.0),
    "frozen_weights": functools.partial(check_one_of, "frozen_weights", accepted=FROZEN_WEIGHTS),
    "exclude": normalize_exclude,
    "grid": _grid_step,
    "distribution": check_distribution,
    "structure": check_structure,
    "seed": functools.partial(check_int, "seed", end=2**32),
}
"""For each setting, a function that returns it in its final form or raises."""
