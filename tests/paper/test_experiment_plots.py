"""Tests of the experiments' figures: the drawn data against means worked out from the runs."""

import io
import json
import math
import random
from dataclasses import asdict, replace

import numpy as np
import pytest
from helpers import WITHOUT_FINITE_NUMBERS

from keras_freeze.paper.experiments import EXPERIMENTS, Experiment, Series
from keras_freeze.paper.plots import plot_experiment
from keras_freeze.paper.runs import Results
from keras_freeze.paper.training import LEARNING_RATES, recipe_for

pytestmark = pytest.mark.cases(2)

EPOCHS = 4
SHORT = {
    name: experiment.changed(epochs=EPOCHS, seeds=2) for name, experiment in EXPERIMENTS.items()
}


def made_up(run, **values):
    """What a run might have come to: the same for the same run, and never trained."""
    dice = random.Random(repr(run))
    rate = run.freeze_rate
    # At the highest rates SNIP is at chance, as it can be.
    top = 0.1 if run.method == "snip" and rate > 0.99 else 0.99 - 0.1 * rate**20
    accuracies = [top - 0.3 / (epoch + 1) ** 2 + 0.01 * dice.random() for epoch in range(EPOCHS)]
    flow = 0.0 if run.method == "snip" and rate > 0.99 else 1.0 + dice.random()
    trained = round(1000 * (1 - rate))
    result = {
        "dataset": run.dataset,
        "seed": run.seed,
        "recipe": asdict(
            recipe_for(run.dataset, epochs=run.epochs, validation_fraction=run.validation_fraction)
        ),
        "report": {
            "real_freeze_rate": 0.997 * rate,
            "compression_factor": 1 / (1 - 0.997 * rate),
        },
        "history": {"accuracy": accuracies, "val_accuracy": [0.98 * a for a in accuracies]},
        "diverged_epoch": None,
        "best_epoch": 1 + int(np.argmax(accuracies)),
        "validation_accuracy": 0.98 * max(accuracies),
        "test_accuracy": top - 0.01 * dice.random(),
        "gradient_flow": flow,
        "flow": {
            "epoch": list(range(EPOCHS + 1)),
            "gradient_flow": [flow / (epoch + 1) for epoch in range(EPOCHS + 1)],
            "gradient_flow_deviation": [0.1 * flow] * (EPOCHS + 1),
        },
        "total_weights": trained if run.method == "snip" else 1000,
        "stored_weights": trained,
        "moved_weights": trained,
        "file_bytes": 4 * trained,
    }
    return {**result, **values}


def written(path, runs, **values):
    """Results on disk, as a sweep leaves them."""
    lines = [json.dumps({"run": asdict(run), "result": made_up(run, **values)}) for run in runs]
    path.write_text("".join(line + "\n" for line in lines))
    return Results(path)


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """All runs of all experiments."""
    runs = dict.fromkeys(run for experiment in SHORT.values() for run in experiment.runs)
    return written(tmp_path_factory.mktemp("results") / "results.jsonl", runs)


def render(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=40)
    assert buffer.getvalue().startswith(b"\x89PNG")


def curves_of(axes):
    return {line.get_label(): line for line in axes.get_lines() if line.get_label()[0] != "_"}


def hollow_of(axes, color):
    """The paper's markers of one color: x and y."""
    return [
        (line.get_xdata()[0], line.get_ydata()[0])
        for line in axes.get_lines()
        if line.get_markerfacecolor() == "none"
        and line.get_color() == color
        and len(line.get_xdata())
    ]


def band_of(axes, color):
    """Lower and upper border, by x, of the band of one color."""
    from matplotlib.colors import same_color

    (band,) = [
        collection
        for collection in axes.collections
        if same_color(collection.get_facecolor()[0][:3], color)
    ]
    corners = band.get_paths()[0].vertices
    xs = sorted(set(corners[:, 0]))
    return {x: tuple(f(corners[corners[:, 0] == x, 1]) for f in (min, max)) for x in xs}


def accuracies_of(results, experiment, label, rate):
    """The test accuracies of one point, in per cent, by way of the runs alone."""
    (series,) = [s for s in experiment.series if s.label == label]
    runs = experiment.runs_of(series, rate)
    return [100 * results[run]["result"]["test_accuracy"] for run in runs]


def labels_of(ticks):
    return [text.get_text() for text in ticks]


def notes_of(figure):
    return " ".join(figure.get_supxlabel().split())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_draws(name, full):
    experiment = SHORT[name]
    figure = plot_experiment(experiment, full)
    assert figure.get_suptitle().startswith(f"{experiment.source}: {experiment.title[:40]}")
    assert all(change in notes_of(figure) for change in experiment.changes)
    assert "Not complete" not in notes_of(figure)
    assert figure.get_figwidth() == 9
    render(figure)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_draws_its_first_run_alone(name, tmp_path):
    experiment = SHORT[name]
    figure = plot_experiment(experiment, written(tmp_path / "r.jsonl", experiment.runs[:1]))
    assert f"Not complete: 1 of {len(experiment.runs)} runs." in notes_of(figure)
    figure.draw_without_rendering()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_draws_runs_without_a_finite_number(name, tmp_path):
    experiment = SHORT[name].changed(seeds=1)
    nothing = {
        **WITHOUT_FINITE_NUMBERS,
        "diverged_epoch": 1,
    }
    figure = plot_experiment(experiment, written(tmp_path / "r.jsonl", experiment.runs, **nothing))
    figure.draw_without_rendering()
    drawn = [line.get_label() for axes in figure.axes for line in axes.get_lines()]
    assert "early stop: epoch 0" not in drawn


def test_training_accuracy_of_a_run_that_diverged_is_marked_as_failed(tmp_path):
    experiment = SHORT["lenet5_capacity"].changed(rates=[0.9, 0.99])
    results = Results(tmp_path / "r.jsonl")
    for run in experiment.runs:
        diverges = run.method == "snip" and run.freeze_rate == 0.9 and run.seed == 1
        result = made_up(run, diverged_epoch=EPOCHS if diverges else None)
        results.append({"run": asdict(run), "result": result})
    axes = plot_experiment(experiment, results).axes[0]
    assert np.isnan(curves_of(axes)["SNIP"].get_ydata()).tolist() == [True, False]
    assert np.isfinite(curves_of(axes)["FreezeNet"].get_ydata()).all()


def test_the_best_run_is_drawn_up_to_the_epoch_in_which_it_diverged(tmp_path):
    experiment = SHORT["lenet5_best_run"].changed(seeds=1)
    history = {"accuracy": [0.5, 0.75, None], "val_accuracy": [0.5, 0.625, None]}
    results = written(tmp_path / "r.jsonl", experiment.runs, history=history, best_epoch=2)
    axes = plot_experiment(experiment, results).axes[0]
    np.testing.assert_array_equal(curves_of(axes)["validation"].get_ydata(), [50, 62.5, math.nan])
    assert "early stop: epoch 2" in curves_of(axes)


def test_points_are_means_with_a_band_of_one_deviation(full):
    experiment = SHORT["lenet5_extreme_rates"]
    axes = plot_experiment(experiment, full).axes[0]
    line = curves_of(axes)["FreezeNet"]
    band = band_of(axes, line.get_color())
    np.testing.assert_array_equal(line.get_xdata(), experiment.rates)
    for rate, mean in zip(line.get_xdata(), line.get_ydata(), strict=True):
        values = accuracies_of(full, experiment, "FreezeNet", rate)
        assert mean == pytest.approx(np.mean(values))
        deviation = np.std(values, ddof=1)
        assert deviation > 0
        assert band[rate] == pytest.approx((mean - deviation, mean + deviation))


def test_dense_baseline_is_a_level_with_a_band(full):
    experiment = SHORT["lenet300_rates"]
    axes = plot_experiment(experiment, full).axes[0]
    values = accuracies_of(full, experiment, "baseline", 0.0)
    level = curves_of(axes)["baseline"]
    np.testing.assert_allclose(level.get_ydata(), np.mean(values))
    (band,) = axes.patches
    low, high = np.mean(values) - np.std(values, ddof=1), np.mean(values) + np.std(values, ddof=1)
    assert (band.get_y(), band.get_y() + band.get_height()) == pytest.approx((low, high))


def test_values_of_the_paper_are_hollow_in_the_color_of_their_series(full):
    experiment = SHORT["lenet5_extreme_rates"]
    axes = plot_experiment(experiment, full).axes[0]
    lines = curves_of(axes)
    snip = lines["SNIP"].get_color()
    assert hollow_of(axes, snip) == [(0.99, 98.80), (0.995, 98.02), (0.999, 20.57)]
    ((_, dense),) = hollow_of(axes, lines["baseline"].get_color())
    assert dense == 99.36
    assert "the paper's value" in labels_of(axes.get_legend().get_texts())


def test_figures_without_values_of_the_paper_do_not_speak_of_them(full):
    axes = plot_experiment(SHORT["lenet5_capacity"], full).axes[0]
    assert labels_of(axes.get_legend().get_texts()) == ["FreezeNet", "SNIP"]


def test_rates_stand_below_and_real_rates_above(full):
    experiment = SHORT["lenet5_extreme_rates"]
    bottom, top = plot_experiment(experiment, full).axes
    assert labels_of(bottom.get_xticklabels()) == [f"{rate:g}" for rate in experiment.rates]
    expected = [f"{0.997 * rate:.4f}" for rate in experiment.rates]
    assert labels_of(top.get_xticklabels()) == expected
    np.testing.assert_array_equal(bottom.get_xticks(), top.get_xticks())
    assert bottom.get_xlim() == top.get_xlim()


def place(axes, rate):
    """How far to the right a rate is drawn."""
    return (axes.transScale + axes.transLimits).transform((rate, 0.0))[0]


def test_rates_of_one_decade_are_evenly_spaced(full):
    axes = plot_experiment(SHORT["lenet5_extreme_rates"], full).axes[0]
    places = [place(axes, rate) for rate in SHORT["lenet5_extreme_rates"].rates]
    np.testing.assert_allclose(np.diff(places), np.diff(places)[0])


@pytest.mark.parametrize("index", [0, 1])
def test_rates_of_several_decades_are_spaced_by_the_logarithm_of_what_is_trained(full, index):
    axes = plot_experiment(SHORT["lenet5_rates"], full).axes[index]
    decade = place(axes, 0.99) - place(axes, 0.9)
    assert decade > 0.3
    assert place(axes, 0.999) - place(axes, 0.99) == pytest.approx(decade)
    assert place(axes, 0.95) - place(axes, 0.9) == pytest.approx(decade * math.log10(2))


def test_rates_up_to_everything_frozen_can_be_drawn(tmp_path):
    experiment = SHORT["lenet5_capacity"].changed(rates=[0.0, 0.9, 0.99, 1.0])
    results = written(
        tmp_path / "r.jsonl",
        experiment.runs,
        report={"real_freeze_rate": 0.5, "compression_factor": 2.0},
    )
    figure = plot_experiment(experiment, results)
    places = [place(figure.axes[0], rate) for rate in experiment.rates]
    assert places == sorted(places)
    assert places[0] > 0
    assert places[-1] < 1
    render(figure)


def test_wide_spreads_have_an_inset_on_the_upper_part(full):
    axes = plot_experiment(SHORT["lenet5_rates"], full).axes[0]
    (inset,) = axes.child_axes
    low, high = inset.get_ylim()
    assert 85 < low < high < 101
    assert low < max(curves_of(axes)["FreezeNet"].get_ydata()) < high
    np.testing.assert_array_equal(
        curves_of(inset)["FreezeNet"].get_ydata(), curves_of(axes)["FreezeNet"].get_ydata()
    )


def test_narrow_spreads_have_no_inset(full):
    assert not plot_experiment(SHORT["reinitialization_to_xavier"], full).axes[0].child_axes


def test_insets_hide_no_curve(full):
    experiment = SHORT["lenet5_rates"]
    axes = plot_experiment(experiment, full).axes[0]
    (inset,) = axes.child_axes
    figure = axes.figure
    figure.draw_without_rendering()
    box = inset.get_window_extent()
    for line in curves_of(axes).values():
        if line.get_label() == "baseline":
            continue
        points = axes.transData.transform(line.get_xydata())
        xs = np.linspace(points[0, 0], points[-1, 0], 500)
        ys = np.interp(xs, points[:, 0], points[:, 1])
        inside = (box.x0 < xs) & (xs < box.x1) & (box.y0 < ys) & (ys < box.y1)
        assert not inside.any()


def test_methods_have_one_color_in_all_figures(full):
    names = ("lenet300_rates", "lenet5_capacity", "vgg16_gradient_flow", "resnet34_tiny_imagenet")
    colors = {}
    for name in names:
        for label, line in curves_of(plot_experiment(SHORT[name], full).axes[0]).items():
            colors.setdefault(label, set()).add(line.get_color())
    assert all(len(found) == 1 for found in colors.values())
    assert len(set.union(*colors.values())) == len(colors)


def test_series_of_one_method_differ_in_color(full):
    for name in ("lenet5_initializations", "reinitialization_distributions"):
        lines = curves_of(plot_experiment(SHORT[name], full).axes[0])
        assert len({line.get_color() for line in lines.values()}) == len(lines)


def test_learning_rates_keep_their_color_between_figures(full):
    low, high = (
        curves_of(plot_experiment(SHORT[name], full).axes[0])
        for name in ("lenet5_low_learning_rates", "lenet5_high_learning_rates")
    )
    assert low["0.1"].get_color() == high["0.1"].get_color()
    styles = {(line.get_color(), line.get_marker()) for line in {**low, **high}.values()}
    assert len(styles) == len(LEARNING_RATES)


def test_runs_without_a_finite_value_are_marked_and_not_averaged_away(tmp_path):
    experiment = SHORT["lenet5_high_learning_rates"].changed(rates=[0.5, 0.9])
    runs = experiment.runs
    broken = [run for run in runs if run.learning_rate == 1.6 and run.freeze_rate == 0.5][:1]
    results = written(tmp_path / "r.jsonl", [run for run in runs if run not in broken])
    lost = {"run": asdict(broken[0]), "result": made_up(broken[0], validation_accuracy=None)}
    results.append(lost)
    axes = plot_experiment(experiment, results).axes[0]
    line = curves_of(axes)["1.6"]
    assert np.isnan(line.get_ydata()).tolist() == [True, False]
    crosses = [found for found in axes.get_lines() if found.get_marker() == "x"]
    assert [rate for cross in crosses for rate in cross.get_xdata()] == [0.5]
    assert "a run that failed" in labels_of(axes.get_legend().get_texts())


def test_gradient_flow_is_relative_to_the_dense_mean_and_zero_stays_zero(full):
    experiment = SHORT["vgg16_gradient_flow"]
    axes = plot_experiment(experiment, full).axes[0]
    flows = {
        s.label: [
            [full[run]["result"]["gradient_flow"] for run in experiment.runs_of(s, rate)]
            for rate in experiment.rates_of(s)
        ]
        for s in experiment.series
    }
    dense = np.mean(flows["baseline"])
    lines = curves_of(axes)
    for label in ("FreezeNet", "SNIP", "GraSP"):
        np.testing.assert_allclose(lines[label].get_ydata(), np.mean(flows[label], 1) / dense)
    np.testing.assert_allclose(lines["baseline"].get_ydata(), 1.0)
    assert lines["SNIP"].get_ydata()[-1] == 0
    assert "summed over the training data before their norm" in notes_of(axes.figure)
    assert axes.get_yscale() == "symlog"
    low, high = axes.get_ylim()
    assert low < 0 < high


def test_gradient_flow_without_zeros_is_logarithmic(tmp_path):
    experiment = SHORT["vgg16_gradient_flow"]
    results = written(tmp_path / "r.jsonl", experiment.runs, gradient_flow=2.0)
    axes = plot_experiment(experiment, results).axes[0]
    assert axes.get_yscale() == "log"
    np.testing.assert_allclose(curves_of(axes)["SNIP"].get_ydata(), 1.0)


def test_gradient_flow_before_the_dense_network_is_measured_is_absolute(tmp_path):
    experiment = SHORT["vgg16_gradient_flow"]
    runs = [run for run in experiment.runs if run.method != "baseline"]
    results = written(tmp_path / "r.jsonl", runs, gradient_flow=2.0)
    axes = plot_experiment(experiment, results).axes[0]
    assert "relative" not in axes.get_ylabel()
    np.testing.assert_allclose(curves_of(axes)["SNIP"].get_ydata(), 2.0)


def test_flow_in_training_starts_before_training_and_has_its_deviation(full):
    experiment = SHORT["vgg16_gradient_flow_in_training"]
    axes = plot_experiment(experiment, full).axes[0]
    line = curves_of(axes)["FreezeNet"]
    flow = full[experiment.runs_of(experiment.series[0], 0.99)[0]]["result"]["flow"]
    np.testing.assert_array_equal(line.get_xdata(), range(EPOCHS + 1))
    np.testing.assert_array_equal(line.get_ydata(), flow["gradient_flow"])
    low, high = band_of(axes, line.get_color())[2]
    half = flow["gradient_flow_deviation"][2]
    assert high - low == pytest.approx(2 * half)


def test_best_series_are_those_best_in_validation_whatever_the_test_says(tmp_path):
    experiment = SHORT["lenet5_best_learning_rates"].changed(rates=[0.9, 0.99])
    results = Results(tmp_path / "r.jsonl")
    best = {0.9: LEARNING_RATES[4], 0.99: LEARNING_RATES[6]}
    for run in experiment.runs:
        wins = best[run.freeze_rate] == run.learning_rate
        result = made_up(
            run, validation_accuracy=0.9 if wins else 0.8, test_accuracy=0.7 if wins else 0.99
        )
        results.append({"run": asdict(run), "result": result})
    lines = curves_of(plot_experiment(experiment, results).axes[0])
    assert set(lines) == {"0.1", "0.4"}
    np.testing.assert_allclose(lines["0.1"].get_ydata(), [70, 99])


def test_learning_curves_are_means_over_steps_and_end_at_100k(full):
    experiment = SHORT["lenet5_learning_curves"]
    panels = plot_experiment(experiment, full).axes
    assert [axes.get_title(loc="left") for axes in panels] == [
        "freezing rate q = 0.99",
        "freezing rate q = 0.999",
    ]
    (series,) = [s for s in experiment.series if s.label == "0.1"]
    accuracies = [
        full[run]["result"]["history"]["val_accuracy"] for run in experiment.runs_of(series, 0.999)
    ]
    line = curves_of(panels[1])["0.1"]
    # 60,000 images, a tenth held out, in batches of 100.
    np.testing.assert_array_equal(line.get_xdata(), 540 * np.arange(1, EPOCHS + 1))
    np.testing.assert_allclose(line.get_ydata(), 100 * np.mean(accuracies, axis=0))


def long_run(run, epochs):
    """A run of full length that lasted for so many epochs."""
    accuracies = [0.5] * epochs
    return made_up(run, history={"accuracy": accuracies, "val_accuracy": accuracies})


def test_learning_curves_stop_after_100k_steps_or_with_the_first_run_that_fails(tmp_path):
    experiment = EXPERIMENTS["lenet5_learning_curves"].changed(seeds=2, rates=[0.99])
    results = Results(tmp_path / "r.jsonl")
    for run in experiment.runs_of(experiment.series[0], 0.99):
        results.append({"run": asdict(run), "result": long_run(run, 250)})
    for run, epochs in zip(experiment.runs_of(experiment.series[8], 0.99), (250, 7), strict=True):
        results.append({"run": asdict(run), "result": long_run(run, epochs)})
    axes = plot_experiment(experiment, results).axes[0]
    lines = curves_of(axes)
    assert lines["0.00625"].get_xdata()[-1] == 540 * (100_000 // 540)
    assert lines["1.6"].get_xdata()[-1] == 7 * 540
    assert "a run that failed" in labels_of(axes.get_legend().get_texts())


def test_best_run_is_circled_at_its_early_stop(tmp_path):
    experiment = SHORT["lenet5_best_run"].changed(epochs=60)
    results = Results(tmp_path / "r.jsonl")
    for number, run in enumerate(experiment.runs):
        validation = [0.9] * 60
        validation[30 + number] = 0.95 + 0.01 * number
        history = {"accuracy": [0.99] * 60, "val_accuracy": validation}
        result = made_up(
            run,
            history=history,
            best_epoch=31 + number,
            validation_accuracy=validation[30 + number],
            test_accuracy=0.5 + 0.1 * number,
        )
        results.append({"run": asdict(run), "result": result})
    axes = plot_experiment(experiment, results).axes[0]
    lines = curves_of(axes)
    np.testing.assert_allclose(lines["validation"].get_ydata()[31], 96)
    np.testing.assert_allclose(lines["training"].get_ydata(), 99)
    circle = lines["early stop: epoch 32"]
    assert circle.get_color() == "red"
    assert (circle.get_xdata()[0], circle.get_ydata()[0]) == (32, pytest.approx(96))
    assert "seed 1, test accuracy 60.00%" in axes.get_title(loc="left")
    (inset,) = axes.child_axes
    assert inset.get_xlim()[0] < 32 < inset.get_xlim()[1]


def test_costs_are_bars_of_the_counted_weights(full):
    panels = plot_experiment(SHORT["method_costs"], full).axes
    heights = {
        container.get_label(): [bar.get_height() for bar in container]
        for container in panels[0].containers
    }
    assert heights == {"baseline": [1000], "SNIP": [100, 10, 1], "FreezeNet": [1000] * 3}
    stored = [[bar.get_height() for bar in c] for c in panels[1].containers]
    assert stored == [[1000], [100, 10, 1], [100, 10, 1]]


def test_sizes_show_the_compression_factor_below_the_accuracies(full):
    experiment = SHORT["lenet5_sizes"]
    upper, lower = plot_experiment(experiment, full).axes[:2]
    assert set(curves_of(upper)) == {"baseline", "SNIP", "FreezeNet"}
    (line,) = lower.get_lines()
    np.testing.assert_array_equal(line.get_xdata(), experiment.rates)
    expected = [1 / (1 - 0.997 * rate) for rate in experiment.rates]
    np.testing.assert_allclose(line.get_ydata(), expected)


def test_search_of_grasp_shows_the_run_best_in_validation(tmp_path):
    experiment = SHORT["lenet5_pruning_methods"]
    results = Results(tmp_path / "r.jsonl")
    for run in experiment.runs:
        # The second seed is the better one in validation, learning rate 0.2 with 9/1 best of all.
        validated = 0.5 + 0.1 * run.seed
        if (run.method, run.learning_rate, run.validation_fraction) == ("grasp", 0.2, 0.1):
            validated = 0.9
        result = made_up(run, validation_accuracy=validated, test_accuracy=0.8 + 0.01 * run.seed)
        results.append({"run": asdict(run), "result": result})
    figure = plot_experiment(experiment, results)
    search, best = figure.axes
    cells = np.asarray(search.get_images()[0].get_array())
    # Rows: learning rates, the highest first; columns: 19/1, 9/1, 3/1.
    expected = np.full((9, 3), 81.0)
    expected[3, 1] = 80.0  # both seeds are as good: the first
    np.testing.assert_allclose(cells, expected)
    (box,) = search.get_lines()
    assert (box.get_xdata()[0], box.get_ydata()[0]) == (1, 3)
    rows = labels_of(best.get_yticklabels())
    assert rows[:4] == [
        "baseline",
        "FreezeNet, 19/1",
        "SNIP, 19/1",
        "GraSP, 9/1,\nlearning rate 0.2",
    ]
    assert len(rows) == 4 + 4  # and what the paper reports of others


def test_experiments_that_compare_data_sets_have_a_panel_for_each(full):
    figure = plot_experiment(SHORT["vgg16_cifar"], full)
    first, second = figure.axes[:2]
    assert set(curves_of(first)) == {
        f"{method}, CIFAR-10" for method in ("baseline", "SNIP", "FreezeNet", "FreezeNet-WD")
    }
    assert (
        curves_of(first)["SNIP, CIFAR-10"].get_color()
        == curves_of(second)["SNIP, CIFAR-100"].get_color()
    )


def test_incomplete_points_are_means_of_what_there_is(tmp_path):
    experiment = SHORT["lenet5_capacity"].changed(rates=[0.9, 0.99])
    runs = experiment.runs
    results = written(tmp_path / "r.jsonl", runs[:5])  # seed 0, and one of seed 1
    figure = plot_experiment(experiment, results)
    assert "Not complete: 5 of 8 runs." in notes_of(figure)
    line = curves_of(figure.axes[0])["FreezeNet"]
    for rate, mean in zip(line.get_xdata(), line.get_ydata(), strict=True):
        found = [
            100 * results[run]["result"]["history"]["accuracy"][-1]
            for run in experiment.runs_of(experiment.series[0], rate)
            if run in results
        ]
        assert len(found) == (2 if rate == 0.9 else 1)
        assert mean == pytest.approx(np.mean(found))


def test_no_results_at_all_is_an_error_that_says_so(tmp_path):
    experiment = EXPERIMENTS["lenet5_rates"]
    with pytest.raises(ValueError, match=r"one run of lenet5_rates: .* Received: .*nothing\.jsonl"):
        plot_experiment(experiment, Results(tmp_path / "nothing.jsonl"))


def test_results_of_other_runs_are_an_error(full):
    with pytest.raises(ValueError, match="changed as its runs were"):
        plot_experiment(EXPERIMENTS["lenet5_rates"], full)


@pytest.mark.parametrize(
    ("experiment", "results", "message"),
    [
        ("lenet5_rates", None, "Received: experiment='lenet5_rates'"),
        (EXPERIMENTS["lenet5_rates"], "results.jsonl", "Received: results='results.jsonl'"),
    ],
)
def test_arguments_of_other_types_are_named(experiment, results, message):
    with pytest.raises(TypeError, match=message):
        plot_experiment(experiment, results)


def test_unknown_view_is_an_error(full):
    with pytest.raises(ValueError, match="Received: view='pie'"):
        plot_experiment(replace(SHORT["lenet5_rates"], view="pie"), full)


def test_experiments_of_ones_own_can_be_drawn(tmp_path):
    experiment = Experiment(
        "mine",
        "Mine",
        "Two initializations",
        "None.",
        "mnist",
        "lenet_300_100",
        tuple(
            Series(name, {"method": "freezenet", "initializer": name})
            for name in ("xavier_normal", "kaiming_uniform")
        ),
        (0.9,),
        seeds=1,
        settings={"epochs": EPOCHS},
    )
    figure = plot_experiment(experiment, written(tmp_path / "r.jsonl", experiment.runs))
    assert labels_of(figure.axes[0].get_xticklabels()) == ["0.9"]
    render(figure)
