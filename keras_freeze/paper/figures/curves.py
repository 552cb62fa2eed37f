"""Curves with bands, over freezing rates or steps, and what makes them readable."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze.paper.figures.style import GRAY, draw_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Values, in points, that spread over more than this get an inset.
_WIDE_SPREAD = 30.0

# Positions of an inset, as shares of the axes: the lower left first, as in the paper.
_INSET_SIZES = ((0.5, 0.45), (0.42, 0.36), (0.34, 0.28))
_INSET_LEFTS = (0.09, 0.2, 0.3, 0.4, 0.5, 0.62)
_INSET_BOTTOMS = (0.13, 0.22, 0.3, 0.4, 0.5, 0.6)
_SPACE_FOR_LABELS = 0.07

# Below the largest value by more than this factor, a value is drawn as next to zero.
_SMALLEST_SHARE = 1e-6


@dataclass(frozen=True)
class Curve:
    """One series as it is drawn.

    Attributes:
        label, color, marker: its style; without a marker it is a line.
        mean, deviation: arrays; NaN where no value is finite.
        x: position of each value. None: one value that holds everywhere.
        failed: positions where a run has no finite value.
        paper: the paper's mean and deviation (NaN if it gives none) by x.
    """

    label: str
    color: str
    marker: str
    mean: np.ndarray
    deviation: np.ndarray
    x: np.ndarray | None = None
    failed: tuple[float, ...] = ()
    paper: Mapping[float, tuple[float, float]] = field(default_factory=dict)


def draw_curves(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Draw means with bands of one deviation, and the paper's values as hollow markers."""
    for curve in curves:
        if curve.x is None:
            _draw_level(axes, curve)
        else:
            _draw_curve(axes, curve, 0.15 if len(curves) < 5 else 0.08)
        if curve.paper:
            _draw_paper(axes, curve)
    draw_grid(axes)


def _draw_level(axes: "Axes", curve: Curve) -> None:
    (mean,), (deviation,) = curve.mean, curve.deviation
    axes.axhline(mean, linestyle="--", color=curve.color, linewidth=1.4, label=curve.label)
    axes.axhspan(mean - deviation, mean + deviation, color=curve.color, alpha=0.15, linewidth=0)


def _draw_curve(axes: "Axes", curve: Curve, opacity: float) -> None:
    count = len(curve.mean)
    axes.plot(
        curve.x,
        curve.mean,
        marker=curve.marker,
        markersize=5,
        markevery=max(1, count // 12),
        color=curve.color,
        linewidth=1.6 if count < 40 else 1.1,
        label=curve.label,
    )
    low, high = curve.mean - curve.deviation, curve.mean + curve.deviation
    axes.fill_between(curve.x, low, high, color=curve.color, alpha=opacity, linewidth=0)
    # A run that failed has no value to be drawn at: it is marked at the lower border.
    border = [0.025] * len(curve.failed)
    axes.plot(curve.failed, border, transform=axes.get_xaxis_transform(), **_cross(curve.color))


def _draw_paper(axes: "Axes", curve: Curve) -> None:
    """Draw hollow markers, larger than those of the curve, so that both show where they agree."""
    for rate, (mean, deviation) in curve.paper.items():
        x, place = rate, axes.transData
        if curve.x is None:  # holds everywhere: at the left border
            x, place = 0.012, axes.get_yaxis_transform()
        marker = hollow(curve.marker or "D")
        axes.plot([x], [mean], color=curve.color, transform=place, **marker)
        axes.plot(
            [x, x],
            [mean - deviation, mean + deviation],
            color=curve.color,
            linewidth=1,
            transform=place,
        )


def hollow(marker: str) -> dict[str, Any]:
    """Return the style of the paper's values, as arguments of `plot`."""
    return {
        "marker": marker,
        "markersize": 9,
        "markerfacecolor": "none",
        "markeredgewidth": 1.3,
        "linestyle": "none",
    }


def _cross(color: str) -> dict[str, Any]:
    return {
        "marker": "x",
        "markersize": 7,
        "markeredgewidth": 1.8,
        "linestyle": "none",
        "color": color,
    }


def draw_legend(axes: "Axes", curves: Sequence[Curve], title: str | None = None) -> None:
    """Draw the legend to the right of the axes, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if any(curve.paper for curve in curves):
        handles += axes.plot([], [], color=GRAY, **hollow("o"))
        labels.append("the paper's value")
    if any(curve.failed for curve in curves):
        handles += axes.plot([], [], **_cross(GRAY))
        labels.append("a run that failed")
    axes.legend(
        handles,
        labels,
        title=title,
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        frameon=False,
        alignment="left",
    )


class RateScale:
    """The axis of freezing rates, logarithmic in 1 - q where that spans more than a decade.

    Args:
        rates: the freezing rates, ascending.
        real_rates: q_beta by rate, as far as it is known.
    """

    def __init__(self, rates: Sequence[float], real_rates: Mapping[float, float]) -> None:
        self.rates = rates
        self.real_rates = real_rates
        trained = [1 - rate for rate in rates if rate < 1]
        self._is_log = len(trained) > 1 and max(trained) > 10.001 * min(trained)
        # q = 1, which is infinitely far, is drawn half a decade beyond the last rate.
        self._floor = min(trained, default=1.0) / 3

    def apply(self, axes: "Axes", low: float, high: float, letter: float = 0.0125) -> None:
        """Set scale, limits and ticks.

        Args:
            axes: the axes whose x axis is set.
            low, high: the first and the last rate shown; the limits lie a little further out.
            letter: width of a letter, as a share of the axis.
        """
        axes.set_xscale("function", functions=(self._position, self._rate))
        left, right = self._position(np.array([low, high], np.float64))
        margin = 0.04 * (right - left) or 0.1
        axes.set_xlim(*self._rate(np.array([left - margin, right + margin])))
        rates = [rate for rate in self.rates if low <= rate <= high]
        widths = [letter * len(f"{rate:g}") for rate in rates]
        fitting = self._fitting(axes, rates, widths)
        axes.set_xticks(rates, [f"{rate:g}" if rate in fitting else "" for rate in rates])
        axes.tick_params(axis="x", labelsize=9)
        axes.minorticks_off()

    def add_real_rates(self, axes: "Axes") -> None:
        """Label the axis, and add another one on top with q_beta at the same positions."""
        axes.set_xlabel("freezing rate $q$ (share of the weights that are not trained)")
        top = axes.twiny()
        top.set_xscale("function", functions=(self._position, self._rate))
        top.set_xlim(axes.get_xlim())
        known = [rate for rate in self.rates if rate in self.real_rates]
        is_crowded = len(self._fitting(axes, known, [0.08] * len(known))) < len(known)
        fitting = self._fitting(axes, known, [0.03] * len(known))
        tilted = {"rotation": 40, "ha": "left", "rotation_mode": "anchor"}
        top.set_xticks(
            known,
            [f"{self.real_rates[rate]:.4f}" if rate in fitting else "" for rate in known],
            **(tilted if is_crowded else {}),
        )
        top.tick_params(labelsize=8, colors=GRAY)
        top.minorticks_off()
        top.spines[["top", "right"]].set_visible(False)
        top.set_xlabel(r"real freezing rate $q_\beta$", fontsize=9, color=GRAY)

    def _fitting(self, axes: "Axes", rates: Sequence[float], widths: Sequence[float]) -> set[float]:
        """Return the rates whose labels do not overlap; the first and last have priority."""
        left, right = self._position(np.array(axes.get_xlim()))
        places = (self._position(np.array(rates)) - left) / (right - left)
        order = [len(rates) - 1, 0, *range(len(rates) - 2, 0, -1)][: len(rates)]
        kept: list[int] = []
        for new in order:
            gaps = [abs(places[new] - places[old]) for old in kept]
            needed = [(widths[new] + widths[old]) / 2 for old in kept]
            if all(gap > width for gap, width in zip(gaps, needed, strict=True)):
                kept.append(new)
        return {rates[index] for index in kept}

    def _position(self, rates: np.ndarray) -> np.ndarray:
        return -np.log10(np.maximum(1 - rates, self._floor)) if self._is_log else rates

    def _rate(self, positions: np.ndarray) -> np.ndarray:
        return 1 - 10.0**-positions if self._is_log else positions


def limit_to_per_cent(axes: "Axes") -> None:
    """Limit the y axis to what per cents can be; markers at 100 % are not cut."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0.0), min(high, 102.0))


def log_scale(axes: "Axes", values: np.ndarray) -> None:
    """Make the y axis logarithmic, and linear next to zero where there are zeros."""
    positive = values[values > 0]
    if not positive.size:
        return
    top = positive.max()
    smallest = max(positive.min(), _SMALLEST_SHARE * top)
    if (values < smallest).any():
        threshold = 10.0 ** math.floor(math.log10(smallest))
        axes.set_yscale("symlog", linthresh=threshold, linscale=0.5)
        axes.set_ylim(-0.3 * threshold, 2.5 * top)
    else:
        axes.set_yscale("log")
        axes.set_ylim(smallest / 2, 2.5 * top)
    axes.yaxis.set_major_formatter("{x:g}")


def zoom_region(curves: Sequence[Curve]) -> tuple[float, float, float, float] | None:
    """Return left, right, bottom and top of the upper part of curves that spread wide, or None."""
    papers = [mean for curve in curves for mean, _ in curve.paper.values()]
    values = np.concatenate([papers, *(curve.mean for curve in curves)])
    values = values[np.isfinite(values)]
    if not values.size or np.ptp(values) <= _WIDE_SPREAD:
        return None
    top = values.max()
    bottom = max(np.quantile(values, 0.25), top - np.ptp(values) / 8)
    xs = [x for curve in curves if curve.x is not None for x in curve.x[curve.mean >= bottom]]
    margin = 0.15 * (top - bottom)
    if not margin or len(set(xs)) < 2:
        return None
    return min(xs), max(xs), bottom - margin, top + margin


def add_inset(
    axes: "Axes",
    curves: Sequence[Curve],
    region: tuple[float, float, float, float],
    set_x: Callable[["Axes", float, float], object],
) -> "Axes":
    """Draw a region of the curves enlarged, where it covers the least of them.

    Args:
        axes: the axes; curves and limits are final.
        curves: the curves in it.
        region: left, right, bottom and top.
        set_x: sets limits, and if needed scale and ticks, of the inset's x axis.

    Returns:
        The inset.
    """
    left, right, bottom, top = region
    inset = axes.inset_axes(_free_place(axes, curves))
    draw_curves(inset, curves)
    set_x(inset, left, right)
    inset.set_ylim(bottom, top)
    inset.tick_params(labelsize=7)
    for line in inset.get_lines():
        line.set_markersize(0.7 * line.get_markersize())
    inset.spines[["top", "right"]].set_visible(True)
    for spine in inset.spines.values():
        spine.set_color("#999999")
    axes.indicate_inset_zoom(inset, edgecolor="#999999", linewidth=0.8, alpha=0.6)
    return inset


def _free_place(axes: "Axes", curves: Sequence[Curve]) -> tuple[float, float, float, float]:
    """Return left, bottom, width and height of a place with few curves, in shares of the axes."""
    points = np.concatenate([*_traces(axes, curves), np.empty((0, 2))])
    best, fewest = None, len(points) + 1
    for (width, height), left, bottom in itertools.product(
        _INSET_SIZES, _INSET_LEFTS, _INSET_BOTTOMS
    ):
        if left + width > 0.99 or bottom + height > 0.97:
            continue
        inside = (points >= (left - _SPACE_FOR_LABELS, bottom - _SPACE_FOR_LABELS)) & (
            points <= (left + width + 0.01, bottom + height + 0.02)
        )
        covered = int(inside.all(axis=1).sum())
        if covered < fewest:
            best, fewest = (left, bottom, width, height), covered
    assert best is not None
    return best


def _traces(axes: "Axes", curves: Sequence[Curve]) -> Iterator[np.ndarray]:
    """Yield points along curves, borders of bands and the paper's values, in shares of the axes."""
    to_axes = axes.transScale + axes.transLimits
    across = np.linspace(0, 1, 200)
    for curve in curves:
        for values in (curve.mean - curve.deviation, curve.mean, curve.mean + curve.deviation):
            if curve.x is None:
                known = to_axes.transform([(axes.get_xlim()[0], values[0])])
            else:
                known = to_axes.transform(np.column_stack([curve.x, values]))
                known = known[np.isfinite(known).all(axis=1)]
            if len(known):
                yield np.column_stack([across, np.interp(across, known[:, 0], known[:, 1])])
        if curve.x is not None and curve.paper:
            yield to_axes.transform([(rate, mean) for rate, (mean, _) in curve.paper.items()])
