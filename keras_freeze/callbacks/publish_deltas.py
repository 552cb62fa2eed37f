"""The callback that publishes a model while it is trained."""

import os
import warnings
from typing import Any

import keras

from keras_freeze._utils.validation import check_int
from keras_freeze.grids import Grid
from keras_freeze.storage.streams.publisher import DeltaPublisher


class PublishDeltas(keras.callbacks.Callback):
    """Writes to a folder what a model is, every so many steps, for models that `follow` it.

    The first file is a delta on the base with the mask, those after it hold nothing but values that
    have changed; `DeltaPublisher` says more. What training ends with is published, too. Callbacks
    that set other weights at the end, as `EarlyStopping(restore_best_weights=True)`, have to come
    before this one in the list.

    Args:
        folder: A path, or a URL for fsspec such as "s3://bucket/run". It is created when needed.
        every: After how many training steps to publish.
        base, values, full_every: As in `DeltaPublisher`. The default of `base` is the model when
            its training begins.

    A file that cannot be written is a warning; the next one is complete.

    Attributes:
        publisher: The `DeltaPublisher`; None before training.

    Raises:
        TypeError, ValueError: If `every` is not an integer of at least 1; in `fit`, as in
            `DeltaPublisher`.

    Example:

    ```python
    publish = keras_freeze.callbacks.PublishDeltas("stream", every=100, values="bfloat16")
    model.fit(x, y, callbacks=[publish])
    keras_freeze.follow(base, "stream")  # in another process
    ```
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        every: int,
        *,
        base: keras.Model | str | os.PathLike[str] | None = None,
        values: str | Grid = "float32",
        full_every: int = 100,
    ) -> None:
        super().__init__()
        self.publisher: DeltaPublisher | None = None
        self._published_model: keras.Model | None = None
        self._every = check_int("every", every, minimum=1)
        self._folder = folder
        self._arguments: dict[str, Any] = {
            "base": base,
            "values": values,
            "full_every": full_every,
        }
        self._num_steps = self._last_batch = self._num_published = 0

    def on_train_begin(self, logs: Any = None) -> None:
        if self.publisher is None:
            self.publisher = DeltaPublisher(self.model, self._folder, **self._arguments)
            self._published_model = self.model
        elif self._published_model is not self.model:
            raise ValueError(
                "This PublishDeltas publishes another model already: make one for each model, with "
                f"a folder of its own. Received: model={self.model!r}"
            )
        self._num_steps = self._num_published = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._last_batch = -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # With `steps_per_execution`, several steps have been made.
        self._num_steps += batch - self._last_batch
        self._last_batch = batch
        if self._num_steps // self._every > self._num_published // self._every:
            self._publish()

    def on_train_end(self, logs: Any = None) -> None:
        self._publish()  # whatever other callbacks have restored

    def _publish(self) -> None:
        assert self.publisher is not None
        try:
            self.publisher.publish()
        except OSError as error:  # training matters more; the next file is a complete one
            warnings.warn(
                f"The model could not be published, and training goes on: {error}", stacklevel=1
            )
        self._num_published = self._num_steps
