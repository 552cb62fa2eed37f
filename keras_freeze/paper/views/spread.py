"""Every run of every series, where a mean would hide what the seeds decide."""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keras_freeze.paper.experiments.experiment import Experiment
from keras_freeze.paper.experiments.markdown import markdown_table
from keras_freeze.paper.experiments.summary import QUANTITIES, Point, seeds_in_words
from keras_freeze.paper.figures.style import draw_grid
from keras_freeze.paper.results import Results
from keras_freeze.paper.views.cells import columns_of
from keras_freeze.paper.views.drawing import panels_by_rate, styles_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(experiment: Experiment, results: Results) -> list[str]:
    """Return a row for each series and rate: the median, and the values of all runs in order."""
    quantity = QUANTITIES[experiment.quantity]
    rows = [
        [label, f"{rate:g}", *_cells(point, quantity.decimals)]
        for label, column in columns_of(experiment, experiment.series, results).items()
        for rate, point in column.items()
    ]
    return [
        f"Of each run of {seeds_in_words(experiment)}: {quantity.name}, in ascending order.",
        markdown_table(["series", "q", "runs", "median", "all runs"], rows),
    ]


def draw(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """Draw a panel for each freezing rate, with a line of dots for each series."""
    figure, panels = panels_by_rate(experiment, results)
    styles = styles_of(experiment.series)
    for axes, points in panels:
        for row, (label, point) in enumerate(points.items()):
            color, marker = styles[label]
            values = _finite(point.values)
            axes.plot(values, [row] * len(values), marker, color=color, alpha=0.5, markersize=9)
        axes.set_yticks(range(len(points)), list(points))
        axes.set_ylim(len(points) - 0.5, -0.5)  # the first series on top
        axes.set_xlabel(QUANTITIES[experiment.quantity].name)
        draw_grid(axes)
    return figure, f"Each dot is one of {seeds_in_words(experiment)}."


def _cells(point: Point, decimals: int) -> list[str]:
    """Return the number of runs, their median and all their values."""
    finite = _finite(point.values)
    texts = [f"{value:.{decimals}f}" for value in finite]
    texts += ["not finite"] * (len(point.values) - len(finite))
    # A run without a finite value is worse than any other.
    ordered = [-math.inf] * (len(point.values) - len(finite)) + finite
    median = statistics.median_low(ordered) if ordered else math.nan
    middle = f"{median:.{decimals}f}" if math.isfinite(median) else ""
    return [f"{len(point.values)} of {point.planned}", middle, ", ".join(texts)]


def _finite(values: Sequence[float]) -> list[float]:
    return sorted(value for value in values if math.isfinite(value))
