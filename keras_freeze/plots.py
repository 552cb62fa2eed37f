"""Pictures of training runs and of masks, as matplotlib figures that touch no global state.

A figure saves itself: `plot_mask(mask).savefig("mask.png")`. Needs matplotlib, which
`pip install keras_freeze[plot]` brings.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze.mask import FreezeMask, MaskEntry
from keras_freeze.training import METHODS, TrainingResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any kind of colour vision can tell apart.
_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#555555"
_COLOURS = {
    "baseline": _GREY,
    "freezenet": _BLUE,
    "freezenet-wd": _PURPLE,
    "snip": _ORANGE,
    "random": _GREEN,
}
_DASHES = ("-", "--", "-.", ":")

# A picture of a mask has at most so many cells; each must be some pixels large to be seen.
_MAX_ROWS, _MAX_COLUMNS = 60, 200


def plot_history(result: TrainingResult) -> "Figure":
    """Draws loss and accuracy over the epochs, training and validation, the best epoch marked.

    Args:
        result: what `train` returned.

    Returns:
        A matplotlib figure.

    Raises:
        ImportError: if matplotlib is missing.

    Example:

    ```python
    plot_history(train("mnist_5k", "lenet_300_100", "freezenet", 0.99)).savefig("curves.png")
    ```
    """
    figure = _new_figure(9.0, 3.6)
    panels = figure.subplots(1, 2)
    epochs = range(1, len(result.history["loss"]) + 1)
    for axes, quantity, scale in zip(panels, ("loss", "accuracy"), (1, 100), strict=True):
        for prefix, colour, dash in (("", _GREY, "--"), ("val_", _BLUE, "-")):
            values = scale * np.array(result.history[prefix + quantity])
            label = "validation" if prefix else "training"
            axes.plot(epochs, values, dash, color=colour, label=label, **_marker(epochs))
            if prefix and result.best_epoch:
                best = values[result.best_epoch - 1]
                axes.plot(
                    [result.best_epoch],
                    [best],
                    "o",
                    color=_ORANGE,
                    markersize=7,
                    zorder=3,
                    label=f"best epoch: {result.best_epoch}",
                )
        _tidy(axes, "accuracy (%)" if quantity == "accuracy" else "loss")
    _plain_log_scale(panels[0])
    panels[0].legend(frameon=False)
    figure.suptitle(
        f"{_title_of(result)}, {_label_of(result)}: test accuracy {result.test_accuracy:.1%}"
    )
    return figure


def plot_comparison(results: Sequence[TrainingResult]) -> "Figure":
    """Draws several runs side by side: validation accuracy over the epochs, and test accuracy.

    Args:
        results: what `train` returned, at least once; best of one network and data set.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: if `results` is empty.
        ImportError: if matplotlib is missing.

    Example:

    ```python
    methods = ("baseline", "freezenet", "snip")
    plot_comparison([train("mnist_5k", "lenet_5_caffe", m, 0.999) for m in methods])
    ```
    """
    if not results:
        raise ValueError("results must hold at least one run. Received: results=[]")
    figure = _new_figure(9.0, 3.6)
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, result in enumerate(results):
        accuracies = 100 * np.array(result.history["val_accuracy"])
        epochs = range(1, len(accuracies) + 1)
        dash = _DASHES[number % len(_DASHES)]
        colour = _colour_of(result)
        curves.plot(
            epochs, accuracies, dash, color=colour, label=_label_of(result), **_marker(epochs)
        )
        bars.barh(number, 100 * result.test_accuracy, color=colour, height=0.6)
        bars.text(
            100 * result.test_accuracy + 1.5, number, f"{result.test_accuracy:.1%}", va="center"
        )
    _tidy(curves, "validation accuracy (%)")
    curves.set_ylim(0, 100)
    bars.set_yticks(range(len(results)), [_label_of(result) for result in results])
    bars.tick_params(axis="y", length=0)
    bars.invert_yaxis()
    bars.set_xlim(0, 118)
    bars.set_xticks(range(0, 101, 20))
    bars.set_xlabel("test accuracy (%)")
    bars.spines[["top", "right"]].set_visible(False)
    figure.legend(
        *curves.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=min(len(results), 4),
        frameon=False,
    )
    figure.suptitle(" / ".join(dict.fromkeys(_title_of(result) for result in results)))
    return figure


def plot_mask(mask: FreezeMask) -> "Figure":
    """Draws the mask, one picture for each variable: dark where weights are trained.

    A dense kernel is drawn as the matrix it is; a convolution as a table of its filters, input
    channels against output channels. The longer side lies across. A matrix that is too large is
    drawn in cells, coloured by the share of their weights that are trained; a single one is seen.

    Args:
        mask: a `FreezeMask`.

    Returns:
        A matplotlib figure.

    Raises:
        TypeError: if `mask` is no `FreezeMask`.
        ImportError: if matplotlib is missing.

    Example:

    ```python
    plot_mask(keras_freeze.get_mask(model)).savefig("mask.png")
    ```
    """
    if not isinstance(mask, FreezeMask):
        raise TypeError(f"mask must be a FreezeMask. Received: mask={mask!r}")
    num_columns = 1 if len(mask) <= 6 else 2 if len(mask) <= 20 else 3
    num_rows = max(1, math.ceil(len(mask) / num_columns))
    figure = _new_figure(9.0 if num_columns == 1 else 6.5 * num_columns, 0.6 + 1.9 * num_rows)
    panels = figure.subplots(num_rows, num_columns, squeeze=False).flatten()
    for axes, entry in zip(panels, mask.entries, strict=False):
        _draw_entry(axes, entry)
    for axes in panels[len(mask) :]:
        axes.set_axis_off()
    figure.suptitle(
        f"Trained: {mask.num_trained:,} of {mask.num_weights:,} weights "
        f"(freezing rate {mask.freeze_rate:.6g})"
    )
    return figure


def _draw_entry(axes: "Axes", entry: MaskEntry) -> None:
    picture, labels, blocks = _as_picture(entry.trained)
    if picture.shape[0] > picture.shape[1]:
        picture, labels, blocks = picture.T, labels[::-1], blocks[::-1]
    shares = cell_shares(picture, _MAX_ROWS, _MAX_COLUMNS)
    in_cells = shares.shape != picture.shape
    image = axes.imshow(
        # A root of the share: otherwise one trained weight in a cell of fifty would be invisible.
        np.sqrt(shares),
        cmap=_white_to_blue(),
        vmin=0,
        vmax=max(np.sqrt(shares).max(initial=0), 1e-9) if in_cells else 1,
        aspect="auto",
        interpolation="nearest",
        extent=(0, picture.shape[1], picture.shape[0], 0),
    )
    if in_cells and shares.any():
        top = shares.max()
        bar = axes.figure.colorbar(image, ax=axes, pad=0.01, aspect=8)
        bar.set_ticks(
            [0, math.sqrt(top / 4), math.sqrt(top)], labels=["0", _percent(top / 4), _percent(top)]
        )
        bar.ax.tick_params(labelsize=7)
        bar.set_label("trained", fontsize=7)
    if not in_cells:
        for axis, size, block in zip("yx", picture.shape, blocks, strict=True):
            if block > 1:
                draw = axes.axhline if axis == "y" else axes.axvline
                for position in range(block, size, block):
                    draw(position, color="#BBBBBB", linewidth=0.5)
    shape = " x ".join(str(length) for length in entry.trained.shape)
    count = int(np.count_nonzero(entry.trained))
    share = count / entry.trained.size if entry.trained.size else 0.0
    axes.set_title(
        f"{entry.path}  ({shape}):  {count:,} of {entry.trained.size:,} trained, {_percent(share)}",
        fontsize=9,
        loc="left",
    )
    axes.set_ylabel(labels[0], fontsize=8)
    axes.set_xlabel(labels[1], fontsize=8)
    axes.set_xticks([])
    axes.set_yticks([])


def _as_picture(trained: np.ndarray) -> tuple[np.ndarray, tuple[str, str], tuple[int, int]]:
    """A kernel as a matrix, what its rows and columns are, and how many belong together."""
    if trained.ndim < 2:
        return trained.reshape(1, -1), ("", _count(trained.size, "value")), (1, 1)
    *spatial, inputs, outputs = trained.shape
    labels = (_count(inputs, "input"), _count(outputs, "output"))
    if len(spatial) == 2:
        height, width = spatial
        table = trained.transpose(2, 0, 3, 1)
        return table.reshape(inputs * height, outputs * width), labels, (height, width)
    window = math.prod(spatial)
    table = trained.reshape(window, inputs, outputs).transpose(1, 0, 2)
    return table.reshape(inputs * window, outputs), labels, (window, 1)


def cell_shares(matrix: np.ndarray, max_rows: int, max_columns: int) -> np.ndarray:
    """Divides a boolean matrix into at most so many cells; gives the share of True in each.

    Args:
        matrix: a boolean array of two dimensions.
        max_rows, max_columns: how many cells there may be each way. A side that is not longer is
            left as it is.

    Returns:
        A float64 array, the matrix itself where it is small enough. The cells at the lower and
        right border may be smaller than the others.

    Example:
        >>> cell_shares(np.array([[True, False, True]]), 1, 2)
        array([[0.5, 1. ]])
    """
    counts = matrix.astype(np.float64)
    sizes = np.ones_like(counts)
    for axis, limit in enumerate((max_rows, max_columns)):
        step = max(1, math.ceil(matrix.shape[axis] / limit))
        starts = np.arange(0, matrix.shape[axis], step)
        counts = np.add.reduceat(counts, starts, axis=axis)
        sizes = np.add.reduceat(sizes, starts, axis=axis)
    return counts / sizes


def _new_figure(width: float, height: float) -> "Figure":
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install keras_freeze[plot]") from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def _white_to_blue() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    # The step from white to the first blue is wide, so that every cell with a trained weight shows.
    return LinearSegmentedColormap.from_list(
        "trained", [(0, "white"), (0.001, "#B8D8EC"), (0.5, _BLUE), (1, "#00263D")]
    )


def _tidy(axes: "Axes", label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("epoch")
    axes.set_ylabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _plain_log_scale(axes: "Axes") -> None:
    """A logarithmic scale with ticks at 1, 2 and 5, written as decimals."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def _marker(epochs: Sequence[int]) -> dict[str, Any]:
    """A line through one point alone is invisible."""
    return {"marker": "o", "markersize": 4} if len(epochs) == 1 else {}


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.1 else f"{100 * share:.0f}%"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _title_of(result: TrainingResult) -> str:
    return f"{result.model_name} on {result.dataset}"


def _label_of(result: TrainingResult) -> str:
    rate = "" if METHODS[result.method].freeze_rate is not None else f", q = {result.freeze_rate:g}"
    return f"{result.method}{rate}"


def _colour_of(result: TrainingResult) -> str:
    return _COLOURS.get(result.method, _GREY)
