"""Many runs: sweeps that resume and spread over machines, and searches for hyperparameters.

`sweep` executes a list of runs, such as the paper's grid of learning rates. `FreezeHyperModel` is
for searches of one's own with any tuner of KerasTuner. Both need it, which the extra `tune` brings.
"""

import gc
import json
import math
import os
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import keras

try:
    import keras_tuner
    from keras_tuner.engine.base_tuner import BaseTuner
    from keras_tuner.engine.trial import TrialStatus
except ImportError as error:
    raise ImportError(
        "Sweeps and searches need KerasTuner: "
        "pip install keras-tuner scikit-learn scipy tensorboard"
    ) from error

from keras_freeze.masks.selection import check_freeze_rate
from keras_freeze.paper import datasets, models
from keras_freeze.paper.runs import Results, Run
from keras_freeze.paper.training import (
    LEARNING_RATES,
    METHODS,
    Setup,
    _StopWhenNotFinite,
    check_choice,
    duration,
    prepare,
    recipe_for,
)

CallbacksOf = Callable[[Run], Sequence[keras.callbacks.Callback]]

_FAILURES_IN_A_ROW = 3
_SECONDS_BETWEEN_REQUESTS = 0.05
_SECONDS_FOR_THE_CHIEF = 600.0


def sweep(
    runs: Iterable[Run],
    folder: str | os.PathLike[str],
    *,
    data_dir: str | os.PathLike[str] | None = None,
    callbacks_of: CallbacksOf | None = None,
    verbose: bool = True,
) -> Results:
    """Executes the runs that `folder` has no result of, here or spread over workers.

    Each result is a line of `folder/results.jsonl` as soon as its run has ended, and that file is
    the only memory: a sweep that was killed goes on when the same call is made again, and repeats
    nothing but the run that was under way. A run whose loss diverges has a result like any other.

    The same program, started several times, shares the work where KerasTuner's environment
    variables say so: KERASTUNER_ORACLE_IP and KERASTUNER_ORACLE_PORT are the address of the chief,
    KERASTUNER_TUNER_ID is "chief" in one process, which hands out the runs and trains nothing, and
    a name of its own in each of the workers. All must see the same folder. What was killed, be it
    chief or worker, is started again under its own name, since the others wait for it.

    Args:
        runs: what to execute, in this order; equal runs are executed once.
        folder: where results.jsonl is, or is made.
        data_dir: where TFDS keeps prepared data sets; None for its default.
        callbacks_of: gives more Keras callbacks for a run, such as a TensorBoard in a folder that
            `run.label` names. None: there are none.
        verbose: whether to show a line on standard error for each run that has ended.

    Returns:
        The `Results` of the folder: every run is in it.

    Raises:
        RuntimeError: at the end, if runs failed; it names them. Their tracebacks are shown where
            they ran, the other runs are executed all the same (unless three in a row failed), and
            the same call tries them again.
        FileNotFoundError, ConnectionError, ImportError: before the first run, where the data cannot
            be had; see `keras_freeze.datasets.load`. In a worker, a ConnectionError if no chief
            answers within ten minutes.
        ValueError: if only some of KerasTuner's environment variables are set.
        TypeError: for anything but runs.

    Example:

    ```python
    runs = [
        Run("mnist_5k", "lenet_300_100", "freezenet", 0.99, seed=seed, learning_rate=rate)
        for seed in range(3)
        for rate in LEARNING_RATES
    ]
    results = sweep(runs, "runs/learning_rates")
    results[runs[0]]["result"]["test_accuracy"]
    ```
    """
    _check_environment()
    runs = list(dict.fromkeys(_check_run(run) for run in runs))
    results = Results(Path(folder) / "results.jsonl")
    pending = [run for run in runs if run not in results]
    if not (_chief_answers(pending, results) if is_worker() else pending):
        return results
    _check_data({run.dataset for run in pending}, data_dir)
    oracle = _PendingRuns(pending, results)
    progress = _Progress(runs, results) if verbose else None
    # What KerasTuner writes down is not needed again, and is not safe against a kill or against
    # several processes in one folder.
    with tempfile.TemporaryDirectory() as scratch:
        tuner = _RunTuner(
            oracle,
            results,
            {"data_dir": data_dir, "verbose": verbose and sys.stderr.isatty()},
            callbacks_of,
            progress,
            scratch,
        )
        tuner.search()
    _raise_if_missing(runs, results, oracle)
    return results


def is_worker() -> bool:
    """Tells a worker, which leaves reports to its chief, from a chief and from a process alone.

    Returns:
        Whether KerasTuner's environment variables make this process a worker.

    Example:

    ```python
    results = sweep(experiment.runs, "runs")
    if not is_worker():
        print(markdown(experiment, results))
    ```
    """
    distributed = "KERASTUNER_ORACLE_IP" in os.environ
    return distributed and "chief" not in os.environ.get("KERASTUNER_TUNER_ID", "")


def check_trials(tuner: Any) -> None:
    """Raises an error if a trial of a search failed, which KerasTuner passes over in silence.

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
        TypeError, ValueError: for ends that are no such numbers.

    Example:
        >>> FreezeHyperModel("mnist_5k", "lenet_300_100", 0.99, learning_rates=LogRange(0.01, 1.0))
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        low, high = _check_learning_rates([self.low, self.high])
        if low >= high:
            raise ValueError(f"low must be less than high. Received: low={low!r}, high={high!r}")


class FreezeHyperModel(keras_tuner.HyperModel):
    """What KerasTuner searches over: architecture, method, freezing rate, learning rate, seed.

    It brings its data: `search()` takes none. A trial trains by the data set's recipe, and
    everything random in it comes from its seed. Of the arguments below that may be one value or
    several, one value is fixed and several are a choice. A trial whose loss is no longer finite
    ends there, and that epoch counts as guessing does.

    `search(epochs=...)` stops every trial after so many epochs of the schedule; `epochs` here
    shortens the schedule itself. `keras_tuner.Hyperband` continues its best trials: give its
    `max_epochs` the same number as `epochs` here, and a trial that is continued to the end has
    followed the whole schedule once. It goes on where it was in the schedule, but not in the
    data: it sees them in the order of the first pass again.

    Args:
        dataset: a name of `keras_freeze.datasets.NAMES`.
        models: one or several names of `keras_freeze.models.MODELS`.
        freeze_rates: one or several freezing rates q, from 0 to 1. Methods that have a rate of
            their own, such as "baseline", are not tried with each.
        methods: one or several names of `keras_freeze.training.METHODS`. Defaults to "freezenet".
        learning_rates: one or several rates of the first steps, or a `LogRange` (of which
            `keras_tuner.GridSearch` tries ten). Defaults to the paper's grid.
        seeds: one or several integers in [0, 2**32). Defaults to 0.
        epochs: length of the schedule; None for the recipe's.
        steps_per_epoch: uses the first so many batches of each pass only; None for all.
        data_dir: where TFDS keeps prepared data sets; None for its default.

    Raises:
        ValueError, TypeError: for unknown names and numbers out of range. Other errors appear when
            a network is first built, as a tuner does when it is made.

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
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        data_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self._dataset = dataset
        self._fixed: dict[str, Any] = {
            "epochs": epochs,
            "steps_per_epoch": steps_per_epoch,
            "data_dir": data_dir,
        }
        recipe_for(dataset, epochs=epochs)  # checks them
        self._models = _check_models(_several("models", models))
        self._methods = _several("methods", methods)
        for method in self._methods:
            check_choice("method", method, METHODS)
        self._freeze_rates = [check_freeze_rate(q) for q in _several("freeze_rates", freeze_rates)]
        self._learning_rates: LogRange | list[float]
        if isinstance(learning_rates, LogRange):
            self._learning_rates = learning_rates
        else:
            self._learning_rates = _check_learning_rates(_several("learning_rates", learning_rates))
        self._seeds = _several("seeds", seeds)
        self._setup: Setup | None = None

    def build(self, hp: Any) -> keras.Model:
        """The network of a trial: compiled, frozen, and at the start of its training.

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
        """Trains the network of a trial by the recipe; called by KerasTuner.

        Args:
            hp: the trial's `keras_tuner.HyperParameters`.
            model: what `build(hp)` returned, perhaps with other weights since.
            callbacks: more Keras callbacks.
            epochs: the epoch of the schedule after which to stop; None for its end.
            initial_epoch: how many epochs of the schedule are behind the network.
            verbose: as `keras.Model.fit` takes it.

        Returns:
            Keras's `History`.
        """
        if self._setup is None or self._setup.network is not model:
            self._setup = replace(self._prepare(hp), network=model)
        setup = self._setup
        if initial_epoch:
            # The weights are those of the best epoch so far, the place in the schedule is not.
            model.optimizer.iterations.assign(initial_epoch * setup.steps_per_epoch)
        return model.fit(
            setup.batches(),
            validation_data=setup.validation,
            epochs=setup.recipe.epochs if epochs is None else epochs,
            initial_epoch=initial_epoch,
            shuffle=False,
            verbose=verbose,
            callbacks=[_EndAtDivergence(datasets.info(setup.dataset).num_classes), *callbacks],
        )

    def _prepare(self, hp: Any) -> Setup:
        model = _choose(hp, "model", self._models)
        method = _choose(hp, "method", self._methods)
        with hp.conditional_scope("method", [m for m in METHODS if METHODS[m].freeze_rate is None]):
            freeze_rate = _choose(hp, "freeze_rate", self._freeze_rates)
        return prepare(
            self._dataset,
            model,
            method,
            0.0 if freeze_rate is None else freeze_rate,
            learning_rate=_choose(hp, "learning_rate", self._learning_rates),
            seed=_choose(hp, "seed", self._seeds),
            **self._fixed,
        )


class _EndAtDivergence(_StopWhenNotFinite):
    """Ends training once a loss is not finite: back at the start, and no better than guessing."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self._guessing = {"loss": math.log(num_classes), "accuracy": 1 / num_classes}

    def on_train_begin(self, logs: Any = None) -> None:
        self._start = self.model.get_weights()
        self._state = [keras.ops.convert_to_numpy(v) for v in self.model.optimizer.variables]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.epoch is None:
            return
        self.model.set_weights(self._start)
        self.model.optimizer.set_weights(self._state)
        for name, value in self._guessing.items():
            logs[name] = logs[f"val_{name}"] = value


class _PendingRuns(keras_tuner.Oracle):
    """Hands out runs that have no result, each once, as the only hyperparameter."""

    def __init__(self, pending: Sequence[Run], results: Results) -> None:
        # KerasTuner's own limit raises where a chief and its workers then wait for ever.
        super().__init__(max_consecutive_failed_trials=len(pending) + 1)
        self.verbose = 0
        self._pending, self._results = deque(pending), results

    def populate_space(self, trial_id: str) -> dict[str, Any]:
        while self._pending and self._pending[0] in self._results:
            self._pending.popleft()
        if self._pending and not self.gave_up:
            run = self._pending.popleft()
            values = {"run": json.dumps(asdict(run))}
            return {"status": TrialStatus.RUNNING, "values": values}
        return {"status": TrialStatus.IDLE if self.ongoing_trials else TrialStatus.STOPPED}

    @keras_tuner.synchronized
    def end_trial(self, trial: Any) -> None:
        known = self.trials.get(trial.trial_id)
        # Else it comes from a worker that had it from a chief that was killed.
        if known is not None and _run_of(known) == _run_of(trial):
            super().end_trial(trial)

    @property
    def failed(self) -> list[Run]:
        return [_run_of(t) for t in self.trials.values() if t.status == TrialStatus.FAILED]

    @property
    def gave_up(self) -> bool:
        last = [self.trials[key].status for key in self.end_order[-_FAILURES_IN_A_ROW:]]
        return last == [TrialStatus.FAILED] * _FAILURES_IN_A_ROW


class _RunTuner(BaseTuner):
    """Executes the runs that it is given and writes down their results."""

    def __init__(
        self,
        oracle: _PendingRuns,
        results: Results,
        how: dict[str, Any],
        callbacks_of: CallbacksOf | None,
        progress: "_Progress | None",
        directory: str,
    ) -> None:
        super().__init__(oracle, directory=directory)
        self._results, self._how, self._progress = results, how, progress
        self._callbacks_of = callbacks_of

    def pre_create_trial(self) -> None:
        if is_worker():  # which KerasTuner lets ask without a pause while others finish
            time.sleep(_SECONDS_BETWEEN_REQUESTS)

    def run_trial(self, trial: Any) -> float:
        run = _run_of(trial)
        if run not in self._results:
            try:
                callbacks = () if self._callbacks_of is None else self._callbacks_of(run)
                record = run.execute(callbacks=callbacks, **self._how)
            except Exception as error:
                error.add_note(f"This run failed: {run.label}")  # KerasTuner shows the traceback
                raise
            self._results.append(record)
            if self._progress is not None:
                self._progress.show(run)
            gc.collect()  # networks refer to themselves, and some are large
        return 0.0  # a score, which nobody looks at


class _Progress:
    """One line on standard error for each run that has ended."""

    def __init__(self, runs: Sequence[Run], results: Results) -> None:
        self._runs, self._results = runs, results
        self._start = time.monotonic()
        self._num_before = self._num_done()

    def show(self, run: Run) -> None:
        num_done, num = self._num_done(), len(self._runs)
        elapsed = time.monotonic() - self._start
        left = elapsed * (num - num_done) / (num_done - self._num_before)
        parts = [run.label, *_numbers(self._results[run]["result"])]
        if left:
            parts.append(f"{duration(left)} left")
        print(f"{num_done}/{num} {'; '.join(parts)}", file=sys.stderr, flush=True)

    def _num_done(self) -> int:
        return sum(run in self._results for run in self._runs)


def _numbers(result: dict[str, Any]) -> list[str]:
    parts = [
        f"{kind} accuracy {result[f'{kind}_accuracy']:.1%}"
        for kind in ("validation", "test")
        if result.get(f"{kind}_accuracy") is not None
    ]
    if result.get("diverged_epoch") is not None:
        parts.append(f"diverged in epoch {result['diverged_epoch']}")
    return parts


def _check_data(names: Iterable[str], data_dir: str | os.PathLike[str] | None) -> None:
    """Fails at once, and once, where every run would fail for want of its data."""
    for name in names:
        datasets.load(name, split="test", data_dir=data_dir)


def _run_of(trial: Any) -> Run:
    return Run(**json.loads(trial.hyperparameters.values["run"]))


def _raise_if_missing(runs: Sequence[Run], results: Results, oracle: _PendingRuns) -> None:
    missing = [run for run in runs if run not in results]
    if not missing:
        return
    failed = oracle.failed  # of a worker always empty: only the chief knows
    lines = [f"- {run.label}{' (failed)' if run in failed else ''}" for run in missing]
    if oracle.gave_up:
        lines.append(f"Stopped after {_FAILURES_IN_A_ROW} failures in a row.")
    raise RuntimeError(
        f"{len(missing)} of {len(runs)} runs have no result. What went wrong is shown above or by "
        "the worker that failed; the same call tries them again.\n" + "\n".join(lines)
    )


def _check_environment() -> None:
    """Refuses settings with which every process would do all the work alone."""
    names = [f"KERASTUNER_{name}" for name in ("TUNER_ID", "ORACLE_IP", "ORACLE_PORT")]
    missing = [name for name in names if name not in os.environ]
    if 0 < len(missing) < len(names):
        raise ValueError(
            f"{', '.join(names)} must all be set, or none of them. "
            f"Received: no {', '.join(missing)}"
        )


def _chief_answers(pending: Sequence[Run], results: Results) -> bool:
    """Waits for the chief, as KerasTuner would for an hour; False if there is none and no work."""
    address = os.environ["KERASTUNER_ORACLE_IP"], int(os.environ["KERASTUNER_ORACLE_PORT"])
    end = time.monotonic() + _SECONDS_FOR_THE_CHIEF
    is_announced = False
    while True:
        try:
            socket.create_connection(address, timeout=10).close()
            return True
        except OSError as error:
            if all(run in results for run in pending):
                return False
            if not is_announced:
                limit = duration(_SECONDS_FOR_THE_CHIEF)
                print(
                    f"Waiting for the chief at {address[0]}:{address[1]}, up to {limit}",
                    file=sys.stderr,
                )
                is_announced = True
            if time.monotonic() > end:
                raise ConnectionError(
                    f"No chief answers at {address[0]}:{address[1]}. Start the same program with "
                    "KERASTUNER_TUNER_ID=chief."
                ) from error
        time.sleep(_SECONDS_BETWEEN_REQUESTS)


def _choose(hp: Any, name: str, values: LogRange | Sequence[Any]) -> Any:
    if isinstance(values, LogRange):
        return hp.Float(name, values.low, values.high, sampling="log")
    return hp.Fixed(name, values[0]) if len(values) == 1 else hp.Choice(name, list(values))


def _several(name: str, values: Any) -> list[Any]:
    several = [values] if isinstance(values, str) or not isinstance(values, Iterable) else values
    several = list(dict.fromkeys(several))
    if not several:
        raise ValueError(f"{name} must be one value at least. Received: {name}={values!r}")
    return several


def _check_models(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        check_choice("model", name, models.MODELS)
    return names


def _check_learning_rates(rates: Sequence[Any]) -> list[float]:
    return [recipe_for("mnist", learning_rate=rate).learning_rate for rate in rates]


def _check_run(run: Any) -> Run:
    if not isinstance(run, Run):
        raise TypeError(f"runs must be `keras_freeze.runs.Run`s. Received: {run!r}")
    return run
