"""Figures 2, S1, ... and table 3: the quantity over the freezing rates, for each data set."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from keras_freeze.paper.experiments.experiment import Experiment
from keras_freeze.paper.experiments.markdown import markdown_table
from keras_freeze.paper.experiments.summary import QUANTITIES, as_number, as_per_cent, by_dataset
from keras_freeze.paper.results import Results
from keras_freeze.paper.views.cells import cell, cells_are, columns_of, rate_table
from keras_freeze.paper.views.drawing import draw_quantity, spread_of, stacked_panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(experiment: Experiment, results: Results) -> list[str]:
    """Return a row for each freezing rate, a column for each series; a table for each data set."""
    quantity = QUANTITIES[experiment.quantity]
    tables = [
        rate_table(columns_of(experiment, group, results), quantity.decimals, experiment.paper)
        for group in by_dataset(experiment.series)
    ]
    bold = (
        " Bold: the best of its row by more than its standard deviation and the other's together."
        if any("**" in table for table in tables)
        else ""
    )
    return [
        cells_are(quantity.name, experiment) + bold,
        *tables,
        *_pruning(experiment, results),
    ]


def draw(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """Draw a panel for each data set."""
    groups = by_dataset(experiment.series)
    figure, panels = stacked_panels(len(groups))
    for axes, group in zip(panels, groups, strict=True):
        draw_quantity(axes, experiment, group, results)
    return figure, spread_of(experiment)


def _pruning(experiment: Experiment, results: Results) -> list[str]:
    """Return what pruning does to networks whose frozen weights were decayed."""
    rows = []
    tested = columns_of(experiment, experiment.series, results, "test_accuracy")
    for label, column in tested.items():
        for rate, point in column.items():
            checks = [r["pruning"] for r in point.results if r.get("pruning") is not None]
            if checks:
                pruned = point.with_values(as_per_cent(c["after"]["accuracy"]) for c in checks)
                largest = [as_number(check["largest_frozen_weight"]) for check in checks]
                cells = [cell(point, 2), cell(pruned, 2), _largest_of(largest)]
                rows.append([label, f"{rate:g}", *cells])
    if not rows:
        return []
    header = ["method", "q", "test accuracy (%)", "pruned (%)", "largest frozen weight"]
    return [
        "Frozen weights that were decayed: the largest that is left with the weights of the best "
        "epoch, in any of the seeds, and the test accuracy once they are set to zero.",
        markdown_table(header, rows),
    ]


def _largest_of(values: Sequence[float]) -> str:
    return f"{max(values):.2g}" if all(map(math.isfinite, values)) else "not finite"
