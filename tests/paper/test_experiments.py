"""The registry of the paper's experiments, their tables, their work, and the architectures."""

import collections
import dataclasses
import math
import shutil
from pathlib import Path

import pytest
from helpers import WITHOUT_FINITE_NUMBERS

from keras_freeze.paper import preparation, recipes
from keras_freeze.paper.experiments import EXPERIMENTS, architectures
from keras_freeze.paper.experiments.experiment import Experiment, Series
from keras_freeze.paper.experiments.work import overview, work_of
from keras_freeze.paper.runs import MEASURES, Results, Run
from keras_freeze.paper.training import LEARNING_RATES
from keras_freeze.paper.views import spread
from keras_freeze.paper.views.reports import markdown, write_report

pytestmark = pytest.mark.cases(2)

ROOT = Path(__file__).resolve().parents[2]
DATA_DIR = ROOT.parent / "shared/data/tensorflow_datasets"
SUBSET = ROOT.parent / "shared/data/tiny-imagenet-200-subset.tar.gz"

ALL = sorted(EXPERIMENTS)

# Of the paper's figures and tables, those that hold data.
SOURCES = [
    *(
        f"Figure {n}, {side}"
        for n in ("2", "3", "4", "S2", "S3", "S4", "S5")
        for side in ("left", "right")
    ),
    *("Figure S1", "Figure S6", "Figure S7", "Figure S8"),
    *("Table 1", "Table 2", "Table 3", "Table 4"),
]

BEYOND = [
    f"{model}_{name}"
    for model in ("lenet300", "lenet5")
    for name in (
        "distributions_and_criteria",
        "shuffled_masks",
        "moving_masks",
        "methods",
        "seeds",
    )
]

# Table 3 as printed, by method and rate: CIFAR-10, its deviation, CIFAR-100, its deviation.
TABLE_3 = {
    "baseline": {0.0: (93.0, 0.1, 71.6, 0.6)},
    "SNIP": {
        0.9: (92.9, 0.1, 53.9, 1.7),
        0.95: (92.5, 0.1, 48.6, 6.6),
        0.99: (10.0, 0.0, 1.0, 0.0),
        0.995: (10.0, 0.0, 1.0, 0.0),
    },
    "FreezeNet": {
        0.9: (92.2, 0.1, 70.7, 0.3),
        0.95: (91.7, 0.1, 69.0, 0.2),
        0.99: (88.6, 0.1, 59.8, 0.3),
        0.995: (86.0, 0.1, 53.4, 0.1),
    },
    "FreezeNet-WD": {
        0.9: (93.2, 0.2, 53.1, 1.8),
        0.95: (92.8, 0.2, 44.5, 5.4),
        0.99: (76.1, 1.0, 13.1, 1.8),
        0.995: (74.6, 1.1, 11.9, 1.4),
    },
}

# Table 2 as printed: SNIP, FreezeNet.
TABLE_2 = {
    0.9: (99.24, 99.37),
    0.99: (98.80, 98.94),
    0.995: (98.02, 98.55),
    0.999: (20.57, 95.61),
}


def result_of(run, **others):
    """A made-up result of a run, with all that a result of its measure holds."""
    num_weights = 1000
    trained = round((1 - run.freeze_rate) * num_weights)
    report = {
        "num_weights": num_weights,
        "num_trained_weights": trained,
        "num_trained_parameters": trained + 10,
        "real_freeze_rate": 1 - (trained + 10) / (num_weights + 10),
        "network_kib": 4 * (trained + 10) / 1024,
        "compression_factor": (num_weights + 10) / (trained + 10),
    }
    if run.measure == "gradient_flow":
        return {"gradient_flow": 0.5, "report": report, **others}
    if run.measure == "costs":
        counts = {"total_weights": 1000, "stored_weights": trained, "moved_weights": trained}
        return {**counts, "file_bytes": 900, "gradient_flow": 0.5, "report": report, **others}
    accuracies = {"accuracy": [0.5, 0.75], "val_accuracy": [0.5, 0.625]}
    result = {
        "seed": run.seed,
        "report": report,
        "history": accuracies,
        "best_epoch": 2,
        "validation_accuracy": 0.625,
        "test_accuracy": 0.75,
        "diverged_epoch": None,
        "pruning": None,
        "seconds": 1.0,
        "versions": {"python": "3.11.7", "keras": "3.15.1"},
    }
    if run.measure == "gradient_flow_in_training":
        values = [0.5, 0.25, 0.125]
        flow = {"epoch": [0, 1, 2], "gradient_flow": values, "gradient_flow_deviation": values}
        result["flow"] = flow
    return {**result, **others}


def write(folder, outcomes):
    """Results of a folder: (run, changes of its made-up result) each."""
    results = Results(folder / "results.jsonl")
    for run, changes in outcomes:
        results.append({"run": dataclasses.asdict(run), "result": result_of(run, **changes)})
    return results


def write_accuracies(folder, experiment, accuracies):
    """Results whose test accuracy is given, in per cent, by label and rate, one for each seed.

    None is an accuracy that is not finite.
    """
    series = {s.label: s for s in experiment.series}
    return write(
        folder,
        [
            (
                run,
                {"test_accuracy": None, "validation_accuracy": None}
                if value is None
                else {"test_accuracy": value / 100, "validation_accuracy": value / 200},
            )
            for (label, rate), values in accuracies.items()
            for run, value in zip(experiment.runs_of(series[label], rate), values, strict=False)
        ],
    )


def tables_in(text):
    """The tables of a Markdown text, each a list of rows of cells, the head first."""
    tables, lines = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            lines.append([cell.strip() for cell in line[1:-1].split(" |")])
        elif lines:
            head, rule, *rows = lines
            assert set(rule) == {"---"}
            assert {len(row) for row in rows} <= {len(head)}
            tables.append([head, *rows])
            lines = []
    return tables


# ---------------------------------------------------------------- registry


def test_registry_holds_each_figure_and_table_with_data_once():
    of_paper = [e.source for e in EXPERIMENTS.values() if e.is_of_paper]
    assert sorted(of_paper) == sorted(SOURCES)


def test_registry_holds_what_the_paper_does_not_have():
    assert [e.name for e in EXPERIMENTS.values() if not e.is_of_paper] == BEYOND


def test_names_headings_and_series_tell_experiments_apart():
    assert [e.name for e in EXPERIMENTS.values()] == list(EXPERIMENTS)
    headings = [e.heading for e in EXPERIMENTS.values()]
    assert len(set(headings)) == len(headings)
    for experiment in EXPERIMENTS.values():
        assert experiment.statement.endswith(".")
        labels = [s.label for s in experiment.series]
        assert len(set(labels)) == len(labels)


def test_each_label_says_which_run_it_is():
    runs = {run for experiment in EXPERIMENTS.values() for run in experiment.runs}
    assert len({run.label for run in runs}) == len(runs)


@pytest.mark.parametrize(
    ("name", "series", "rates", "seeds"),
    [
        ("lenet5_extreme_rates", 2, 10, 5),
        ("lenet5_best_learning_rates", 9, 9, 3),
        ("resnet34_tiny_imagenet", 3, 6, 3),
        ("vgg16_gradient_flow", 3, 7, 10),
        ("lenet5_pruning_methods", 2 + 9 * 3, 1, 5),
        ("lenet300_distributions_and_criteria", 4 * 3, 3, 3),
        ("lenet5_shuffled_masks", 7, 3, 3),
        ("lenet300_moving_masks", 5, 2, 3),
        ("lenet300_methods", 4, 5, 5),
        ("lenet300_seeds", 2, 1, 10),
    ],
)
def test_grids_have_their_seeds(name, series, rates, seeds):
    with_baseline = any(s.label == "baseline" for s in EXPERIMENTS[name].series)
    runs = EXPERIMENTS[name].runs
    assert len(runs) == seeds * (series * rates + with_baseline)
    assert {run.seed for run in runs} == set(range(seeds))


def test_the_first_runs_are_a_whole_figure_of_one_seed():
    runs = EXPERIMENTS["lenet5_extreme_rates"].runs
    assert {run.seed for run in runs[:21]} == {0}


def test_grasp_is_searched_as_in_the_supplement():
    grasp = [r for r in EXPERIMENTS["lenet5_pruning_methods"].runs if r.method == "grasp"]
    combinations = collections.Counter((r.learning_rate, r.validation_fraction) for r in grasp)
    rates = [0.1 / 16, 0.1 / 8, 0.1 / 4, 0.1 / 2, 0.1, 0.2, 0.4, 0.8, 1.6]
    splits = [1 / 10, 1 / 20, 1 / 4]  # 9/1, 19/1, 3/1
    assert combinations == {(rate, split): 5 for rate in rates for split in splits}
    assert list(LEARNING_RATES) == rates


@pytest.mark.parametrize("name", BEYOND)
def test_beyond_the_paper_there_is_a_question_and_no_number_of_the_paper(name):
    experiment = EXPERIMENTS[name]
    text = markdown(experiment, Results("no results"))
    assert text.startswith(f"## Beyond the paper: {experiment.title} (LeNet-")
    assert f"The question: {experiment.statement}\n" in text
    assert "The paper's statement" not in text
    assert experiment.paper == {}


def test_moving_masks_are_each_schedule_beside_the_mask_that_stays():
    runs = EXPERIMENTS["lenet300_moving_masks"].runs
    assert {(run.method, run.schedule, run.distribution) for run in runs} == {
        ("freezenet", None, "global"),
        ("freezenet", "gradual", "global"),
        ("freezenet", "rigl", "global"),
        ("freezenet", "set", "global"),
        ("random", "rigl", "erk"),
    }


def test_the_methods_side_by_side_share_the_runs_of_the_papers_figure():
    methods, figure = (EXPERIMENTS[name] for name in ("lenet300_methods", "lenet300_rates"))
    shared = set(methods.runs) & set(figure.runs)
    assert {run.method for run in shared} == {"baseline", "freezenet", "snip"}
    assert {run.freeze_rate for run in shared} == {0.0, *methods.rates}


def test_capacity_is_trained_without_weight_decay_and_shows_the_last_epoch():
    experiment = EXPERIMENTS["lenet5_capacity"]
    assert {run.l2 for run in experiment.runs} == {0.0}
    assert experiment.quantity == "training_accuracy"


def test_table_2_is_in_the_registry_as_printed():
    expected = {("baseline", 0.0): (99.36, None)}
    for rate, values in TABLE_2.items():
        for label, value in zip(("SNIP", "FreezeNet"), values, strict=True):
            expected[label, rate] = (value, None)
    assert EXPERIMENTS["lenet5_sizes"].paper == expected
    assert EXPERIMENTS["lenet5_rates"].paper == expected
    extreme = {key: value for key, value in expected.items() if key[1] != 0.9}
    assert EXPERIMENTS["lenet5_extreme_rates"].paper == extreme


def test_table_3_is_in_the_registry_as_printed():
    expected = {}
    for method, by_rate in TABLE_3.items():
        for rate, values in by_rate.items():
            expected[f"{method}, CIFAR-10", rate] = values[:2]
            expected[f"{method}, CIFAR-100", rate] = values[2:]
    assert EXPERIMENTS["vgg16_cifar"].paper == expected


def test_other_numbers_of_the_text_and_table_4():
    assert EXPERIMENTS["lenet300_rates"].paper == {("baseline", 0.0): (98.57, None)}
    assert EXPERIMENTS["lenet5_best_run"].paper == {("FreezeNet, 19/1", 0.99): (99.1, None)}
    table = tables_in(markdown(EXPERIMENTS["lenet5_pruning_methods"], Results("no results")))[0]
    assert table[0][1:4] == [
        "sparse gradients in training",
        "additional hyperparameters",
        "trained weights (%)",
    ]
    assert [(row[0].split(" (")[0], *row[1:4], row[5]) for row in table[1:]] == [
        ("baseline", "-", "-", "", "99.4"),
        ("FreezeNet, 19/1", "✓", "✗", "", "99.1"),
        ("SNIP, 19/1", "✓", "✗", "", "98.9"),
        ("GraSP", "✓", "✗", "", "98.9"),
        ("Connection-Learning", "✗", "✗", "8.3", "99.2"),
        ("Dynamic-Network-Surgery", "✗", "✗", "0.9", "99.1"),
        ("Learning-Compression", "✗", "✓", "1.0", "98.9"),
        ("Sparse-Momentum", "✗", "✓", "1.0", "99.2"),
    ]


@pytest.mark.parametrize("name", ALL)
def test_every_number_of_the_paper_belongs_to_a_point(name):
    experiment = EXPERIMENTS[name]
    points = {(s.label, rate) for s in experiment.series for rate in experiment.rates_of(s)}
    assert set(experiment.paper) <= points


# ---------------------------------------------------------------- changes


def test_what_is_changed_is_said():
    experiment = EXPERIMENTS["lenet5_extreme_rates"]
    changed = experiment.changed(
        dataset="mnist_5k",
        model="lenet_300_100",
        epochs=5,
        seeds=2,
        rates=[0.999, 0.99],
        steps_per_epoch=3,
    )
    assert changed.changes == (
        "5,000 digits of MNIST instead of MNIST",
        "LeNet-300-100 instead of LeNet-5-Caffe",
        "5 of 40 epochs, the schedule shortened in proportion",
        "only the first 3 batches of training, validation and test images",
        "2 of 5 seeds",
        "rates 0.99, 0.999",
    )
    assert changed.paper == {}
    assert "Changed here: 5,000 digits of MNIST instead of MNIST; LeNet-300-100" in markdown(
        changed, Results("no results")
    )


def test_the_experiments_own_values_are_no_change():
    experiment = EXPERIMENTS["lenet5_extreme_rates"]
    same = experiment.changed(
        dataset="mnist", model="lenet_5_caffe", epochs=250, seeds=5, rates=experiment.rates
    )
    assert same.changes == ()
    assert same.runs == experiment.runs
    assert "Changed here: nothing." in markdown(same, Results("no results"))


def test_shortened_runs_keep_the_papers_numbers_beside_them():
    changed = EXPERIMENTS["lenet5_sizes"].changed(epochs=5, rates=[0.99])
    assert changed.changes == (
        "5 of 250 epochs, the schedule shortened in proportion",
        "rates 0.99",
    )
    assert changed.paper == EXPERIMENTS["lenet5_sizes"].paper


def test_another_data_set_is_refused_where_data_sets_are_compared():
    with pytest.raises(ValueError, match=r"vgg16_cifar, which compares data sets.*dataset='mnist'"):
        EXPERIMENTS["vgg16_cifar"].changed(dataset="mnist")


# ---------------------------------------------------------------- tables

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


def test_a_dense_network_without_gradient_divides_nothing(tmp_path):
    experiment = EXPERIMENTS["vgg16_gradient_flow"].changed(seeds=1, rates=[0.99])
    results = write(tmp_path, [(run, {"gradient_flow": 0.0}) for run in experiment.runs])
    text = markdown(experiment, results)
    assert "or has none" in text
    assert {cell for row in tables_in(text)[0][1:] for cell in row[3:]} == {""}


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


def test_gradient_flow_is_relative_to_the_dense_mean(tmp_path):
    experiment = EXPERIMENTS["vgg16_gradient_flow"].changed(seeds=2, rates=[0.99])
    flows = {"baseline": [0.1, 0.3], "FreezeNet": [0.6, 0.8], "SNIP": [0.0, 0.0], "GraSP": [0.02]}
    outcomes = [
        (run, {"gradient_flow": flow})
        for s in experiment.series
        for rate in experiment.rates_of(s)
        for run, flow in zip(experiment.runs_of(s, rate), flows[s.label], strict=False)
    ]
    text = markdown(experiment, write(tmp_path / "some", outcomes))
    (table,) = tables_in(text)
    assert [row[3:] for row in table[1:]] == [
        ["1.00 ± 0.71", "", "", ""],
        ["", "3.50 ± 0.71", "0.00 ± 0.00", "0.10 (1 of 2)"],
    ]
    assert "mean of 0.2," in text
    assert "summed over the training data before their norm" in text
    without = [(run, changes) for run, changes in outcomes if run.method != "baseline"]
    text = markdown(experiment, write(tmp_path / "others", without))
    assert "not measured yet" in text
    assert {cell for row in tables_in(text)[0][1:] for cell in row[3:]} == {""}


def test_gradient_flow_in_training_is_shown_at_some_epochs(tmp_path):
    experiment = EXPERIMENTS["vgg16_gradient_flow_in_training"]
    epochs = list(range(251))
    flow = {
        "epoch": epochs,
        "gradient_flow": [0.5 + epoch for epoch in epochs[:-1]] + [None],
        "gradient_flow_deviation": [0.25] * 251,
    }
    run = experiment.runs_of(experiment.series[0], 0.99)[0]
    flows = tables_in(markdown(experiment, write(tmp_path, [(run, {"flow": flow})])))[0]
    assert flows[0] == ["epoch", "FreezeNet", "SNIP", "FreezeNet-WD"]
    assert [row[:2] for row in flows[1:]] == [
        ["0", "0.5 ± 0.25"],
        ["16", "16.5 ± 0.25"],
        ["31", "31.5 ± 0.25"],
        ["62", "62.5 ± 0.25"],
        ["125", "126 ± 0.25"],
        ["188", "188 ± 0.25"],
        ["250", "not finite"],
    ]


def test_the_best_learning_rate_is_chosen_by_validation_not_by_test(tmp_path):
    experiment = EXPERIMENTS["lenet5_best_learning_rates"].changed(seeds=1, rates=[0.9, 0.99])
    by_label = {s.label: s for s in experiment.series}
    outcomes = [
        (experiment.runs_of(by_label[label], 0.9)[0], accuracies)
        for label, accuracies in {
            "0.05": {"validation_accuracy": 0.75, "test_accuracy": 0.9},
            "0.1": {"validation_accuracy": 0.8, "test_accuracy": 0.7},
            "0.2": {"validation_accuracy": None, "test_accuracy": 0.1},
        }.items()
    ]
    everything, best = tables_in(markdown(experiment, write(tmp_path, outcomes)))
    assert everything[1][6:9] == ["90.00", "70.00", "10.00"]
    assert best[1:] == [["0.9", "0.1", "80.00", "70.00"], ["0.99", "", "", ""]]


def test_validation_curves_say_how_good_and_how_fast(tmp_path):
    experiment = EXPERIMENTS["lenet5_learning_curves"].changed(seeds=2, rates=[0.99])
    curves = (
        [([0.5, 0.8, 0.9], 0.9), ([0.5, 0.9, 0.9], 0.9)],
        [([0.895, 0.7], 0.895), ([0.7, 0.85], 0.85)],
    )
    outcomes = [
        (run, {"history": {"val_accuracy": curve}, "validation_accuracy": best})
        for s, pairs in zip(experiment.series, curves, strict=False)
        for run, (curve, best) in zip(experiment.runs_of(s, 0.99), pairs, strict=True)
    ]
    (table,) = tables_in(markdown(experiment, write(tmp_path, outcomes)))
    assert table[:4] == [
        ["learning rate", "validation accuracy (%)", "epochs until 89.00 %"],
        ["0.00625", "90.00 ± 0.00", "2.5"],
        ["0.0125", "87.25 ± 3.18", "reached by 1 of 2"],
        ["0.025", "", ""],
    ]


def test_the_best_run_is_best_in_validation(tmp_path):
    experiment = EXPERIMENTS["lenet5_best_run"].changed(seeds=3)
    accuracies = [(0.75, 0.9), (0.8, 0.7), (None, 0.1)]
    outcomes = [
        (run, {"validation_accuracy": validation, "test_accuracy": test})
        for run, (validation, test) in zip(experiment.runs, accuracies, strict=True)
    ]
    (table,) = tables_in(markdown(experiment, write(tmp_path, outcomes)))
    assert table[1:] == [
        ["0", "2", "75.00", "90.00"],
        ["**1**", "**2**", "**80.00**", "**70.00**"],
        ["2", "2", "not finite", "10.00"],
        ["the paper's best", "", "", "99.1"],
    ]


def test_the_spread_has_every_run_in_order_and_the_median(tmp_path):
    experiment = EXPERIMENTS["lenet300_seeds"].changed(seeds=4)
    accuracies = {("FreezeNet", 0.999): [82, 80, 83.5], ("SNIP", 0.999): [60, 11.35, None, 20]}
    results = write_accuracies(tmp_path, experiment, accuracies)
    (table,) = tables_in(markdown(experiment, results))
    assert table[1:] == [
        ["FreezeNet", "0.999", "3 of 4", "82.00", "80.00, 82.00, 83.50"],
        ["SNIP", "0.999", "4 of 4", "11.35", "11.35, 20.00, 60.00, not finite"],
    ]


def test_the_spread_has_a_dot_for_every_run(tmp_path):
    experiment = EXPERIMENTS["lenet300_seeds"].changed(seeds=3)
    accuracies = {("FreezeNet", 0.999): [82, 80, 83.5], ("SNIP", 0.999): [60, None]}
    figure, _ = spread.draw(experiment, write_accuracies(tmp_path, experiment, accuracies))
    (axes,) = figure.axes
    assert [line.get_xdata().tolist() for line in axes.lines] == [[80, 82, 83.5], [60]]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["FreezeNet", "SNIP"]


def test_costs_are_marked_by_what_was_counted(tmp_path):
    experiment = EXPERIMENTS["method_costs"].changed(seeds=1, rates=[0.9])
    baseline, snip, freezenet = (
        experiment.runs_of(s, r)[0] for s, r in zip(experiment.series, (0.0, 0.9, 0.9), strict=True)
    )
    outcomes = [
        (baseline, {"gradient_flow": 0.25}),
        (snip, {"total_weights": 100, "moved_weights": 98, "gradient_flow": 0.1}),
        (freezenet, {"gradient_flow": 0.5}),
    ]
    measured, paper = tables_in(markdown(experiment, write(tmp_path / "some", outcomes)))
    dense, tenth = "1,000 = 1.0000 D", "100 = 0.1000 D"
    assert measured[1:] == [
        ["baseline", "0", dense, dense, "900", f"✗ {dense}", "✗", "✓ 1.00"],
        ["SNIP", "0.9", tenth, tenth, "900", "✓ 98 = 0.0980 D", "✓", "✗ 0.40"],
        ["FreezeNet", "0.9", dense, tenth, "900", f"✓ {tenth}", "✗", "✓ 2.00"],
    ]
    assert paper[1:] == [
        ["standard", "D", "D", "✗", "✗", "✓"],
        ["pruned", "D (1 - q)", "D (1 - q)", "✓", "✓", "✗"],
        ["FreezeNet", "D", "D (1 - q)", "✓", "✗", "✓"],
    ]
    all_moved = [(freezenet, {"moved_weights": 1000})]
    measured, _ = tables_in(markdown(experiment, write(tmp_path / "other", all_moved)))
    assert measured[3][5:] == [f"✗ {dense}", "✗", ""]


def test_table_2_before_any_run_is_the_papers():
    (table,) = tables_in(markdown(EXPERIMENTS["lenet5_sizes"], Results("no results")))
    head, *rows = table
    columns = dict(zip(head, zip(*rows, strict=True), strict=True))
    assert columns["q"] == ("0", "0.9", "0.99", "0.995", "0.999")
    assert [f"{float(v):.3f}" for v in columns["q_beta"]] == [
        *("0.000", "0.899", "0.989", "0.994", "0.998")
    ]
    assert columns["size, paper's rule"] == ("1,683.9", "170.7", "19.1", "10.7", "3.9")
    assert columns["factor, paper's rule"] == ("1.0", "9.9", "88.2", "157.4", "431.8")
    assert columns["compression factor"] == ("1.0", "9.9", "88.2", "157.8", "426.8")
    assert columns["FreezeNet"] == tuple(
        f"(paper {value})" for value in (99.36, 99.37, 98.94, 98.55, 95.61)
    )
    assert columns["the paper's"] == ("1.000", "1.000", "0.996", "0.992", "0.962")


def test_table_2_of_runs_has_their_own_sizes_and_ratios(tmp_path):
    experiment = EXPERIMENTS["lenet5_sizes"].changed(seeds=2, rates=[0.99])
    accuracies = {
        ("baseline", 0.0): [99.0, 99.0],
        ("SNIP", 0.99): [50.0],
        ("FreezeNet", 0.99): [98.0, 97.0],
    }
    (table,) = tables_in(markdown(experiment, write_accuracies(tmp_path, experiment, accuracies)))
    dense, at_99 = table[1:]
    assert dense[6:] == ["99.00 ± 0.00 (paper 99.36)"] * 2 + ["1.000", "1.000"]
    # 20 of the made-up network's 1,010 parameters
    assert at_99[1:6] == ["0.9802", "0.1", "19.1", "50.5", "88.2"]
    assert at_99[6:] == [
        "50.00 (1 of 2; paper 98.8)",
        "97.50 ± 0.71 (paper 98.94)",
        "0.985",
        "0.996",
    ]


def test_grasps_result_is_the_best_of_its_search_in_validation(tmp_path):
    experiment = EXPERIMENTS["lenet5_pruning_methods"].changed(seeds=2)
    by_label = {s.label: s for s in experiment.series}
    accuracies = {
        "GraSP, 9/1, learning rate 0.1": [(0.8, 0.6), (0.9, 0.5)],
        "GraSP, 19/1, learning rate 0.2": [(0.95, 0.4), (0.7, 0.99)],
        "FreezeNet, 19/1": [(0.5, 0.9), (0.6, 0.8)],
    }
    outcomes = [
        (run, {"validation_accuracy": validation, "test_accuracy": test})
        for label, pairs in accuracies.items()
        for run, (validation, test) in zip(
            experiment.runs_of(by_label[label], 0.99), pairs, strict=True
        )
    ]
    methods, search = tables_in(markdown(experiment, write(tmp_path, outcomes)))
    assert methods[1:5] == [
        ["baseline", "-", "-", "", "", "99.4"],
        ["FreezeNet, 19/1", "✓", "✗", "1.0", "80.00", "99.1"],
        ["SNIP, 19/1", "✓", "✗", "", "", "98.9"],
        ["GraSP, 19/1, learning rate 0.2", "✓", "✗", "1.0", "40.00", "98.9"],
    ]
    assert search[0] == ["learning rate", "9/1", "19/1", "3/1"]
    assert [row[0] for row in search[1:]] == [f"{rate:g}" for rate in LEARNING_RATES]
    by_rate = {row[0]: row[1:] for row in search[1:]}
    assert by_rate["0.1"] == ["90.00 / 50.00", "", ""]
    assert by_rate["0.2"] == ["", "**95.00 / 40.00**", ""]


def test_pruning_methods_have_a_table_for_each_rate_and_the_papers_numbers_at_theirs(tmp_path):
    experiment = EXPERIMENTS["lenet5_pruning_methods"].changed(seeds=1, rates=[0.9, 0.99])
    accuracies = {
        ("baseline", 0.0): [99.0],
        ("FreezeNet, 19/1", 0.9): [90.0],
        ("FreezeNet, 19/1", 0.99): [80.0],
        ("GraSP, 9/1, learning rate 0.1", 0.9): [70.0],
        ("GraSP, 3/1, learning rate 0.2", 0.99): [60.0],
    }
    results = write_accuracies(tmp_path, experiment, accuracies)
    text = markdown(experiment, results)
    at_90, search_at_90, at_99, search_at_99 = tables_in(text)
    assert text.index("q = 0.9:") < text.index("q = 0.99:")
    assert [(row[0], *row[3:]) for row in at_90[1:]] == [
        ("baseline", "100.0", "99.00", "99.4"),
        ("FreezeNet, 19/1", "10.0", "90.00", ""),
        ("SNIP, 19/1", "", "", ""),
        ("GraSP, 9/1, learning rate 0.1", "10.0", "70.00", ""),
    ]
    assert [(row[0], *row[3:]) for row in at_99[1:5]] == [
        ("baseline", "100.0", "99.00", "99.4"),
        ("FreezeNet, 19/1", "1.0", "80.00", "99.1"),
        ("SNIP, 19/1", "", "", "98.9"),
        ("GraSP, 3/1, learning rate 0.2", "1.0", "60.00", "98.9"),
    ]
    assert len(at_99) == 1 + 4 + 4
    bold = [
        [cell for row in table for cell in row if "**" in cell]
        for table in (search_at_90, search_at_99)
    ]
    assert bold == [["**35.00 / 70.00**"], ["**30.00 / 60.00**"]]


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


# ---------------------------------------------------------------- work


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"epochs": 25}, 25 * 540),  # 54,000 images, 100 a step
        ({"validation_fraction": 0.05}, 250 * 570),
        ({"epochs": 2, "steps_per_epoch": 3}, 2 * 3),
        ({"measure": "gradient_flow"}, 540),
        ({"measure": "gradient_flow_in_training", "epochs": 4}, 4 * 540 + 5 * 540),
    ],
)
def test_steps_come_from_epochs_batches_and_splits(settings, steps):
    run = Run("mnist", "lenet_300_100", "freezenet", 0.99, seed=0, **settings)
    assert work_of([run]).steps == steps


def test_a_last_batch_that_is_not_full_is_a_step():
    run = Run("cifar10", "vgg16_d", "snip", 0.9, seed=0, epochs=1)
    assert work_of([run]).steps == math.ceil(45_000 / 128)


def test_hours_grow_with_the_pixels_and_equal_runs_count_once():
    small, large = (
        Run(dataset, "vgg16_d", "snip", 0.9, seed=0, epochs=1, steps_per_epoch=1)
        for dataset in ("cifar10", "tiny_imagenet")
    )
    assert work_of([large]).hours == pytest.approx(4 * work_of([small]).hours)
    assert work_of([small, large, small]).runs == 2


def test_every_measure_has_an_estimate():
    for measure in MEASURES:
        run = Run("mnist_5k", "lenet_300_100", "snip", 0.9, seed=0, measure=measure)
        assert work_of([run]).steps >= 80


def test_the_list_names_every_experiment_and_counts_shared_runs_once():
    lines = overview(EXPERIMENTS.values()).splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == list(EXPERIMENTS)
    runs = {run for experiment in EXPERIMENTS.values() for run in experiment.runs}
    assert lines[-2].split()[:3] == ["all", "together", f"{len(runs):,}"]


# ---------------------------------------------------------------- architectures


@pytest.fixture(scope="module")
def page():
    return architectures.markdown()


def test_the_committed_page_is_what_the_generator_makes(page):
    assert (ROOT / "docs" / "paper" / "architectures.md").read_text(encoding="utf-8") == page


def test_layers_add_up_to_the_papers_counts(page):
    tables = tables_in(page)
    expected = [
        (266_200, 410, 0),
        (430_500, 580, 0),
        (15_239_872, 5_258, 10_496),
        (21_366_464, 200, 17_152),
    ]
    for layers, counts, numbers in zip(tables[::2], tables[1::2], expected, strict=True):
        sums = [
            sum(int(row[column].replace(",", "")) for row in layers[1:]) for column in (-3, -2, -1)
        ]
        assert tuple(sums) == numbers
        assert counts[1][1:] == [f"{n:,}" for n in (sum(numbers), *numbers)]
        for counted, printed in zip(counts[1::2], counts[2::2], strict=True):
            assert counted[1:] == printed[1:]


def test_resnet34_is_table_s1(page):
    layers = tables_in(page)[6]
    columns = ("layer", "output", "times", "n_in", "n_out", "kernel", "stride", "padding")
    chosen = [[row[layers[0].index(name)] for name in columns] for row in layers[1:]]
    assert [[row[0].split(",")[0], *row[1:]] for row in chosen] == [
        ["Conv2D", "64 x 64", "1", "3", "64", "3 x 3", "1 x 1", "1"],
        ["ResBlock", "32 x 32", "1", "64", "64", "3 x 3", "2 x 2", "1"],
        ["ResBlock", "32 x 32", "2", "64", "64", "3 x 3", "1 x 1", "1"],
        ["ResBlock", "16 x 16", "1", "64", "128", "3 x 3", "2 x 2", "1"],
        ["ResBlock", "16 x 16", "3", "128", "128", "3 x 3", "1 x 1", "1"],
        ["ResBlock", "8 x 8", "1", "128", "256", "3 x 3", "2 x 2", "1"],
        ["ResBlock", "8 x 8", "5", "256", "256", "3 x 3", "1 x 1", "1"],
        ["ResBlock", "4 x 4", "1", "256", "512", "3 x 3", "2 x 2", "1"],
        ["ResBlock", "4 x 4", "2", "512", "512", "3 x 3", "1 x 1", "1"],
        ["AvgPool", "", "1", "512", "512", "4 x 4", "", ""],
        ["linear", "", "1", "512", "200", "", "", ""],
    ]


def test_convolutions_of_vgg16_d_have_bias_normalization_and_relu(page):
    rows = tables_in(page)[4][1:]
    blocks = [row for row in rows if row[0] == "Conv2D" or row[0] == "linear"]
    assert sum(int(row[1]) for row in blocks) == 16
    assert [row[8:11] for row in blocks] == [["✓", "✓", "✓"]] * (len(blocks) - 1) + [
        ["✓", "✗", "✗"]
    ]


def test_the_residual_block_is_drawn_with_both_its_ways(page):
    with_convolution, with_identity = page.split("```mermaid")[1:]
    for edge in (
        "input --> stage2_block1_conv1",
        "input --> stage2_block1_shortcut",
        "stage2_block1_conv2_bn --> stage2_block1_add",
        "stage2_block1_shortcut_bn --> stage2_block1_add",
    ):
        assert edge in with_convolution
    assert "input --> stage1_block2_add" in with_identity
    assert "shortcut" not in with_identity


# ---------------------------------------------------------------- the large networks


@pytest.fixture
def small_batches(monkeypatch):
    """The recipes with few images a step, so that the large networks take seconds."""
    for name in ("cifar10", "tiny_imagenet"):
        recipe = dataclasses.replace(recipes.recipe_for(name), batch_size=8)
        monkeypatch.setitem(recipes.RECIPES, name, recipe)
    monkeypatch.setattr(preparation, "_EVALUATION_BATCH", 8)


def run_and_show(experiment, label, folder, data_dir):
    """Executes one run of an experiment for two steps; its cell in the table."""
    short = experiment.changed(epochs=1, seeds=1, rates=[0.99], steps_per_epoch=2)
    series = next(s for s in short.series if s.label == label)
    (run,) = short.runs_of(series, 0.99)
    record = run.execute(data_dir=data_dir, verbose=False)
    results = Results(folder / "results.jsonl")
    results.append(record)
    table = tables_in(markdown(short, results))[0]
    return record["result"], table[2][table[0].index(label)]


@pytest.mark.exhaustive
def test_vgg16_d_trains_on_cifar_10_by_its_experiment(tmp_path, small_batches):
    if not (DATA_DIR / "cifar10").is_dir():
        pytest.skip(f"{DATA_DIR / 'cifar10'} is missing")
    label = "FreezeNet, CIFAR-10"
    result, cell = run_and_show(EXPERIMENTS["vgg16_cifar"], label, tmp_path, DATA_DIR)
    assert result["report"]["num_weights"] == 15_239_872
    assert result["report"]["num_trained_parameters"] == pytest.approx(169_000, rel=0.01)
    assert cell.startswith(f"{100 * result['test_accuracy']:.2f}")


@pytest.mark.exhaustive
def test_resnet34_trains_on_tiny_imagenet_by_its_experiment(tmp_path, small_batches):
    if not SUBSET.is_file():
        pytest.skip(f"{SUBSET} is missing")
    manual = tmp_path / "downloads" / "manual"
    manual.mkdir(parents=True)
    shutil.copy(SUBSET, manual)
    experiment = EXPERIMENTS["resnet34_tiny_imagenet"]
    result, cell = run_and_show(experiment, "FreezeNet", tmp_path, tmp_path)
    assert result["report"]["num_weights"] == 21_366_464
    assert result["report"]["num_trained_weights"] >= 213_664
    assert cell == f"{100 * result['test_accuracy']:.2f}"
