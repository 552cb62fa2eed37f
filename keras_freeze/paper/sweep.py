"""Sweeps: many runs that resume after an interruption and spread over machines."""

import gc
import hashlib
import json
import logging
import os
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_freeze._utils.text import duration
from keras_freeze._utils.validation import type_error
from keras_freeze.paper import datasets
from keras_freeze.paper._keras_tuner import BaseTuner, TrialStatus, keras_tuner
from keras_freeze.paper.results import Results
from keras_freeze.paper.run import Run

_logger = logging.getLogger(__name__)

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
    """Execute the runs that `folder` has no result of, here or spread over workers.

    Each result is a line of `folder/results.jsonl` as soon as its run has ended, and that file is
    the memory of what is done: a sweep that was killed continues when the same call is made again.
    The run that was interrupted goes on from its `folder/unfinished-*.npz`, which is written at the
    end of an epoch, once a minute at most, and removed when the run has ended; a run with more
    callbacks or a `schedule` starts again. A run whose loss diverges has a result like any other.

    The same program, started several times, shares the work where KerasTuner's environment
    variables say so: KERASTUNER_ORACLE_IP and KERASTUNER_ORACLE_PORT are the address of the chief,
    KERASTUNER_TUNER_ID is "chief" in one process, which hands out the runs and trains nothing, and
    a different name in each of the workers. All must see the same folder. A chief or worker that
    was killed is started again under the same name, since the others wait for it.

    Args:
        runs: what to execute, in this order; equal runs are executed once.
        folder: where results.jsonl is or is created.
        data_dir: where TFDS keeps prepared data sets. None: its default.
        callbacks_of: returns more Keras callbacks for a run, such as a TensorBoard in a folder that
            `run.label` names. None: there are none. What they have in memory would not survive an
            interruption.
        verbose: whether to show a line on standard error for each run that has ended or goes on.

    Returns:
        The `Results` of the folder: every run is in it.

    Raises:
        RuntimeError: at the end, if runs failed; it names them. Their tracebacks are shown where
            they ran, the other runs are executed all the same (unless three in a row failed), and
            the same call tries them again.
        FileNotFoundError, ConnectionError, ImportError: before the first run, where the data cannot
            be loaded; see `keras_freeze.datasets.load`. In a worker, a ConnectionError if no chief
            answers within ten minutes.
        ValueError: if only some of KerasTuner's environment variables are set.
        TypeError: for anything but runs, or a run whose criterion is not a name.

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
    """Return whether this process is a worker, which leaves reports to its chief.

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
            values = {"run": json.dumps(vars(run))}
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
            how, backup = self._how, self._backup_of(run)
            if self._progress is not None and backup.exists():
                self._progress.show_interrupted(run)
            try:
                if self._callbacks_of is None:
                    record = run.execute(backup=backup, **how)
                else:
                    record = run.execute(callbacks=self._callbacks_of(run), **how)
            except Exception as error:
                error.add_note(f"This run failed: {run.label}")  # KerasTuner shows the traceback
                raise
            self._results.append(record)
            backup.unlink(missing_ok=True)
            if self._progress is not None:
                self._progress.show(run)
            gc.collect()  # networks refer to themselves, and some are large
        return 0.0  # a score, which nothing uses

    def _backup_of(self, run: Run) -> Path:
        folder = self._results.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        settings = json.dumps(vars(run), sort_keys=True).encode()
        return folder / f"unfinished-{hashlib.sha256(settings).hexdigest()[:16]}.npz"


class _Progress:
    """One line on standard error for each run that has ended or goes on."""

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

    def show_interrupted(self, run: Run) -> None:
        print(f"{run.label}: going on from its backup", file=sys.stderr, flush=True)

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
    """Fail at once, and once, where every run would fail because its data are missing."""
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
        f"{len(missing)} of {len(runs)} runs have no result. Their errors are shown above or by "
        "the worker that failed; the same call tries them again.\n" + "\n".join(lines)
    )


def _check_environment() -> None:
    """Raise an error for settings with which every process would do all the work alone."""
    names = [f"KERASTUNER_{name}" for name in ("TUNER_ID", "ORACLE_IP", "ORACLE_PORT")]
    missing = [name for name in names if name not in os.environ]
    if 0 < len(missing) < len(names):
        raise ValueError(
            f"{', '.join(names)} must all be set, or none of them. "
            f"Received: no {', '.join(missing)}"
        )


def _chief_answers(pending: Sequence[Run], results: Results) -> bool:
    """Wait for the chief, as KerasTuner would for an hour; False if there is none and no work."""
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
                _logger.warning("Waiting for the chief at %s:%s, up to %s", *address, limit)
                is_announced = True
            if time.monotonic() > end:
                raise ConnectionError(
                    f"No chief answers at {address[0]}:{address[1]}. Start the same program with "
                    "KERASTUNER_TUNER_ID=chief."
                ) from error
        time.sleep(_SECONDS_BETWEEN_REQUESTS)


def _check_run(run: Any) -> Run:
    if not isinstance(run, Run):
        raise type_error("runs", run, "`keras_freeze.runs.Run`s")
    if not isinstance(run.criterion, (str, type(None))):
        raise type_error("criterion", run.criterion, "a name in a sweep, whose runs are a file")
    return run
