"""Tests of examples/fine_tune.py, run as a user runs it, and of the files that it sends."""

import json

import keras
import numpy as np
import pytest
from delta_cases import count_changed
from example_scripts import run

import keras_freeze as kf

# Takes a minute.
pytestmark = pytest.mark.exhaustive

NUM_WEIGHTS = 784 * 300 + 300 * 100 + 100 * 5
NUM_BIASES = 300 + 100 + 5
NUM_LORA = (784 + 300) + (300 + 100) + (100 + 5)  # of rank 1
NUM_TRAINED = {
    "base, not adapted": 0,
    "full fine-tuning": NUM_WEIGHTS + NUM_BIASES,
    "head only": 100 * 5 + 5,
    "LoRA, rank 1": NUM_LORA + NUM_BIASES,
    "LoRA, rank 4": 4 * NUM_LORA + NUM_BIASES,
    "FreezeNet, q = 0.99": 2657 + NUM_BIASES,
    "FreezeNet, q = 0.999": 265 + NUM_BIASES,
    "the same, small, q = 0.99": 2657 + NUM_BIASES,
    "the same, small, q = 0.999": 265 + NUM_BIASES,
}
DELTAS = ("full", "head", "freezenet_0.99", "freezenet_0.999", "small_0.99")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One short run: its folder, the finished process, and the rows of its table by way."""
    folder = tmp_path_factory.mktemp("fine_tune")
    process = run("fine_tune.py", "--epochs=1", "--rates=0.99,0.999", f"--output_dir={folder}")
    assert process.returncode == 0, process.stderr
    rows = json.loads((folder / "result.json").read_text())["rows"]
    return folder, process, {row["way"]: row for row in rows}


def load_base(folder):
    return keras.models.load_model(folder / "base.keras")


def accuracy_on_5_to_9(model):
    images, labels = kf.datasets.load_arrays("mnist_5k", "test")
    is_new = labels >= 5
    predicted = model.predict(images[is_new], verbose=0).argmax(axis=-1) + 5
    return np.mean(predicted == labels[is_new])


def test_every_way_trains_as_many_values_as_it_says(finished):
    rows = finished[2]
    assert {way: row["num_trained"] for way, row in rows.items()} == NUM_TRAINED


def test_every_way_is_better_on_the_new_digits_than_the_base(finished):
    rows = dict(finished[2])
    base = rows.pop("base, not adapted")["test_accuracy"]
    assert all(row["test_accuracy"] > base + 0.1 for row in rows.values()), rows


def test_the_table_has_the_numbers_of_the_result(finished):
    _, process, rows = finished
    lines = [line for line in process.stdout.splitlines() if line.startswith("|")]
    printed = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [cells[0] for cells in printed] == list(rows)
    for way, accuracy, rate, trained, _, sent in printed:
        row = rows[way]
        assert accuracy == f"{100 * row['test_accuracy']:.2f}"
        assert rate == ("" if row["learning_rate"] is None else str(row["learning_rate"]))
        assert trained == f"{row['num_trained']:,}"
        assert sent == f"{row['freeze_bytes']:,}"


@pytest.mark.parametrize("way", [way for way in NUM_TRAINED if way != "base, not adapted"])
def test_a_file_on_the_base_loads_as_a_network_with_the_accuracy_of_the_table(finished, way):
    folder, _, rows = finished
    file = folder / rows[way]["file"]
    assert file.stat().st_size == rows[way]["freeze_bytes"]
    loaded = kf.load(file, base=folder / "base.keras")
    assert accuracy_on_5_to_9(loaded) == pytest.approx(rows[way]["test_accuracy"], abs=1e-6)


def test_one_base_serves_the_deltas_in_turn_and_is_itself_again(finished):
    folder = finished[0]
    device, base = load_base(folder), load_base(folder)
    for stem in DELTAS:
        file = folder / f"{stem}.freeze"
        loaded = kf.load(file, base=folder / "base.keras")
        kf.apply_delta(device, file)
        assert count_changed(device, loaded) == 0
        assert count_changed(device, base) > 0
        kf.remove_delta(device, file)
        assert count_changed(device, base) == 0


@pytest.mark.parametrize("rate", ["0.99", "0.999"])
def test_a_freezenet_delta_changes_what_is_trained_and_no_more(finished, rate):
    folder, _, rows = finished
    loaded = kf.load(folder / f"freezenet_{rate}.freeze", base=folder / "base.keras")
    num_trained = rows[f"FreezeNet, q = {rate}"]["num_trained"]
    assert 0.9 * num_trained <= count_changed(loaded, load_base(folder)) <= num_trained


def test_the_weights_file_of_full_fine_tuning_holds_weights_only(finished):
    folder, _, rows = finished
    file = folder / "full.weights.h5"
    values = 4 * (NUM_WEIGHTS + NUM_BIASES)
    assert values < file.stat().st_size < 1.05 * values
    assert file.stat().st_size == rows["full fine-tuning"]["float32_bytes"]
    model = load_base(folder)
    model.load_weights(file)
    assert count_changed(model, kf.load(folder / "full.freeze", base=folder / "base.keras")) == 0


def test_a_delta_is_a_small_part_of_the_weights_file(finished):
    rows = finished[2]
    whole = rows["full fine-tuning"]["float32_bytes"]
    assert rows["FreezeNet, q = 0.99"]["freeze_bytes"] < whole / 50
    assert rows["FreezeNet, q = 0.999"]["freeze_bytes"] < whole / 250
    for rate in ("0.99", "0.999"):
        exact, small = (rows[f"{way}, q = {rate}"] for way in ("FreezeNet", "the same, small"))
        assert small["freeze_bytes"] < exact["freeze_bytes"] / 2


def test_progress_names_each_way_and_learning_rate_and_nothing_else_is_on_standard_error(finished):
    lines = finished[1].stderr.splitlines()
    ways = [way for way in NUM_TRAINED if way != "base, not adapted"]
    named = [f"{number}/{len(ways)} {way}" for number, way in enumerate(ways, start=1)]
    assert [line for line in lines if not line.startswith("  learning rate ")] == [
        "base: digits 0-4",
        *named,
    ]
    assert len(lines) > 2 * len(ways)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rates=0.9,many"], ["rates", "0.9,many"]),
        (["--rates=1.5"], ["freeze_rate", "1.5"]),
        (["--dataset=cifar10"], ["dataset", "cifar10"]),
        (["--epochs=0"], ["epochs", "0"]),
    ],
)
def test_a_bad_flag_is_one_line_and_a_status(flags, words, tmp_path):
    process = run("fine_tune.py", *flags, f"--output_dir={tmp_path / 'run'}")
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith("fine_tune.py: error: ")
    assert all(word in line for word in words)
    assert not (tmp_path / "run").exists()
