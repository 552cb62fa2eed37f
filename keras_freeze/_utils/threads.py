"""Protection of a mask against being replaced while another thread trains."""

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import keras

from keras_freeze import backend

# By optimizer, and not in it: locks cannot be copied or pickled.
_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()


def exclusive(optimizer: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a scope in which no other thread steps with an optimizer or replaces its mask.

    The replicas of `tf.distribute`, which step together in threads of their own, do not wait.
    """
    if backend.num_replicas() > 1:
        return contextlib.nullcontext()
    return _locks.setdefault(optimizer, threading.RLock())


def check_not_trained_elsewhere(model: keras.Model) -> None:
    """Check that no other thread trains a model that is about to be changed.

    Raises:
        RuntimeError: if `fit` or `train_on_batch` runs in another thread, for this model or for
            one that shares variables with it.
    """
    # Keras has no flag that says so.
    for thread, frame in sys._current_frames().items():
        if thread == threading.get_ident():
            continue
        for trained in _trained_in(frame):
            if _share_variables(model, trained):
                raise RuntimeError(
                    "The model is being trained in another thread, and its weights and mask must "
                    "not be changed meanwhile. Wait for `fit` to end, or do it in a callback, "
                    "which runs in the thread of `fit`, between two steps. "
                    f"Received: model {model.name!r}, trained by `fit` of {trained.name!r}"
                )


def _trained_in(frame: FrameType | None) -> Iterator[keras.Model]:
    while frame is not None:
        if frame.f_code.co_name in ("fit", "train_on_batch"):
            owner = frame.f_locals.get("self")
            if isinstance(owner, keras.Model):
                yield owner
        frame = frame.f_back


def _share_variables(first: keras.Model, second: keras.Model) -> bool:
    ids = {id(v) for v in first.variables}
    return first is second or any(id(v) in ids for v in second.variables)
