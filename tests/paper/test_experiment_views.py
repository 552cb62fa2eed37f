"""The tables of single views: gradient flow, learning rates, spread, costs, sizes, methods."""

import pytest
from experiment_cases import tables_in, write, write_accuracies

from keras_freeze.paper.experiments import EXPERIMENTS
from keras_freeze.paper.runs import Results
from keras_freeze.paper.training import LEARNING_RATES
from keras_freeze.paper.views import spread
from keras_freeze.paper.views.reports import markdown

pytestmark = pytest.mark.cases(2)


def test_a_dense_network_without_gradient_divides_nothing(tmp_path):
    experiment = EXPERIMENTS["vgg16_gradient_flow"].changed(seeds=1, rates=[0.99])
    results = write(tmp_path, [(run, {"gradient_flow": 0.0}) for run in experiment.runs])
    text = markdown(experiment, results)
    assert "or has none" in text
    assert {cell for row in tables_in(text)[0][1:] for cell in row[3:]} == {""}


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
