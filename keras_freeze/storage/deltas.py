"""Apply a `.freeze` file that was saved on a base to that base in place, and remove it again."""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_freeze.parameters import path_of
from keras_freeze.placements import remember_grids
from keras_freeze.starts import BASE
from keras_freeze.storage.container import read_container
from keras_freeze.storage.errors import FreezeFileError, naming, refusing
from keras_freeze.storage.header import Header
from keras_freeze.storage.keras_model import (
    bits_of,
    check_built,
    dtype_of,
    fingerprint,
    finish_loading,
    is_random_state,
    set_bits,
    values_for,
    variables_of,
)
from keras_freeze.storage.restoring import (
    check_fingerprint,
    check_rest,
    check_variables,
    restored,
)
from keras_freeze.storage.vocabularies import check_same_vocabularies


@dataclass(frozen=True)
class _Replaced:
    """The values of one variable that a delta replaced: their indices, old and new values."""

    index: int
    places: np.ndarray
    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class _Applied:
    """A delta that is applied to a model: its file, and what it replaced."""

    name: str
    digest: bytes
    replaced: list[_Replaced]


_applied: weakref.WeakKeyDictionary[Any, _Applied] = weakref.WeakKeyDictionary()


def apply_delta(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Turn a base into the model that was saved on it, in place.

    One model in memory can serve many fine-tuned models, each of them in a file of a few percent
    of its size: apply one, remove it with `remove_delta`, apply the next. Only the values that
    change are kept for `remove_delta`.

    Args:
        model: The base, or a `keras.Model` of equal architecture with equal values.
        path: Path of a file that was saved with `base`.

    Raises:
        OSError: If the file cannot be read.
        FreezeFileError: If the file is damaged, was saved without a base, or belongs to another
            base. The model is then unchanged.
        ValueError: If a delta is already applied, or if the model is not built.
        TypeError: If an argument has a wrong type.

    Example:

    ```python
    keras_freeze.apply_delta(model, "digits.freeze")
    model.predict(x)
    keras_freeze.remove_delta(model, "digits.freeze")
    ```
    """
    check_built(model, "model")
    variables = variables_of(model)
    with naming(path):
        container = read_container(path)
        header = Header.from_json(container.header)
        if header.base is None:
            raise FreezeFileError(
                "The file was saved without a base, so that it is not a delta: use `load`."
            )
        _check_architecture(header, variables)
        check_same_vocabularies(model, header.vocabularies)
        if model in _applied and fingerprint(variables) != header.base:
            raise ValueError(
                f"The delta {_applied[model].name!r} is applied to this model: remove it with "
                "`remove_delta` first."
            )
        check_fingerprint(header, variables)
        with refusing():
            values = restored(header, container, variables)
            check_rest(values)
        found = [
            (index, variable, bits)
            for index, (variable, bits) in enumerate(zip(variables, values.bits, strict=True))
            if not is_random_state(variable)
        ]
        for _, variable, bits in found:
            values_for(variable, bits, dtype_of(variable))  # raises before anything is assigned
    replaced = []
    for index, variable, bits in found:
        before = bits_of(variable)
        places = np.flatnonzero(before != bits)
        if places.size:
            replaced.append(_Replaced(index, places, before[places], bits[places]))
            set_bits(variable, bits, dtype_of(variable))
    remember_grids(variables, values.placements)
    finish_loading(model)
    _applied[model] = _Applied(os.fspath(path), container.digest, replaced)


def remove_delta(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Restore the values that a base had before `apply_delta`, bit for bit.

    Args:
        model: The `keras.Model` that the delta was applied to in this process.
        path: Path of the delta.

    Raises:
        OSError: If the file cannot be read.
        FreezeFileError: If the file is damaged.
        ValueError: If this delta is not applied to the model, or if the model has changed since.
        TypeError: If an argument has a wrong type.

    Example:

    ```python
    keras_freeze.remove_delta(model, "digits.freeze")
    ```
    """
    check_built(model, "model")
    with naming(path):
        digest = read_container(path).digest
    applied = _applied.get(model)
    if applied is None or applied.digest != digest:
        on_it = "none" if applied is None else repr(applied.name)
        raise ValueError(
            f"The delta that {os.fspath(path)!r} holds now is not applied to this model. Applied "
            f"is: {on_it}."
        )
    variables = variables_of(model)
    current = {part.index: bits_of(variables[part.index]) for part in applied.replaced}
    for part in applied.replaced:
        if not np.array_equal(current[part.index][part.places], part.after):
            raise ValueError(
                f"The variable {path_of(variables[part.index])!r} has changed since the delta was "
                "applied, so that it cannot be removed: load the base again."
            )
    for part in applied.replaced:
        current[part.index][part.places] = part.before
        variable = variables[part.index]
        set_bits(variable, current[part.index], dtype_of(variable))
    finish_loading(model)
    del _applied[model]


def _check_architecture(header: Header, variables: Sequence[Any]) -> None:
    try:
        check_variables(header, variables)
        for index, record in enumerate(header.records):
            source = record.source
            if source is not None and source.kind == BASE and source.index != index:
                raise FreezeFileError(f"{record.path!r} is another variable in the base.")
    except FreezeFileError as error:
        raise FreezeFileError(
            f"The delta does not belong to the architecture of the model: {error} If it was saved "
            "on this base with a new head or other layers, use `load(path, base=model)`."
        ) from error
