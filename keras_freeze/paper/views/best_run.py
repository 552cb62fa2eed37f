"""Figure S8: the best run, its early stop marked."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze.paper.experiments.experiment import Experiment
from keras_freeze.paper.experiments.markdown import markdown_table
from keras_freeze.paper.experiments.summary import (
    as_per_cent,
    best_in_validation,
    points_of,
    seeds_in_words,
)
from keras_freeze.paper.figures.curves import Curve, add_inset, draw_curves, draw_legend, hollow
from keras_freeze.paper.figures.style import BLUE, GRAY
from keras_freeze.paper.results import Results
from keras_freeze.paper.views.cells import columns_of, per_cent, printed
from keras_freeze.paper.views.drawing import set_steps, stacked_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def table(experiment: Experiment, results: Results) -> list[str]:
    """Return a row for each seed; the run with the best validation accuracy is the result."""
    blocks = ["The result is the run with the best validation accuracy, in bold."]
    for label, column in columns_of(experiment, experiment.series, results).items():
        for rate, point in column.items():
            best = best_in_validation(point)
            rows = [
                [
                    f"**{cell}**" if result is best else cell
                    for cell in (
                        str(result["seed"]),
                        str(result["best_epoch"]),
                        per_cent(result["validation_accuracy"]),
                        per_cent(result["test_accuracy"]),
                    )
                ]
                for result in point.results
            ]
            if (label, rate) in experiment.paper:
                rows.append(["the paper's best", "", "", printed(experiment.paper[label, rate])])
            header = ["seed", "best epoch", "validation accuracy (%)", "test accuracy (%)"]
            blocks += [f"{label}, q = {rate:g}:", markdown_table(header, rows)]
    return blocks


def draw(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """Draw the run with the best validation accuracy, a panel for each series and rate."""
    columns = [
        (series.label, point)
        for series in experiment.series
        for point in points_of(experiment, series, results)
    ]
    figure, panels = stacked_panels(len(columns))
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
            color,
            marker,
            100 * np.array(history[name], np.float64),
            np.zeros(len(epochs)),
            epochs,
        )
        for label, color, name in (
            ("training", GRAY, "accuracy"),
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
            _circle(add_inset(axes, curves, region, set_steps), best, value)
    draw_legend(axes, curves)


def _circle(axes: "Axes", x: float, y: float, label: str | None = None) -> None:
    style = {**hollow("o"), "markersize": 11, "markeredgewidth": 2}
    axes.plot([x], [y], color="red", zorder=4, label=label, **style)
