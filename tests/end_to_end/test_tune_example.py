"""Tests of examples/tune_learning_rate.py."""

import json
import math

import pytest
from example_scripts import run

from keras_freeze.paper.runs import Results, Run

# Validation and test accuracy for the seeds 0 and 1, by freezing rate and learning rate.
ACCURACIES = {
    (0.9, 0.1): [(0.90, 0.80), (0.94, 0.90)],
    (0.9, 1.6): [(0.93, 0.99), (0.90, 0.99)],
    (0.99, 0.1): [(0.60, 0.50), (0.70, 0.60)],
    (0.99, 1.6): [(None, 0.10), (0.80, 0.70)],  # the first diverged
}
TEST_ACCURACIES = f"""\
| q | q_beta | trained parameters | 0.1 | 1.6 |
| --- | --- | --- | --- | --- |
| 0.9 | 0.5000 | 7 | 85.00 ± {10 / math.sqrt(2):.2f} | **99.00 ± 0.00** |
| 0.99 | 0.5000 | 7 | 55.00 ± {10 / math.sqrt(2):.2f} | 40.00 ± {60 / math.sqrt(2):.2f} |
"""
BEST = f"""\
| q | best learning rate | validation accuracy (%) | test accuracy (%) |
| --- | --- | --- | --- |
| 0.9 | 0.1 | 92.00 ± {4 / math.sqrt(2):.2f} | 85.00 ± {10 / math.sqrt(2):.2f} |
| 0.99 | 0.1 | 65.00 ± {10 / math.sqrt(2):.2f} | 55.00 ± {10 / math.sqrt(2):.2f} |
"""
SHORT = ("--epochs=1", "--trials=1", "--rates=0.9,0.99")


def test_the_tables_have_test_accuracies_and_the_best_in_validation(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    for (q, rate), of_seeds in ACCURACIES.items():
        for seed, (validation, test) in enumerate(of_seeds):
            settings = {"epochs": 3, "learning_rate": rate}
            run_ = Run("mnist_5k", "lenet_300_100", "freezenet", q, seed, **settings)
            record = {"run": vars(run_), "finished": "", "result": {}}
            record["result"] = {
                "validation_accuracy": validation,
                "test_accuracy": test,
                "report": {"real_freeze_rate": 0.5, "num_trained_parameters": 7},
            }
            results.append(record)
    flags = ["--epochs=3", "--rates=0.9,0.99", "--learning_rates=0.1,1.6", "--seeds=2"]
    process = run("tune_learning_rate.py", *flags, f"--output_dir={tmp_path}")
    assert process.returncode == 0, process.stderr
    assert TEST_ACCURACIES in process.stdout
    assert BEST in process.stdout
    assert (
        "5,000 digits of MNIST instead of MNIST; LeNet-300-100 instead of LeNet-5-Caffe"
        in process.stdout
    )
    assert "learning rates 0.1, 1.6" in process.stdout
    assert process.stderr == ""
    (page,) = tmp_path.glob("sweep-*.md")
    assert process.stdout == f"{page.read_text(encoding='utf-8')}\nWritten to {page}\n"
    assert len(results) == 8


@pytest.mark.exhaustive
def test_a_search_is_of_each_rate_and_is_repeated_only_if_flags_differ(tmp_path):
    def search(*flags):
        flags = ("--search=random", *SHORT, *flags, f"--output_dir={tmp_path}")
        process = run("tune_learning_rate.py", *flags)
        assert process.returncode == 0, process.stderr
        return process.stdout

    first = search()
    assert [line.split(" | ")[:2] for line in first.splitlines() if line.startswith("| 0")] == [
        ["| 0.9", "1"],
        ["| 0.99", "1"],
    ]
    trials = {path: path.read_bytes() for path in tmp_path.glob("*/trial_*/trial.json")}
    assert sorted(_hyperparameters(text)["freeze_rate"] for text in trials.values()) == [0.9, 0.99]
    assert first.splitlines()[-5:] == search().splitlines()[-5:]
    assert trials == {path: path.read_bytes() for path in tmp_path.glob("*/trial_*/trial.json")}
    search("--learning_rates=0.001,0.002", "--rates=0.9")
    (new,) = set(tmp_path.glob("*/trial_*/trial.json")) - set(trials)
    assert 0.001 <= _hyperparameters(new.read_bytes())["learning_rate"] <= 0.002
    assert len(list(tmp_path.glob("random-*.md"))) == 2


def _hyperparameters(text):
    return json.loads(text)["hyperparameters"]["values"]


def test_chief_and_workers_are_told_to_search_at_one_rate(tmp_path):
    names = {"ORACLE_IP": "127.0.0.1", "ORACLE_PORT": "1", "TUNER_ID": "chief"}
    environment = {f"KERASTUNER_{name}": value for name, value in names.items()}
    flags = ("--search=random", *SHORT, f"--output_dir={tmp_path}")
    process = run("tune_learning_rate.py", *flags, **environment)
    assert process.returncode == 1
    line = process.stderr.strip().splitlines()[-1]
    assert line.startswith("tune_learning_rate.py: error: ")
    assert line.endswith("Received: --rates=0.9,0.99")
    assert not list(tmp_path.iterdir())


def test_missing_data_are_one_line_and_a_status(tmp_path):
    flags = ["--dataset=mnist", "--data_dir=no/such/folder", "--rates=0.9", "--seeds=1"]
    flags += ["--learning_rates=0.1", f"--output_dir={tmp_path}"]
    process = run("tune_learning_rate.py", *flags)
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith("tune_learning_rate.py: error: ")
    assert "no/such/folder" in line
    assert process.stdout == ""


def test_runs_that_fail_are_one_line_after_their_tracebacks(tmp_path):
    flags = [
        "--model=vgg16_d",
        "--rates=0.9",
        "--seeds=1",
        "--epochs=1",
    ]  # the images are too small
    flags += ["--learning_rates=0.1", f"--output_dir={tmp_path}"]
    process = run("tune_learning_rate.py", *flags)
    assert process.returncode == 1
    line = process.stderr.splitlines()[-1]
    assert line.startswith("tune_learning_rate.py: error: 1 of 1 runs have no result. ")
    assert process.stdout == ""
