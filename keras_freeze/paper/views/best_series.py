"""Figures S4, left, and S6: the best learning rates."""

from typing import TYPE_CHECKING

from keras_freeze.paper.experiments.experiment import Experiment
from keras_freeze.paper.experiments.markdown import markdown_table
from keras_freeze.paper.experiments.summary import label_of_largest, points_at
from keras_freeze.paper.results import Results
from keras_freeze.paper.views.cells import cell, columns_of
from keras_freeze.paper.views.drawing import draw_quantity, spread_of, stacked_panels
from keras_freeze.paper.views.rates import table as rate_tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(experiment: Experiment, results: Results) -> list[str]:
    """Return all series, and for each rate which of them is best in validation."""
    validated = columns_of(experiment, experiment.series, results, "validation_accuracy")
    tested = columns_of(experiment, experiment.series, results, "test_accuracy")
    rows = []
    for rate in experiment.rates:
        best = label_of_largest({label: column[rate].mean for label, column in validated.items()})
        cells = ["", "", ""]
        if best is not None:
            cells = [best, *(cell(columns[best][rate], 2) for columns in (validated, tested))]
        rows.append([f"{rate:g}", *cells])
    header = ["q", "best learning rate", "validation accuracy (%)", "test accuracy (%)"]
    return [
        *rate_tables(experiment, results),
        "The best learning rate by mean validation accuracy; the test set chooses nothing:",
        markdown_table(header, rows),
    ]


def draw(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """Draw those that are best in validation at any rate; the test set chooses nothing."""
    best = {
        label_of_largest({label: point.mean for label, point in points.items()})
        for rate in experiment.rates
        for points in [points_at(experiment, results, rate, "validation_accuracy")]
    }
    figure, (axes,) = stacked_panels(1)
    chosen = [series for series in experiment.series if series.label in best]
    draw_quantity(axes, experiment, chosen, results)
    return figure, (
        f"Of {len(experiment.series)} learning rates those that have the best mean validation "
        f"accuracy at one freezing rate or more. {spread_of(experiment)}"
    )
