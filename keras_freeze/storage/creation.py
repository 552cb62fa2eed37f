"""Keras is watched while it builds a model from a `.freeze` file.

A file says how large its variables are, and its configuration says it again in other words, such as
the units of a layer, which nobody but Keras can read. So a variable that the file does not announce
is refused when Keras creates it, before it gets its memory.
"""

import collections
import contextlib
import contextvars
import math
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from keras_freeze import _keras_private
from keras_freeze.storage.errors import FreezeFileError
from keras_freeze._utils.bits import WIDTHS

Shaped = tuple[tuple[int, ...], str]
"""The shape and dtype of a variable."""

_SPARE = 1 << 20  # bytes of variables that are not in the file: counters, learning rates, metrics
_COPIES = 8  # how often an optimizer may keep what it trains, averages and accumulators included


@contextlib.contextmanager
def only_announced(variables: Iterable[Shaped], max_bytes: int | None = None) -> Iterator[None]:
    """A scope in which Keras creates the variables that are announced, and little beside them.

    Args:
        variables: shapes and dtypes of those that are announced.
        max_bytes: what all of them may take, and what a symbolic tensor may stand for; None for
            any size.

    Raises:
        FreezeFileError: at the end too, if Keras has caught the error.
    """
    ledger = _Ledger(variables, max_bytes)
    token = _ledger.set(ledger)
    try:
        with _watching():
            yield
    finally:
        _ledger.reset(token)
    if ledger.refused is not None:
        raise FreezeFileError(f"Keras has gone on after an error: {ledger.refused}")


class _Ledger:
    """Which of the announced variables have been created, and the bytes of all others."""

    def __init__(self, variables: Iterable[Shaped], max_bytes: int | None) -> None:
        self._announced = collections.Counter(variables)
        announced = sum(_num_bytes(*one) * count for one, count in self._announced.items())
        self._max_bytes = max_bytes
        self._spare = max(_SPARE, _COPIES * announced)
        if max_bytes is not None:
            self._spare = min(self._spare, max(max_bytes - announced, 0))
        self.refused: str | None = None

    def add_variable(self, variable: Any, shape: tuple[int, ...]) -> None:
        """Counts a variable that is about to get its memory."""
        described = (shape, _keras_private.stored_dtype(variable))
        if self._announced[described] > 0:
            self._announced[described] -= 1
            return
        self._spare -= _num_bytes(*described)
        if self._spare < 0:
            self._refuse(
                f"its configuration has a variable {variable.path[:100]!r} of shape {shape}, with "
                "which it takes more memory than the variables that it announces"
            )

    def check_tensor(self, shape: tuple[int | None, ...], dtype: str) -> None:
        """Looks at a symbolic tensor, of which a layer may make a constant of that size."""
        size = _num_bytes(tuple(length or 1 for length in shape), dtype)
        if self._max_bytes is not None and size > self._max_bytes:
            self._refuse(
                f"its configuration has a tensor of shape {shape}, larger than the "
                f"{self._max_bytes:,} bytes that it may take"
            )

    def _refuse(self, problem: str) -> None:
        self.refused = problem
        raise FreezeFileError(problem)


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * WIDTHS.get(dtype, 16)


_ledger: contextvars.ContextVar[_Ledger | None] = contextvars.ContextVar("ledger", default=None)
_lock = threading.Lock()
_num_watching = 0
_validate_shape = _keras_private.shape_check()
_init_tensor = keras.KerasTensor.__init__


def _watched_shape(self: Any, shape: Any) -> Any:
    # Keras calls it for each variable, just before it gets its value.
    is_new = not _keras_private.has_shape(self)  # some backends call it again for its value
    shape = _validate_shape(self, shape)
    ledger = _ledger.get()
    if ledger is not None and is_new:
        ledger.add_variable(self, tuple(shape))
    return shape


def _watched_tensor(self: Any, *args: Any, **kwargs: Any) -> None:
    _init_tensor(self, *args, **kwargs)
    ledger = _ledger.get()
    if ledger is not None:
        ledger.check_tensor(tuple(self.shape), self.dtype)


@contextlib.contextmanager
def _watching() -> Iterator[None]:
    """Puts the two functions in Keras's place, while any thread loads a file."""
    global _num_watching
    with _lock:
        _num_watching += 1
        _keras_private.set_shape_check(_watched_shape)
        keras.KerasTensor.__init__ = _watched_tensor
    try:
        yield
    finally:
        with _lock:
            _num_watching -= 1
            if not _num_watching:
                _keras_private.set_shape_check(_validate_shape)
                keras.KerasTensor.__init__ = _init_tensor
