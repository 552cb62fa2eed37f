"""What the figures of the views share: curves over freezing rates, and their styles."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from keras_freeze.paper.experiments.experiment import Experiment, Series
from keras_freeze.paper.experiments.summary import (
    QUANTITIES,
    Point,
    is_dense,
    points_at,
    points_by_label,
    seeds_in_words,
)
from keras_freeze.paper.figures.curves import (
    Curve,
    RateScale,
    add_inset,
    draw_curves,
    draw_legend,
    limit_to_per_cent,
    zoom_region,
)
from keras_freeze.paper.figures.style import COLORS, MARKERS, OTHER_STYLES, new_figure
from keras_freeze.paper.recipes import LEARNING_RATES
from keras_freeze.paper.results import Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH = 9.0


# The markers of the learning rates.
_MARKERS = "os^DvPX<>"


def stacked_panels(count: int) -> tuple["Figure", Sequence["Axes"]]:
    """Return a figure and its panels, one below the other."""
    figure = new_figure(WIDTH, 5.2 if count == 1 else 0.8 + 4.0 * count)
    return figure, figure.subplots(count, 1, squeeze=False).flatten()


def panels_by_rate(
    experiment: Experiment, results: Results
) -> "tuple[Figure, list[tuple[Axes, dict[str, Point]]]]":
    """Return a figure and a panel for each freezing rate, with the points of all series there."""
    figure, panels = stacked_panels(len(experiment.rates))
    for axes, rate in zip(panels, experiment.rates, strict=True):
        axes.set_title(f"freezing rate q = {rate:g}", loc="left", fontsize=10)
    points = [points_at(experiment, results, rate) for rate in experiment.rates]
    return figure, list(zip(panels, points, strict=True))


def draw_quantity(
    axes: "Axes", experiment: Experiment, series: Sequence[Series], results: Results
) -> None:
    """Draw the experiment's quantity over the freezing rates, with an inset and a legend."""
    name = QUANTITIES[experiment.quantity].name
    columns = points_by_label(experiment, series, results)
    curves, scale = draw_over_rates(axes, experiment, series, columns, name)
    if "%" in name:
        limit_to_per_cent(axes)
    region = zoom_region(curves)
    if region is not None:
        add_inset(axes, curves, region, functools.partial(scale.apply, letter=0.025))
    draw_legend(axes, curves, legend_title(series))


def draw_over_rates(
    axes: "Axes",
    experiment: Experiment,
    series: Sequence[Series],
    columns: Mapping[str, Sequence[Point]],
    name: str,
) -> tuple[list[Curve], RateScale]:
    """Draw points over the freezing rates; return the curves and the scale of the x axis."""
    styles = styles_of(experiment.series)
    curves = [
        _curve_of(experiment, s, columns[s.label], *styles[s.label])
        for s in series
        if any(point.values for point in columns[s.label])
    ]
    draw_curves(axes, curves)
    axes.set_ylabel(name)
    return curves, scale_rates(axes, experiment, columns)


def scale_rates(
    axes: "Axes", experiment: Experiment, columns: Mapping[str, Sequence[Point]]
) -> RateScale:
    """Make the x axis one of freezing rates: all of the experiment's, finished or not."""
    series = [s for s in experiment.series if not is_dense(s)]
    rates = sorted({rate for s in series for rate in experiment.rates_of(s)})
    real_rates = {
        point.rate: point.real_rate
        for points in columns.values()
        for point in points
        if point.results
    }
    scale = RateScale(rates, real_rates)
    scale.apply(axes, rates[0], rates[-1])
    scale.add_real_rates(axes)
    return scale


def _curve_of(
    experiment: Experiment, series: Series, points: Sequence[Point], color: str, marker: str
) -> Curve:
    paper = {
        point.rate: (mean, math.nan if deviation is None else deviation)
        for point in points
        for mean, deviation in [experiment.paper.get((series.label, point.rate), (None, None))]
        if mean is not None
    }
    return Curve(
        series.label,
        color,
        marker,
        mean=np.array([point.mean for point in points]),
        deviation=np.array([point.deviation for point in points]),
        x=None if is_dense(series) else np.array([point.rate for point in points]),
        failed=tuple(p.rate for p in points if p.values and not math.isfinite(p.mean)),
        paper=paper,
    )


def styles_of(series: Sequence[Series]) -> dict[str, tuple[str, str]]:
    """Return color and marker by label; methods and learning rates keep theirs in all figures."""
    if legend_title(series) is not None:
        return {s.label: _style_of_learning_rate(s.settings["learning_rate"]) for s in series}
    own = {s.label: (COLORS[m], MARKERS[m]) for s in series for m in [s.settings["method"]]}
    colors = {color for color, _ in own.values()}
    others = iter([style for style in OTHER_STYLES if style[0] not in colors])
    styles: dict[str, tuple[str, str]] = {}
    taken = set()
    for s in series:
        place = s.settings.get("dataset"), s.settings["method"]
        styles[s.label] = next(others, OTHER_STYLES[0]) if place in taken else own[s.label]
        taken.add(place)
    return styles


def _style_of_learning_rate(rate: float) -> tuple[str, str]:
    """Return a color, from dark to light along the paper's grid, and a marker."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    place = math.log2(rate / LEARNING_RATES[0])
    last = len(LEARNING_RATES) - 1
    index = min(max(round(place), 0), last)
    return to_hex(colormaps["viridis"](0.9 * index / last)), _MARKERS[index]


def legend_title(series: Iterable[Series]) -> str | None:
    """Return what the labels are where they are mere numbers."""
    named = all(s.label == f"{s.settings.get('learning_rate', 0):g}" for s in series)
    return "learning rate" if named else None


def finite_means(curves: Iterable[Curve]) -> np.ndarray:
    """Return the finite means of curves."""
    values = np.concatenate([np.empty(0), *(curve.mean for curve in curves)])
    return values[np.isfinite(values)]


def spread_of(experiment: Experiment) -> str:
    """Return what lines and bands are, as a sentence."""
    if experiment.seeds == 1:
        return "One seed."
    return f"Mean and a band of one standard deviation over {seeds_in_words(experiment)}."


def set_steps(inset: "Axes", low: float, high: float) -> None:
    """Set limits and ticks of an x axis of steps or epochs."""
    inset.set_xlim(low, high)
    inset.locator_params(axis="x", nbins=4)
    inset.xaxis.set_major_formatter("{x:,.0f}")
