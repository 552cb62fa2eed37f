"""Tests of examples/many_deltas.py, run as a user runs it, on digits and with random weights."""

import json

import pytest
from example_scripts import run

import keras_freeze as kf

# Takes minutes: each network is a new graph.
pytestmark = pytest.mark.exhaustive

SMALL = (
    "--dataset=mnist_5k",
    "--weights=random",
    "--image_size=32",
    "--num_images=100",
    "--num_validation=50",
    "--epochs=1",
)
KINDS = ("head", "head_small", "delta", "delta_small")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One short run: its folder, the finished process, and the rows of its table."""
    folder = tmp_path_factory.mktemp("many_deltas")
    process = run("many_deltas.py", *SMALL, f"--output_dir={folder}")
    assert process.returncode == 0, process.stderr
    return folder, process, json.loads((folder / "result.json").read_text())


def test_the_table_has_all_kinds_of_files_and_the_networks_as_they_are(finished):
    folder, process, rows = finished
    labels = ["heads", "heads, small", "deltas", "deltas, small", "whole networks"]
    assert [row["files"] for row in rows] == [f"2 {label}" for label in labels]
    for row in rows:
        assert f"| {row['files']} " in process.stdout
    for kind, row in zip(KINDS, rows, strict=False):
        files = [folder / f"task_0{number}_{kind}.freeze" for number in (0, 1)]
        assert row["bytes"] == sum(file.stat().st_size for file in files)
        assert row["seconds_to_switch"] > 0
        assert len(row["accuracies"]) == 2
    assert rows[-1]["bytes"] == 2 * (folder / "base.keras").stat().st_size
    assert rows[3]["bytes"] < rows[2]["bytes"] < rows[4]["bytes"] / 10


def test_a_file_loads_on_the_base(finished):
    folder = finished[0]
    loaded = kf.load(folder / "task_01_delta_small.freeze", base=folder / "base.keras")
    assert loaded.output_shape == (None, 5)


def test_nothing_is_trained_twice(finished):
    folder = finished[0]
    again = run("many_deltas.py", *SMALL, f"--output_dir={folder}")
    assert again.returncode == 0
    assert again.stderr == ""
    rows = json.loads((folder / "result.json").read_text())
    assert [row["accuracies"] for row in rows] == [row["accuracies"] for row in finished[2]]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method=lottery"], ["methods", "lottery", "freezenet_0.99"]),
        (["--num_validation=5000"], ["num_validation"]),
        (["--dataset=cifar100", "--data_dir=no/such/folder"], ["data_dir", "no/such/folder"]),
    ],
)
def test_a_bad_flag_is_one_line_and_a_status(flags, words, tmp_path):
    process = run("many_deltas.py", *SMALL, *flags, f"--output_dir={tmp_path / 'run'}")
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith("many_deltas.py: error: ")
    assert all(word in line for word in words)
