"""Sweeps: once, resumed, killed, and over workers.

They are mostly of a measure that only waits: `toy`. Run as a script, this file sweeps in a process
of its own, which the tests kill or make a worker.
"""

import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from keras_freeze.paper import runs, tuning
from keras_freeze.paper import sweep as sweep_module
from keras_freeze.paper.runs import Results, Run
from keras_freeze.paper.tuning import sweep

# A process that waits for another so long hangs; no busy machine needs it.
HOUR = 3600.0


def toy(run, *, callbacks, **how):
    """Notes its start in the file that `callbacks` names, and fails for seeds of 100 and more."""
    for path in callbacks:
        with open(path, "a") as file:
            file.write(f"{run.seed} {os.getpid()}\n")
        if "KERASTUNER_ORACLE_IP" in os.environ:
            wait_for(lambda path=path: len({pid for _, pid in starts(path)}) >= 2)
    if run.seed >= 100:
        raise ValueError(f"no such seed: {run.seed}")
    return {"test_accuracy": run.seed / 100, "report": {}}


def toy_run(seed):
    return Run("mnist_5k", "lenet_300_100", "random", 0.5, seed, measure="toy")


def toy_sweep(folder, sweep_runs, **arguments):
    """A sweep in which each run leaves a line in `folder`/starts."""
    log = [Path(folder) / "starts"]
    return sweep(sweep_runs, folder, callbacks_of=lambda run: log, **arguments)


def starts(path):
    """Seed and process of each run that has begun, in order."""
    if not Path(path).exists():
        return []
    lines = Path(path).read_text().splitlines()
    return [tuple(map(int, line.split())) for line in lines]


def started_seeds(folder):
    return [seed for seed, _ in starts(Path(folder) / "starts")]


def lines_of(folder):
    return (Path(folder) / "results.jsonl").read_bytes().splitlines()


def accuracies_of(folder):
    """Seed and accuracy of every line."""
    records = [json.loads(line) for line in lines_of(folder)]
    return sorted((record["run"]["seed"], record["result"]["test_accuracy"]) for record in records)


def wait_for(condition):
    end = time.monotonic() + HOUR
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _with_toy(monkeypatch):
    monkeypatch.setitem(runs.MEASURES, "toy", toy)
    monkeypatch.setattr(gc, "collect", lambda: None)  # a good part of a second after each run


# Sweeps in one process


def test_a_sweep_executes_every_run_once_in_order(tmp_path):
    sweep_runs = [toy_run(seed) for seed in (3, 1, 2, 1, 3)]
    results = toy_sweep(tmp_path, sweep_runs)
    assert started_seeds(tmp_path) == [3, 1, 2]
    assert accuracies_of(tmp_path) == [(1, 0.01), (2, 0.02), (3, 0.03)]
    assert results[toy_run(2)]["result"]["test_accuracy"] == 0.02
    assert [path.name for path in tmp_path.iterdir() if path.suffix] == ["results.jsonl"]


def test_a_sweep_repeats_nothing_that_has_a_result(tmp_path):
    toy_sweep(tmp_path, [toy_run(1), toy_run(2)])
    toy_sweep(tmp_path, [toy_run(2), toy_run(1)])
    assert started_seeds(tmp_path) == [1, 2]
    toy_sweep(tmp_path, [toy_run(2), toy_run(3)])
    assert started_seeds(tmp_path) == [1, 2, 3]


def test_only_the_run_of_a_torn_last_line_is_repeated(tmp_path, caplog):
    toy_sweep(tmp_path, [toy_run(1), toy_run(2)])
    file = tmp_path / "results.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    toy_sweep(tmp_path, [toy_run(1), toy_run(2)])
    assert "results.jsonl, line 2 was left out" in caplog.text
    assert started_seeds(tmp_path) == [1, 2, 2]


def test_a_run_that_fails_makes_the_sweep_fail_and_the_others_are_kept(tmp_path, capsys):
    sweep_runs = [toy_run(seed) for seed in (1, 100, 2)]
    with pytest.raises(RuntimeError, match="1 of 3 runs") as caught:
        toy_sweep(tmp_path, sweep_runs)
    assert f"- {toy_run(100).label} (failed)" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "ValueError: no such seed: 100" in shown
    assert f"This run failed: {toy_run(100).label}" in shown
    assert [seed for seed, _ in accuracies_of(tmp_path)] == [1, 2]
    with pytest.raises(RuntimeError):
        toy_sweep(tmp_path, sweep_runs)
    assert started_seeds(tmp_path) == [1, 100, 2, 100]


def test_a_sweep_stops_after_three_failures_in_a_row_and_says_so(tmp_path):
    seeds = [100, 101, 1, 102, 103, 104, 2]
    with pytest.raises(RuntimeError, match="Stopped after 3 failures in a row") as caught:
        toy_sweep(tmp_path, [toy_run(seed) for seed in seeds])
    assert started_seeds(tmp_path) == seeds[:-1]
    assert str(caught.value).count("(failed)") == 5
    assert str(caught.value).splitlines()[-2] == f"- {toy_run(2).label}"


def test_a_hundred_runs_are_a_hundred_lines(tmp_path):
    results = toy_sweep(tmp_path, [toy_run(seed) for seed in range(100)])
    assert len(results) == len(lines_of(tmp_path)) == 100


def test_progress_is_a_line_for_each_run_that_has_ended(tmp_path, capsys):
    toy_sweep(tmp_path, [toy_run(1), toy_run(2)])
    captured = capsys.readouterr()
    assert captured.out == ""
    first, second = captured.err.splitlines()
    assert first.startswith(f"1/2 {toy_run(1).label}; test accuracy 1.0%; ")
    assert first.endswith(" left")
    assert second == f"2/2 {toy_run(2).label}; test accuracy 2.0%"
    toy_sweep(tmp_path, [toy_run(1), toy_run(2), toy_run(3)], verbose=False)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.filterwarnings("ignore:Test accuracy")
def test_a_run_that_diverges_has_a_result(tmp_path, capsys):
    settings = {"epochs": 1, "steps_per_epoch": 2, "learning_rate": 1e30}
    run = Run("mnist_5k", "lenet_300_100", "freezenet", 0.99, 0, **settings)
    result = sweep([run], tmp_path)[run]["result"]
    assert result["diverged_epoch"] == 1
    assert result["validation_accuracy"] is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"1/1 {run.label}; test accuracy {result['test_accuracy']:.1%}; diverged in epoch 1"
    )


@pytest.mark.parametrize("bad", ["mnist", {"seed": 0}, None])
def test_what_is_no_run_is_refused(bad, tmp_path):
    with pytest.raises(TypeError, match=r"`runs` must be .*Received"):
        sweep([bad], tmp_path)


# Sweeps that are killed


def start_process(folder, *arguments, **environment):
    """This file as a script, which waits for a line on its standard input."""
    return subprocess.Popen(
        [sys.executable, __file__, str(folder), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def script(folder, place=None, number=None):
    """Sweeps over twelve runs; kills itself where it is told to, at the so-and-so-many-th run."""
    runs.MEASURES["toy"] = toy
    gc.collect = lambda: None
    if place is not None:
        kill_at(place, int(number))
    sys.stdin.readline()
    toy_sweep(folder, twelve_runs(), verbose=False)


def twelve_runs():
    return [toy_run(seed) for seed in range(12)]


def table_of(folder):
    known = Results(folder / "results.jsonl")
    return [known[run]["result"]["test_accuracy"] for run in twelve_runs()]


def kill_at(place, number):
    append = Results.append
    counts = iter(range(1, 13))

    def append_or_die(self, record):
        if next(counts) < number:
            append(self, record)
            return
        if place == "halfway in writing a line":
            with self.path.open("ab") as file:
                file.write(json.dumps(record).encode()[:100])
        if place == "between the line and KerasTuner's files":
            append(self, record)
        os.kill(os.getpid(), signal.SIGKILL)

    Results.append = append_or_die


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*no record of a run")
def test_a_sweep_that_is_killed_three_times_ends_with_the_same_records(tmp_path):
    rng = random.Random(1)
    places = ["in a run", "halfway in writing a line", "between the line and KerasTuner's files"]
    rng.shuffle(places)
    processes = [start_process(tmp_path, place, rng.randint(1, 3)) for place in places]
    finished = set()
    for process in processes:  # they import together and sweep one after the other
        num_before = len(starts(tmp_path / "starts"))
        process.communicate("go\n")
        assert process.returncode == -signal.SIGKILL
        assert not finished & set(started_seeds(tmp_path)[num_before:])
        known = Results(tmp_path / "results.jsonl")
        finished = {run.seed for run in twelve_runs() if run in known}
    assert 0 < len(finished) < 12
    toy_sweep(tmp_path, twelve_runs())
    counts = Counter(started_seeds(tmp_path))
    assert sorted(counts) == list(range(12))
    assert sorted(counts.values()) == [1] * 10 + [2] * 2  # two kills lost the run under way
    sweep(twelve_runs(), tmp_path / "never_killed")
    assert table_of(tmp_path) == table_of(tmp_path / "never_killed")


# Chief and workers


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


@pytest.fixture
def distributed(monkeypatch):
    """The environment of a chief and its workers, in which this process is the chief."""
    environment = {"KERASTUNER_ORACLE_IP": "127.0.0.1", "KERASTUNER_ORACLE_PORT": free_port()}
    for name, value in {**environment, "KERASTUNER_TUNER_ID": "chief"}.items():
        monkeypatch.setenv(name, value)
    return environment


@pytest.mark.exhaustive
def test_chief_and_two_workers_execute_each_run_once(tmp_path, distributed):
    workers = [
        start_process(tmp_path, **distributed, KERASTUNER_TUNER_ID=f"worker{number}")
        for number in range(2)
    ]
    arguments = (tmp_path, twelve_runs())
    chief = threading.Thread(target=toy_sweep, args=arguments, daemon=True)
    chief.start()
    try:
        for worker in workers:
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            errors = worker.communicate(timeout=HOUR)[1]
            assert worker.returncode == 0, errors
        chief.join(timeout=HOUR)
        assert not chief.is_alive()
    finally:
        for worker in workers:
            worker.kill()
    begun = starts(tmp_path / "starts")
    assert sorted(seed for seed, _ in begun) == list(range(12))
    assert {pid for _, pid in begun} == {worker.pid for worker in workers}
    assert accuracies_of(tmp_path) == [(seed, seed / 100) for seed in range(12)]


@pytest.mark.parametrize("role", ["chief", "worker0"])
def test_chief_and_workers_return_at_once_if_nothing_is_left(
    role, tmp_path, distributed, monkeypatch
):
    results = Results(tmp_path / "results.jsonl")
    results.append(toy_run(1).execute())
    monkeypatch.setenv("KERASTUNER_TUNER_ID", role)
    assert toy_run(1) in sweep([toy_run(1)], tmp_path)


def test_a_worker_without_a_chief_gives_up(tmp_path, distributed, monkeypatch):
    monkeypatch.setenv("KERASTUNER_TUNER_ID", "worker0")
    monkeypatch.setattr(sweep_module, "_SECONDS_FOR_THE_CHIEF", 0.0)
    with pytest.raises(ConnectionError, match="No chief answers"):
        sweep([toy_run(1)], tmp_path)


def test_a_chief_does_not_count_what_a_killed_chief_had_handed_out(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    old, new = (sweep_module._PendingRuns([toy_run(seed)], results) for seed in (1, 2))
    for oracle in (old, new):
        oracle._set_project_dir(str(tmp_path), "project")
    stray, trial = old.create_trial("worker0"), new.create_trial("worker1")
    assert stray.trial_id == trial.trial_id
    stray.status = "FAILED"
    new.end_trial(stray)
    assert new.ongoing_trials == {"worker1": trial}
    assert new.failed == []
    trial.status = "FAILED"
    new.end_trial(trial)
    assert new.ongoing_trials == {}
    assert new.failed == [toy_run(2)]


@pytest.mark.parametrize(
    ("address", "role", "expected"),
    [
        (None, None, False),
        (None, "worker0", False),
        ("127.0.0.1", "chief", False),
        ("127.0.0.1", "worker0", True),
    ],
)
def test_a_worker_is_who_has_an_address_and_is_no_chief(address, role, expected, monkeypatch):
    for name, value in (("ORACLE_IP", address), ("TUNER_ID", role)):
        monkeypatch.delenv(f"KERASTUNER_{name}", raising=False)
        if value is not None:
            monkeypatch.setenv(f"KERASTUNER_{name}", value)
    assert tuning.is_worker() is expected


if __name__ == "__main__":
    script(*sys.argv[1:])
