"""One measurement of an experiment as data: its settings, and the line of results it leaves."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import keras
import numpy as np

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from keras_freeze import backend
from keras_freeze.callbacks.gradient_flow_history import GradientFlowHistory
from keras_freeze.gradients.flow import gradient_flow
from keras_freeze.initializers.seeded import INITIALIZERS
from keras_freeze.masks.selection import check_freeze_rate
from keras_freeze.optimizer.arguments import check_seed
from keras_freeze.paper.models import MODELS
from keras_freeze.paper.training import (
    METHODS,
    check_choice,
    check_steps,
    jsonable,
    prepare,
    recipe_for,
    train,
    versions,
)
from keras_freeze.parameters import WEIGHT, kind_of
from keras_freeze.reporting import report
from keras_freeze.storage import save


@dataclass(frozen=True)
class Run:
    """The settings of one run; equal settings are the same run, wherever it is repeated.

    What is None when a Run is made takes its value from the data set's recipe at once; batch size,
    momentum and the steps after which the rate drops always come from the recipe.

    Attributes:
        dataset, model, method, freeze_rate, seed: as `keras_freeze.training.train` takes them.
        measure: what is measured, a name of `MEASURES`.
        epochs, learning_rate, l2, initializer, validation_fraction: as `train` takes them.
        reinitializer: name of the initialiser of algorithm S1; None for the ordinary algorithm.
        steps_per_epoch: how many batches of each pass are used; None for all.

    Raises:
        ValueError, TypeError: for unknown names and numbers out of range. A network that does not
            fit the images is found out when the run is executed.

    Example:
        >>> Run("mnist", "lenet_5_caffe", "freezenet", 0.99, seed=0).epochs
        250
    """

    dataset: str
    model: str
    method: str
    freeze_rate: float
    seed: int
    measure: str = "training"
    epochs: int | None = None
    learning_rate: float | None = None
    l2: float | None = None
    initializer: str | None = None
    reinitializer: str | None = None
    validation_fraction: float | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        check_choice("measure", self.measure, MEASURES)
        check_choice("model", self.model, MODELS)
        if self.reinitializer is not None:
            check_choice("reinitializer", self.reinitializer, INITIALIZERS)
        check_steps(self.steps_per_epoch)
        only_rate = check_choice("method", self.method, METHODS).freeze_rate
        rate = check_freeze_rate(self.freeze_rate)
        recipe = recipe_for(self.dataset, **{name: getattr(self, name) for name in _OF_RECIPE})
        known = {
            "seed": check_seed(self.seed),
            "freeze_rate": rate if only_rate is None else only_rate,
            **{name: getattr(recipe, name) for name in _OF_RECIPE},
        }
        for name, value in known.items():
            object.__setattr__(self, name, value)

    @property
    def label(self) -> str:
        """The settings in a few words, which differ between any two runs."""
        usual = recipe_for(self.dataset)
        parts = [f"{self.model} on {self.dataset}", self.method, f"q = {self.freeze_rate:g}"]
        parts += [
            f"{name.replace('_', ' ')} {_short(getattr(self, name))}"
            for name in _OF_RECIPE
            if getattr(self, name) != getattr(usual, name)
        ]
        if self.reinitializer is not None:
            parts.append(f"reinitialised by {self.reinitializer}")
        if self.steps_per_epoch is not None:
            parts.append(f"{self.steps_per_epoch} steps an epoch")
        if self.measure != "training":
            parts.append(self.measure.replace("_", " "))
        return ", ".join([*parts, f"seed {self.seed}"])

    def execute(
        self,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        verbose: bool = True,
    ) -> dict[str, Any]:
        """Trains or measures, and returns the record for `Results.append`.

        Args:
            data_dir: where TFDS keeps prepared data sets; None for its default.
            callbacks: more Keras callbacks, where the run trains.
            verbose: whether to show progress on standard error.

        Returns:
            A dictionary for JSON: "run" (the settings), "finished" (when) and "result".
        """
        start = time.perf_counter()
        result = MEASURES[self.measure](
            self, data_dir=data_dir, callbacks=callbacks, verbose=verbose
        )
        seconds = time.perf_counter() - start
        result = {"seconds": seconds, "versions": versions(), **result}
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        return {"run": asdict(self), "finished": finished, "result": jsonable(result)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Run":
        """The run of a record; settings that older versions did not know have their defaults."""
        known = {field.name for field in fields(cls)}
        settings = record.get("run") if isinstance(record, Mapping) else None
        if not isinstance(settings, Mapping) or not isinstance(record.get("result"), Mapping):
            raise TypeError('a record has the objects "run" and "result"')
        return cls(**{name: value for name, value in settings.items() if name in known})


_OF_RECIPE = ("epochs", "learning_rate", "l2", "initializer", "validation_fraction")


def _settings(run: Run) -> dict[str, Any]:
    """The arguments of `train` and `prepare`."""
    names = ("dataset", "model", "method", "freeze_rate", "seed", *_OF_RECIPE)
    return {
        "reinitializer": run.reinitializer,
        "steps_per_epoch": run.steps_per_epoch,
        **{name: getattr(run, name) for name in names},
    }


def _measure_training(
    run: Run, data_dir: Any, callbacks: Sequence[keras.callbacks.Callback], verbose: bool
) -> dict[str, Any]:
    """Trains and tests: `TrainingResult.to_dict`."""
    result = train(**_settings(run), data_dir=data_dir, callbacks=callbacks, verbose=verbose)
    return result.to_dict()


def _measure_gradient_flow(run: Run, data_dir: Any, **_: Any) -> dict[str, Any]:
    """The gradient flow over the training data before training."""
    setup = prepare(**_settings(run), data_dir=data_dir)
    flow = gradient_flow(setup.network, setup.batches())
    return {"gradient_flow": flow, "report": report(setup.network).to_dict()}


def _measure_gradient_flow_in_training(
    run: Run, data_dir: Any, callbacks: Sequence[keras.callbacks.Callback], verbose: bool
) -> dict[str, Any]:
    """Trains and tests; "flow" is what `GradientFlowHistory` recorded.

    Unlike the history, it has the flow before training, too.
    """
    setup = prepare(**_settings(run), data_dir=data_dir)
    flow = GradientFlowHistory(setup.batches())
    result = setup.fit([flow, *callbacks], verbose=verbose)
    return {**result.to_dict(), "flow": flow.history}


def _measure_costs(run: Run, data_dir: Any, **_: Any) -> dict[str, Any]:
    """What table 1 states, counted: in the network, in a file, and in one step of training."""
    setup = prepare(**_settings(run), data_dir=data_dir)
    network = setup.network
    weights = [v for v in network.trainable_variables if kind_of(v) == WEIGHT]
    before = [backend.to_numpy(v) for v in weights]
    flow = gradient_flow(network, setup.batches())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.freeze"
        save(network, path)
        file_bytes = path.stat().st_size
    network.fit(setup.batches().take(1), shuffle=False, verbose=0)
    moved = [
        np.count_nonzero(backend.to_numpy(v) != b) for v, b in zip(weights, before, strict=True)
    ]
    counts = report(network)
    return {
        "total_weights": int(sum(np.count_nonzero(b) for b in before)),
        "stored_weights": counts.num_trained_weights,
        "file_bytes": file_bytes,
        "moved_weights": int(sum(moved)),
        "gradient_flow": flow,
        "report": counts.to_dict(),
    }


MEASURES: Mapping[str, Callable[..., dict[str, Any]]] = {
    "training": _measure_training,
    "gradient_flow": _measure_gradient_flow,
    "gradient_flow_in_training": _measure_gradient_flow_in_training,
    "costs": _measure_costs,
}
"""What a run can measure, by name."""


class Results:
    """Records of runs in a file, one JSON object a line, which only ever grows.

    Several processes may append to one file at a time. A process that is killed while it writes
    leaves at most one broken line, which counts for nothing and hurts no other.

    Args:
        path: of the file; it and its folder are made when something is first appended.

    Example:

    ```python
    results = Results("runs/results.jsonl")
    run = Run("mnist_5k", "lenet_300_100", "freezenet", 0.99, seed=0)
    if run not in results:
        results.append(run.execute())
    results[run]["result"]["test_accuracy"]
    ```
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._position, self._num_lines = 0, 0
        self._records: dict[Run, dict[str, Any]] = {}

    def __contains__(self, run: Run) -> bool:
        self._read()
        return run in self._records

    def __getitem__(self, run: Run) -> dict[str, Any]:
        self._read()
        return self._records[run]

    def __len__(self) -> int:
        self._read()
        return len(self._records)

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds what `Run.execute` returned, safely on disk when this returns.

        Raises:
            TypeError, ValueError: for anything else.
        """
        Run.from_record(record)
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            _lock(file)
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> None:
        """Reads the lines that were added, by whatever process, since the last time."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written, or cut off
                self._position += len(line)
                self._num_lines += 1
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            run = Run.from_record(record)
            _check_result(run, record["result"])
        except (ValueError, TypeError, KeyError) as error:
            self._leave_out(error)
        else:
            self._records[run] = record

    def _leave_out(self, error: Exception) -> None:
        place = f"{self.path}, line {self._num_lines}"
        if place not in _left_out:
            _left_out.add(place)
            print(f"{place} was left out, since it is no record of a run: {error}", file=sys.stderr)


# Said once each, however often a file is read.
_left_out: set[str] = set()


def _check_result(run: Run, result: Mapping[str, Any]) -> None:
    """Refuses a result that tables and figures could not be made of."""
    numbers = _NUMBERS.get(run.measure, ())
    missing = [name for name in ("report", *numbers) if name not in result]
    wrong = [n for n in numbers if not isinstance(result.get(n), (int, float, type(None)))]
    if missing or wrong or not isinstance(result["report"], Mapping):
        raise ValueError(f"its result lacks a number: {', '.join(missing + wrong) or 'report'}")


_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "training": ("test_accuracy", "validation_accuracy"),
    "gradient_flow": ("gradient_flow",),
    "gradient_flow_in_training": ("test_accuracy", "validation_accuracy"),
    "costs": ("gradient_flow", "file_bytes"),
}


def _lock(file: IO[bytes]) -> None:
    """Keeps other processes from appending until the file is closed, where the system can."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
