"""Watch which variables Keras creates while it builds a model from a `.freeze` file.

The header lists the shapes of the variables. The configuration implies them too, by the units of a
layer for instance, but only Keras can tell how. So a variable that is not in the header is refused
when Keras creates it, before its memory is allocated.
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
from keras_freeze._utils.bits import WIDTHS
from keras_freeze.storage.errors import FreezeFileError

Shaped = tuple[tuple[int, ...], str]
"""The shape and dtype of a variable."""

_SPARE = 1 << 20  # bytes of variables that are not in the file: counters, learning rates, metrics
_COPIES = 8  # how many variables an optimizer may have for each one that it trains


@contextlib.contextmanager
def only_announced(variables: Iterable[Shaped], max_bytes: int | None = None) -> Iterator[None]:
    """Let Keras create the variables that the file lists, and few other bytes, in this scope.

    Args:
        variables: Shapes and dtypes of the variables that the file lists.
        max_bytes: The largest size in bytes of all variables together, and of any symbolic tensor;
            None for no limit.

    Raises:
        FreezeFileError: If Keras creates more; at the end of the scope if Keras caught the error.
    """
    ledger = _Ledger(variables, max_bytes)
    token = _ledger.set(ledger)
    try:
        with _watching():
            yield
    finally:
        _ledger.reset(token)
    if ledger.refused is not None:
        raise FreezeFileError(ledger.refused)


class _Ledger:
    """Which of the listed variables have been created, and the size of all others."""

    def __init__(self, variables: Iterable[Shaped], max_bytes: int | None) -> None:
        self._announced = collections.Counter(variables)
        announced = sum(_num_bytes(*one) * count for one, count in self._announced.items())
        self._max_bytes = max_bytes
        self._spare = max(_SPARE, _COPIES * announced)
        if max_bytes is not None:
            self._spare = min(self._spare, max(max_bytes - announced, 0))
        self.refused: str | None = None

    def add_variable(self, variable: Any, shape: tuple[int, ...]) -> None:
        """Count a variable whose memory is about to be allocated."""
        described = (shape, _keras_private.stored_dtype(variable))
        if self._announced[described] > 0:
            self._announced[described] -= 1
            return
        self._spare -= _num_bytes(*described)
        if self._spare < 0:
            self._refuse(
                f"The configuration of the model has a variable {variable.path[:100]!r} of shape "
                f"{shape}, which is not in the header of the file and too large for the memory "
                "that the other variables leave. Do not trust this file."
            )

    def check_tensor(self, shape: tuple[int | None, ...], dtype: str) -> None:
        """Check the size of a symbolic tensor: a layer may create a constant of that size."""
        size = _num_bytes(tuple(length or 1 for length in shape), dtype)
        if self._max_bytes is not None and size > self._max_bytes:
            self._refuse(
                f"The configuration of the model has a tensor of shape {shape}, which takes more "
                f"than {self._max_bytes:,} bytes. If you expect this size and trust the file, use "
                "`load(path, max_bytes=...)`."
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
    # Keras calls it for each variable, just before its value is set.
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
    """Replace two functions of Keras while any thread loads a file."""
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
