"""Pictures of the paper's experiments, drawn from one's own runs."""

import functools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze.paper.experiments import QUANTITIES, Experiment, Point, Series, points_of
from keras_freeze.paper.experiments.catalog import REPORTED
from keras_freeze.paper.experiments.summary import (
    as_per_cent,
    best_in_validation,
    by_dataset,
    dense_mean,
    grasp_search,
    is_dense,
    label_of_largest,
    points_at,
    seeds_in_words,
)
from keras_freeze.paper.experiments.work import steps_per_epoch
from keras_freeze.paper.figures.curves import (
    Curve,
    RateScale,
    add_inset,
    draw_curves,
    draw_legend,
    hollow,
    limit_to_per_cent,
    log_scale,
    zoom_region,
)
from keras_freeze.paper.figures.style import (
    BLACK,
    BLUE,
    COLOURS,
    GREY,
    MARKERS,
    OTHER_STYLES,
    draw_grid,
    new_figure,
)
from keras_freeze.paper.runs import Results, Run
from keras_freeze.paper.training import LEARNING_RATES, check_choice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH = 9.0

# Of the learning rates.
_MARKERS = "os^DvPX<>"

# Figure S4 right ends here.
_MAX_STEPS = 100_000


def plot_experiment(experiment: Experiment, results: Results) -> "Figure":
    """Draws what an experiment's runs came to, as the paper's figure of it.

    Means of the seeds have a band of one standard deviation, the paper's own numbers are hollow
    markers, and an inset shows the upper part of what spreads wide. What was changed of the paper's
    experiment is written below, and how many of the runs there are as long as some are missing.

    Args:
        experiment: one of `keras_freeze.experiments.EXPERIMENTS`, changed as its runs were.
        results: what has been run so far; a part of the runs will do.

    Returns:
        A matplotlib figure, 9 inches wide.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if no run of the experiment is finished.
        ImportError: if matplotlib is missing.

    Example:

    ```python
    experiment = EXPERIMENTS["lenet5_extreme_rates"].changed(epochs=5)
    results = Results("runs/reproduce/results.jsonl")
    plot_experiment(experiment, results).savefig("figure2_right.png")
    ```
    """
    if not isinstance(experiment, Experiment):
        raise TypeError(
            "experiment must be an Experiment, as those in keras_freeze.experiments.EXPERIMENTS. "
            f"Received: experiment={experiment!r}"
        )
    if not isinstance(results, Results):
        raise TypeError(
            f"results must be a keras_freeze.runs.Results. Received: results={results!r}"
        )
    runs = experiment.runs
    finished = sum(run in results for run in runs)
    if not finished:
        raise ValueError(
            f"results must hold one run of {experiment.name} at least; run the experiment first, "
            f"and pass it changed as its runs were. Received: {results.path}, with {len(results)} "
            f"runs, none of them among its {len(runs)}"
        )
    figure, note = check_choice("view", experiment.view, _VIEWS)(experiment, results)
    notes = [note]
    if experiment.changes:
        notes.append(f"Changed of the paper's experiment: {'; '.join(experiment.changes)}.")
    if finished < len(runs):
        notes.append(f"Not complete: {finished} of {len(runs)} runs.")
    _add_texts(figure, experiment.heading, notes)
    return figure


def _add_texts(figure: "Figure", title: str, notes: Iterable[str]) -> None:
    figure.suptitle(textwrap.fill(title, 90), x=0.01, ha="left", fontsize=12)
    lines = [line for note in notes for line in textwrap.wrap(note, 140)]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=8.5)


def _draw_rates(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """A panel for each data set."""
    groups = by_dataset(experiment.series)
    figure, panels = _panels(len(groups))
    for axes, group in zip(panels, groups, strict=True):
        _draw_quantity(axes, experiment, group, results)
    return figure, _spread_of(experiment)


def _draw_best_series(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """Those that are best in validation somewhere; the test set chooses nothing."""
    best = {
        label_of_largest({label: point.mean for label, point in points.items()})
        for rate in experiment.rates
        for points in [points_at(experiment, results, rate, "validation_accuracy")]
    }
    figure, (axes,) = _panels(1)
    chosen = [series for series in experiment.series if series.label in best]
    _draw_quantity(axes, experiment, chosen, results)
    return figure, (
        f"Of {len(experiment.series)} learning rates those that have the best mean validation "
        f"accuracy at one freezing rate at least. {_spread_of(experiment)}"
    )


def _draw_quantity(
    axes: "Axes", experiment: Experiment, series: Sequence[Series], results: Results
) -> None:
    """The experiment's quantity over the freezing rates, with an inset and a legend."""
    name = QUANTITIES[experiment.quantity].name
    columns = {s.label: points_of(experiment, s, results) for s in series}
    curves, scale = _draw_over_rates(axes, experiment, series, columns, name)
    if "%" in name:
        limit_to_per_cent(axes)
    region = zoom_region(curves)
    if region is not None:
        add_inset(axes, curves, region, functools.partial(scale.apply, letter=0.025))
    draw_legend(axes, curves, _legend_title(series))


def _draw_over_rates(
    axes: "Axes",
    experiment: Experiment,
    series: Sequence[Series],
    columns: Mapping[str, Sequence[Point]],
    name: str,
) -> tuple[list[Curve], RateScale]:
    styles = _styles_of(experiment.series)
    curves = [
        _curve_of(experiment, s, columns[s.label], *styles[s.label])
        for s in series
        if any(point.values for point in columns[s.label])
    ]
    draw_curves(axes, curves)
    axes.set_ylabel(name)
    return curves, _scale_rates(axes, experiment, columns)


def _scale_rates(
    axes: "Axes", experiment: Experiment, columns: Mapping[str, Sequence[Point]]
) -> RateScale:
    """Makes the axis one of freezing rates, all that there are to be."""
    series = [s for s in experiment.series if not is_dense(s)]
    rates = sorted({rate for s in series for rate in experiment.rates_of(s)})
    real_rates = {
        point.rate: point.real_rate
        for points in columns.values()
        for point in points
        if point.results
    }
    scale = RateScale(rates, real_rates)
    scale.apply(axes, rates[0], rates[-1])
    scale.add_real_rates(axes)
    return scale


def _curve_of(
    experiment: Experiment, series: Series, points: Sequence[Point], colour: str, marker: str
) -> Curve:
    paper = {
        point.rate: (mean, math.nan if deviation is None else deviation)
        for point in points
        for mean, deviation in [experiment.paper.get((series.label, point.rate), (None, None))]
        if mean is not None
    }
    return Curve(
        series.label,
        colour,
        marker,
        mean=np.array([point.mean for point in points]),
        deviation=np.array([point.deviation for point in points]),
        x=None if is_dense(series) else np.array([point.rate for point in points]),
        failed=tuple(p.rate for p in points if p.values and not math.isfinite(p.mean)),
        paper=paper,
    )


def _draw_relative(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """Divided by the dense network's mean, once that is known."""
    columns = {s.label: points_of(experiment, s, results) for s in experiment.series}
    name = QUANTITIES[experiment.quantity].name
    dense = dense_mean(experiment, results)
    if math.isfinite(dense):
        name = f"{name},\nrelative to the dense network"
        columns = {
            label: [point.relative_to(dense) for point in points]
            for label, points in columns.items()
        }
    figure, (axes,) = _panels(1)
    curves, _ = _draw_over_rates(axes, experiment, experiment.series, columns, name)
    log_scale(axes, _means_of(curves))
    draw_legend(axes, curves)
    return figure, (
        f"{_spread_of(experiment)} Gradients are summed over the training data before their norm "
        "is taken, with BatchNormalization in training mode."
    )


def _draw_flow_in_training(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """One run of each series, a panel for each rate."""
    figure, panels = _panels(len(experiment.rates))
    styles = _styles_of(experiment.series)
    for axes, rate in zip(panels, experiment.rates, strict=True):
        points = points_at(experiment, results, rate)
        curves = [
            _flow_curve(label, *styles[label], point.results[0]["flow"])
            for label, point in points.items()
            if point.results
        ]
        draw_curves(axes, curves)
        log_scale(axes, _means_of(curves))
        axes.set_xlabel("epochs trained")
        axes.set_ylabel("L1 norm of the gradient\nper trained parameter")
        axes.set_title(f"q = {rate:g}", loc="left", fontsize=10)
        draw_legend(axes, curves)
    return figure, (
        "Mean and standard deviation over the batches of training data, of each series in the "
        "finished run with the lowest seed."
    )


def _flow_curve(label: str, colour: str, marker: str, flow: Mapping[str, Any]) -> Curve:
    mean, deviation = (
        np.array(flow[name], np.float64) for name in ("gradient_flow", "gradient_flow_deviation")
    )
    epochs = np.array(flow["epoch"], np.float64)
    return Curve(label, colour, marker, mean, deviation, epochs)


def _draw_validation_curves(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """A panel for each rate."""
    figure, panels = _panels(len(experiment.rates))
    styles = _styles_of(experiment.series)
    for axes, rate in zip(panels, experiment.rates, strict=True):
        points = points_at(experiment, results, rate)
        curves = [
            _validation_curve(s.label, *styles[s.label], point.results, run)
            for s in experiment.series
            for point in [points[s.label]]
            for run in experiment.runs_of(s, point.rate)[:1]
            if point.results
        ]
        draw_curves(axes, curves)
        axes.set_xlabel("optimisation steps")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylabel("validation accuracy (%)")
        axes.set_title(f"q = {rate:g}", loc="left", fontsize=10)
        limit_to_per_cent(axes)
        region = zoom_region(curves)
        if region is not None:
            add_inset(axes, curves, region, _set_steps)
        draw_legend(axes, curves, _legend_title(experiment.series))
    return figure, (
        f"Mean over {seeds_in_words(experiment)} after each epoch, for the first {_MAX_STEPS:,} "
        "steps."
    )


def _validation_curve(
    label: str,
    colour: str,
    marker: str,
    results: Sequence[Mapping[str, Any]],
    run: Run,
) -> Curve:
    """The mean as far as all of the runs went, which are as long as `run`."""
    assert run.epochs is not None  # a Run has taken it from its recipe
    accuracies = [result["history"]["val_accuracy"] for result in results]
    length = min(map(len, accuracies))
    mean = 100 * np.mean([np.array(a[:length], np.float64) for a in accuracies], axis=0)
    steps = steps_per_epoch(run) * np.arange(1, length + 1)
    shown = steps <= _MAX_STEPS
    last = steps_per_epoch(run) * length
    stopped = length < run.epochs and last <= _MAX_STEPS
    return Curve(
        label,
        colour,
        marker,
        mean[shown],
        np.zeros(shown.sum()),
        steps[shown],
        failed=(last,) if stopped else (),
    )


def _set_steps(inset: "Axes", low: float, high: float) -> None:
    inset.set_xlim(low, high)
    inset.locator_params(axis="x", nbins=4)
    inset.xaxis.set_major_formatter("{x:,.0f}")


def _draw_best_run(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """The run with the best validation accuracy, a panel for each series and rate."""
    columns = [
        (series.label, point)
        for series in experiment.series
        for point in points_of(experiment, series, results)
    ]
    figure, panels = _panels(len(columns))
    for axes, (label, point) in zip(panels, columns, strict=True):
        best = best_in_validation(point)
        title = f"{label}, q = {point.rate:g}"
        if best is not None:
            _draw_run(axes, best)
            title += (
                f": seed {best['seed']}, test accuracy {as_per_cent(best['test_accuracy']):.2f}%"
            )
        axes.set_title(title, loc="left", fontsize=10)
    return figure, f"The run with the best validation accuracy of {seeds_in_words(experiment)}."


def _draw_run(axes: "Axes", result: Mapping[str, Any]) -> None:
    history, best = result["history"], result["best_epoch"]
    epochs = np.arange(1, len(history["accuracy"]) + 1)
    marker = "o" if len(epochs) < 10 else ""
    curves = [
        Curve(
            label,
            colour,
            marker,
            100 * np.array(history[name], np.float64),
            np.zeros(len(epochs)),
            epochs,
        )
        for label, colour, name in (
            ("training", GREY, "accuracy"),
            ("validation", BLUE, "val_accuracy"),
        )
    ]
    draw_curves(axes, curves)
    axes.set_xlabel("epoch")
    axes.set_ylabel("accuracy (%)")
    if best:
        value = curves[1].mean[best - 1]
        _circle(axes, best, value, f"early stop: epoch {best}")
        reach = max(3, len(epochs) // 12)
        near = slice(max(0, best - 1 - reach), best + reach)
        values = np.concatenate([curve.mean[near] for curve in curves])
        values = values[np.isfinite(values)]  # that of the best epoch at least
        margin = 0.25 * np.ptp(values) or 0.5
        region = (epochs[near][0], epochs[near][-1], values.min() - margin, values.max() + margin)
        if len(epochs) > 2 * reach + 1:
            _circle(add_inset(axes, curves, region, _set_steps), best, value)
    draw_legend(axes, curves)


def _circle(axes: "Axes", x: float, y: float, label: str | None = None) -> None:
    style = {**hollow("o"), "markersize": 11, "markeredgewidth": 2}
    axes.plot([x], [y], color="red", zorder=4, label=label, **style)


def _draw_costs(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """What table 1 states, as bars for each freezing rate."""
    columns = {s.label: points_of(experiment, s, results) for s in experiment.series}
    figure = new_figure(_WIDTH, 6.6)
    panels = figure.subplots(2, 2).flatten()
    names = {
        "total_weights": "weights that are not zero",
        "stored_weights": "weights to store",
        "moved_weights": "weights changed by one step",
        "gradient_flow": "L1 gradient per trained parameter",
    }
    colours = {label: colour for label, (colour, _) in _styles_of(experiment.series).items()}
    for axes, (key, name) in zip(panels, names.items(), strict=True):
        measured = columns
        if key != experiment.quantity:
            measured = {
                label: [p.with_values(result[key] for result in p.results) for p in points]
                for label, points in columns.items()
            }
        _draw_bars(axes, measured, colours)
        axes.set_title(name, loc="left", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure, f"Mean over {seeds_in_words(experiment)}. The scales are logarithmic."


def _draw_bars(
    axes: "Axes", columns: Mapping[str, Sequence[Point]], colours: Mapping[str, str]
) -> None:
    """The bars of one freezing rate beside one another."""
    rates = sorted({point.rate for points in columns.values() for point in points})
    real_rates = dict.fromkeys(rates, "")
    labels = {
        rate: [n for n in columns if any(p.rate == rate for p in columns[n])] for rate in rates
    }
    for label, points in columns.items():
        shown = [point for point in points if math.isfinite(point.mean)]
        real_rates |= {point.rate: f"{point.real_rate:.4f}" for point in shown}
        places = [
            rates.index(p.rate)
            + 0.38 * (labels[p.rate].index(label) - (len(labels[p.rate]) - 1) / 2)
            for p in shown
        ]
        bars = axes.bar(places, [p.mean for p in shown], 0.36, color=colours[label], label=label)
        texts = [f"{p.mean / 1000:,.1f}k" if p.mean >= 1000 else f"{p.mean:.3g}" for p in shown]
        axes.bar_label(bars, texts, padding=1, fontsize=7)
    axes.set_xticks(range(len(rates)), [f"{rate:g}\n{real_rates[rate]}" for rate in rates])
    axes.set_xlabel(r"$q$, below it $q_\beta$", fontsize=9)
    draw_grid(axes)
    axes.grid(visible=False, axis="x")
    means = [p.mean for points in columns.values() for p in points if math.isfinite(p.mean)]
    log_scale(axes, np.array(means))


def _draw_sizes(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """The accuracies, and by how much less is to be stored."""
    figure, (upper, lower) = _panels(2)
    _draw_quantity(upper, experiment, experiment.series, results)
    columns = {s.label: points_of(experiment, s, results) for s in experiment.series}
    factors = {
        point.rate: point.results[0]["report"]["compression_factor"]
        for points in columns.values()
        for point in points
        if point.results and point.rate in experiment.rates
    }
    rates = sorted(factors)
    lower.plot(rates, [factors[rate] for rate in rates], "o-", color=BLACK, markersize=5)
    for rate in rates:
        lower.annotate(
            f"{factors[rate]:.1f}",
            (rate, factors[rate]),
            xytext=(6, -11),
            textcoords="offset points",
            fontsize=9,
        )
    draw_grid(lower)
    _scale_rates(lower, experiment, columns)
    log_scale(lower, np.array(list(factors.values())))
    lower.set_ylabel("dense size / network size")
    return figure, _spread_of(experiment)


def _draw_pruning_methods(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """GraSP's search as a map, and its best run beside the other methods' and the paper's."""
    figure = new_figure(_WIDTH, 4.6 * len(experiment.rates) + 0.4)
    rows = figure.subplots(len(experiment.rates), 2, squeeze=False, width_ratios=(2, 3))
    for (left, right), rate in zip(rows, experiment.rates, strict=True):
        points = points_at(experiment, results, rate)
        searched, winner = grasp_search(experiment, points)
        _draw_search(left, searched, points, winner)
        left.set_title(f"GraSP's search, q = {rate:g}", loc="left", fontsize=10)
        others = [s.label for s in experiment.series if s not in searched]
        shown = {label: points[label] for label in [*others, winner] if label is not None}
        _draw_best_runs(right, experiment, shown, rate)
    return figure, (
        f"Filled: of {seeds_in_words(experiment)} the run with the best validation accuracy, as in "
        "the map; dots: the others. GraSP's is the best of its whole search, boxed in the map."
    )


def _draw_search(
    axes: "Axes", searched: Sequence[Series], points: Mapping[str, Point], winner: str | None
) -> None:
    """Test accuracy of the run that is best in validation: learning rates against splits."""
    rates = sorted({s.settings["learning_rate"] for s in searched}, reverse=True)
    fractions = sorted({s.settings["validation_fraction"] for s in searched})
    cells = np.full((len(rates), len(fractions)), math.nan)
    for s in searched:
        best = best_in_validation(points[s.label])
        if best is not None:
            row = rates.index(s.settings["learning_rate"])
            column = fractions.index(s.settings["validation_fraction"])
            cells[row, column] = as_per_cent(best["test_accuracy"])
            if s.label == winner:
                axes.plot([column], [row], "s", color="red", markersize=22, markerfacecolor="none")
    # The better half in colour, yet never so dark that the numbers cannot be read.
    known = cells[np.isfinite(cells)]
    top, middle = (known.max(), np.median(known)) if known.size else (1.0, 0.0)
    lowest, highest = middle - (top - middle), top + 2 * (top - middle)
    axes.imshow(cells, cmap="Blues", aspect="auto", vmin=lowest, vmax=highest)
    for (row, column), value in np.ndenumerate(cells):
        text = f"{value:.2f}" if math.isfinite(value) else "no run"
        axes.text(column, row, text, ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(fractions)), [f"{1 / part - 1:.0f}/1" for part in fractions])
    axes.set_yticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_xlabel("split of training and validation images")
    axes.set_ylabel("learning rate")


def _draw_best_runs(
    axes: "Axes", experiment: Experiment, points: Mapping[str, Point], rate: float
) -> None:
    """A row for each method: its best run, its other runs, and the paper's number."""
    methods = {s.label: s.settings["method"] for s in experiment.series}
    rows = list(points)
    paper = {label: mean for (label, r), (mean, _) in experiment.paper.items() if r in (0.0, rate)}
    if any(r == rate for _, r in experiment.paper):
        paper |= {label: REPORTED["GraSP"][1] for label in rows if methods[label] == "grasp"}
        for name, (share, accuracy) in REPORTED.items():
            if name not in ("SNIP", "GraSP", "FreezeNet"):
                rows.append(f"{name}\n{share:g} % trained")
                paper[rows[-1]] = accuracy
    for row, label in enumerate(rows):
        colour = COLOURS[methods[label]] if label in methods else GREY
        best = best_in_validation(points[label]) if label in points else None
        if best is not None:
            tested = [as_per_cent(result["test_accuracy"]) for result in points[label].results]
            axes.plot(tested, [row] * len(tested), ".", color=colour, markersize=5)
            axes.plot([as_per_cent(best["test_accuracy"])], [row], "o", color=colour, markersize=7)
        if label in paper:
            axes.plot([paper[label]], [row], color=colour, **hollow("o"))
    if paper:
        axes.plot([], [], color=GREY, label="the paper's value", **hollow("o"))
        axes.legend(frameon=False, fontsize=9)
    axes.set_yticks(
        range(len(rows)), [label.replace(", learning", ",\nlearning") for label in rows]
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("test accuracy (%)")
    draw_grid(axes)


_VIEWS: Mapping[str, Callable[[Experiment, Results], tuple["Figure", str]]] = {
    "rates": _draw_rates,
    "relative": _draw_relative,
    "flow_in_training": _draw_flow_in_training,
    "best_series": _draw_best_series,
    "validation_curves": _draw_validation_curves,
    "best_run": _draw_best_run,
    "costs": _draw_costs,
    "sizes": _draw_sizes,
    "pruning_methods": _draw_pruning_methods,
}


def _panels(count: int) -> tuple["Figure", Sequence["Axes"]]:
    """Panels below one another."""
    figure = new_figure(_WIDTH, 5.2 if count == 1 else 0.8 + 4.0 * count)
    return figure, figure.subplots(count, 1, squeeze=False).flatten()


def _styles_of(series: Sequence[Series]) -> dict[str, tuple[str, str]]:
    """Colour and marker by label; methods and learning rates keep theirs in all pictures."""
    if _legend_title(series) is not None:
        return {s.label: _style_of_learning_rate(s.settings["learning_rate"]) for s in series}
    own = {s.label: (COLOURS[m], MARKERS[m]) for s in series for m in [s.settings["method"]]}
    colours = {colour for colour, _ in own.values()}
    others = iter([style for style in OTHER_STYLES if style[0] not in colours])
    styles: dict[str, tuple[str, str]] = {}
    taken = set()
    for s in series:
        place = s.settings.get("dataset"), s.settings["method"]
        styles[s.label] = next(others, OTHER_STYLES[0]) if place in taken else own[s.label]
        taken.add(place)
    return styles


def _style_of_learning_rate(rate: float) -> tuple[str, str]:
    """From dark to light along the paper's grid."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    place = math.log2(rate / LEARNING_RATES[0])
    last = len(LEARNING_RATES) - 1
    index = min(max(round(place), 0), last)
    return to_hex(colormaps["viridis"](0.9 * index / last)), _MARKERS[index]


def _legend_title(series: Iterable[Series]) -> str | None:
    """Says what the labels are where they are mere numbers."""
    named = all(s.label == f"{s.settings.get('learning_rate', 0):g}" for s in series)
    return "learning rate" if named else None


def _means_of(curves: Iterable[Curve]) -> np.ndarray:
    """All that are finite."""
    values = np.concatenate([np.empty(0), *(curve.mean for curve in curves)])
    return values[np.isfinite(values)]


def _spread_of(experiment: Experiment) -> str:
    if experiment.seeds == 1:
        return "One seed."
    return f"Mean and a band of one standard deviation over {seeds_in_words(experiment)}."
