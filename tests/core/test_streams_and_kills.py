"""A trainer and a follower that are killed at any moment: nothing lost, nothing half applied."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import pytest
from stream_cases import digest, network

import keras_freeze as kf

SCRIPT = Path(__file__).parents[1] / "support" / "stream_cases.py"


@pytest.fixture(name="forks")
def forks_of_a_process():
    """A function that starts a process, and kills all of them at the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads do not survive a fork
    parent = subprocess.Popen(
        [sys.executable, str(SCRIPT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )

    def start(*arguments):
        print(*arguments, file=parent.stdin, flush=True)
        return int(parent.stdout.readline())

    yield start
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()


def lines_of(path):
    """The complete lines that a process has written before it was killed."""
    text = path.read_text() if path.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def wait_for(condition):
    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("nothing happened for two minutes")


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_kills", [6, pytest.param(200, marks=pytest.mark.exhaustive)], ids=["few", "many"]
)
def test_trainers_and_followers_may_be_killed_at_any_moment(num_kills, forks, tmp_path):
    if keras.backend.backend() != "torch" or not hasattr(os, "fork"):
        pytest.skip("the files are the same with any backend; the others cannot be forked")
    rng = random.Random(num_kills)
    folder = tmp_path / "stream"
    outputs = {side: tmp_path / side for side in ("publish", "follow")}
    running, written = {}, dict.fromkeys(outputs, 0)
    for number in range(num_kills):
        for side, output in outputs.items():
            if side not in running:
                seed = [1000 * number] if side == "publish" else []
                running[side] = forks(side, output.with_suffix(f".{number}"), folder, *seed)
                written[side] = output.with_suffix(f".{number}")
        side = rng.choice(list(outputs))
        wait_for(lambda: lines_of(written[side]))  # noqa: B023
        time.sleep(rng.random() * 0.2)
        os.kill(running.pop(side), signal.SIGKILL)
    for process in running.values():
        os.kill(process, signal.SIGKILL)
    states = {line for path in tmp_path.glob("publish.*") for line in lines_of(path)}
    followed = [line.split()[1] for path in tmp_path.glob("follow.*") for line in lines_of(path)]
    assert followed
    assert set(followed) <= states
    model = network()
    last = kf.follow(model, folder).number  # whatever was going on, the folder is whole
    assert digest(model) in states
    assert last == max(int(name.split("-")[0]) for name in os.listdir(folder) if name[0] != ".")
