"""Curves with bands, over freezing rates or steps, and what makes them readable."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze.paper.figures.style import GREY, draw_grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Values, in points, that spread over more than this get an inset.
_WIDE_SPREAD = 30.0

# Positions of an inset, as shares of the axes: the lower left first, as in the paper.
_INSET_SIZES = ((0.5, 0.45), (0.42, 0.36), (0.34, 0.28))
_INSET_LEFTS = (0.09, 0.2, 0.3, 0.4, 0.5, 0.62)
_INSET_BOTTOMS = (0.13, 0.22, 0.3, 0.4, 0.5, 0.6)
_ROOM_FOR_LABELS = 0.07

# Below the largest value by more than this factor, a value is drawn as next to zero.
_SMALLEST_SHARE = 1e-6


@dataclass(frozen=True)
class Curve:
    """What is drawn of one series.

    Attributes:
        label, colour, marker: how it looks; without a marker, it is a mere line.
        mean, deviation: arrays; NaN where there is no finite value.
        x: of each value; None for one value that holds everywhere.
        failed: x where a run has no finite value.
        paper: the paper's mean and deviation (NaN if it gives none) by x.
    """

    label: str
    colour: str
    marker: str
    mean: np.ndarray
    deviation: np.ndarray
    x: np.ndarray | None = None
    failed: tuple[float, ...] = ()
    paper: Mapping[float, tuple[float, float]] = field(default_factory=dict)


def draw_curves(axes: "Axes", curves: Sequence[Curve]) -> None:
    """Draws means with bands of one deviation; the paper's values as hollow markers."""
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
    axes.axhline(mean, linestyle="--", color=curve.colour, linewidth=1.4, label=curve.label)
    axes.axhspan(mean - deviation, mean + deviation, color=curve.colour, alpha=0.15, linewidth=0)


def _draw_curve(axes: "Axes", curve: Curve, opacity: float) -> None:
    count = len(curve.mean)
    axes.plot(
        curve.x,
        curve.mean,
        marker=curve.marker,
        markersize=5,
        markevery=max(1, count // 12),
        color=curve.colour,
        linewidth=1.6 if count < 40 else 1.1,
        label=curve.label,
    )
    low, high = curve.mean - curve.deviation, curve.mean + curve.deviation
    axes.fill_between(curve.x, low, high, color=curve.colour, alpha=opacity, linewidth=0)
    # A run that failed has no value to be drawn at: it is marked at the lower border.
    border = [0.025] * len(curve.failed)
    axes.plot(curve.failed, border, transform=axes.get_xaxis_transform(), **_cross(curve.colour))


def _draw_paper(axes: "Axes", curve: Curve) -> None:
    """Hollow, and larger than one's own, so that both show where they are the same."""
    for rate, (mean, deviation) in curve.paper.items():
        x, place = rate, axes.transData
        if curve.x is None:  # holds everywhere: at the left border
            x, place = 0.012, axes.get_yaxis_transform()
        marker = hollow(curve.marker or "D")
        axes.plot([x], [mean], color=curve.colour, transform=place, **marker)
        axes.plot(
            [x, x],
            [mean - deviation, mean + deviation],
            color=curve.colour,
            linewidth=1,
            transform=place,
        )


def hollow(marker: str) -> dict[str, Any]:
    """The look of the paper's values, as arguments of `plot`."""
    return {
        "marker": marker,
        "markersize": 9,
        "markerfacecolor": "none",
        "markeredgewidth": 1.3,
        "linestyle": "none",
    }


def _cross(colour: str) -> dict[str, Any]:
    return {
        "marker": "x",
        "markersize": 7,
        "markeredgewidth": 1.8,
        "linestyle": "none",
        "color": colour,
    }


def draw_legend(axes: "Axes", curves: Sequence[Curve], title: str | None = None) -> None:
    """To the right of the axes, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    if any(curve.paper for curve in curves):
        handles += axes.plot([], [], color=GREY, **hollow("o"))
        labels.append("the paper's value")
    if any(curve.failed for curve in curves):
        handles += axes.plot([], [], **_cross(GREY))
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
        """Sets scale, limits and ticks.

        Args:
            axes: whose x axis it becomes.
            low, high: the first and the last rate shown; the limits lie a little further out.
            letter: how wide one is, as a share of the axis.
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
        """Names the axis, and adds another with q_beta at the same places on top."""
        axes.set_xlabel("freezing rate $q$")
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
        top.tick_params(labelsize=8, colors=GREY)
        top.minorticks_off()
        top.spines[["top", "right"]].set_visible(False)
        top.set_xlabel(r"real freezing rate $q_\beta$", fontsize=9, color=GREY)

    def _fitting(self, axes: "Axes", rates: Sequence[float], widths: Sequence[float]) -> set[float]:
        """The rates whose labels do not run into one another; the first and last come first."""
        left, right = self._position(np.array(axes.get_xlim()))
        places = (self._position(np.array(rates)) - left) / (right - left)
        order = [len(rates) - 1, 0, *range(len(rates) - 2, 0, -1)][: len(rates)]
        kept: list[int] = []
        for new in order:
            gaps = [abs(places[new] - places[old]) for old in kept]
            rooms = [(widths[new] + widths[old]) / 2 for old in kept]
            if all(gap > room for gap, room in zip(gaps, rooms, strict=True)):
                kept.append(new)
        return {rates[index] for index in kept}

    def _position(self, rates: np.ndarray) -> np.ndarray:
        return -np.log10(np.maximum(1 - rates, self._floor)) if self._is_log else rates

    def _rate(self, positions: np.ndarray) -> np.ndarray:
        return 1 - 10.0**-positions if self._is_log else positions


def limit_to_per_cent(axes: "Axes") -> None:
    """Cuts off what bands claim below 0 and above 100 %; markers at 100 % are still whole."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 0.0), min(high, 102.0))


def log_scale(axes: "Axes", values: np.ndarray) -> None:
    """A logarithmic scale; where there are zeros, it is linear next to zero, so that they show."""
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
    """The upper part of curves that spread wide: left, right, bottom, top; None where none do."""
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
    """Draws a region of the curves larger, where it covers the least of them.

    Args:
        axes: its curves are drawn and its limits final.
        curves: what is drawn there.
        region: left, right, bottom and top.
        set_x: sets limits, and scale and ticks if need be, of the inset's x axis.

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
    """Left, bottom, width and height, in shares of the axes, where few curves run."""
    points = np.concatenate([*_traces(axes, curves), np.empty((0, 2))])
    best, fewest = None, len(points) + 1
    for (width, height), left, bottom in itertools.product(
        _INSET_SIZES, _INSET_LEFTS, _INSET_BOTTOMS
    ):
        if left + width > 0.99 or bottom + height > 0.97:
            continue
        inside = (points >= (left - _ROOM_FOR_LABELS, bottom - _ROOM_FOR_LABELS)) & (
            points <= (left + width + 0.01, bottom + height + 0.02)
        )
        covered = int(inside.all(axis=1).sum())
        if covered < fewest:
            best, fewest = (left, bottom, width, height), covered
    assert best is not None
    return best


def _traces(axes: "Axes", curves: Sequence[Curve]) -> Iterator[np.ndarray]:
    """Points along curves, the borders of bands, and the paper's, in shares of the axes."""
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
