"""The callback that records the gradient flow through training."""

from collections.abc import Iterator
from typing import Any

import keras

from keras_freeze.gradients.data import Passes, preprocessed, preprocesses
from keras_freeze.gradients.flow import FlowMeter


class GradientFlowHistory(keras.callbacks.Callback):
    """Records the gradient flow before training and after each epoch (figure 4 right).

    Each record is the mean and the standard deviation, over the batches of the given data, of the
    L1 norm of a batch's gradient divided by the number of trained parameters: the mean is
    `gradient_flow(..., reduce="norms")`. They join the epoch's logs as "gradient_flow" and
    "gradient_flow_deviation", for `History` and for loggers that come later in the list of
    callbacks. Where a gradient is not finite they are NaN. Training itself stays the same to the
    last bit; it takes the time of one more forward and backward pass for each batch of the data.

    Args:
        x, y, sample_weight: training data, as in `gradient_flow`. A dataset is read again for each
            record, so give the callback a separate one: reading a shuffled `tf.data.Dataset` moves
            its order on, also for `fit`.
        steps: how many batches to use, the first ones. None: all.
        batch_size: of arrays. None: 32, as in `fit`.

    Attributes:
        history: lists "epoch" (how many epochs had been trained, the first value before training),
            "gradient_flow" and "gradient_flow_deviation", of the last `fit`.

    Raises:
        ValueError, TypeError: as in `gradient_flow`; for a generator, which can be read only once.

    Example:

    ```python
    flow = keras_freeze.callbacks.GradientFlowHistory(x[:1280], y[:1280], batch_size=128)
    model.fit(x, y, epochs=10, callbacks=[flow])
    flow.history["gradient_flow"]
    ```
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        *,
        sample_weight: Any = None,
        steps: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self._data = EpochData(x, y, sample_weight, steps, batch_size)
        self.history = _empty_history()

    def on_train_begin(self, logs: Any = None) -> None:
        self.history = _empty_history()
        self._passes = self._data.passes(self.model)
        self._meter = FlowMeter(self.model)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self.history["epoch"]:  # not in on_train_begin, which does not know the epoch
            self._record(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        record = self._record(epoch + 1)
        if logs is not None:
            logs.update(record)

    def _record(self, epoch: int) -> dict[str, float]:
        flow = self._meter.statistics(self._passes)
        record = {"gradient_flow": flow.mean, "gradient_flow_deviation": flow.deviation}
        for name, value in {"epoch": epoch, **record}.items():
            self.history[name].append(value)
        return record


def _empty_history() -> dict[str, list[Any]]:
    return {"epoch": [], "gradient_flow": [], "gradient_flow_deviation": []}


class EpochData:
    """Data for one pass after each epoch.

    Raises:
        TypeError: for data that can be read only once. Other errors are those of `Passes`.
    """

    def __init__(self, x: Any, *others: Any) -> None:
        if isinstance(x, Iterator):
            raise TypeError(
                "Argument `x` must be arrays or a dataset that can be read again and again. "
                f"Received: x={x!r}, which can be read once."
            )
        self._given = (x, *others)
        self._passes = Passes(*self._given)

    def passes(self, model: keras.Model) -> Passes:
        """Return passes over these data as a model gets them from `fit`."""
        if not preprocesses(model):
            return self._passes
        x, y, sample_weight, *others = self._given
        return Passes(*preprocessed(model, x, y, sample_weight), *others)
