"""`python -m keras_freeze` as processes: from a base and a trained model to both again."""

import json
import os
import subprocess
import sys

import keras
import pytest
from delta_cases import adapted, assert_same_weights, pretrained

import keras_freeze as kf


def run(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "keras_freeze", *arguments],
        cwd=folder,
        env={**os.environ, "KERAS_BACKEND": keras.backend.backend()},
        capture_output=True,
        text=True,
        check=False,
    )


def answer(folder, *arguments):
    """The one JSON object that a command prints."""
    done = run(folder, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_delta_is_made_verified_applied_and_removed(tmp_path):
    base = pretrained()
    model = adapted(base)
    base.save(tmp_path / "base.keras")
    model.save(tmp_path / "model.keras")

    made = answer(tmp_path, "diff", "base.keras", "model.keras", "-o", "delta.freeze")
    assert 0 < made["num_differing"] < made["num_values"] / 2
    assert made["delta_bytes"] < made["model_bytes"] / 5
    assert answer(tmp_path, "verify", "delta.freeze", "--base", "base.keras")["valid"]

    undo = ("--keep-undo", "undo.freeze")
    answer(tmp_path, "apply", "base.keras", "delta.freeze", "-o", "again.keras", *undo)
    again = keras.models.load_model(tmp_path / "again.keras")
    assert_same_weights(again, model)
    assert kf.get_mask(again) == kf.get_mask(model)

    answer(tmp_path, "remove", "again.keras", "undo.freeze", "-o", "removed.keras")
    assert_same_weights(keras.models.load_model(tmp_path / "removed.keras"), base)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("verify", "missing.keras"), 1),
        (("verify", "broken.keras"), 1),
        (("diff", "broken.keras", "broken.keras", "-o", "broken.keras"), 1),
        (("apply", "broken.keras", "broken.keras"), 2),
    ],
)
def test_errors_are_no_tracebacks(arguments, status, tmp_path):
    (tmp_path / "broken.keras").write_bytes(b"PK\x03\x04")
    done = run(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert "Traceback" not in done.stderr
    assert "error: " in done.stderr.splitlines()[-1]
