"""Table 4: the best run of each pruning method."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze.paper.experiments.catalog import REPORTED
from keras_freeze.paper.experiments.experiment import Experiment, Series
from keras_freeze.paper.experiments.markdown import NO, YES, markdown_table
from keras_freeze.paper.experiments.summary import (
    Point,
    as_per_cent,
    best_in_validation,
    grasp_search,
    points_at,
    seeds_in_words,
)
from keras_freeze.paper.figures.curves import hollow
from keras_freeze.paper.figures.style import COLORS, GRAY, draw_grid, new_figure
from keras_freeze.paper.results import Results
from keras_freeze.paper.views.cells import per_cent, printed
from keras_freeze.paper.views.drawing import WIDTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Of table 4, as printed: sparse gradients in training, additional hyperparameters.
_TABLE_4: Mapping[str, tuple[str, str]] = {
    "baseline": ("-", "-"),
    "snip": (YES, NO),
    "grasp": (YES, NO),
    "Connection-Learning": (NO, NO),
    "Dynamic-Network-Surgery": (NO, NO),
    "Learning-Compression": (NO, YES),
    "Sparse-Momentum": (NO, YES),
    "freezenet": (YES, NO),
}


def table(experiment: Experiment, results: Results) -> list[str]:
    """Return table 4 for each rate: the best run of each method, of GraSP in its search."""
    blocks = [
        "Of each method the run with the best validation accuracy over "
        f"{seeds_in_words(experiment)}, and its test accuracy. Sparse gradients and additional "
        "hyperparameters: as the paper says. GraSP's result is that of its whole search: below, of "
        "each learning rate and split of training and validation images the validation and the "
        "test accuracy (%) of the seed that is best in validation; in bold what is best in "
        "validation of all.",
    ]
    for rate in experiment.rates:
        points = points_at(experiment, results, rate)
        searched, winner = grasp_search(experiment, points)
        best = {label: best_in_validation(point) for label, point in points.items()}
        blocks += [f"q = {rate:g}:", _method_table(experiment, rate, best, searched, winner)]
        if searched:
            blocks += ["GraSP's search:", _search_table(searched, best, winner)]
    return blocks


def draw(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """Draw GraSP's search as a map, and its best run beside the other methods' and the paper's."""
    figure = new_figure(WIDTH, 4.6 * len(experiment.rates) + 0.4)
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


def _method_table(
    experiment: Experiment,
    rate: float,
    best: Mapping[str, Mapping[str, Any] | None],
    searched: Sequence[Series],
    winner: str | None,
) -> str:
    """Return a row for each method; at the paper's rate also for those that it reports."""
    is_papers = any(r == rate for _, r in experiment.paper)
    paper = {label: value for (label, r), value in experiment.paper.items() if r in (0.0, rate)}
    methods = {s.label: s.settings["method"] for s in experiment.series if s not in searched}
    if searched:
        label = winner or "GraSP"
        methods[label] = "grasp"
        if is_papers:
            paper[label] = (REPORTED["GraSP"][1], None)
    rows = [
        [
            label,
            *_TABLE_4.get(method, ("", "")),
            *_best_cells(best.get(label)),
            printed(paper.get(label)),
        ]
        for label, method in methods.items()
    ]
    if is_papers:
        rows += [
            [
                f"{name} (as reported in the paper, not measured)",
                *_TABLE_4[name],
                f"{share:.1f}",
                "",
                f"{accuracy:.1f}",
            ]
            for name, (share, accuracy) in REPORTED.items()
            if name in _TABLE_4
        ]
    header = ["method", "sparse gradients in training", "additional hyperparameters"]
    header += ["trained weights (%)", "test accuracy (%)", "the paper's (%)"]
    return markdown_table(header, rows)


def _best_cells(result: Mapping[str, Any] | None) -> list[str]:
    if result is None:
        return ["", ""]
    counted = result["report"]
    share = 100.0 * counted["num_trained_weights"] / counted["num_weights"]
    return [f"{share:.1f}", per_cent(result["test_accuracy"])]


def _search_table(
    searched: Iterable[Series],
    best: Mapping[str, Mapping[str, Any] | None],
    winner: str | None,
) -> str:
    """Return a row for each learning rate, a column for each split."""
    cells: dict[float, dict[str, str]] = {}
    for s in searched:
        result = best[s.label]
        cell = ""
        if result is not None:
            cell = " / ".join(per_cent(result[f"{k}_accuracy"]) for k in ("validation", "test"))
        split = f"{1 / s.settings['validation_fraction'] - 1:.0f}/1"
        row = cells.setdefault(s.settings["learning_rate"], {})
        row[split] = f"**{cell}**" if s.label == winner else cell
    splits = list(dict.fromkeys(split for row in cells.values() for split in row))
    rows = [[f"{rate:g}", *(row[split] for split in splits)] for rate, row in cells.items()]
    return markdown_table(["learning rate", *splits], rows)


def _draw_search(
    axes: "Axes", searched: Sequence[Series], points: Mapping[str, Point], winner: str | None
) -> None:
    """Draw the test accuracy of the run that is best in validation, by learning rate and split."""
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
    # The better half in color, yet never so dark that the numbers cannot be read.
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
    """Draw a row for each method: its best run, its other runs, and the paper's number."""
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
        color = COLORS[methods[label]] if label in methods else GRAY
        best = best_in_validation(points[label]) if label in points else None
        if best is not None:
            tested = [as_per_cent(result["test_accuracy"]) for result in points[label].results]
            axes.plot(tested, [row] * len(tested), ".", color=color, markersize=5)
            axes.plot([as_per_cent(best["test_accuracy"])], [row], "o", color=color, markersize=7)
        if label in paper:
            axes.plot([paper[label]], [row], color=color, **hollow("o"))
    if paper:
        axes.plot([], [], color=GRAY, label="the paper's value", **hollow("o"))
        axes.legend(frameon=False, fontsize=9)
    axes.set_yticks(
        range(len(rows)), [label.replace(", learning", ",\nlearning") for label in rows]
    )
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("test accuracy (%)")
    draw_grid(axes)
