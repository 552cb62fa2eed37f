"""Training runs that have been interrupted go on with the epoch after the last backup."""

import json
import logging
import os
import time
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_freeze._utils.files import replacing
from keras_freeze.model_state import get_mask
from keras_freeze.paper.training_callbacks import KeepBest, set_values, values_of
from keras_freeze.paper.training_result import versions

if TYPE_CHECKING:
    from keras_freeze.paper.run import Run

_logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_BACKUPS = 60.0


@dataclass(frozen=True)
class Interrupted:
    """What a run had done when it was interrupted; nothing if it was not.

    Attributes:
        epochs: how many epochs had ended.
        seconds: how long they took.
        history: their logs, by name.
    """

    epochs: int = 0
    seconds: float = 0.0
    history: Mapping[str, list[float]] = field(default_factory=dict)


class Backup(keras.callbacks.Callback):
    """Writes the state of a run to a file at the ends of epochs, once a minute or less often.

    Among the callbacks of `fit` it comes after the KeepBest that it is given.

    Args:
        path: the file, which exists if the run was interrupted.
        run: the settings.
        network: the run's network, compiled and frozen.
        best: knows the best epoch so far.
    """

    def __init__(
        self, path: str | os.PathLike[str], run: "Run", network: keras.Model, best: KeepBest
    ) -> None:
        super().__init__()
        self._path, self._network, self._best = path, network, best
        mask = get_mask(network)
        # Only what has all of this in common can go on from the file.
        self._of = {
            "run": json.loads(json.dumps(vars(run), default=repr)),
            "versions": versions(),
            "mask": None if mask is None else mask.fingerprint,
        }
        self._before = Interrupted()

    def restore(self) -> Interrupted:
        """Bring the network to where the run was interrupted, if it was.

        A file that is damaged or of something else is warned of, and everything stays as it is.
        """
        if not os.path.exists(self._path):
            return self._before
        try:
            about, arrays = self._read()
        except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
            message = "The run starts again, as it cannot go on from %s: %s"
            _logger.warning(message, os.fspath(self._path), error)
            return self._before
        set_values(self._network, arrays["weights"], arrays["state"])
        best = self._best
        best.epoch, best.accuracy = about["best_epoch"], about["best_accuracy"]
        best.weights, best.state = arrays["best_weights"], arrays["best_state"]
        self._before = Interrupted(**about["before"])
        return self._before

    def on_train_begin(self, logs: Any = None) -> None:
        self._start = self._last = time.monotonic()
        self._history = {name: list(values) for name, values in self._before.history.items()}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for name, value in logs.items():
            self._history.setdefault(name, []).append(float(value))
        now = time.monotonic()
        if now - self._last < _SECONDS_BETWEEN_BACKUPS or self.model.stop_training:
            return
        self._last = now
        seconds = self._before.seconds + now - self._start
        try:
            self._write(Interrupted(epoch + 1, seconds, self._history))
        except OSError as error:  # of a full disk, say, for which no run has to fail
            _logger.warning("There is no new backup of the run: %s", error)

    def _read(self) -> tuple[dict[str, Any], dict[str, list[np.ndarray]]]:
        with np.load(self._path, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            if about["of"] != self._of:
                raise ValueError("it is of another run, mask or version")
            arrays = {kind: _several(file, kind) for kind in _KINDS}
        return about, arrays

    def _write(self, interrupted: Interrupted) -> None:
        about = {
            "of": self._of,
            "before": asdict(interrupted),
            "best_epoch": self._best.epoch,
            "best_accuracy": self._best.accuracy,
        }
        # On JAX `self.model` writes to the variables what has been trained.
        values = (*values_of(self.model), self._best.weights or [], self._best.state or [])
        arrays: dict[str, Any] = {
            f"{kind}/{number}": array
            for kind, of_kind in zip(_KINDS, values, strict=True)
            for number, array in enumerate(of_kind)
        }
        with replacing(self._path) as path, open(path, "wb") as file:
            np.savez(file, about=np.array(json.dumps(about)), **arrays)


_KINDS = ("weights", "state", "best_weights", "best_state")


def _several(file: Mapping[str, np.ndarray], kind: str) -> list[np.ndarray]:
    count = sum(name.startswith(f"{kind}/") for name in file)
    return [file[f"{kind}/{number}"] for number in range(count)]
