"""What is trained of a model as one vector, for machines that train it together."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_freeze import backend
from keras_freeze._utils.bits import as_bits, from_bits, numpy_dtype
from keras_freeze._utils.threads import check_not_trained_elsewhere
from keras_freeze._utils.validation import received, type_error
from keras_freeze.grids import DTYPES
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.model_state import ModelOptimizers, check_not_quantized, get_mask
from keras_freeze.parameters import path_of
from keras_freeze.storage.keras_model import check_built, dtype_of
from keras_freeze.storage.patches import Patch, apply_all, bits_at, flat_places


def get_trained(model: keras.Model) -> np.ndarray:
    """Return what is trained of a frozen model as one vector, which another machine can set.

    The order is that of `model.trainable_variables`, and within a variable that of its rows: of a
    weight with a mask only the trained entries, of all others (biases, scales of normalizations)
    every entry. Moving statistics and the state of the optimizer are not part of it.

    In a callback, too, these are the values after the last step. A model that is trained on a grid
    gives the points that it has.

    Args:
        model: A built `keras.Model` that is frozen, with or without an optimizer.

    Returns:
        A vector of `kf.report(model).num_trained_parameters` values. Its dtype is float32, as of
        models in mixed precision, bfloat16 and float16; or float64 if a variable has that dtype.
        Either holds the values exactly.

    Raises:
        TypeError: If `model` is not a `keras.Model`.
        ValueError: If the model is not built or not frozen, or has `frozen_weights="decay"`, with
            which training changes the frozen weights, too.
        RuntimeError: While another thread trains the model.

    Example:

    ```python
    vectors = [keras_freeze.get_trained(client) for client in clients]
    keras_freeze.set_trained(server, np.mean(vectors, axis=0))
    ```
    """
    parts = _parts_of(model, _mask_of(model))
    values = [from_bits(bits_at(p.variable, p.places), dtype_of(p.variable)) for p in parts]
    is_double = any(_held_dtype(part.variable) == np.float64 for part in parts)
    dtype = np.float64 if is_double else np.float32
    return np.concatenate([np.empty(0, dtype), *(v.astype(dtype) for v in values)])


def set_trained(model: keras.Model, vector: Any, *, fingerprint: str | None = None) -> None:
    """Set what is trained of a frozen model, in the order of `get_trained`; all of it or nothing.

    Frozen weights, moving statistics and the state of the optimizer stay as they are. The vector of
    another machine fits where architecture, frozen weights and mask are the same there. The length
    alone does not tell: send the fingerprint of the mask along.

    Training goes on from the values given. On a grid, values stay as given until the next step; an
    entry that is given the value that it has goes on from the optimizer's precise value.

    Args:
        model: A built `keras.Model` that is frozen, with or without an optimizer.
        vector: A vector as `get_trained` returns it, or an average of such: an array of one axis of
            float64, float32, float16 or bfloat16, rounded to the dtypes of the variables.
        fingerprint: `FreezeMask.fingerprint` of the mask that the vector belongs to. Defaults to
            `None`, which does not compare masks.

    Raises:
        TypeError: If `model` is not a `keras.Model`, `vector` does not hold floating-point numbers,
            or `fingerprint` is not a string.
        ValueError: If `vector` has another length or shape, or values that are NaN, infinite, or
            too large for a variable; if `fingerprint` is that of another mask; and as in
            `get_trained`. The model is then as it was.
        RuntimeError: While another thread trains the model.

    Example:

    ```python
    fingerprint = keras_freeze.get_mask(client).fingerprint
    vector = keras_freeze.get_trained(client)
    keras_freeze.set_trained(server, vector, fingerprint=fingerprint)
    ```
    """
    mask = _mask_of(model)
    if fingerprint is not None:
        _check_fingerprint(fingerprint, mask)
    parts = _parts_of(model, mask)
    values = _values_for(parts, _checked_vector(vector, sum(part.size for part in parts)))
    patches = [
        Patch(i, part.places, bits_at(part.variable, part.places), as_bits(given))
        for i, (part, given) in enumerate(zip(parts, values, strict=True))
    ]
    apply_all(model, [part.variable for part in parts], patches)


@dataclass(frozen=True)
class _Part:
    """What is trained of one variable.

    Attributes:
        variable: the variable.
        places: the flat indices of the trained entries; None for all of them.
        size: how many there are.
    """

    variable: Any
    places: np.ndarray | None
    size: int


def _mask_of(model: Any) -> FreezeMask:
    """Check that a model has trained values to get and set, and return its mask."""
    check_built(model, "model")
    check_not_trained_elsewhere(model)
    mask = get_mask(model)
    if mask is None:
        optimizers = ModelOptimizers(model)
        if not optimizers.all:
            optimizers.required()  # says why not
        raise ValueError(
            "The model must be frozen: call `keras_freeze.freeze` or train it first. "
            f"Received: model={model!r}"
        )
    check_not_quantized(model)
    if any(d.decay_scale is not None for d in frozen_variables.decisions_about(model.variables)):
        raise ValueError(
            'A model with frozen_weights="decay" cannot be exchanged as a vector of what is '
            f"trained: its frozen weights change in every step, too. Received: model={model!r}"
        )
    return mask


def _parts_of(model: keras.Model, mask: FreezeMask) -> list[_Part]:
    """Return what is trained of each trainable variable of which something is."""
    parts = []
    for variable in model.trainable_variables:
        entry = mask.find(variable)
        if entry is None or entry.trained.all():
            parts.append(_Part(variable, None, int(np.prod(variable.shape))))
        elif entry.trained.any():
            places = flat_places(entry.trained)
            parts.append(_Part(variable, places, places.size))
    return parts


def _held_dtype(variable: Any) -> Any:
    """Return the dtype of a variable's values, which is not that of the variable on JAX."""
    return backend.held_dtype(numpy_dtype(dtype_of(variable)))


def _check_fingerprint(fingerprint: Any, mask: FreezeMask) -> None:
    if not isinstance(fingerprint, str):
        raise type_error("fingerprint", fingerprint, "a string, `FreezeMask.fingerprint`, or None")
    if fingerprint != mask.fingerprint:
        raise ValueError(
            "Argument `fingerprint` must be that of the model's mask, so that the vector holds the "
            f"values of the same weights: {mask.fingerprint!r}. "
            f"Received: fingerprint={fingerprint!r:.100}"
        )


def _checked_vector(vector: Any, size: int) -> np.ndarray:
    accepted = f"an array of {size} floating-point numbers, as `keras_freeze.get_trained` returns"
    try:
        array = backend.to_numpy(vector) if keras.ops.is_tensor(vector) else np.asarray(vector)
    except ValueError:  # of nested lists of different lengths
        raise type_error("vector", vector, accepted) from None
    if array.dtype.name not in DTYPES:
        raise TypeError(
            f"Argument `vector` must be {accepted}. {received('vector', vector)}, dtype "
            f"{array.dtype}"
        )
    if array.shape != (size,):
        raise ValueError(
            f"Argument `vector` must be {accepted}: one for each value that is trained. "
            f"Received: vector of shape {array.shape}"
        )
    return array


def _values_for(parts: Sequence[_Part], vector: np.ndarray) -> list[np.ndarray]:
    """Return the values of each part, rounded to the dtype of its variable."""
    found, begin = [], 0
    for part in parts:
        given = vector[begin : begin + part.size]
        begin += part.size
        with np.errstate(over="ignore"):
            values = given.astype(_held_dtype(part.variable))
        finite = np.isfinite(values)
        if not finite.all():
            raise ValueError(
                f"Argument `vector` must have finite values. Received: {np.sum(~finite)} of "
                f"{part.size} values for {path_of(part.variable)!r} that are NaN, infinite or too "
                f"large for {values.dtype.name}; the first is {given[~finite][0]!s}"
            )
        found.append(values.astype(numpy_dtype(dtype_of(part.variable)), copy=False))
    return found
