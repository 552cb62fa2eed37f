"""Several processes that train one model, for tests: a script in each, started and ended here."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import pytest
from processes import HIDE_TENSORFLOW

# What a script begins with: `RANK`, `COUNT`, `FOLDER`, `ARGUMENTS`, and `give(**arrays)`.
_PRELUDE = """
import datetime, json, os, sys
import numpy as np
RANK, COUNT, FOLDER = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
ARGUMENTS = json.loads(sys.argv[2])

def give(**arrays):
    np.savez(os.path.join(FOLDER, f"{RANK}.npz"), **arrays)
"""
# What it begins and ends with for each backend.
_PRELUDES = {
    "torch": """
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=ARGUMENTS["timeout"]))
""",
    "jax": HIDE_TENSORFLOW
    + """
import jax, keras
if COUNT > 1:  # as keras.distribution.initialize does, which has no argument for timeouts
    jax.distributed.initialize(
        os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"], COUNT, RANK,
        heartbeat_timeout_seconds=ARGUMENTS["timeout"],
        shutdown_timeout_seconds=ARGUMENTS["timeout"],
    )
""",
    "tensorflow": """
import tensorflow as tf
tf.config.set_visible_devices([], "GPU")
STRATEGY = tf.distribute.MultiWorkerMirroredStrategy(
    communication_options=tf.distribute.experimental.CommunicationOptions(
        timeout_seconds=ARGUMENTS["timeout"]
    )
)
""",
}
_ENDS = {"torch": "\ndist.barrier()\ndist.destroy_process_group()\n", "jax": "", "tensorflow": ""}


@dataclass(frozen=True)
class Finished:
    """A process that has ended: its exit status, what it wrote, and the arrays it gave."""

    returncode: int | None
    errors: str
    arrays: dict[str, np.ndarray]


def marks_of_processes(backend):
    """The marks of a module that starts processes of this backend."""
    is_another = keras.backend.backend() != backend
    return [pytest.mark.slow, pytest.mark.skipif(is_another, reason=f"processes of {backend}")]


def free_ports(count):
    """Ports of this machine that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("localhost", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def run_together(script, folder, count=2, timeout=240, group_timeout=60, **arguments):
    """Run a script in so many processes of one group, and return what has become of each.

    All of them are ended after `timeout` seconds, whatever happens; `group_timeout` is how long
    the backend waits for a message. The script finds `arguments` in `ARGUMENTS`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    ports = free_ports(count)
    backend = keras.backend.backend()
    whole = _PRELUDE + _PRELUDES[backend] + script + _ENDS[backend]
    arguments = json.dumps({"timeout": group_timeout, **arguments})
    processes, logs = [], []
    try:
        for rank in range(count):
            logs.append((folder / f"{rank}.txt").open("w+"))
            command = [sys.executable, "-c", whole, str(folder), arguments]
            environment = {**os.environ, **_environment(rank, count, ports)}
            processes.append(subprocess.Popen(command, env=environment, stderr=logs[-1]))
        end = time.monotonic() + timeout
        for process in processes:
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [_finished(*item, folder) for item in zip(range(count), processes, logs, strict=True)]


def _environment(rank, count, ports):
    workers = [f"localhost:{port}" for port in ports]
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(ports[0]),
        "GLOO_SOCKET_IFNAME": "lo",
        "TF_CONFIG": json.dumps(task),
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def _finished(rank, process, log, folder):
    log.seek(0)
    errors = log.read()
    log.close()
    path = folder / f"{rank}.npz"
    arrays = dict(np.load(path)) if path.exists() else {}
    return Finished(process.returncode, errors, arrays)


def assert_all_succeeded(finished):
    """Whether all processes have ended well."""
    assert [one.returncode for one in finished] == [0] * len(finished), "\n\n".join(
        one.errors[-4000:] for one in finished
    )
