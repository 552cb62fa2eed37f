"""The figure of an experiment."""

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from keras_freeze._utils.validation import check_instance, check_one_of
from keras_freeze.paper.experiments.experiment import Experiment
from keras_freeze.paper.results import Results
from keras_freeze.paper.views import VIEWS

if TYPE_CHECKING:
    from matplotlib.figure import Figure


RATES_NOTE = (
    "q: freezing rate, the share of the weights that are not trained. q_beta: real freezing rate, "
    "the share of all parameters that are not trained."
)


def plot_experiment(experiment: Experiment, results: Results) -> "Figure":
    """Draw what an experiment's runs came to, as the paper's figure of it.

    Means of the seeds have a band of one standard deviation, the paper's own numbers are hollow
    markers, and an inset shows the upper part of values that spread wide. Written below are what
    was changed of the paper's experiment and, where runs are missing, how many are finished.

    Args:
        experiment: one of `keras_freeze.experiments.EXPERIMENTS`, changed as its runs were.
        results: what has been run so far: all or a part of its runs.

    Returns:
        A matplotlib figure, 9 inches wide.

    Raises:
        TypeError: if an argument has another type.
        ValueError: if no run of the experiment is finished.
        ImportError: if matplotlib is missing.

    Example:

    ```python
    experiment = EXPERIMENTS["lenet5_extreme_rates"].changed(epochs=5)
    results = Results("runs/reproduce/results.jsonl")
    plot_experiment(experiment, results).savefig("figure2_right.png")
    ```
    """
    check_instance("experiment", experiment, Experiment, "a value of EXPERIMENTS")
    check_instance("results", results, Results, "a `keras_freeze.runs.Results`")
    runs = experiment.runs
    finished = sum(run in results for run in runs)
    if not finished:
        raise ValueError(
            f"Argument `results` must hold at least one run of {experiment.name}: run it "
            f"first, and pass it changed as its runs were. Received: {results.path}, with "
            f"{len(results)} runs, none of them among its {len(runs)}"
        )
    view = VIEWS[check_one_of("view", experiment.view, VIEWS)]
    figure, note = view.draw(experiment, results)
    notes = [note, RATES_NOTE]
    if experiment.changes:
        whose = "the paper's" if experiment.is_of_paper else "the full"
        notes.append(f"Changed of {whose} experiment: {'; '.join(experiment.changes)}.")
    if finished < len(runs):
        notes.append(f"Not complete: {finished} of {len(runs)} runs.")
    _add_texts(figure, experiment.heading, notes)
    return figure


def _add_texts(figure: "Figure", title: str, notes: Iterable[str]) -> None:
    figure.suptitle(textwrap.fill(title, 90), x=0.01, ha="left", fontsize=12)
    lines = [line for note in notes for line in textwrap.wrap(note, 140)]
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=8.5)
