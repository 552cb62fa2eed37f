"""Table 1: what standard training, pruning and FreezeNet cost."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keras_freeze.paper.experiments.experiment import Experiment
from keras_freeze.paper.experiments.markdown import NO, YES, markdown_table
from keras_freeze.paper.experiments.summary import (
    Point,
    dense_mean,
    points_by_label,
    seeds_in_words,
)
from keras_freeze.paper.figures.curves import log_scale
from keras_freeze.paper.figures.style import draw_grid, new_figure
from keras_freeze.paper.results import Results
from keras_freeze.paper.views.cells import columns_of
from keras_freeze.paper.views.drawing import WIDTH, styles_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Table 1 as printed.
_TABLE_1 = (
    ("standard", "D", "D", NO, NO, YES),
    ("pruned", "D (1 - q)", "D (1 - q)", YES, YES, NO),
    ("FreezeNet", "D", "D (1 - q)", YES, NO, YES),
)


# The share of the dense network's gradient from which a gradient flow is called faithful.
_FAITHFUL = 0.5


def table(experiment: Experiment, results: Results) -> list[str]:
    """Return table 1, measured."""
    dense = dense_mean(experiment, results)
    rows = [
        [label, f"{rate:g}", *_cost_cells(point, dense)]
        for label, column in columns_of(experiment, experiment.series, results).items()
        for rate, point in column.items()
    ]
    marks = ["sparse gradients", "sparse tensor computations", "faithful gradient flow"]
    counts = ["total weights", "weights to store"]
    return [
        f"Means over {seeds_in_words(experiment)}; D is the number of the dense network's weights. "
        "Total weights: those that are not zero. Weights to store: those whose values a .freeze "
        "file holds; beside them the size of the whole file. Sparse gradients: the weights that "
        "one training step changed, ✓ if they are no more than those to be trained. Sparse tensor "
        "computations: ✓ if every frozen weight is zero. Gradient flow: the L1 norm per trained "
        f"parameter relative to the dense network's, ✓ from {_FAITHFUL:g} on (the paper states no "
        "limit).",
        markdown_table(["method", "q", *counts, "file (bytes)", *marks], rows),
        "The paper's table, which was not measured:",
        markdown_table(["method", *counts, *marks], _TABLE_1),
    ]


def draw(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """Draw what table 1 states, as bars for each freezing rate."""
    columns = points_by_label(experiment, experiment.series, results)
    figure = new_figure(WIDTH, 6.6)
    panels = figure.subplots(2, 2).flatten()
    names = {
        "total_weights": "weights that are not zero",
        "stored_weights": "weights to store",
        "moved_weights": "weights changed by one step",
        "gradient_flow": "L1 gradient per trained parameter",
    }
    colors = {label: color for label, (color, _) in styles_of(experiment.series).items()}
    for axes, (key, name) in zip(panels, names.items(), strict=True):
        measured = columns
        if key != experiment.quantity:
            measured = {
                label: [p.with_values(result[key] for result in p.results) for p in points]
                for label, points in columns.items()
            }
        _draw_bars(axes, measured, colors)
        axes.set_title(name, loc="left", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure, f"Mean over {seeds_in_words(experiment)}. The scales are logarithmic."


def _cost_cells(point: Point, dense: float) -> list[str]:
    if not point.results:
        return [""] * 6
    num_weights = point.results[0]["report"]["num_weights"]
    trained = max(result["report"]["num_trained_weights"] for result in point.results)
    total, stored, moved, size = (
        statistics.fmean(result[name] for result in point.results)
        for name in ("total_weights", "stored_weights", "moved_weights", "file_bytes")
    )
    relative = point.mean / dense
    return [
        _share_of(total, num_weights),
        _share_of(stored, num_weights),
        f"{size:,.0f}",
        f"{_mark(moved <= trained < num_weights)} {_share_of(moved, num_weights)}",
        _mark(total <= trained < num_weights),
        "" if math.isnan(relative) else f"{_mark(relative >= _FAITHFUL)} {relative:.2f}",
    ]


def _share_of(count: float, num_weights: int) -> str:
    return f"{count:,.0f} = {count / num_weights:.4f} D"


def _mark(is_so: bool) -> str:
    return YES if is_so else NO


def _draw_bars(
    axes: "Axes", columns: Mapping[str, Sequence[Point]], colors: Mapping[str, str]
) -> None:
    """Draw the bars of one freezing rate side by side."""
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
        bars = axes.bar(places, [p.mean for p in shown], 0.36, color=colors[label], label=label)
        texts = [f"{p.mean / 1000:,.1f}k" if p.mean >= 1000 else f"{p.mean:.3g}" for p in shown]
        axes.bar_label(bars, texts, padding=1, fontsize=7)
    axes.set_xticks(range(len(rates)), [f"{rate:g}\n{real_rates[rate]}" for rate in rates])
    axes.set_xlabel(r"freezing rate $q$, below it $q_\beta$", fontsize=9)
    draw_grid(axes)
    axes.grid(visible=False, axis="x")
    means = [p.mean for points in columns.values() for p in points if math.isfinite(p.mean)]
    log_scale(axes, np.array(means))
