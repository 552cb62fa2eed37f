"""Several deltas on one base in memory, of which one at a time is applied."""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_freeze._utils.validation import type_error, value_error
from keras_freeze.placements import Placement, remember_grids
from keras_freeze.storage.container import read_container
from keras_freeze.storage.deltas import check_unchanged, delta_values
from keras_freeze.storage.errors import naming
from keras_freeze.storage.header import Header
from keras_freeze.storage.keras_model import check_built, variables_of
from keras_freeze.storage.patches import Patch, apply_all, in_turn, patches_to


@dataclass(frozen=True)
class _Delta:
    """What a delta replaces, and the grids that its values are on."""

    patches: Sequence[Patch]
    placements: Sequence[Placement | None]


_NONE = _Delta((), ())


class DeltaSet:
    """Several deltas on one base in memory, between which a model switches in milliseconds.

    A delta is read and checked once, by `add`. `switch` then replaces the values that differ, in
    place, so that the model keeps its compiled functions and one copy of the base serves all.

    A model must not compute while it is switched. Threads that share it hold `lock` from their
    switch to the end of their computation; the methods take it, too.

    Args:
        model: The base, a built `keras.Model` to which no delta is applied.

    Attributes:
        active: The name of the delta that is applied; None for the base.
        lock: A lock (`threading.RLock`).

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If it is not built.

    Example:

    ```python
    deltas = keras_freeze.DeltaSet(base)
    deltas.add("cats", "cats.freeze")
    deltas.add("dogs", "dogs.freeze")
    with deltas.lock:
        deltas.switch("dogs")
        base.predict(x)
    deltas.switch(None)  # the base again, bit for bit
    ```
    """

    def __init__(self, model: keras.Model) -> None:
        check_built(model, "model")
        self.active: str | None = None
        self.lock = threading.RLock()
        self._model = model
        self._variables = variables_of(model)
        self._deltas: dict[str, _Delta] = {}

    def add(self, name: str, path: str | os.PathLike[str]) -> None:
        """Read a delta. The model must be the base, or have a delta of this set applied.

        Args:
            name: What `switch` is to call it.
            path: Path of a file that was saved with `base`.

        Raises:
            OSError: If the file cannot be read.
            FreezeFileError: If the file is damaged, was saved without a base, or belongs to another
                base. The set and the model are then unchanged.
            TypeError: If an argument has a wrong type.
            ValueError: If there is a delta of this name, if the model has changed since `switch`,
                or if it no longer has a variable that it had when the set was made.
        """
        if not isinstance(name, str):
            raise type_error("name", name, "a string")
        with self.lock:
            if name in self._deltas:
                raise ValueError(
                    "Argument `name` must be new, or its delta be removed first. "
                    f"Received: name={name!r}, which the set has already"
                )
            active = self.active
            self.switch(None)
            try:
                self._deltas[name] = self._read(path)
            finally:
                self.switch(active)

    def _read(self, path: str | os.PathLike[str]) -> _Delta:
        check_unchanged(self._model, self._variables, ())
        with naming(path):
            container = read_container(path)
            header = Header.from_json(container.header)
            values = delta_values(self._model, header, container, self._variables)
            return _Delta(patches_to(self._variables, values.bits), values.placements)

    def switch(self, name: str | None) -> None:
        """Apply a delta in the place of the one that is applied.

        Args:
            name: The name of the delta; None for the base.

        Raises:
            TypeError: If the name is neither a string nor None.
            ValueError: If the set has no such delta, or if values that a delta has replaced, or is
                to replace, have changed since, or if the model no longer has a variable that it had
                when the set was made. The model is then unchanged.
        """
        with self.lock:
            if name is not None:
                self._check_known(name, "None or ")
            if name == self.active:
                return
            before = _NONE if self.active is None else self._deltas[self.active]
            after = _NONE if name is None else self._deltas[name]
            patches = in_turn([patch.reverse for patch in before.patches], after.patches)
            check_unchanged(self._model, self._variables, patches)
            apply_all(self._model, self._variables, patches)
            if after.placements:
                remember_grids(self._variables, after.placements)
            self.active = name

    def remove(self, name: str) -> None:
        """Forget a delta, after `switch(None)` if it is the one that is applied.

        Raises:
            TypeError: If the name is no string.
            ValueError: If the set has no such delta, or as for `switch`.
        """
        with self.lock:
            self._check_known(name)
            if name == self.active:
                self.switch(None)
            del self._deltas[name]

    def _check_known(self, name: Any, or_else: str = "") -> None:
        known = ", ".join(map(repr, self._deltas)) or "none"
        accepted = f"{or_else}the name of a delta of the set ({known})"
        if not isinstance(name, str):
            raise type_error("name", name, accepted)
        if name not in self._deltas:
            raise value_error("name", name, accepted)

    @property
    def num_bytes(self) -> int:
        """The memory that all deltas take, in bytes."""
        with self.lock:
            deltas = list(self._deltas.values())
        return sum(patch.num_bytes for delta in deltas for patch in delta.patches)

    def __contains__(self, name: object) -> bool:
        return name in self._deltas

    def __iter__(self) -> Iterator[str]:
        with self.lock:
            return iter(list(self._deltas))

    def __len__(self) -> int:
        return len(self._deltas)
