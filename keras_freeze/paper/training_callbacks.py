"""The callbacks of a training run: best epoch, divergence, progress."""

import math
import shutil
import sys
import time
from typing import Any

import keras
import numpy as np

from keras_freeze import backend
from keras_freeze._utils.text import duration

_clock = time.monotonic  # under this name so that tests can replace it


def values_of(model: keras.Model) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return copies of the values of a model's weights and of its optimizer's variables."""
    weights, state = model.weights, model.optimizer.variables
    return [backend.to_numpy(v) for v in weights], [backend.to_numpy(v) for v in state]


def set_values(model: keras.Model, weights: list[np.ndarray], state: list[np.ndarray]) -> None:
    """Set what `values_of` returned.

    FreezeNet-WD's frozen weights and the factor that they have shrunk by belong together.
    """
    model.set_weights(weights)
    model.optimizer.set_weights(state)


class KeepBest(keras.callbacks.Callback):
    """Restores the weights and the optimizer state of the first best validation epoch.

    Args:
        first_epoch: the first epoch, from 1, that counts: those before may have another mask. If
            none counts, the model is left as it is, or as it was at first if all would count.

    Attributes:
        epoch, accuracy: the best epoch so far, from 1, and its validation accuracy.
        weights, state: what the model and the optimizer had then; None before that.
    """

    def __init__(self, first_epoch: int = 1) -> None:
        super().__init__()
        self._first_epoch = first_epoch
        self.weights: list[np.ndarray] | None = None
        self.state: list[np.ndarray] | None = None
        self.epoch = 0
        self.accuracy = -math.inf

    def on_train_begin(self, logs: Any = None) -> None:
        if self._first_epoch == 1 and self.weights is None:
            self._keep()  # in case no epoch has a finite loss

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch + 1 < self._first_epoch:
            return
        if math.isfinite(logs["val_loss"]) and logs["val_accuracy"] > self.accuracy:
            self.epoch, self.accuracy = epoch + 1, logs["val_accuracy"]
            self._keep()

    def on_train_end(self, logs: Any = None) -> None:
        if self.weights is None or self.state is None:
            return
        set_values(self.model, self.weights, self.state)

    def _keep(self) -> None:
        self.weights, self.state = values_of(self.model)


class StopWhenNotFinite(keras.callbacks.Callback):
    """Ends training once the loss is NaN or infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch: int | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # The loss so far in this epoch, which stays what it is once it is not finite.
        if not math.isfinite(logs["loss"]):
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if not (math.isfinite(logs["loss"]) and math.isfinite(logs["val_loss"])):
            self.epoch = epoch + 1
            self.model.stop_training = True


class Progress(keras.callbacks.Callback):
    """One line on standard error: kept up to date on a terminal, else one every 10 seconds."""

    _SECONDS_BETWEEN_LINES = 10.0

    def __init__(self, epochs: int, steps: int, best: KeepBest, first_epoch: int = 0) -> None:
        super().__init__()
        self._epochs, self._steps, self._best = epochs, steps, best
        self._first_epoch = first_epoch
        self._is_terminal = sys.stderr.isatty()
        self._epoch = first_epoch
        self._numbers = ""

    def on_train_begin(self, logs: Any = None) -> None:
        self._start = self._last_line = _clock()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._is_terminal:
            self._show(self._epoch + min(1.0, (batch + 1) / self._steps))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch + 1
        self._numbers = (
            f": loss {logs['loss']:.4f}, accuracy {logs['accuracy']:.1%}, validation "
            f"{logs['val_accuracy']:.1%}"
        )
        if self._best.epoch:
            self._numbers += f", best {self._best.accuracy:.1%} in {self._best.epoch}"
        is_due = _clock() - self._last_line >= self._SECONDS_BETWEEN_LINES
        if self._is_terminal or is_due or self._epoch == self._epochs:
            self._show(self._epoch)
            self._last_line = _clock()

    def on_train_end(self, logs: Any = None) -> None:
        if self._is_terminal:
            print(file=sys.stderr)

    def _show(self, epochs_done: float) -> None:
        elapsed = _clock() - self._start
        left = elapsed * (self._epochs - epochs_done) / (epochs_done - self._first_epoch)
        clock = f"{duration(left)} left" if left else f"took {duration(elapsed)}"
        line = f"epoch {math.ceil(epochs_done)}/{self._epochs}, {clock}{self._numbers}"
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + line[:width].ljust(width), end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)
