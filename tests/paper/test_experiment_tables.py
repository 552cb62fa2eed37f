"""What the tables and reports of all experiments share: means, marks, and what is missing."""

import dataclasses

import pytest
from experiment_cases import TABLE_3, tables_in, write, write_accuracies
from helpers import WITHOUT_FINITE_NUMBERS

from keras_freeze.paper.experiments import EXPERIMENTS
from keras_freeze.paper.experiments.experiment import Experiment, Series
from keras_freeze.paper.runs import Results
from keras_freeze.paper.views.reports import markdown, write_report

pytestmark = pytest.mark.cases(2)

ALL = sorted(EXPERIMENTS)

RATES = Experiment(
    "rates",
    "Figure 0",
    "A title",
    "A statement.",
    "mnist",
    "lenet_300_100",
    (
        Series("baseline", {"method": "baseline"}, rates=(0.0,)),
        Series("FreezeNet", {"method": "freezenet"}),
        Series("SNIP", {"method": "snip"}),
    ),
    (0.9, 0.99),
    seeds=3,
)


def test_rates_have_means_deviations_and_the_papers_values(tmp_path):
    experiment = dataclasses.replace(
        RATES, paper={("FreezeNet", 0.9): (98.5, None), ("SNIP", 0.99): (90.0, 0.5)}
    )
    accuracies = {
        ("baseline", 0.0): [98.0, 98.5, 99.0],
        ("FreezeNet", 0.9): [97.0, 98.0],
        ("FreezeNet", 0.99): [95.0],
        ("SNIP", 0.9): [96.0, 97.0, 98.0],
    }
    results = write_accuracies(tmp_path, experiment, accuracies)
    text = markdown(experiment, results, figure="rates.png")
    (table,) = tables_in(text)
    assert table == [
        ["q", "q_beta", "trained parameters", "baseline", "FreezeNet", "SNIP"],
        ["0", "0.0000", "1,010", "98.50 ± 0.50", "", ""],
        ["0.9", "0.8911", "110", "", "97.50 ± 0.71 (2 of 3; paper 98.5)", "97.00 ± 1.00"],
        ["0.99", "0.9802", "20", "", "95.00 (1 of 3)", "(paper 90.0 ± 0.5)"],
    ]
    assert text.startswith("## Figure 0: A title (LeNet-300-100 on MNIST)\n\n")
    assert "The paper's statement: A statement.\n" in text
    assert "![A title](rates.png)" in text
    assert "over 3 seeds" in text
    assert (
        "Runs: 9 of 15 finished, 9 s of training in all. With python 3.11.7, keras 3.15.1" in text
    )


@pytest.mark.parametrize(
    ("freezenet", "snip", "cells"),
    [
        # 97 - 1 > 94 + 1
        ([96.0, 97.0, 98.0], [93.0, 94.0, 95.0], ["**97.00 ± 1.00**", "94.00 ± 1.00"]),
        # 97 - 1 = 95 + 1
        ([96.0, 97.0, 98.0], [94.0, 95.0, 96.0], ["97.00 ± 1.00", "95.00 ± 1.00"]),
        ([97.0, 97.0, 97.0], [10.0], ["97.00 ± 0.00", "10.00 (1 of 3)"]),
        ([10.0, 10.0, 10.0], [20.0, 20.0, 20.0], ["10.00 ± 0.00", "**20.00 ± 0.00**"]),
    ],
)
def test_bold_is_what_is_better_by_more_than_the_deviations(tmp_path, freezenet, snip, cells):
    accuracies = {("FreezeNet", 0.9): freezenet, ("SNIP", 0.9): snip}
    text = markdown(RATES, write_accuracies(tmp_path, RATES, accuracies))
    assert tables_in(text)[0][2][4:] == cells
    assert ("Bold:" in text) == any("**" in cell for cell in cells)


def test_one_seed_alone_is_never_bold(tmp_path):
    experiment = RATES.changed(seeds=1)
    accuracies = {("FreezeNet", 0.9): [99.0], ("SNIP", 0.9): [9.0]}
    text = markdown(experiment, write_accuracies(tmp_path, experiment, accuracies))
    assert tables_in(text)[0][2][4:] == ["99.00", "9.00"]


def test_diverged_runs_are_counted(tmp_path):
    runs = RATES.runs_of(RATES.series[1], 0.99)
    epochs = [None, 4, 1]
    outcomes = [(run, {"diverged_epoch": e}) for run, e in zip(runs, epochs, strict=True)]
    text = markdown(RATES, write(tmp_path, outcomes))
    assert "FreezeNet at q = 0.99, 2 of 3 runs." in text
    assert "no longer finite" not in markdown(RATES, write(tmp_path / "other", []))


def test_training_accuracy_of_a_run_that_diverged_is_not_that_of_its_last_epoch(tmp_path):
    experiment = dataclasses.replace(RATES, quantity="training_accuracy")
    complete, diverged = experiment.series[1:]
    outcomes = [
        (experiment.runs_of(complete, 0.9)[0], {}),
        (experiment.runs_of(diverged, 0.9)[0], {"diverged_epoch": 2}),
        (experiment.runs_of(diverged, 0.9)[1], {}),
    ]
    text = markdown(experiment, write(tmp_path, outcomes))
    assert tables_in(text)[0][2][4:] == ["75.00 (1 of 3)", "not finite (2 of 3)"]
    assert "counts as not finite: SNIP at q = 0.9, 1 of 2 runs." in text
    assert "best epoch" not in text


def test_a_value_that_is_not_finite_is_called_so(tmp_path):
    experiment = dataclasses.replace(RATES, quantity="validation_accuracy")
    outcomes = [(RATES.runs_of(RATES.series[1], 0.99)[0], {"validation_accuracy": None})]
    table = tables_in(markdown(experiment, write(tmp_path, outcomes)))[0]
    assert table[3][4] == "not finite (1 of 3)"


def test_decayed_weights_have_a_table_of_what_pruning_does(tmp_path):
    experiment = dataclasses.replace(
        RATES, series=(Series("FreezeNet-WD", {"method": "freezenet-wd"}),), seeds=2
    )
    runs = experiment.runs_of(experiment.series[0], 0.9)
    checks = [
        {"largest_frozen_weight": 1e-9, "after": {"accuracy": 0.5}},
        {"largest_frozen_weight": 0.25, "after": {"accuracy": 0.52}},
    ]
    outcomes = [
        (run, {"pruning": check, "test_accuracy": 0.75})
        for run, check in zip(runs, checks, strict=True)
    ]
    _, pruned = tables_in(markdown(experiment, write(tmp_path, outcomes)))
    assert pruned[1:] == [["FreezeNet-WD", "0.9", "75.00 ± 0.00", "51.00 ± 1.41", "0.25"]]


def test_data_sets_have_a_table_each():
    text = markdown(EXPERIMENTS["vgg16_cifar"], Results("no results"))
    ten, hundred = tables_in(text)
    for table, start, name in ((ten, 0, "CIFAR-10"), (hundred, 2, "CIFAR-100")):
        assert table[0][3:] == [f"{method}, {name}" for method in TABLE_3]
        for row in table[1:]:
            for method, cell in zip(TABLE_3, row[3:], strict=True):
                values = TABLE_3[method].get(float(row[0]))
                printed = "(paper {} ± {})".format(*values[start : start + 2]) if values else ""
                assert cell == printed


@pytest.mark.parametrize("name", ALL)
def test_every_experiment_has_a_table_of_runs_without_a_finite_number(name, tmp_path):
    experiment = EXPERIMENTS[name].changed(seeds=2)
    nothing = {
        **WITHOUT_FINITE_NUMBERS,
        "pruning": {"largest_frozen_weight": None, "after": {"accuracy": None}},
    }
    outcomes = [
        (run, {**nothing, "diverged_epoch": 1} if "training" in run.measure else nothing)
        for run in experiment.runs
    ]
    results = write(tmp_path, outcomes)
    text = markdown(experiment, results)
    assert "nan" not in "".join(cell for table in tables_in(text) for row in table for cell in row)
    assert f"Runs: {len(experiment.runs)} of {len(experiment.runs)} finished" in text


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_every_experiment_has_a_table_with_none_some_and_all_of_its_runs(name, share, tmp_path):
    experiment = EXPERIMENTS[name].changed(seeds=2)
    runs = experiment.runs[: round(share * len(experiment.runs))]
    text = markdown(experiment, write(tmp_path, [(run, {}) for run in runs]))
    assert tables_in(text)
    assert experiment.statement in text
    assert "2 of " in text  # seeds
    assert f"Runs: {len(runs)} of {len(experiment.runs)} finished" in text


def test_a_report_has_a_section_and_a_figure_for_each(tmp_path):
    run = RATES.runs[0]
    results = write(tmp_path / "runs", [(run, {})])
    other = dataclasses.replace(EXPERIMENTS["vgg16_cifar"])
    text = write_report([RATES, other], results, tmp_path / "report")
    assert sorted(path.name for path in (tmp_path / "report").iterdir()) == [
        "rates.png",
        "report.md",
    ]
    assert (tmp_path / "report" / "report.md").read_text(encoding="utf-8") == text
    assert text.count("\n## ") + text.startswith("## ") == 2
    assert text.count("![") == 1
