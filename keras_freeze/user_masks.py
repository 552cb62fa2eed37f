"""Masks of the user's own: a FreezeMask, a mapping from paths to arrays, or a function."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from keras_freeze import backend
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.parameters import WEIGHT, Parameter, shorten

MaskLike = FreezeMask | Mapping[str, Any] | Callable[[Any], Any]


def mask_from(mask: Any, parameters: list[Parameter]) -> FreezeMask:
    """A FreezeMask over all weights, and what else was named, from a mask of the user's own."""
    if isinstance(mask, FreezeMask):
        chosen = {entry.position: (entry.path, entry.trained) for entry in mask.entries}
    elif isinstance(mask, Mapping):
        if not mask:
            raise ValueError(
                "Argument `mask` must name the variables that are trained in part. Received: an "
                "empty mapping; to train everything, use freeze_rate=0."
            )
        chosen = {_position_of(path, parameters): (path, array) for path, array in mask.items()}
        if len(chosen) < len(mask):
            raise ValueError(
                "Argument `mask` names a variable twice. "
                f"Received: mask with the paths {shorten([str(path) for path in mask])}"
            )
    elif callable(mask):
        chosen = _from_function(mask, parameters)
    else:
        raise TypeError(
            "Argument `mask` must be a FreezeMask, a mapping from paths to boolean arrays, or a "
            f"function of a variable. Received: mask={mask!r} of type {type(mask)}"
        )
    entries = []
    for p in parameters:
        shape = tuple(p.variable.shape)
        if p.position in chosen:
            array = _check_array(*chosen.pop(p.position), p)
            entries.append(MaskEntry(p.position, p.path, array, p.is_frozen_candidate))
        elif p.is_frozen_candidate:
            entries.append(MaskEntry(p.position, p.path, np.ones(shape, bool)))
    if chosen:
        raise ValueError(
            "Argument `mask` covers variables that this model does not have: "
            f"{shorten([path for path, _ in chosen.values()])}. "
            f"Its trainable variables are {shorten([p.path for p in parameters])}."
        )
    return FreezeMask(entries, [parameters[e.position].variable for e in entries])


def _from_function(
    mask: Callable[[Any], Any], parameters: list[Parameter]
) -> dict[int, tuple[str, Any]]:
    """What a function says of weights, and of parameters that may be weights of other names."""
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
    found = [p.position for p in parameters if p.path == path]
    if not found and isinstance(path, str):
        found = [p.position for p in parameters if p.path.endswith("/" + path)]
    if not found:  # a layer's name, for its only weight
        weights = [p for p in parameters if p.kind == WEIGHT]
        found = [p.position for p in weights if f"/{path}/" in f"/{p.path}"]
    if len(found) != 1:
        problem = "names several variables" if found else "names no trainable variable"
        raise ValueError(
            f"Argument `mask`: the path {path!r} {problem}. The trainable variables are "
            f"{shorten([p.path for p in parameters], limit=40)}. Use a function of a variable "
            "where paths are ambiguous."
        )
    return found[0]


def _check_array(path: str, array: Any, parameter: Parameter) -> np.ndarray:
    array = backend.to_numpy(array) if keras.ops.is_tensor(array) else np.asarray(array)
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
