"""Figure S4, right: validation accuracy over the training steps."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze.paper.experiments.experiment import Experiment
from keras_freeze.paper.experiments.markdown import markdown_table
from keras_freeze.paper.experiments.summary import (
    Point,
    as_per_cent,
    label_of_largest,
    points_at,
    seeds_in_words,
)
from keras_freeze.paper.experiments.work import steps_per_epoch
from keras_freeze.paper.figures.curves import (
    Curve,
    add_inset,
    draw_curves,
    draw_legend,
    limit_to_per_cent,
    zoom_region,
)
from keras_freeze.paper.results import Results
from keras_freeze.paper.run import Run
from keras_freeze.paper.views.cells import cell, cells_are
from keras_freeze.paper.views.drawing import legend_title, panels_by_rate, set_steps, styles_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Where figure S4, right, ends.
_MAX_STEPS = 100_000


def table(experiment: Experiment, results: Results) -> list[str]:
    """Return the best validation accuracies, and how many epochs they take."""
    blocks = [
        f"{cells_are('best validation accuracy (%)', experiment)} And the mean number of epochs "
        "until it is within one percentage point of the best mean of the table."
    ]
    for rate in experiment.rates:
        points = points_at(experiment, results, rate, "validation_accuracy")
        best = label_of_largest({label: point.mean for label, point in points.items()})
        goal = points[best].mean - 1.0 if best else math.nan
        until = f"epochs until {goal:.2f} %" if best else "epochs"
        rows = [[label, cell(p, 2), _epochs_until(goal, p)] for label, p in points.items()]
        blocks += [
            f"q = {rate:g}:",
            markdown_table(["learning rate", "validation accuracy (%)", until], rows),
        ]
    return blocks


def draw(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """Draw a panel for each rate."""
    figure, panels = panels_by_rate(experiment, results)
    styles = styles_of(experiment.series)
    for axes, points in panels:
        curves = [
            _validation_curve(s.label, *styles[s.label], point.results, run)
            for s in experiment.series
            for point in [points[s.label]]
            for run in experiment.runs_of(s, point.rate)[:1]
            if point.results
        ]
        draw_curves(axes, curves)
        axes.set_xlabel("optimization steps")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_ylabel("validation accuracy (%)")
        limit_to_per_cent(axes)
        region = zoom_region(curves)
        if region is not None:
            add_inset(axes, curves, region, set_steps)
        draw_legend(axes, curves, legend_title(experiment.series))
    return figure, (
        f"Mean over {seeds_in_words(experiment)} after each epoch, for the first {_MAX_STEPS:,} "
        "steps."
    )


def _epochs_until(goal: float, point: Point) -> str:
    counts = []
    for result in point.results:
        curve = map(as_per_cent, result["history"]["val_accuracy"])
        counts += [epoch for epoch, value in enumerate(curve, start=1) if value >= goal][:1]
    if len(counts) < len(point.results):
        return f"reached by {len(counts)} of {len(point.results)}"
    return f"{statistics.fmean(counts):.1f}" if counts else ""


def _validation_curve(
    label: str,
    color: str,
    marker: str,
    results: Sequence[Mapping[str, Any]],
    run: Run,
) -> Curve:
    """Return the mean up to the last epoch of all of the runs, which are planned as `run` is."""
    accuracies = [result["history"]["val_accuracy"] for result in results]
    length = min(map(len, accuracies))
    mean = 100 * np.mean([np.array(a[:length], np.float64) for a in accuracies], axis=0)
    steps = steps_per_epoch(run) * np.arange(1, length + 1)
    shown = steps <= _MAX_STEPS
    last = steps_per_epoch(run) * length
    stopped = length < run.recipe.epochs and last <= _MAX_STEPS
    return Curve(
        label,
        color,
        marker,
        mean[shown],
        np.zeros(shown.sum()),
        steps[shown],
        failed=(last,) if stopped else (),
    )
