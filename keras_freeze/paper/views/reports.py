"""What an experiment came to, in Markdown: tables with the paper's numbers beside the measured."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from keras_freeze._utils.files import replacing
from keras_freeze._utils.text import duration
from keras_freeze.paper.experiments.experiment import Experiment
from keras_freeze.paper.results import Results
from keras_freeze.paper.views import VIEWS
from keras_freeze.paper.views.cells import columns_of
from keras_freeze.paper.views.figure import RATES_NOTE, plot_experiment

# What is shown of a run that diverged, by quantity.
_SHOWN_OF_DIVERGED: Mapping[str, str] = {
    "test_accuracy": "the accuracy shown is of the best epoch before, or of the start",
    "validation_accuracy": "the accuracy shown is of the best epoch before, if there was one",
    "training_accuracy": "such a run has no accuracy of its last epoch, and counts as not finite",
}


def markdown(
    experiment: Experiment, results: Results, *, figure: str | os.PathLike[str] | None = None
) -> str:
    """Describe an experiment and what its finished runs came to, as one section of Markdown.

    Args:
        experiment: the experiment, changed as its runs were.
        results: what has been run so far: all, a part or nothing.
        figure: path of its figure relative to the file that the section goes into. None: it has
            no figure.

    Returns:
        Heading, the paper's statement or the question, what was changed, the tables, how many of
        the runs are finished, and the versions used. It ends with a newline.

    Example:

    ```python
    print(markdown(EXPERIMENTS["lenet5_sizes"], Results("runs/reproduce/results.jsonl")))
    ```
    """
    heading = "The paper's statement" if experiment.is_of_paper else "The question"
    blocks = [
        f"## {experiment.heading}",
        f"{heading}: {experiment.statement}",
        f"Changed here: {'; '.join(experiment.changes) or 'nothing'}.",
        RATES_NOTE,
        *([] if figure is None else [f"![{experiment.title}]({figure})"]),
        *VIEWS[experiment.view].table(experiment, results),
        *_divergences(experiment, results),
        _colophon(experiment, results),
    ]
    return "\n\n".join(blocks) + "\n"


def write_report(
    experiments: Sequence[Experiment],
    results: Results,
    folder: str | os.PathLike[str],
) -> str:
    """Write report.md, a section for each experiment, and a figure of each beside it.

    Args:
        experiments: the experiments, changed as their runs were.
        results: what has been run so far. An experiment without a finished run has no figure.
        folder: the folder to write to; it is created. Existing files are replaced atomically.

    Returns:
        The text of report.md.

    Example:

    ```python
    results = sweep(experiment.runs, "runs/reproduce")
    write_report([experiment], results, "runs/reproduce")
    ```
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sections = []
    for experiment in experiments:
        figure = None
        if any(run in results for run in experiment.runs):
            figure = f"{experiment.name}.png"
            with replacing(folder / figure) as path:
                plot_experiment(experiment, results).savefig(path)
        sections.append(markdown(experiment, results, figure=figure))
    text = "\n".join(sections)
    with replacing(folder / "report.md") as path:
        path.write_text(text, encoding="utf-8")
    return text


def _divergences(experiment: Experiment, results: Results) -> list[str]:
    """Return which runs ended early, as a paragraph."""
    found = []
    for label, column in columns_of(experiment, experiment.series, results).items():
        for rate, point in column.items():
            count = sum(r.get("diverged_epoch") is not None for r in point.results)
            if count:
                found.append(f"{label} at q = {rate:g}, {count} of {len(point.results)} runs")
    if not found:
        return []
    shown = _SHOWN_OF_DIVERGED[experiment.quantity]
    return [f"The loss was no longer finite, which ended training; {shown}: {'; '.join(found)}."]


def _colophon(experiment: Experiment, results: Results) -> str:
    """Return how many runs are finished, how long they took, and the versions used."""
    runs = experiment.runs
    found = [results[run]["result"] for run in runs if run in results]
    text = f"Runs: {len(found)} of {len(runs)} finished"
    if not found:
        return f"{text}."
    seconds = sum(result.get("seconds", 0.0) for result in found)
    text += f", {duration(seconds)} of training in all." if seconds else "."
    versions: dict[str, dict[str, None]] = {}
    for result in found:
        for package, version in result.get("versions", {}).items():
            versions.setdefault(package, {})[version] = None
    packages = [f"{package} {' and '.join(numbers)}" for package, numbers in versions.items()]
    return f"{text} With {', '.join(packages)}." if packages else text
