"""Figures of masks."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze._utils.validation import check_instance
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.paper.figures.style import BLUE, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The largest number of cells per variable; each must be some pixels large to be seen.
_MAX_ROWS, _MAX_COLUMNS = 60, 200


def plot_mask(mask: FreezeMask) -> "Figure":
    """Draw a mask, one panel for each variable: dark where weights are trained.

    A dense kernel is drawn as a matrix, a convolution as a table of its filters, input channels
    against output channels. The longer side is horizontal. A matrix that is too large is drawn in
    cells, colored by the share of their weights that are trained; a single trained weight shows.

    Args:
        mask: a `FreezeMask`.

    Returns:
        A matplotlib figure.

    Raises:
        TypeError: if `mask` is not a `FreezeMask`.
        ImportError: if matplotlib is missing.

    Example:

    ```python
    plot_mask(keras_freeze.get_mask(model)).savefig("mask.png")
    ```
    """
    check_instance("mask", mask, FreezeMask, "a FreezeMask")
    num_columns = 1 if len(mask) <= 6 else 2 if len(mask) <= 20 else 3
    num_rows = max(1, math.ceil(len(mask) / num_columns))
    figure = new_figure(9.0 if num_columns == 1 else 6.5 * num_columns, 0.6 + 1.9 * num_rows)
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
    """Return a kernel as a matrix, what its rows and columns are, and how many belong together."""
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
    """Return the share of True in each cell of a boolean matrix.

    Args:
        matrix: a boolean array of two dimensions.
        max_rows, max_columns: the largest number of cells in each direction. A side that is not
            longer is left as it is.

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


def _white_to_blue() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    # The step from white to the first blue is wide, so that every cell with a trained weight shows.
    return LinearSegmentedColormap.from_list(
        "trained", [(0, "white"), (0.001, "#B8D8EC"), (0.5, BLUE), (1, "#00263D")]
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.1 else f"{100 * share:.0f}%"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
