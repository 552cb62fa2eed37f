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
    for name in ("test", "keras-hub"):
        (folder / f".installed-{name}").touch()
    environment = {**os.environ, "CALLS": str(folder / "calls"), "FAILS": fails}
    command = ["make", "--directory", str(ROOT), target, f"VENV={folder}"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    return done.returncode, (folder / "calls").read_text().splitlines()


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@needs_make
@pytest.mark.parametrize("fails", ["tensorflow", "jax", "torch", "none"])
@pytest.mark.parametrize("target", ["test", "test-slow", "test-all"])
def test_every_suite_runs_and_the_status_tells_of_all(target, fails, tmp_path):
    status, calls = make(target, fails, tmp_path)
    backends = [call.split()[0] for call in calls]
    assert backends == ["torch", "tensorflow", "jax"]
    assert (status == 0) == (fails == "none")


@needs_make
def test_every_test_is_run_by_test_all(tmp_path):
    _, calls = make("test-all", "none", tmp_path)
    assert not any(" -m " in call.split("pytest")[1] for call in calls)
    folders = {call.split()[0]: call.split("many ")[1].split() for call in calls}
    assert folders == {
        "torch": ["tests/unit", "tests/core"],
        "tensorflow": ["tests"],
        "jax": ["tests/core"],
    }


@needs_make
@pytest.mark.parametrize("target", ["test", "test-slow"])
def test_every_folder_of_tests_is_in_a_target_that_selects_by_markers(target, tmp_path):
    _, calls = make(target, "none", tmp_path)
    words = {word for call in calls for word in call.split() if word.startswith("tests/")}
    assert all((ROOT / word).exists() for word in words)
    folders = {Path(word).name for word in words if not word.endswith(".py")}
    with_tests = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    slow = {"paper", "end_to_end"}
    assert folders == (with_tests if target == "test-slow" else with_tests - slow)
    selected = "slow and not exhaustive" if target == "test-slow" else "not slow and not exhaustive"
    assert all(f"-m {selected} " in call for call in calls)
