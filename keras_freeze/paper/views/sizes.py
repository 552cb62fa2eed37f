"""Table 2: network sizes and accuracies."""

import math
from typing import TYPE_CHECKING

import keras
import numpy as np

from keras_freeze.paper import datasets, models
from keras_freeze.paper.experiments.experiment import Experiment
from keras_freeze.paper.experiments.markdown import markdown_table
from keras_freeze.paper.experiments.summary import QUANTITIES, Point, points_by_label
from keras_freeze.paper.figures.curves import log_scale
from keras_freeze.paper.figures.style import BLACK, draw_grid
from keras_freeze.paper.results import Results
from keras_freeze.paper.sizes import PaperSize, paper_sizes
from keras_freeze.paper.views.cells import cell, cells_are, columns_of
from keras_freeze.paper.views.drawing import draw_quantity, scale_rates, spread_of, stacked_panels
from keras_freeze.reporting import report

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def table(experiment: Experiment, results: Results) -> list[str]:
    """Return table 2: network sizes, exact and by the paper's rule, and accuracies."""
    columns = columns_of(experiment, experiment.series, results)
    (dense,) = columns["baseline"].values()
    sizes = paper_sizes(*_weights_and_others(experiment), [dense.rate, *experiment.rates])
    rows = []
    for size in sizes:
        rate = size.freeze_rate
        labels = {label: "baseline" if rate == dense.rate else label for label in columns}
        points = {label: columns[labels[label]][rate] for label in ("SNIP", "FreezeNet")}
        paper = {label: experiment.paper.get((labels[label], rate)) for label in points}
        rows.append(
            [
                f"{rate:g}",
                *_size_cells(size, points["FreezeNet"]),
                *(cell(point, 2, paper[label]) for label, point in points.items()),
                _ratio(points["FreezeNet"].mean, dense.mean),
                _ratio(_mean(paper["FreezeNet"]), _mean(experiment.paper.get(("baseline", 0.0)))),
            ]
        )
    header = ["q", "q_beta", "size (KiB)", "size, paper's rule", "compression factor"]
    header += ["factor, paper's rule", "SNIP", "FreezeNet", "FreezeNet / baseline", "the paper's"]
    return [
        f"{cells_are(QUANTITIES[experiment.quantity].name, experiment)} Sizes: trained "
        "parameters as float32, without the mask; of FreezeNet as it was trained, or as it will "
        "be. The paper's rule applies the rate to the biases as well, adds them once more, and "
        "divides rounded sizes.",
        markdown_table(header, rows),
    ]


def draw(experiment: Experiment, results: Results) -> tuple["Figure", str]:
    """Draw the accuracies and the compression factors."""
    figure, (upper, lower) = stacked_panels(2)
    draw_quantity(upper, experiment, experiment.series, results)
    columns = points_by_label(experiment, experiment.series, results)
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
    scale_rates(lower, experiment, columns)
    log_scale(lower, np.array(list(factors.values())))
    lower.set_ylabel("dense size / network size")
    return figure, spread_of(experiment)


def _weights_and_others(experiment: Experiment) -> tuple[int, int]:
    facts = datasets.info(experiment.dataset)
    zeros = keras.initializers.Zeros()
    build = models.MODELS[experiment.model]
    counted = report(build(facts.num_classes, facts.image_shape, initializer=zeros))
    return counted.num_weights, counted.num_other


def _size_cells(size: PaperSize, point: Point) -> list[str]:
    real_rate, kib, factor = size.real_freeze_rate, size.size_kib, size.compression_factor
    if point.results:
        counted = point.results[0]["report"]
        real_rate, kib = counted["real_freeze_rate"], counted["network_kib"]
        factor = counted["compression_factor"]
    return [
        f"{real_rate:.4f}",
        f"{kib:,.1f}",
        f"{size.paper_size:,.1f}",
        *("" if f is None else f"{f:.1f}" for f in (factor, size.paper_compression_factor)),
    ]


def _ratio(accuracy: float, dense: float) -> str:
    return f"{accuracy / dense:.3f}" if dense and math.isfinite(accuracy / dense) else ""


def _mean(paper: tuple[float, float | None] | None) -> float:
    return math.nan if paper is None else paper[0]
