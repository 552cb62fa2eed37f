"""What a training run comes to, and its files."""

import csv
import json
import os
import platform
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_freeze import backend
from keras_freeze._utils.files import replacing
from keras_freeze._utils.text import duration, jsonable
from keras_freeze._version import __version__
from keras_freeze.criteria.grasp_criterion import GraSP
from keras_freeze.pruning import PruningCheck
from keras_freeze.reporting import Report

if TYPE_CHECKING:
    from keras_freeze.paper.run import Run


class WithRun:
    """A base class of what belongs to a run: the run's attributes are its own, too."""

    run: "Run"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "run":  # while an object is copied, there is no run yet
            raise AttributeError(name)
        return getattr(self.run, name)

    @property
    def model_name(self) -> str:
        """The name of the network."""
        return self.run.model

    @property
    def criterion(self) -> str:
        """The name of what chose the trained weights."""
        criterion = self.run.chosen_criterion
        if isinstance(criterion, (str, GraSP)):
            return str(criterion)
        return getattr(criterion, "__name__", type(criterion).__name__)


@dataclass(frozen=True, eq=False)
class TrainingResult(WithRun):
    """What a training run comes to.

    Attributes of the run can be read here, too: `dataset`, `method`, `freeze_rate`, `seed`,
    `recipe` and so on; `model_name` and `criterion` are the names of the network and of the
    criterion.

    Attributes:
        run: the settings, a `keras_freeze.runs.Run`.
        report: counts, freezing rates and sizes.
        history: "loss", "accuracy", "val_loss" and "val_accuracy" after each epoch, and what
            callbacks logged.
        best_epoch: the epoch with the best validation accuracy, from 1; the first of several. 0 if
            no epoch had a finite validation loss: the weights are then the initial ones. Where the
            mask changes in training, only an epoch that ends with the last mask counts, and
            without one the weights are those of the end.
        validation_accuracy, validation_loss: of that epoch; None if it is 0.
        test_accuracy, test_loss: of its weights on the test set, which decided nothing.
        pruning: for FreezeNet-WD, the test set's metrics before and after its frozen weights are
            set to zero, and the largest of these; None for other methods.
        diverged_epoch: the epoch whose loss was no longer finite, after which training stopped;
            None if the loss stayed finite.
        seconds: wall time of the epochs, validation included.
        versions: of Python and the packages that results depend on.
        model: the network, with the weights and the optimizer state of the best epoch.
    """

    run: "Run"
    report: Report
    history: dict[str, list[float]]
    best_epoch: int
    validation_accuracy: float | None
    validation_loss: float | None
    test_accuracy: float
    test_loss: float
    pruning: PruningCheck | None
    diverged_epoch: int | None
    seconds: float
    versions: dict[str, str]
    model: keras.Model = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return all but the network, for JSON; a number that is not finite becomes None."""
        own = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("run", "model")
        }
        names = ["dataset", "method", "criterion", "frozen_weights"]
        names += ["freeze_rate", "seed", "reinitializer", "distribution", "mask", "schedule"]
        return jsonable(
            {
                **{name: getattr(self, name) for name in names},
                "model": self.model_name,
                "recipe": asdict(self.run.recipe),
                **own,
                "report": self.report.to_dict(),
                "pruning": None if self.pruning is None else asdict(self.pruning),
            }
        )

    def summary(self) -> str:
        """Return the accuracies and the epoch that they belong to, in a line or two."""
        lines = [
            f"Test accuracy {self.test_accuracy:.2%} with the weights of "
            + (
                f"epoch {self.best_epoch}, the best in validation "
                f"({self.validation_accuracy:.2%}); {duration(self.seconds)} of training"
                if self.best_epoch
                else "the start, since no epoch had a finite loss"
                if self.run.schedule is None
                else "the end, since no epoch with the last mask had a finite loss"
            )
        ]
        if self.diverged_epoch is not None:
            lines.append(
                f"Training stopped in epoch {self.diverged_epoch}: the loss was no longer finite. "
                f"A lower learning rate than {self.run.learning_rate:g} may help."
            )
        if self.pruning is not None:
            lines.append(
                f"With the frozen weights set to zero, of which the largest is "
                f"{self.pruning.largest_frozen_weight:.2g}: {self.pruning.after['accuracy']:.2%}"
            )
        return "\n".join(lines)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write result.json, history.csv and model.keras into a folder, which is created.

        Each file is written atomically and replaces the one that is there.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "result.json") as path:
            path.write_text(json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n")
        with replacing(folder / "history.csv") as path, path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["epoch", *self.history])
            writer.writerows(
                [epoch, *values]
                for epoch, values in enumerate(zip(*self.history.values(), strict=True), start=1)
            )
        with replacing(folder / "model.keras") as path:
            self.model.save(path)


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that results depend on."""
    return {
        "python": platform.python_version(),
        "keras_freeze": __version__,
        "keras": keras.__version__,
        keras.backend.backend(): backend.VERSION,
        "numpy": np.__version__,
    }
