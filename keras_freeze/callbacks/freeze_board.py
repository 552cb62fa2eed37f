"""The callback that writes the curves of a frozen training to TensorBoard."""

import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

import keras

from keras_freeze._utils.validation import type_error
from keras_freeze.callbacks.drift import FrozenWeights, numbered
from keras_freeze.callbacks.gradient_flow_history import EpochData
from keras_freeze.gradients.flow import FlowMeter
from keras_freeze.model_state import ModelOptimizers
from keras_freeze.parameters import shorten
from keras_freeze.reporting import report


class FreezeBoard(keras.callbacks.Callback):
    """Writes to TensorBoard, after each epoch, what a frozen training should be watched for.

    The curves are in the folder "freeze" in `log_dir`, beside those of Keras's
    `TensorBoard` callback and over the same epochs:

    * "freeze_rate" and "real_freeze_rate", the rates q and q_beta of `report`, and its
      "gradient_bytes", which each of several processes gives in a step;
    * "trained_share/<path>", for each weight variable the share of it that is trained;
    * "gradient_flow" and "gradient_flow_deviation", if data are given: those of
      `GradientFlowHistory`, of the weights that the model has at the end of the epoch;
    * "frozen_drift", and "frozen_drift/<path>" for each variable with frozen weights: how many
      frozen weights differ in any bit from what they were when training began, and with
      `frozen_weights="zero"` from zero. It must be 0; otherwise there is a warning, too, once for
      each `fit`. It is also checked after the last epoch, when moving averages have been written
      into the model.

    With `frozen_weights="decay"` all frozen weights are one scalar times their start. The drift
    then counts those that are further from the common factor (the median of all) than rounding
    once in every step can bring them, and "frozen_deviation" is the largest such relative
    distance, rounding included.

    Training began when the first epoch did: after `BackupAndRestore` has put weights back, and,
    where the first batch decides the mask, before that batch. A weight that a replaced mask
    freezes (`freeze(..., overwrite=True)`) is compared with what it was after the epoch in which
    that happened; under "decay" so are all others from then on. `reinitialize`, and `load_weights`
    of other weights, during training are drift, and so is `prune` unless the frozen weights are
    zero, or decay, already. Without a mask, there is no drift.

    Training itself stays the same to the last bit. Main memory holds a copy of the model's
    trainable variables, except for "zero".

    Args:
        log_dir: the folder to show with `tensorboard --logdir`; it is made if need be.
        x, y, sample_weight, steps, batch_size: data for the gradient flow, as in
            `GradientFlowHistory`. None: no gradient flow.

    Raises:
        ImportError: without the package `tensorboard`.
        TypeError, ValueError: for a `log_dir` that is not a path; for data as in
            `GradientFlowHistory`.

    Example:

    ```python
    board = keras_freeze.callbacks.FreezeBoard("logs", x[:1280], y[:1280], batch_size=128)
    model.fit(x, y, epochs=10, callbacks=[keras.callbacks.TensorBoard("logs"), board])
    ```
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        x: Any = None,
        y: Any = None,
        *,
        sample_weight: Any = None,
        steps: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(log_dir, (str, os.PathLike)):
            raise type_error("log_dir", log_dir, "the path of a folder")
        _import_tensorboard()  # better now than when training begins
        self._folder = os.path.join(log_dir, "freeze")
        data = (x, y, sample_weight, steps, batch_size)
        self._data = None if all(part is None for part in data) else EpochData(*data)
        self._file: _EventFile | None = None
        self._frozen: FrozenWeights | None = None
        self._has_warned = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._close()  # an earlier training may have been interrupted
        self._file = _EventFile(self._folder)
        self._flow_meter = None
        if self._data is not None:
            self._passes = self._data.passes(self.model)
            self._flow_meter = FlowMeter(self.model)
        self._frozen = None
        self._has_warned = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        optimizer = ModelOptimizers(self.model).single
        # Not in on_train_begin, where weights may still be restored.
        if self._frozen is None and optimizer is not None:
            self._frozen = FrozenWeights(optimizer, self.model.trainable_variables)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert self._file is not None
        self._file.write(epoch, {**self._rates(), **self._flow(), **self._drift()})

    def on_train_end(self, logs: Any = None) -> None:
        self._drift()
        self._close()
        self._frozen = None

    def _rates(self) -> dict[str, float]:
        counts = report(self.model)
        names = ("freeze_rate", "real_freeze_rate", "gradient_bytes")
        rates = {name: getattr(counts, name) for name in names}
        labels = numbered([row.path for row in counts.rows])
        for label, row in zip(labels, counts.rows, strict=True):
            if row.size and (row.is_weight or row.num_trained < row.size):
                rates[f"trained_share/{label}"] = row.num_trained / row.size
        return rates

    def _flow(self) -> dict[str, float]:
        if self._flow_meter is None:
            return {}
        flow = self._flow_meter.statistics(self._passes)
        return {"gradient_flow": flow.mean, "gradient_flow_deviation": flow.deviation}

    def _drift(self) -> dict[str, float]:
        drift = None if self._frozen is None else self._frozen.drift()
        if drift is None:
            return {}
        self._warn(drift.counts)
        scalars: dict[str, float] = {"frozen_drift": sum(drift.counts.values())}
        scalars.update({f"frozen_drift/{label}": n for label, n in drift.counts.items()})
        if drift.deviation is not None:
            scalars["frozen_deviation"] = drift.deviation
        return scalars

    def _warn(self, counts: Mapping[str, int]) -> None:
        drifted = [f"{label} ({count})" for label, count in counts.items() if count]
        if drifted and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "Frozen weights have changed since training began. This many differ: "
                f"{shorten(drifted)}. Look for what else writes to these variables: a callback, a "
                "layer, or a call to `prune`, `reinitialize` or `load_weights`.",
                stacklevel=2,
            )

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class _EventFile:
    """Writes scalars to an event file of TensorBoard, without TensorFlow."""

    def __init__(self, folder: str) -> None:
        self._event, self._summary, writer = _import_tensorboard()
        self._writer = writer(folder)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add scalars of one step, and flush them."""
        values = [
            self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()
        ]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _import_tensorboard() -> tuple[Any, Any, Any]:
    """Return the classes Event, Summary and EventFileWriter."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise ImportError(
            "FreezeBoard writes files of TensorBoard: pip install tensorboard"
        ) from error
    return Event, Summary, EventFileWriter
