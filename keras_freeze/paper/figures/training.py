"""Figures of training runs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze._utils.validation import value_error
from keras_freeze.paper.figures.style import (
    BLUE,
    COLORS,
    GRAY,
    ORANGE,
    new_figure,
    plain_log_scale,
    tidy,
)
from keras_freeze.paper.recipes import METHODS
from keras_freeze.paper.titles import title_of
from keras_freeze.paper.training_result import TrainingResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DASHES = ("-", "--", "-.", ":")


def plot_history(result: TrainingResult) -> "Figure":
    """Draw loss and accuracy over the epochs, training and validation, the best epoch marked.

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
        for prefix, color, dash in (("", GRAY, "--"), ("val_", BLUE, "-")):
            values = scale * np.array(result.history[prefix + quantity])
            label = "validation" if prefix else "training"
            axes.plot(epochs, values, dash, color=color, label=label, **_marker(epochs))
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
    figure.supxlabel(_explanation([result]), x=0.99, ha="right", fontsize=8)
    return figure


def plot_comparison(results: Sequence[TrainingResult]) -> "Figure":
    """Draw several runs side by side: validation accuracy over the epochs, and test accuracy.

    Args:
        results: what `train` returned, at least one; best of one network and data set.

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
        raise value_error("results", results, "at least one result")
    figure = new_figure(9.0, 3.6)
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, result in enumerate(results):
        accuracies = 100 * np.array(result.history["val_accuracy"])
        epochs = range(1, len(accuracies) + 1)
        dash = _DASHES[number % len(_DASHES)]
        color = _color_of(result)
        curves.plot(
            epochs, accuracies, dash, color=color, label=_label_of(result), **_marker(epochs)
        )
        bars.barh(number, 100 * result.test_accuracy, color=color, height=0.6)
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
        title=_explanation(results),
        title_fontsize=8,
    )
    figure.suptitle(" / ".join(dict.fromkeys(_title_of(result) for result in results)))
    return figure


def _explanation(results: Sequence[TrainingResult]) -> str:
    """Say what q is, if a label has it."""
    has_rates = any(METHODS[result.method].freeze_rate is None for result in results)
    return "q: freezing rate, the share of the weights that are not trained" if has_rates else ""


def _marker(epochs: Sequence[int]) -> dict[str, Any]:
    """Return a marker for a single point, which a line does not show."""
    return {"marker": "o", "markersize": 4} if len(epochs) == 1 else {}


def _title_of(result: TrainingResult) -> str:
    return f"{title_of(result.model_name)} on {title_of(result.dataset)}"


def _label_of(result: TrainingResult) -> str:
    rate = "" if METHODS[result.method].freeze_rate is not None else f", q = {result.freeze_rate:g}"
    return f"{title_of(result.method)}{rate}"


def _color_of(result: TrainingResult) -> str:
    return COLORS.get(result.method, GRAY)
