"""Figure 4, left: the quantity over the freezing rates, relative to the dense network."""

import math
from typing import TYPE_CHECKING

from keras_freeze.paper.experiments.experiment import Experiment
from keras_freeze.paper.experiments.summary import QUANTITIES, dense_mean, points_by_label
from keras_freeze.paper.figures.curves import draw_legend, log_scale
from keras_freeze.paper.results import Results
from keras_freeze.paper.views.cells import cells_are, columns_of, rate_table
from keras_freeze.paper.views.drawing import (
    draw_over_rates,
    finite_means,
    spread_of,
    stacked_panels,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(experiment: Experiment, results: Results) -> list[str]:
    """Return the table of freezing rates, divided by the mean of the dense network."""
    dense = dense_mean(experiment, results)
    relative = {
        label: {rate: point.relative_to(dense) for rate, point in column.items()}
        for label, column in columns_of(experiment, experiment.series, results).items()
    }
    name = QUANTITIES[experiment.quantity].name
    if math.isnan(dense):
        text = f"The {name} relative to the dense network, which is not measured yet, or has none."
    else:
        name += f", divided by the dense network's mean of {dense:.4g}"
        text = cells_are(name, experiment)
    how = (
        "The gradients are summed over the training data before their norm is taken, with "
        "BatchNormalization in training mode."
    )
    return [f"{text} {how}", rate_table(relative, 2, {})]


def draw(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """Draw the quantity divided by the dense network's mean, once that is known."""
    columns = points_by_label(experiment, experiment.series, results)
    name = QUANTITIES[experiment.quantity].name
    dense = dense_mean(experiment, results)
    if math.isfinite(dense):
        name = f"{name},\nrelative to the dense network"
        columns = {
            label: [point.relative_to(dense) for point in points]
            for label, points in columns.items()
        }
    figure, (axes,) = stacked_panels(1)
    curves, _ = draw_over_rates(axes, experiment, experiment.series, columns, name)
    log_scale(axes, finite_means(curves))
    draw_legend(axes, curves)
    return figure, (
        f"{spread_of(experiment)} Gradients are summed over the training data before their norm "
        "is taken, with BatchNormalization in training mode."
    )
