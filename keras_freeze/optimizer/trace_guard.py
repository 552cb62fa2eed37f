"""Detection of functions that were traced for a mask that has been replaced since."""

import weakref
from typing import Any

import keras
from keras import ops

from keras_freeze import backend


class TraceGuard:
    """Makes functions fail, or JAX trace them again, once the mask they were traced for is gone.

    A function that is traced while the optimizer has a certain generation keeps this number as a
    constant, and compares it with the present one whenever it runs.

    Attributes:
        generation: how often functions have been invalidated.
        markers: variables whose shape is another one for each generation, for the sake of JAX,
            which traces again for other shapes; none on other backends.
        variable: holds the present generation. Not stored: it is valid in this process only.
        models: the models whose train functions have been traced by Keras.
        has_others: whether other functions have been traced, which Keras does not trace again.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.variable = keras.Variable(0, dtype="int32", trainable=False)
        self.markers = backend.trace_markers(self.generation)
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()
        self.has_others = False

    def invalidate(self) -> None:
        """Invalidate all functions that have been traced until now."""
        self.generation += 1
        self.variable.assign(self.generation)
        self.markers = backend.trace_markers(self.generation)

    def checks(self) -> list[Any]:
        """Return operations that fail when the function being traced is no longer valid."""
        if not backend.is_traced():
            return []
        model = backend.model_being_traced()
        if model is None:
            self.has_others = True
        else:
            self.models.add(model)
        return [
            backend.require(
                ops.equal(self.variable, self.generation),
                "This function was traced before the freezing mask was replaced. Trace it "
                "again: for `fit`, compile the model; otherwise make a new tf.function.",
            )
        ]
