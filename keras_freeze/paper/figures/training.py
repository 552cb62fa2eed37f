"""Pictures of training runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze.paper.figures.style import (
    BLUE,
    COLOURS,
    GREY,
    ORANGE,
    new_figure,
    plain_log_scale,
    tidy,
)
from keras_freeze.paper.training import METHODS, TrainingResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DASHES = ("-", "--", "-.", ":")


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
    figure = new_figure(9.0, 3.6)
    panels = figure.subplots(1, 2)
    epochs = range(1, len(result.history["loss"]) + 1)
    for axes, quantity, scale in zip(panels, ("loss", "accuracy"), (1, 100), strict=True):
        for prefix, colour, dash in (("", GREY, "--"), ("val_", BLUE, "-")):
            values = scale * np.array(result.history[prefix + quantity])
            label = "validation" if prefix else "training"
            axes.plot(epochs, values, dash, color=colour, label=label, **_marker(epochs))
            if prefix and result.best_epoch:
                best = values[result.best_epoch - 1]
                axes.plot(
                    [result.best_epoch],
                    [best],
                    "o",
                    color=ORANGE,
                    markersize=7,
                    zorder=3,
                    label=f"best epoch: {result.best_epoch}",
                )
        tidy(axes, "accuracy (%)" if quantity == "accuracy" else "loss")
    plain_log_scale(panels[0])
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
    figure = new_figure(9.0, 3.6)
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
    tidy(curves, "validation accuracy (%)")
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


def _marker(epochs: Sequence[int]) -> dict[str, Any]:
    """A line through one point alone is invisible."""
    return {"marker": "o", "markersize": 4} if len(epochs) == 1 else {}


def _title_of(result: TrainingResult) -> str:
    return f"{result.model_name} on {result.dataset}"


def _label_of(result: TrainingResult) -> str:
    rate = "" if METHODS[result.method].freeze_rate is not None else f", q = {result.freeze_rate:g}"
    return f"{result.method}{rate}"


def _colour_of(result: TrainingResult) -> str:
    return COLOURS.get(result.method, GREY)
