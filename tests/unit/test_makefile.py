"""Tests of the Makefile with a Python that only notes how it was called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STUB = """#!/bin/sh
echo "$KERAS_BACKEND $*" >> "$CALLS"
[ "$KERAS_BACKEND" != "$FAILS" ]
"""


def make(target, fails, folder):
    """The status of `make`, and the calls of Python, where the suite of one backend fails."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(STUB)
    python.chmod(0o755)
    (folder / ".installed-test").touch()
    environment = {**os.environ, "CALLS": str(folder / "calls"), "FAILS": fails}
    command = ["make", "--directory", str(ROOT), target, f"VENV={folder}"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    return done.returncode, (folder / "calls").read_text().splitlines()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("fails", ["tensorflow", "jax", "torch", "none"])
@pytest.mark.parametrize("target", ["test", "test-all"])
def test_every_suite_runs_and_the_status_tells_of_all(target, fails, tmp_path):
    status, calls = make(target, fails, tmp_path)
    assert [call.split()[0] for call in calls] == ["tensorflow", "jax", "torch"]
    folders = "tests/core"
    assert [call.endswith(folders) for call in calls] == [False, True, True]
    assert all(("--whole" in call) == (target == "test-all") for call in calls)
    assert (status == 0) == (fails == "none")
