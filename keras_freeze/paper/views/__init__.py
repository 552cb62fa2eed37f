"""How experiments are shown: one module per view, with its `table` and its `draw`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from keras_freeze.paper.experiments.experiment import Experiment
from keras_freeze.paper.results import Results
from keras_freeze.paper.views import (
    best_run,
    best_series,
    costs,
    flow_in_training,
    pruning_methods,
    rates,
    relative,
    sizes,
    spread,
    validation_curves,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class View(Protocol):
    """A module of this package."""

    def table(self, experiment: Experiment, results: Results) -> list[str]:
        """Return paragraphs and tables of Markdown."""

    def draw(self, experiment: Experiment, results: Results) -> tuple["Figure", str]:
        """Return a figure, and a note to write below it."""


VIEWS: Mapping[str, View] = {
    "rates": rates,
    "relative": relative,
    "flow_in_training": flow_in_training,
    "best_series": best_series,
    "validation_curves": validation_curves,
    "best_run": best_run,
    "costs": costs,
    "sizes": sizes,
    "spread": spread,
    "pruning_methods": pruning_methods,
}
"""The views by name."""
