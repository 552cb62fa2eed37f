"""Apply a `.freeze` file that was saved on a base to that base in place, and remove it again."""

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_freeze._utils.files import check_replaceable, is_same_file
from keras_freeze.parameters import path_of
from keras_freeze.placements import remember_grids
from keras_freeze.starts import BASE
from keras_freeze.storage.container import Container, read_container
from keras_freeze.storage.errors import FreezeFileError, check_path, naming, refusing
from keras_freeze.storage.header import Header
from keras_freeze.storage.keras_model import bits_of, check_built, fingerprint, variables_of
from keras_freeze.storage.patches import Patch, apply_all, patches_to
from keras_freeze.storage.restoring import (
    Values,
    check_fingerprint,
    check_rest,
    check_variables,
    restored,
)
from keras_freeze.storage.undo import write_undo
from keras_freeze.storage.vocabularies import check_same_vocabularies


@dataclass(frozen=True)
class _Applied:
    """A delta that is applied to a model.

    Attributes:
        name: its path.
        digest: that of its file.
        undo: the digest of the file that `keep_undo` wrote; None without.
        variables: the model's variables at that time.
        patches: what it replaced in them.
    """

    name: str
    digest: bytes
    undo: bytes | None
    variables: list[Any]
    patches: list[Patch]


# Those that are applied to a model, one on the other.
_applied: weakref.WeakKeyDictionary[Any, list[_Applied]] = weakref.WeakKeyDictionary()


def apply_delta(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    keep_undo: str | os.PathLike[str] | None = None,
) -> None:
    """Turn a base into the model that was saved on it, in place.

    One model in memory can serve many fine-tuned models, each of them in a file of a few percent
    of its size: apply one, remove it with `remove_delta`, apply the next. Only the values that
    change are kept for `remove_delta`. `DeltaSet` keeps several deltas in memory and switches
    between them in milliseconds.

    Args:
        model: The base, or a `keras.Model` of equal architecture with equal values.
        path: Path of a file that was saved with `base`.
        keep_undo: Path of a file to write: the delta that turns the model back into the base, to
            apply with `apply_delta` in any process, where the base is not at hand any more.
            Defaults to `None`, which writes none.

    Raises:
        OSError: If the file cannot be read.
        FreezeFileError: If the file is damaged, was saved without a base, or belongs to another
            base. The model is then unchanged.
        ValueError: If the model is not built, or if a delta is applied that this one is not based
            on.
        TypeError: If an argument has a wrong type.

    Example:

    ```python
    keras_freeze.apply_delta(model, "digits.freeze")
    model.predict(x)
    keras_freeze.remove_delta(model, "digits.freeze")
    ```
    """
    check_built(model, "model")
    if keep_undo is not None:
        _check_undo(keep_undo, path)
    variables = variables_of(model)
    with naming(path):
        container = read_container(path)
        header = Header.from_json(container.header)
        applied = _applied.get(model)
        if applied and header.base is not None and fingerprint(variables) != header.base:
            raise ValueError(
                f"The delta {applied[-1].name!r} is applied to this model, and this one belongs to "
                "another base: remove it with `remove_delta` first."
            )
        values = delta_values(model, header, container, variables)
        patches = patches_to(variables, values.bits)
    before = [bits_of(v) for v in variables] if keep_undo is not None else []
    apply_all(model, variables, patches)
    undo = None
    if keep_undo is not None:
        try:
            write_undo(keep_undo, model, before)
            undo = read_container(keep_undo).digest
        except BaseException:
            apply_all(model, variables, [patch.reverse for patch in patches])
            raise
    remember_grids(variables, values.placements)
    stack = _applied.setdefault(model, [])
    if len(stack) > 1 and stack[-1].digest == stack[-2].undo:
        del stack[-2:]  # so that a model to which deltas and undos are applied holds few of them
    stack.append(_Applied(os.fspath(path), container.digest, undo, variables, patches))


def delta_values(
    model: keras.Model, header: Header, container: Container, variables: Sequence[Any]
) -> Values:
    """Return the values that a delta gives to the variables of its base.

    Raises:
        FreezeFileError: If it is not a delta, is damaged, or belongs to another base.
    """
    if header.base is None:
        raise FreezeFileError(
            "The file was saved without a base, so that it is not a delta: use `load`."
        )
    _check_architecture(header, variables)
    check_same_vocabularies(model, header.vocabularies)
    check_fingerprint(header, variables)
    with refusing():
        values = restored(header, container, variables)
        check_rest(values)
    return values


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
    stack = _applied.get(model) or []
    if not stack or stack[-1].digest != digest:
        on_it = repr(stack[-1].name) if stack else "none"
        raise ValueError(
            f"The delta that {os.fspath(path)!r} holds now is not applied to this model. Applied "
            f"is: {on_it}."
        )
    variables = stack[-1].variables
    undo = [patch.reverse for patch in stack[-1].patches]
    check_unchanged(model, variables, undo)
    apply_all(model, variables, undo)
    stack.pop()


def check_unchanged(model: keras.Model, variables: Sequence[Any], patches: Sequence[Patch]) -> None:
    """Check that variables that a model had are still its own, with the values to be replaced.

    It may have others besides, as `enable_lora` adds them.

    Raises:
        ValueError: If they are not.
    """
    ids = {id(variable) for variable in variables_of(model)}
    for variable in variables:
        if id(variable) not in ids:
            raise ValueError(
                f"The model no longer has the variable {path_of(variable)!r} that it had when the "
                "delta was read or applied, so that it cannot be applied or removed: load the base "
                "again."
            )
    for patch in patches:
        if not patch.is_applicable(variables):
            raise ValueError(
                f"The variable {path_of(variables[patch.index])!r} has changed since the delta was "
                "read or applied, so that it cannot be applied or removed: load the base again."
            )


def _check_undo(keep_undo: Any, path: str | os.PathLike[str]) -> None:
    check_path(keep_undo, "keep_undo")
    check_replaceable(keep_undo, "keep_undo")
    if is_same_file(keep_undo, path):
        raise ValueError(
            "Argument `keep_undo` must not be the file of the delta. "
            f"Received: keep_undo={os.fspath(keep_undo)!r}, path={os.fspath(path)!r}"
        )


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
