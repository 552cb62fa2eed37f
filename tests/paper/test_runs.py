"""Runs as data, and the file of their results."""

import json
import math
import multiprocessing

import numpy as np
import pytest

from keras_freeze.paper import runs
from keras_freeze.paper.runs import MEASURES, Results, Run

RUN = Run("mnist_5k", "lenet_300_100", "freezenet", 0.99, seed=0)


def record_of(run, accuracy=0.5):
    result = {"test_accuracy": accuracy, "validation_accuracy": 0.5, "report": {}}
    return {"run": run.__dict__, "finished": "2026-01-01T00:00:00+00:00", "result": result}


def run_of(seed):
    return Run("mnist_5k", "lenet_300_100", "freezenet", 0.99, seed=seed)


def test_what_is_none_takes_the_recipes_value_so_that_equal_runs_are_equal():
    run = Run("mnist", "lenet_5_caffe", "snip", 0.9, seed=np.int64(3))
    spelt_out = Run(
        "mnist",
        "lenet_5_caffe",
        "snip",
        0.9,
        seed=3,
        epochs=250,
        learning_rate=0.1,
        l2=5e-4,
        initializer="xavier_normal",
        validation_fraction=0.1,
    )
    assert run == spelt_out
    assert json.loads(json.dumps(run.__dict__)) == run.__dict__


def test_a_method_with_one_rate_has_it_whatever_is_given():
    assert Run("mnist", "lenet_5_caffe", "baseline", 0.9, seed=0).freeze_rate == 0.0


def test_labels_of_different_runs_differ():
    others = {
        "seed": 1,
        "freeze_rate": 0.9,
        "method": "snip",
        "model": "lenet_5_caffe",
        "dataset": "mnist",
        "measure": "costs",
        "epochs": 3,
        "learning_rate": 0.2,
        "l2": 0.0,
        "initializer": "pm_sigma",
        "reinitializer": "pm_sigma",
        "validation_fraction": 0.2,
        "steps_per_epoch": 3,
        "criterion": "magnitude",
        "distribution": "erk",
        "mask": "shuffled",
        "schedule": "rigl",
    }
    labels = {Run(**{**RUN.__dict__, name: value}).label for name, value in others.items()}
    assert len(labels | {RUN.label}) == len(RUN.__dict__) + 1


@pytest.mark.parametrize(
    ("setting", "value", "error"),
    [
        ("dataset", "svhn", ValueError),
        ("model", 3, ValueError),
        ("method", "lottery", ValueError),
        ("measure", "time", ValueError),
        ("freeze_rate", "0.9", TypeError),
        ("freeze_rate", 1.1, ValueError),
        ("seed", -1, ValueError),
        ("seed", "a", TypeError),
        ("epochs", 0, ValueError),
        ("learning_rate", -0.1, ValueError),
        ("l2", -1.0, ValueError),
        ("initializer", "glorot", ValueError),
        ("reinitializer", "glorot", ValueError),
        ("validation_fraction", 1.0, ValueError),
        ("steps_per_epoch", 0, ValueError),
        ("steps_per_epoch", 1.5, TypeError),
        ("distribution", "er", ValueError),
        ("mask", "random", ValueError),
        ("schedule", "snfs", ValueError),
    ],
)
def test_a_bad_setting_is_named_with_its_value(setting, value, error):
    with pytest.raises(error, match=f"{setting}.*Received.*{value!r}"):
        Run(**{**RUN.__dict__, setting: value})


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"method": "freezenet-wd", "schedule": "rigl"}, "frozen weights decay"),
        ({"measure": "costs", "schedule": "set"}, "measure='costs', which does not train"),
        ({"measure": "gradient_flow", "schedule": "rigl"}, "which does not train"),
        ({"mask": "drawn", "schedule": "gradual"}, "'rigl', 'set' or None with mask='drawn'"),
    ],
)
def test_settings_that_exclude_each_other_are_named(others, reason):
    with pytest.raises(ValueError, match=f"`schedule` must be .*{reason}.*Received: schedule="):
        Run(**{**RUN.__dict__, **others})


def test_records_and_labels_are_valid_that_do_not_know_how_the_mask_comes_about():
    record = record_of(RUN)
    record["run"] = {
        name: value
        for name, value in record["run"].items()
        if name not in ("distribution", "mask", "schedule")
    }
    assert Run.from_record(record) == RUN
    assert RUN.label == "lenet_300_100 on mnist_5k, freezenet, q = 0.99, seed 0"


@pytest.mark.parametrize("measure", MEASURES)
def test_a_record_of_every_measure_can_be_read_back(measure, tmp_path):
    run = Run(**{**RUN.__dict__, "measure": measure, "epochs": 1, "steps_per_epoch": 2})
    results = Results(tmp_path / "folder" / "results.jsonl")
    record = run.execute(verbose=False)
    results.append(record)
    read = Results(results.path)
    assert run in read
    assert read[run] == json.loads(json.dumps(record))
    assert read[run]["result"]["report"]["num_trained_weights"] == 2662
    assert read[run]["result"]["seconds"] > 0


def test_gradient_flow_through_training_starts_before_it():
    run = Run(**{**RUN.__dict__, "measure": "gradient_flow_in_training", "epochs": 2})
    run = Run(**{**run.__dict__, "steps_per_epoch": 2})
    result = run.execute(verbose=False)["result"]
    assert result["flow"]["epoch"] == [0, 1, 2]
    assert result["flow"]["gradient_flow"][1:] == result["history"]["gradient_flow"]


def test_costs_are_those_of_the_network_and_of_a_step():
    costs = {}
    for method in ("snip", "freezenet"):
        run = Run("mnist_5k", "lenet_300_100", method, 0.99, 0, measure="costs", steps_per_epoch=2)
        costs[method] = run.execute(verbose=False)["result"]
    assert costs["snip"]["total_weights"] == 2662  # the others are zero
    assert costs["freezenet"]["total_weights"] == 266_200
    for cost in costs.values():
        assert cost["stored_weights"] == 2662
        assert 0 < cost["moved_weights"] <= 2662
        assert 4 * 2662 / 2 < cost["file_bytes"] < 4 * 2662 * 2
    assert costs["snip"]["gradient_flow"] < costs["freezenet"]["gradient_flow"]


def test_a_value_that_is_not_finite_becomes_null(tmp_path, monkeypatch):
    measured = {"test_accuracy": math.nan, "validation_accuracy": None, "report": {}}
    monkeypatch.setitem(runs.MEASURES, "training", lambda run, **how: measured)
    results = Results(tmp_path / "results.jsonl")
    results.append(RUN.execute())
    assert results[RUN]["result"]["test_accuracy"] is None


def test_the_last_record_of_a_run_counts(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    results.append(record_of(RUN, 0.1))
    results.append(record_of(RUN, 0.2))
    assert len(results) == 1
    assert results[RUN]["result"]["test_accuracy"] == 0.2


def test_a_line_that_a_kill_cut_off_hurts_no_other(tmp_path):
    path = tmp_path / "results.jsonl"
    whole = json.dumps(record_of(run_of(0))) + "\n"
    for cut in range(1, len(whole) - 1, 7):
        path.write_text(whole + whole[:cut])
        results = Results(path)
        assert len(results) == 1
        results.append(record_of(run_of(1)))
        assert run_of(1) in results
        assert len(Results(path)) == 2


@pytest.mark.parametrize(
    "line",
    [
        "garbage",
        "null",
        "[1]",
        '{"run": 3}',
        '{"run": null, "result": {}}',
        json.dumps({**record_of(RUN), "result": None}),
        json.dumps({**record_of(RUN), "result": {}}),
        json.dumps(record_of(RUN, "high")),
        json.dumps({**record_of(RUN), "run": {**RUN.__dict__, "method": "lottery"}}),
    ],
)
def test_a_line_that_is_no_record_is_named_once_and_left_out(line, tmp_path, caplog):
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join([json.dumps(record_of(run_of(1))), line, ""]))
    for _ in range(2):
        assert len(Results(path)) == 1
    (message,) = caplog.messages
    assert message.startswith(f"{path}, line 2 was left out")


def test_settings_of_a_newer_version_are_left_out(tmp_path):
    path = tmp_path / "results.jsonl"
    record = record_of(RUN)
    path.write_text(json.dumps({**record, "run": {**record["run"], "colour": "red"}}) + "\n")
    assert RUN in Results(path)


@pytest.mark.parametrize("record", [None, {"a": 1}, {"run": {}, "result": {}}])
def test_what_is_no_record_cannot_be_appended(record, tmp_path):
    results = Results(tmp_path / "results.jsonl")
    with pytest.raises(TypeError):
        results.append(record)
    assert not results.path.exists()


def append_many(path, first):
    for seed in range(first, first + 50):
        Results(path).append(record_of(run_of(seed)))


def test_several_processes_append_whole_lines(tmp_path):
    path = tmp_path / "results.jsonl"
    with multiprocessing.get_context("fork").Pool(3) as pool:
        pool.starmap(append_many, [(path, 0), (path, 50), (path, 100)])
    assert len(Results(path)) == len(path.read_text().splitlines()) == 150
