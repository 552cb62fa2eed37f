"""Figure 4, right: the gradient flow through training."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze.paper.experiments.experiment import Experiment
from keras_freeze.paper.experiments.markdown import markdown_table
from keras_freeze.paper.experiments.summary import Point, points_at
from keras_freeze.paper.figures.curves import Curve, draw_curves, draw_legend, log_scale
from keras_freeze.paper.results import Results
from keras_freeze.paper.views.drawing import finite_means, panels_by_rate, styles_of
from keras_freeze.paper.views.rates import table as rate_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(experiment: Experiment, results: Results) -> list[str]:
    """Return the gradient at some epochs of one run of each series, and what all runs came to."""
    blocks = [
        "L1 norm of the gradient per trained parameter: mean ± standard deviation over the batches "
        "of training data, of each series in the finished run with the lowest seed, after some of "
        "the epochs."
    ]
    for rate in experiment.rates:
        points = points_at(experiment, results, rate)
        flows = {label: _flow_by_epoch(point) for label, point in points.items()}
        epochs = sorted({epoch for flow in flows.values() for epoch in flow})
        rows = [
            [str(epoch), *(flow.get(epoch, "") for flow in flows.values())]
            for epoch in _some(epochs)
        ]
        blocks += [f"q = {rate:g}:", markdown_table(["epoch", *flows], rows)]
    return blocks + rate_tables(experiment, results)


def draw(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """Draw one run of each series, a panel for each rate."""
    figure, panels = panels_by_rate(experiment, results)
    styles = styles_of(experiment.series)
    for axes, points in panels:
        curves = [
            _flow_curve(label, *styles[label], point.results[0]["flow"])
            for label, point in points.items()
            if point.results
        ]
        draw_curves(axes, curves)
        log_scale(axes, finite_means(curves))
        axes.set_xlabel("epochs trained")
        axes.set_ylabel("L1 norm of the gradient\nper trained parameter")
        draw_legend(axes, curves)
    return figure, (
        "Mean and standard deviation over the batches of training data, of each series in the "
        "finished run with the lowest seed."
    )


def _flow_by_epoch(point: Point) -> dict[int, str]:
    """Return mean and deviation of the first run's gradient, by the epochs trained before."""
    if not point.results:
        return {}
    flow = point.results[0]["flow"]
    pairs = zip(flow["gradient_flow"], flow["gradient_flow_deviation"], strict=True)
    cells = ["not finite" if None in pair else "{:.3g} ± {:.2g}".format(*pair) for pair in pairs]
    return dict(zip(flow["epoch"], cells, strict=True))


def _some(values: Sequence[int]) -> list[int]:
    """Return the first, the last, and a few between them."""
    last = len(values) - 1
    chosen = {round(last * share) for share in (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)}
    return [values[index] for index in sorted(chosen)] if values else []


def _flow_curve(label: str, color: str, marker: str, flow: Mapping[str, Any]) -> Curve:
    mean, deviation = (
        np.array(flow[name], np.float64) for name in ("gradient_flow", "gradient_flow_deviation")
    )
    epochs = np.array(flow["epoch"], np.float64)
    return Curve(label, color, marker, mean, deviation, epochs)
