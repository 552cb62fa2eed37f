"""Apply a `.freeze` file that was saved on a base to that base in place, and take it off again."""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_freeze.parameters import path_of
from keras_freeze.starts import BASE
from keras_freeze.storage.container import read_container
from keras_freeze.storage.errors import FreezeFileError, naming, refusing
from keras_freeze.storage.header import Header
from keras_freeze.storage.keras_model import (
    bits_of,
    dtype_of,
    fingerprint,
    finish_loading,
    is_random_state,
    set_bits,
    variables_of,
)
from keras_freeze.storage.loading import (
    check_fingerprint,
    check_rest,
    check_variables,
    restored,
)
from keras_freeze.storage.vocabularies import check_same_vocabularies


@dataclass(frozen=True)
class _Replaced:
    """What a delta replaced in one variable: at which places, what was there, and what is now."""

    index: int
    places: np.ndarray
    before: np.ndarray
    after: np.ndarray


@dataclass(frozen=True)
class _Applied:
    """A delta that is on a model: which file it is, and what it replaced."""

    name: str
    digest: bytes
    replaced: list[_Replaced]


_applied: weakref.WeakKeyDictionary[Any, _Applied] = weakref.WeakKeyDictionary()


def apply_delta(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Turns a base into the network that was saved on it, in place.

    One model in memory can serve many retrained networks of a few per cent of its size: apply one,
    take it off with `remove_delta`, apply the next. Only values that differ are kept to go back.

    Args:
        model: the base, or a model of equal architecture with equal values.
        path: a file that was saved with `base=`.

    Raises:
        FreezeFileError: if the file is damaged, was saved without a base, or belongs to another
            one. The model is then as it was.
        ValueError: if a delta is on the model already.
        TypeError: if `model` is no Keras model.

    Example:

    ```python
    keras_freeze.apply_delta(model, "digits.freeze")
    model.predict(x)
    keras_freeze.remove_delta(model, "digits.freeze")
    ```
    """
    _check_model(model)
    variables = variables_of(model)
    with naming(path):
        container = read_container(path)
        header = Header.from_json(container.header)
        if header.base is None:
            raise FreezeFileError(
                "It was saved without a base, so that it is no delta: use `load`."
            )
        _check_architecture(header, variables)
        check_same_vocabularies(model, header.vocabularies)
        if model in _applied and fingerprint(variables) != header.base:
            raise ValueError(
                f"The delta {_applied[model].name!r} is on this model: take it off with "
                "`remove_delta` first."
            )
        check_fingerprint(header, variables)
        with refusing():
            values = restored(header, container, variables)
            check_rest(values)
    replaced = []
    for index, (variable, bits) in enumerate(zip(variables, values.bits, strict=True)):
        if is_random_state(variable):
            continue
        before = bits_of(variable)
        places = np.flatnonzero(before != bits)
        if places.size:
            replaced.append(_Replaced(index, places, before[places], bits[places]))
            set_bits(variable, bits, dtype_of(variable))
    finish_loading(model)
    _applied[model] = _Applied(os.fspath(path), container.digest, replaced)


def remove_delta(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Gives a base back the values that it had before `apply_delta`, bit for bit.

    Args:
        model: the model that the delta was applied to, in this process.
        path: the delta.

    Raises:
        FreezeFileError: if the file is damaged.
        ValueError: if this delta is not on the model, or the model has been changed since.
    """
    _check_model(model)
    with naming(path):
        digest = read_container(path).digest
    applied = _applied.get(model)
    if applied is None or applied.digest != digest:
        on_it = "none" if applied is None else repr(applied.name)
        raise ValueError(
            f"The delta that {os.fspath(path)!r} holds now is not on this model. On it is: {on_it}."
        )
    variables = variables_of(model)
    current = {part.index: bits_of(variables[part.index]) for part in applied.replaced}
    for part in applied.replaced:
        if not np.array_equal(current[part.index][part.places], part.after):
            raise ValueError(
                f"The variable {path_of(variables[part.index])!r} has been changed since the delta "
                "was applied, so that it cannot be taken off: load the base again."
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
            f"The delta does not fit the model: {error} If it was saved on this base with a new "
            "head or other layers, use `load(path, base=model)`."
        ) from error


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(f"Argument `model` must be a keras.Model. Received: model={model!r}")
    if not model.built:
        raise ValueError("Argument `model` is not built: call it on a batch of data first.")
