"""Masks that the user passes to `freeze`: a FreezeMask, a mapping or a function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from keras_freeze import backend
from keras_freeze._utils.validation import type_error
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.parameters import WEIGHT, Parameter, shorten

MaskLike = FreezeMask | Mapping[str, Any] | Callable[[Any], Any]


def mask_from(mask: MaskLike, parameters: list[Parameter]) -> FreezeMask:
    """Return a FreezeMask over all weights, and over what else a mask names.

    Raises:
        TypeError: for any other mask.
        ValueError: for wrong paths, shapes or dtypes.
    """
    chosen = _arrays_by_position(mask, parameters)
    entries = []
    for p in parameters:
        if p.position in chosen:
            array = _check_array(*chosen.pop(p.position), p)
            entries.append(MaskEntry(p.position, p.path, array, p.is_frozen_candidate))
        elif p.is_frozen_candidate:
            array = np.ones(tuple(p.variable.shape), bool)
            entries.append(MaskEntry(p.position, p.path, array))
    if chosen:
        raise ValueError(
            "Argument `mask` covers variables that this model does not have: "
            f"{shorten([path for path, _ in chosen.values()])}. "
            f"Its trainable variables are {shorten([p.path for p in parameters])}."
        )
    return FreezeMask(entries, [parameters[e.position].variable for e in entries])


def parts_for(
    mask: FreezeMask, model: keras.Model, optimizers: Sequence[FreezeOptimizer]
) -> list[FreezeMask]:
    """Split a mask of a model's trainable variables: one part for each of several FreezeOptimizers.

    Raises:
        ValueError: if the mask freezes something that none of them trains.
    """
    trained = {id(v) for optimizer in optimizers for v in optimizer.built_variables}
    not_covered = [
        entry.path
        for entry in mask.entries
        if not entry.trained.all() and id(model.trainable_variables[entry.position]) not in trained
    ]
    if not_covered:
        raise ValueError(
            f"Argument `mask` freezes entries of {shorten(not_covered)}, which no FreezeOptimizer "
            "of the model trains: another optimizer would go on to change them. Leave them out of "
            "the mask, or train them with a FreezeOptimizer."
        )
    return [_part_for(mask, optimizer) for optimizer in optimizers]


def _part_for(mask: FreezeMask, optimizer: FreezeOptimizer) -> FreezeMask:
    """Return the entries of a mask about an optimizer's variables, with their positions there."""
    variables = list(optimizer.built_variables)
    entries = []
    for position, variable in enumerate(variables):
        entry = mask.find(variable)
        if entry is not None:
            entries.append(replace(entry, position=position))
    part = FreezeMask(entries, [variables[entry.position] for entry in entries])
    return mask_from(part, optimizer.classify(variables))


def _arrays_by_position(mask: Any, parameters: list[Parameter]) -> dict[int, tuple[str, Any]]:
    """Return the arrays of a mask with their paths, by the positions of their variables."""
    if isinstance(mask, FreezeMask):
        return {entry.position: (entry.path, entry.trained) for entry in mask.entries}
    if isinstance(mask, Mapping):
        return _from_mapping(mask, parameters)
    if callable(mask) and not isinstance(mask, type):
        return _from_function(mask, parameters)
    accepted = "a FreezeMask, a mapping from paths to boolean arrays, or a function of a variable"
    raise type_error("mask", mask, accepted)


def _from_mapping(
    mask: Mapping[str, Any], parameters: list[Parameter]
) -> dict[int, tuple[str, Any]]:
    if not mask:
        raise ValueError(
            "Argument `mask` must name the variables that are trained in part. Received: an empty "
            "mapping; to train everything, use freeze_rate=0."
        )
    chosen = {_position_of(path, parameters): (path, array) for path, array in mask.items()}
    if len(chosen) < len(mask):
        raise ValueError(
            "Argument `mask` names a variable twice. "
            f"Received: mask with the paths {shorten([str(path) for path in mask])}"
        )
    return chosen


def _from_function(
    mask: Callable[[Any], Any], parameters: list[Parameter]
) -> dict[int, tuple[str, Any]]:
    """Call a function with each weight, and each parameter that may be a weight of another name."""
    chosen = {}
    for p in parameters:
        array = mask(p.variable) if p.is_frozen_candidate or p.may_be_weight else None
        if array is None:
            continue
        array = _check_array(p.path, array, p)
        if p.is_frozen_candidate or not array.all():
            chosen[p.position] = (p.path, array)
    return chosen


def _position_of(path: Any, parameters: list[Parameter]) -> int:
    """Return the position of the one variable that a path, or the end of a path, names."""
    found = [p.position for p in parameters if p.path == path]
    if not found and isinstance(path, str):
        found = [p.position for p in parameters if p.path.endswith("/" + path)]
    if not found:  # a layer's name, for its only weight
        weights = [p for p in parameters if p.kind == WEIGHT]
        found = [p.position for p in weights if f"/{path}/" in f"/{p.path}"]
    if len(found) != 1:
        problem = "names several variables" if found else "names no trainable variable"
        raise ValueError(
            f"Argument `mask` must name variables by paths: {path!r} {problem}. The trainable "
            f"variables are {shorten([p.path for p in parameters], limit=40)}. Use a function of a "
            "variable where paths are ambiguous."
        )
    return found[0]


def _check_array(path: str, array: Any, parameter: Parameter) -> np.ndarray:
    """Return the mask of one variable as a NumPy array."""
    try:
        array = backend.to_numpy(array) if keras.ops.is_tensor(array) else np.asarray(array)
    except ValueError:  # of nested lists of different lengths
        array = np.array(None)
    if array.dtype != bool:
        raise ValueError(
            f"Argument `mask`: the array for {path!r} must be boolean, True where an entry is "
            f"trained. Received: dtype {array.dtype}."
        )
    if array.shape != tuple(parameter.variable.shape):
        raise ValueError(
            f"Argument `mask`: the array for {path!r} must have the variable's shape "
            f"{tuple(parameter.variable.shape)}. Received: shape {array.shape}."
        )
    if parameter.excluded and not array.all():
        raise ValueError(
            f"Argument `mask` freezes entries of {path!r}, which the optimizer's `exclude` says "
            "are always trained."
        )
    return array
