"""Tests of examples/tune_learning_rate.py, run as a user runs it."""

import math

from test_examples import run

from keras_freeze.runs import Results, Run

# Validation and test accuracy for the seeds 0 and 1, by freezing rate and learning rate.
ACCURACIES = {
    (0.9, 0.1): [(0.90, 0.80), (0.94, 0.90)],
    (0.9, 1.6): [(0.93, 0.99), (0.90, 0.99)],
    (0.99, 0.1): [(0.60, 0.50), (0.70, 0.60)],
    (0.99, 1.6): [(None, 0.10), (0.80, 0.70)],  # the first diverged
}
TABLE = f"""\
| q | 0.1 | 1.6 |
| --- | --- | --- |
| 0.9 | **85.00 ± {10 / math.sqrt(2):.2f}** | 99.00 ± 0.00 |
| 0.99 | **55.00 ± {10 / math.sqrt(2):.2f}** | 40.00 ± {60 / math.sqrt(2):.2f} |
"""


def test_the_table_has_test_accuracies_and_marks_the_best_in_validation(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    for (q, rate), of_seeds in ACCURACIES.items():
        for seed, (validation, test) in enumerate(of_seeds):
            settings = {"epochs": 3, "learning_rate": rate}
            run_ = Run("mnist_5k", "lenet_300_100", "freezenet", q, seed, **settings)
            record = {"run": vars(run_), "finished": "", "result": {}}
            record["result"] = {"validation_accuracy": validation, "test_accuracy": test}
            results.append(record)
    flags = ["--epochs=3", "--rates=0.9,0.99", "--learning_rates=0.1,1.6", "--seeds=0,1"]
    process = run("tune_learning_rate.py", *flags, f"--output_dir={tmp_path}")
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"{TABLE}Written to {tmp_path / 'sweep.md'}\n"
    assert process.stderr == ""
    assert (tmp_path / "sweep.md").read_text() == TABLE
    assert len(results) == 8


def test_missing_data_are_one_line_and_a_status(tmp_path):
    flags = ["--dataset=mnist", "--data_dir=no/such/folder", "--rates=0.9", "--seeds=0"]
    flags += ["--learning_rates=0.1", f"--output_dir={tmp_path}"]
    process = run("tune_learning_rate.py", *flags)
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith("tune_learning_rate.py: error: ")
    assert "no/such/folder" in line
    assert process.stdout == ""
