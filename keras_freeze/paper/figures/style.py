"""What all figures share: colors, grids and scales."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colors, which people with any kind of color vision can tell apart.
BLUE, ORANGE, GREEN, PURPLE, GRAY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555"
AMBER, SKY, BLACK = "#E69F00", "#56B4E9", "#000000"
COLORS = {
    "baseline": GRAY,
    "freezenet": BLUE,
    "freezenet-wd": PURPLE,
    "snip": ORANGE,
    "random": GREEN,
    "grasp": AMBER,
}
MARKERS = {
    "baseline": "",
    "freezenet": "o",
    "freezenet-wd": "D",
    "snip": "s",
    "random": "^",
    "grasp": "v",
}

# For series without a color; first those that stand for no method in the paper's curves.
OTHER_STYLES = (
    (SKY, "s"),
    (AMBER, "D"),
    (BLACK, "^"),
    (PURPLE, "v"),
    (GREEN, "P"),
    (ORANGE, "X"),
    (BLUE, "<"),
)


def new_figure(width: float, height: float) -> "Figure":
    """Return an empty figure, sized in inches."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def tidy(axes: "Axes", label: str) -> None:
    """Draw a grid behind the data, and make the x axis one of epochs."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    draw_grid(axes)


def draw_grid(axes: "Axes") -> None:
    """Draw a light grid behind the data, and remove the frame."""
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def plain_log_scale(axes: "Axes") -> None:
    """Make the y axis logarithmic, with ticks at 1, 2 and 5, written as decimals."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
