"""Tests of examples/federated.py, run as a user runs it."""

import importlib.util
import json

import numpy as np
import pytest
from example_scripts import run

import keras_freeze as kf

NUM_WEIGHTS = 784 * 300 + 300 * 100 + 100 * 10
NUM_BIASES = 300 + 100 + 10
SMALL = ("--rates=0.99", "--clients=4", "--rounds=2", "--learning_rates=0.01,0.2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One short run: its folder, the finished process, and its result."""
    folder = tmp_path_factory.mktemp("federated")
    process = run("federated.py", *SMALL, f"--output_dir={folder}")
    assert process.returncode == 0, process.stderr
    return folder, process, json.loads((folder / "result.json").read_text())


def test_clients_have_few_digits_and_all_images(finished):
    result = finished[2]
    labels = kf.datasets.load_arrays("mnist_5k", "train")[1]
    assert sum(result["num_examples"]) == len(labels)
    assert len(result["num_digits"]) == 4
    assert max(result["num_digits"]) < 10


def test_bytes_are_those_of_the_vectors_of_scores_and_of_the_mask(finished):
    folder, _, result = finished
    whole, frozen = result["rows"]
    assert whole["num_values"] == NUM_WEIGHTS + NUM_BIASES
    assert frozen["num_values"] == NUM_WEIGHTS // 100 + NUM_BIASES
    mask = kf.FreezeMask.load(folder / "mask_0.99.freeze")
    assert mask.num_trained == NUM_WEIGHTS // 100
    once = 4 * NUM_WEIGHTS + (folder / "mask_0.99.freeze").stat().st_size
    for row, start in ((whole, 0), (frozen, once)):
        assert row["bytes_a_round"] == 4 * row["num_values"]
        assert row["bytes_in_all"] == start + 2 * 2 * row["bytes_a_round"]


def test_networks_learn_and_the_better_learning_rate_is_chosen(finished):
    _, process, result = finished
    for row in result["rows"]:
        assert len(row["accuracies"]) == 2
        assert row["accuracies"][-1] > 0.25
        tried = [
            line for line in process.stderr.splitlines() if f"q = {row['freeze_rate']:g}," in line
        ]
        found = [float(line.split("%")[0].split()[-1]) for line in tried]
        assert len(found) == 2
        assert 100 * row["validation_accuracy"] == pytest.approx(max(found), abs=0.06)
        assert row["learning_rate"] == (0.01, 0.2)[int(np.argmax(found))]


def test_the_table_has_the_numbers_of_the_result(finished):
    _, process, result = finished
    lines = [line for line in process.stdout.splitlines() if line.startswith("|")]
    printed = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [cells[0] for cells in printed] == ["all weights", "FreezeNet, q = 0.99"]
    for cells, row in zip(printed, result["rows"], strict=True):
        assert cells[1:5] == [
            f"{row['num_values']:,}",
            f"{row['learning_rate']:g}",
            f"{row['bytes_a_round']:,}",
            f"{row['bytes_in_all'] / 1e6:.2f}",
        ]
        assert cells[-1] == f"{100 * row['accuracies'][-1]:.1f}"


@pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs Flower")
def test_flower_averages_the_same_vectors(finished, tmp_path):
    process = run("federated.py", *SMALL, "--engine=flower", f"--output_dir={tmp_path}")
    assert process.returncode == 0, process.stderr
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    for row, expected in zip(rows, finished[2]["rows"], strict=True):
        assert row["accuracies"] == pytest.approx(expected["accuracies"], abs=0.02)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rates=much"], ["rates", "much"]),
        (["--learning_rates=0"], ["learning_rates", "0"]),
        (["--learning_rates=1e9", "--clients=1", "--rounds=1"], ["diverged", "1e9"]),
        (["--clients=5000"], ["clients times shards", "5000"]),
    ],
)
def test_a_bad_flag_is_one_line_and_a_status(flags, words, tmp_path):
    process = run("federated.py", *flags, f"--output_dir={tmp_path}")
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith("federated.py: error: ")
    assert all(word in line for word in words)
