"""examples/train_on_several_machines.py in two processes, as a user starts it."""

import os
import re
import subprocess
import sys

import pytest
from example_scripts import ROOT, run
from together import free_ports

import keras_freeze as kf

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "examples" / "train_on_several_machines.py"


def test_two_processes_end_with_one_network(tmp_path):
    addresses = ",".join(f"localhost:{port}" for port in free_ports(2))
    flags = [f"--addresses={addresses}", "--epochs=2", f"--output={tmp_path / 'one.freeze'}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), *flags, f"--rank={rank}"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    printed = [output for output, _ in outputs]
    for rank, text in enumerate(printed):
        assert f"Process {rank} of 2" in text
        assert "Bytes of gradients in a step: 12,288 instead of 1,066,440" in text
        assert "Frozen weights kept their start: True" in text
    first, second = (re.findall(r"(?:weights|accuracy): (\S+)", text) for text in printed)
    assert first == second
    assert float(first[1].rstrip("%")) > 70
    x, y = kf.datasets.load_arrays("mnist_5k", "test")
    loaded = kf.load(tmp_path / "one.freeze")
    assert f"{loaded.evaluate(x, y, verbose=0)[1]:.2%}" == first[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "the addresses of all processes"),
        (("--addresses=localhost:1,localhost:2", "--rank=2"), "--rank=2"),
    ],
)
def test_a_process_without_a_place_is_refused(flags, message):
    process = run("train_on_several_machines.py", *flags)
    assert process.returncode == 1
    assert message in process.stderr
