"""Searches for hyperparameters with any tuner of KerasTuner."""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras

from keras_freeze._utils.validation import check_number, value_error
from keras_freeze.masks.selection import check_freeze_rate
from keras_freeze.paper import datasets
from keras_freeze.paper._keras_tuner import TrialStatus, keras_tuner
from keras_freeze.paper.preparation import Setup, prepare_run
from keras_freeze.paper.recipes import LEARNING_RATES, METHODS
from keras_freeze.paper.run import Run
from keras_freeze.paper.training_callbacks import StopWhenNotFinite, set_values, values_of


def check_trials(tuner: Any) -> None:
    """Raise an error if a trial of a search failed, which KerasTuner does not report.

    Args:
        tuner: a KerasTuner tuner whose `search` has ended. In the worker of a chief nothing is
            checked: the chief knows of all trials.

    Raises:
        RuntimeError: if trials failed; it names their hyperparameters and the first one's error.

    Example:

    ```python
    tuner.search()
    check_trials(tuner)
    ```
    """
    if not isinstance(tuner.oracle, keras_tuner.Oracle):
        return
    trials = tuner.oracle.trials.values()
    failed = [t for t in trials if t.status in (TrialStatus.FAILED, TrialStatus.INVALID)]
    if failed:
        lines = [f"- {trial.trial_id}: {trial.hyperparameters.values}" for trial in failed]
        message = failed[0].message or "The error is shown by the worker that ran it."
        raise RuntimeError(
            f"{len(failed)} of {len(trials)} trials failed:\n" + "\n".join([*lines, message])
        )


@dataclass(frozen=True)
class LogRange:
    """All learning rates between two, each order of magnitude equally likely.

    Attributes:
        low, high: the ends, 0 < low < high.

    Raises:
        TypeError, ValueError: for other values.

    Example:
        >>> FreezeHyperModel("mnist_5k", "lenet_300_100", 0.99, learning_rates=LogRange(0.01, 1.0))
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        low = check_number("low", self.low, positive=True)
        if low >= check_number("high", self.high, positive=True):
            raise value_error("high", self.high, f"greater than `low`, {low:g}")


class FreezeHyperModel(keras_tuner.HyperModel):
    """What KerasTuner searches over: architecture, method, freezing rate, learning rate, seed.

    It has its own data: `search()` takes none. A trial trains by the data set's recipe, and
    everything random in it comes from its seed. Of the arguments below that may be one value or
    several, one value is fixed and several are a choice. A trial whose loss is no longer finite
    ends there, and that epoch counts as guessing does.

    `search(epochs=...)` stops every trial after that number of epochs of the schedule; `epochs`
    here shortens the schedule itself. `keras_tuner.Hyperband` continues its best trials: give its
    `max_epochs` the same number as `epochs` here, and a trial that is continued to the end has
    followed the whole schedule once. It continues where it was in the schedule, but not in the
    data: it sees them in the order of the first pass again.

    Args:
        dataset: a name of `keras_freeze.datasets.NAMES`.
        models: one or several names of `keras_freeze.models.MODELS`.
        freeze_rates: one or several freezing rates q, from 0 to 1. Methods with a single rate,
            such as "baseline", are not tried with each.
        methods: one or several names of `keras_freeze.training.METHODS`. Defaults to "freezenet".
        learning_rates: one or several learning rates of the first steps, or a `LogRange` (of which
            `keras_tuner.GridSearch` tries ten). Defaults to the paper's grid.
        seeds: one or several integers in [0, 2**32). Defaults to 0.
        data_dir: where TFDS keeps prepared data sets. None: its default.
        **settings: other settings of `keras_freeze.runs.Run`, the same for all trials, such as
            `epochs` (the length of the schedule), `steps_per_epoch` or `l2`.

    Raises:
        ValueError, TypeError: for unknown names and numbers out of range. Other errors appear when
            a network is first built, as a tuner does when it is created.

    Example:

    ```python
    hypermodel = FreezeHyperModel("mnist_5k", "lenet_300_100", 0.99, epochs=10)
    tuner = keras_tuner.RandomSearch(
        hypermodel, objective="val_accuracy", max_trials=5, directory="runs", project_name="mine"
    )
    tuner.search()
    check_trials(tuner)
    get_mask(tuner.get_best_models()[0])
    ```
    """

    def __init__(
        self,
        dataset: str,
        models: str | Sequence[str],
        freeze_rates: float | Sequence[float],
        *,
        methods: str | Sequence[str] = "freezenet",
        learning_rates: float | Sequence[float] | LogRange = LEARNING_RATES,
        seeds: int | Sequence[int] = 0,
        data_dir: str | os.PathLike[str] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if settings.get("schedule") is not None:
            accepted = "None in a search, whose tuner compares epochs with different masks"
            raise value_error("schedule", settings["schedule"], accepted)
        self._data_dir = data_dir
        self._fixed: dict[str, Any] = {"dataset": dataset, **settings}
        self._choices: dict[str, LogRange | list[Any]] = {
            "model": _several("models", models),
            "method": _several("methods", methods),
            "freeze_rate": [check_freeze_rate(q) for q in _several("freeze_rates", freeze_rates)],
            "learning_rate": (
                learning_rates
                if isinstance(learning_rates, LogRange)
                else _several("learning_rates", learning_rates)
            ),
            "seed": _several("seeds", seeds),
        }
        self._check_choices()
        self._setup: Setup | None = None

    def build(self, hp: Any) -> keras.Model:
        """Return the network of a trial: compiled, frozen, and at the start of its training.

        Args:
            hp: the trial's `keras_tuner.HyperParameters`.

        Returns:
            A Keras model, whose optimizer is a `FreezeOptimizer` with a mask.
        """
        self._setup = self._prepare(hp)
        return self._setup.network

    def fit(
        self,
        hp: Any,
        model: keras.Model,
        *,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        epochs: int | None = None,
        initial_epoch: int = 0,
        verbose: Any = "auto",
    ) -> keras.callbacks.History:
        """Train the network of a trial by the recipe; called by KerasTuner.

        Args:
            hp: the trial's `keras_tuner.HyperParameters`.
            model: what `build(hp)` returned, perhaps with other weights since.
            callbacks: more Keras callbacks.
            epochs: the epoch of the schedule after which to stop. None: its last.
            initial_epoch: number of epochs of the schedule that the network has been trained for.
            verbose: as `keras.Model.fit` takes it.

        Returns:
            Keras's `History`.
        """
        if self._setup is None or self._setup.network is not model:
            self._setup = replace(self._prepare(hp), network=model)
        setup = self._setup
        if initial_epoch:
            # The weights are those of the best epoch so far, the position in the schedule is not.
            model.optimizer.iterations.assign(initial_epoch * setup.steps_per_epoch)
        return model.fit(
            setup.batches(),
            validation_data=setup.validation,
            epochs=setup.run.epochs if epochs is None else epochs,
            initial_epoch=initial_epoch,
            shuffle=False,
            verbose=verbose,
            callbacks=[_EndAtDivergence(datasets.info(setup.run.dataset).num_classes), *callbacks],
        )

    def _check_choices(self) -> None:
        """Make a Run with each value, which checks it."""
        values = {
            name: [of_name.low] if isinstance(of_name, LogRange) else of_name
            for name, of_name in self._choices.items()
        }
        first = {**self._fixed, **{name: of_name[0] for name, of_name in values.items()}}
        for name, of_name in values.items():
            for value in of_name:
                Run(**{**first, name: value})

    def _prepare(self, hp: Any) -> Setup:
        chosen = {name: _choose(hp, name, self._choices[name]) for name in ("model", "method")}
        with hp.conditional_scope("method", [m for m in METHODS if METHODS[m].freeze_rate is None]):
            freeze_rate = _choose(hp, "freeze_rate", self._choices["freeze_rate"])
        for name in ("learning_rate", "seed"):
            chosen[name] = _choose(hp, name, self._choices[name])
        run = Run(freeze_rate=0.0 if freeze_rate is None else freeze_rate, **chosen, **self._fixed)
        return prepare_run(run, self._data_dir)


class _EndAtDivergence(StopWhenNotFinite):
    """Ends training once a loss is not finite: back at the start, and no better than guessing."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self._guessing = {"loss": math.log(num_classes), "accuracy": 1 / num_classes}

    def on_train_begin(self, logs: Any = None) -> None:
        self._start = values_of(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.epoch is None:
            return
        set_values(self.model, *self._start)
        for name, value in self._guessing.items():
            logs[name] = logs[f"val_{name}"] = value


def _choose(hp: Any, name: str, values: LogRange | Sequence[Any]) -> Any:
    if isinstance(values, LogRange):
        return hp.Float(name, values.low, values.high, sampling="log")
    return hp.Fixed(name, values[0]) if len(values) == 1 else hp.Choice(name, list(values))


def _several(name: str, values: Any) -> list[Any]:
    several = [values] if isinstance(values, str) or not isinstance(values, Iterable) else values
    several = list(dict.fromkeys(several))
    if not several:
        raise value_error(name, values, "at least one value")
    return several
