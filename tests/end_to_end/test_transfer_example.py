"""Tests of examples/transfer.py, run as a user runs it, on digits and with random weights."""

import json

import keras
import numpy as np
import pytest
from delta_cases import changed_by
from example_scripts import run

import keras_freeze as kf

# Takes minutes: each network is a new graph.
pytestmark = pytest.mark.exhaustive

SMALL = (
    "--datasets=mnist_5k",
    "--weights=random",
    "--image_size=32",
    "--num_images=200",
    "--num_validation=100",
    "--num_test=100",
    "--epochs=1",
    "--search_epochs=1",
    "--search_images=100",
)
METHODS = ("head", "freezenet_0.99", "lora_1", "freezenet_0.99_drawn")
NUM_HEAD = 1280 * 10 + 10


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One short run: its folder, the finished process, and the rows of its table."""
    folder = tmp_path_factory.mktemp("transfer")
    process = start(folder)
    assert process.returncode == 0, process.stderr
    rows = json.loads((folder / "result.json").read_text())
    return folder, process, {(row["method"], row["kind"]): row for row in rows}


def start(folder, *flags):
    methods = f"--methods={','.join(METHODS)}"
    rates = "--learning_rates=0.001,0.003"
    return run("transfer.py", *SMALL, methods, rates, f"--output_dir={folder}", *flags)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "transfer.jsonl").open()]


def load_base(folder):
    return keras.models.load_model(folder / "base_mnist_5k.keras")


def test_the_table_has_each_method_exact_and_small(finished):
    _, process, rows = finished
    assert list(rows) == [(name, kind) for name in METHODS for kind in ("exact", "small")]
    lines = [line for line in process.stdout.splitlines() if line.startswith("|")][2:]
    printed = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    for row, cells in zip(rows.values(), printed, strict=True):
        assert cells[1] == row["kind"]
        assert cells[3:5] == [f"{row['num_trained']:,}", f"{row['bytes']:,}"]
        assert cells[5] == f"{100 * row['test_accuracy']:.2f}"


def test_bytes_are_those_of_the_files_and_small_files_are_smaller(finished):
    folder, _, rows = finished
    for line in lines_of(folder):
        for file in line.get("files", ()):
            assert (folder / file["file"]).stat().st_size == file["bytes"]
            assert rows[line["settings"]["method"], file["kind"]]["bytes"] == file["bytes"]
    for name in METHODS:
        assert rows[name, "small"]["bytes"] < rows[name, "exact"]["bytes"] / 2


def count(base, name):
    return sum(
        np.prod(v.shape)
        for layer in base.layers
        for v in layer.trainable_variables
        if v.name == name and layer.name != "head"
    )


def test_methods_train_what_they_say(finished):
    folder, _, rows = finished
    base = load_base(folder)
    num_weights, num_layers = count(base, "kernel"), 50  # each trains at least one weight
    chosen = num_weights - round(0.99 * num_weights)
    assert rows["head", "exact"]["num_trained"] == NUM_HEAD
    for name in ("freezenet_0.99", "freezenet_0.99_drawn"):
        found = rows[name, "exact"]["num_trained"] - NUM_HEAD - count(base, "bias")
        assert chosen <= found <= chosen + num_layers
    assert NUM_HEAD < rows["lora_1", "exact"]["num_trained"] < 50_000


@pytest.mark.parametrize("name", ["head", "freezenet_0.99", "freezenet_0.99_drawn"])
@pytest.mark.parametrize("end", ["", "_small"])
def test_a_delta_goes_on_the_base_and_off_again(finished, name, end):
    folder = finished[0]
    file = folder / f"mnist_5k_{name}_0{end}.freeze"
    changed = changed_by(file, folder / "base_mnist_5k.keras")
    assert changed <= finished[2][name, "exact"]["num_trained"]
    assert changed > 0 or end  # rounding may take back what little has been learned


def test_lora_loads_with_its_factors(finished):
    folder = finished[0]
    loaded = kf.load(folder / "mnist_5k_lora_1_0.freeze", base=folder / "base_mnist_5k.keras")
    assert len(loaded.weights) > len(load_base(folder).weights)


def test_the_learning_rate_is_the_one_that_is_best_in_validation(finished):
    folder, _, rows = finished
    found = {}
    for line in lines_of(folder):
        if line["settings"]["purpose"] == "search":
            of_method = found.setdefault(line["settings"]["method"], {})
            of_method[line["settings"]["learning_rate"]] = line["validation_accuracy"]
    assert sorted(found) == ["freezenet_0.99", "lora_1"]  # the drawn one takes FreezeNet's
    for name, accuracies in found.items():
        assert sorted(accuracies) == [0.001, 0.003]
        assert accuracies[rows[name, "exact"]["learning_rate"]] == max(accuracies.values())
    assert (
        rows["freezenet_0.99_drawn", "exact"]["learning_rate"]
        == rows["freezenet_0.99", "exact"]["learning_rate"]
    )


def test_nothing_is_done_twice_and_the_table_is_the_same(finished):
    folder, process, _ = finished
    measured = (folder / "transfer.jsonl").read_bytes()
    (folder / "result.json").unlink()
    (folder / "transfer.png").unlink()
    again = start(folder)
    assert again.returncode == 0
    assert again.stderr == ""
    assert again.stdout == process.stdout
    assert (folder / "transfer.jsonl").read_bytes() == measured
    assert (folder / "transfer.png").stat().st_size > 10_000


def test_a_folder_of_other_settings_is_refused(finished):
    process = start(finished[0], "--epochs=2")
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith("transfer.py: error: output_dir must be new")


def test_progress_is_one_line_a_network(finished):
    lines = finished[1].stderr.splitlines()
    assert len(lines) == len(lines_of(finished[0]))
    assert all(line.startswith("5,000 digits, seed 0: ") for line in lines)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--methods=head,lottery"], ["methods", "lottery", "freezenet_0.99"]),
        (["--datasets=cifar"], ["datasets", "cifar10"]),
        (["--seeds=one"], ["seeds", "one"]),
        (["--num_images=4500", "--num_validation=4500"], ["num_images", "num_validation"]),
        (["--datasets=cifar10", "--data_dir=no/such/folder"], ["data_dir", "no/such/folder"]),
    ],
)
def test_a_bad_flag_is_one_line_and_a_status(flags, words, tmp_path):
    process = run("transfer.py", *SMALL, *flags, f"--output_dir={tmp_path / 'run'}")
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith("transfer.py: error: ")
    assert all(word in line for word in words)
