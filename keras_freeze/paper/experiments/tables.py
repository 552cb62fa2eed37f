"""What an experiment came to, in Markdown: tables with the paper's numbers beside the measured."""

import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras

from keras_freeze._utils.files import replacing
from keras_freeze.paper import datasets, models
from keras_freeze.paper.experiments.catalog import REPORTED
from keras_freeze.paper.experiments.experiment import Experiment, Series
from keras_freeze.paper.experiments.summary import (
    QUANTITIES,
    Point,
    as_number,
    as_per_cent,
    best_in_validation,
    by_dataset,
    dense_mean,
    grasp_search,
    label_of_largest,
    points_at,
    points_of,
    seeds_in_words,
)
from keras_freeze.paper.runs import Results
from keras_freeze.paper.training import duration
from keras_freeze.reporting import PaperSize, paper_sizes, report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

YES, NO = "✓", "✗"

# Table 1 as printed.
_TABLE_1 = (
    ("standard", "D", "D", NO, NO, YES),
    ("pruned", "D (1 - q)", "D (1 - q)", YES, YES, NO),
    ("FreezeNet", "D", "D (1 - q)", YES, NO, YES),
)

# Of table 4, as printed: sparse gradients in training, additional hyperparameters.
_TABLE_4: Mapping[str, tuple[str, str]] = {
    "baseline": ("-", "-"),
    "snip": (YES, NO),
    "grasp": (YES, NO),
    "Connection-Learning": (NO, NO),
    "Dynamic-Network-Surgery": (NO, NO),
    "Learning-Compression": (NO, YES),
    "Sparse-Momentum": (NO, YES),
    "freezenet": (YES, NO),
}

# What is shown of a run that diverged, by quantity.
_SHOWN_OF_DIVERGED: Mapping[str, str] = {
    "test_accuracy": "the accuracy shown is of the best epoch before, or of the start",
    "validation_accuracy": "the accuracy shown is of the best epoch before, if there was one",
    "training_accuracy": "such a run has no accuracy of its last epoch, and counts as not finite",
}

# The share of the dense network's gradient from which a gradient flow is called faithful. The paper
# names none.
_FAITHFUL = 0.5


def markdown(
    experiment: Experiment, results: Results, *, figure: str | os.PathLike[str] | None = None
) -> str:
    """Describes an experiment and what its finished runs came to, as one section of Markdown.

    Args:
        experiment: the experiment, changed as its runs were.
        results: what has been run so far; nothing and a part will do.
        figure: where its picture is, seen from the file that the section goes into. None: there is
            no picture.

    Returns:
        Heading, the paper's statement, what was changed, the tables, how many of the runs are
        finished, and what with. It ends with a newline.

    Example:

    ```python
    print(markdown(EXPERIMENTS["lenet5_sizes"], Results("runs/reproduce/results.jsonl")))
    ```
    """
    blocks = [
        f"## {experiment.heading}",
        f"The paper's statement: {experiment.statement}",
        f"Changed here: {'; '.join(experiment.changes) or 'nothing'}.",
        *([] if figure is None else [f"![{experiment.title}]({figure})"]),
        *VIEWS[experiment.view](experiment, results),
        *_divergences(experiment, results),
        _colophon(experiment, results),
    ]
    return "\n\n".join(blocks) + "\n"


def write_report(
    experiments: Sequence[Experiment],
    results: Results,
    folder: str | os.PathLike[str],
    draw: "Callable[[Experiment, Results], Figure]",
) -> str:
    """Writes report.md, a section for each experiment, and a picture of each beside it.

    Args:
        experiments: the experiments, changed as their runs were.
        results: what has been run so far. An experiment without a finished run has no picture.
        folder: where to; it is created. A file that is there is replaced, as a whole or not at all.
        draw: makes the picture of an experiment: `keras_freeze.plots.plot_experiment`.

    Returns:
        The text of report.md.

    Example:

    ```python
    results = sweep(experiment.runs, "runs/reproduce")
    write_report([experiment], results, "runs/reproduce", keras_freeze.plots.plot_experiment)
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
                draw(experiment, results).savefig(path)
        sections.append(markdown(experiment, results, figure=figure))
    text = "\n".join(sections)
    with replacing(folder / "report.md") as path:
        path.write_text(text, encoding="utf-8")
    return text


def _rates(experiment: Experiment, results: Results) -> list[str]:
    """A row for each freezing rate, a column for each series; a table for each data set."""
    quantity = QUANTITIES[experiment.quantity]
    tables = [
        _rate_table(_columns(experiment, group, results), quantity.decimals, experiment.paper)
        for group in by_dataset(experiment.series)
    ]
    bold = (
        " Bold: the best of its row by more than its standard deviation and the other's together."
        if any("**" in table for table in tables)
        else ""
    )
    return [
        _cells_are(quantity.name, experiment) + bold,
        *tables,
        *_pruning(experiment, results),
    ]


def _relative(experiment: Experiment, results: Results) -> list[str]:
    """The same, divided by the mean of the dense network."""
    dense = dense_mean(experiment, results)
    relative = {
        label: {rate: point.relative_to(dense) for rate, point in column.items()}
        for label, column in _columns(experiment, experiment.series, results).items()
    }
    name = QUANTITIES[experiment.quantity].name
    if math.isnan(dense):
        text = f"The {name} relative to the dense network, which is not measured yet, or has none."
    else:
        name += f", divided by the dense network's mean of {dense:.4g}"
        text = _cells_are(name, experiment)
    how = (
        "The gradients are summed over the training data before their norm is taken, with "
        "BatchNormalization in training mode."
    )
    return [f"{text} {how}", _rate_table(relative, 2, {})]


def _flow_in_training(experiment: Experiment, results: Results) -> list[str]:
    """The gradient at some epochs of one run of each series, and what the runs came to."""
    blocks = [
        "L1 norm of the gradient per trained parameter: mean ± standard deviation over the batches "
        "of training data, of each series in the finished run with the lowest seed, after some of "
        "the epochs."
    ]
    for rate in experiment.rates:
        points = points_at(experiment, results, rate)
        flows = {label: _flow_by_epoch(point) for label, point in points.items()}
        epochs = sorted({epoch for flow in flows.values() for epoch in flow})
        rows = [
            [str(epoch), *(flow.get(epoch, "") for flow in flows.values())]
            for epoch in _some(epochs)
        ]
        blocks += [f"q = {rate:g}:", table(["epoch", *flows], rows)]
    return blocks + _rates(experiment, results)


def _best_series(experiment: Experiment, results: Results) -> list[str]:
    """All series, and for each rate which of them is best in validation."""
    validated = _columns(experiment, experiment.series, results, "validation_accuracy")
    tested = _columns(experiment, experiment.series, results, "test_accuracy")
    rows = []
    for rate in experiment.rates:
        best = label_of_largest({label: column[rate].mean for label, column in validated.items()})
        cells = ["", "", ""]
        if best is not None:
            cells = [best, *(_cell(columns[best][rate], 2) for columns in (validated, tested))]
        rows.append([f"{rate:g}", *cells])
    header = ["q", "best learning rate", "validation accuracy (%)", "test accuracy (%)"]
    return [
        *_rates(experiment, results),
        "The best learning rate by mean validation accuracy; the test set chooses nothing:",
        table(header, rows),
    ]


def _validation_curves(experiment: Experiment, results: Results) -> list[str]:
    """How good in validation, and after how many epochs nearly as good as the best."""
    blocks = [
        f"{_cells_are('best validation accuracy (%)', experiment)} And the mean number of epochs "
        "until it is within one percentage point of the best mean of the table."
    ]
    for rate in experiment.rates:
        points = points_at(experiment, results, rate, "validation_accuracy")
        best = label_of_largest({label: point.mean for label, point in points.items()})
        goal = points[best].mean - 1.0 if best else math.nan
        until = f"epochs until {goal:.2f} %" if best else "epochs"
        rows = [[label, _cell(p, 2), _epochs_until(goal, p)] for label, p in points.items()]
        blocks += [
            f"q = {rate:g}:",
            table(["learning rate", "validation accuracy (%)", until], rows),
        ]
    return blocks


def _best_run(experiment: Experiment, results: Results) -> list[str]:
    """A row for each seed; the run with the best validation accuracy is the result."""
    blocks = ["The result is the run with the best validation accuracy, in bold."]
    for label, column in _columns(experiment, experiment.series, results).items():
        for rate, point in column.items():
            best = best_in_validation(point)
            rows = [
                [
                    f"**{cell}**" if result is best else cell
                    for cell in (
                        str(result["seed"]),
                        str(result["best_epoch"]),
                        _per_cent(result["validation_accuracy"]),
                        _per_cent(result["test_accuracy"]),
                    )
                ]
                for result in point.results
            ]
            if (label, rate) in experiment.paper:
                rows.append(["the paper's best", "", "", _printed(experiment.paper[label, rate])])
            header = ["seed", "best epoch", "validation accuracy (%)", "test accuracy (%)"]
            blocks += [f"{label}, q = {rate:g}:", table(header, rows)]
    return blocks


def _costs(experiment: Experiment, results: Results) -> list[str]:
    """Table 1, measured."""
    dense = dense_mean(experiment, results)
    rows = [
        [label, f"{rate:g}", *_cost_cells(point, dense)]
        for label, column in _columns(experiment, experiment.series, results).items()
        for rate, point in column.items()
    ]
    marks = ["sparse gradients", "sparse tensor computations", "faithful gradient flow"]
    counts = ["total weights", "weights to store"]
    return [
        f"Means over {seeds_in_words(experiment)}; D is the number of the dense network's weights. "
        "Total weights: those that are not zero. Weights to store: those whose values a .freeze "
        "file holds; beside them the size of the whole file. Sparse gradients: the weights that "
        "one training step changed, ✓ if they are no more than those to be trained. Sparse tensor "
        "computations: ✓ if every frozen weight is zero. Gradient flow: the L1 norm per trained "
        f"parameter relative to the dense network's, ✓ from {_FAITHFUL:g} on, a limit of ours.",
        table(["method", "q", *counts, "file (bytes)", *marks], rows),
        "The paper's table, which was not measured:",
        table(["method", *counts, *marks], _TABLE_1),
    ]


def _sizes(experiment: Experiment, results: Results) -> list[str]:
    """Table 2: network sizes, exact and by the paper's rule, and accuracies."""
    columns = _columns(experiment, experiment.series, results)
    (dense,) = columns["baseline"].values()
    sizes = paper_sizes(*_weights_and_others(experiment), [dense.rate, *experiment.rates])
    rows = []
    for size in sizes:
        rate = size.freeze_rate
        labels = {label: "baseline" if rate == dense.rate else label for label in columns}
        points = {label: columns[labels[label]][rate] for label in ("SNIP", "FreezeNet")}
        paper = {label: experiment.paper.get((labels[label], rate)) for label in points}
        rows.append(
            [
                f"{rate:g}",
                *_size_cells(size, points["FreezeNet"]),
                *(_cell(point, 2, paper[label]) for label, point in points.items()),
                _ratio(points["FreezeNet"].mean, dense.mean),
                _ratio(_mean(paper["FreezeNet"]), _mean(experiment.paper.get(("baseline", 0.0)))),
            ]
        )
    header = ["q", "q_beta", "size (KiB)", "size, paper's rule", "compression factor"]
    header += ["factor, paper's rule", "SNIP", "FreezeNet", "FreezeNet / baseline", "the paper's"]
    return [
        f"{_cells_are(QUANTITIES[experiment.quantity].name, experiment)} Sizes: trained "
        "parameters as float32, without the mask; of FreezeNet as it was trained, or as it is to "
        "be. The paper's rule applies the rate to the biases as well, adds them once more, and "
        "divides rounded sizes.",
        table(header, rows),
    ]


def _pruning_methods(experiment: Experiment, results: Results) -> list[str]:
    """Table 4: the best run of each method, GraSP's out of its whole search; for each rate."""
    blocks = [
        "Of each method the run with the best validation accuracy over "
        f"{seeds_in_words(experiment)}, and its test accuracy. Sparse gradients and additional "
        "hyperparameters: as the paper says. GraSP's result is that of its whole search: below, of "
        "each learning rate and split of training and validation images the validation and the "
        "test accuracy (%) of the seed that is best in validation; in bold what is best in "
        "validation of all.",
    ]
    for rate in experiment.rates:
        points = points_at(experiment, results, rate)
        searched, winner = grasp_search(experiment, points)
        best = {label: best_in_validation(point) for label, point in points.items()}
        blocks += [f"q = {rate:g}:", _method_table(experiment, rate, best, searched, winner)]
        if searched:
            blocks += ["GraSP's search:", _search_table(searched, best, winner)]
    return blocks


def _method_table(
    experiment: Experiment,
    rate: float,
    best: Mapping[str, Mapping[str, Any] | None],
    searched: Sequence[Series],
    winner: str | None,
) -> str:
    """A row for each method, and for those that the paper reports where the rate is theirs."""
    is_papers = any(r == rate for _, r in experiment.paper)
    paper = {label: value for (label, r), value in experiment.paper.items() if r in (0.0, rate)}
    methods = {s.label: s.settings["method"] for s in experiment.series if s not in searched}
    if searched:
        label = winner or "GraSP"
        methods[label] = "grasp"
        if is_papers:
            paper[label] = (REPORTED["GraSP"][1], None)
    rows = [
        [
            label,
            *_TABLE_4.get(method, ("", "")),
            *_best_cells(best.get(label)),
            _printed(paper.get(label)),
        ]
        for label, method in methods.items()
    ]
    if is_papers:
        rows += [
            [
                f"{name} (as reported in the paper, not measured)",
                *_TABLE_4[name],
                f"{share:.1f}",
                "",
                f"{accuracy:.1f}",
            ]
            for name, (share, accuracy) in REPORTED.items()
            if name in _TABLE_4
        ]
    header = ["method", "sparse gradients in training", "additional hyperparameters"]
    header += ["trained weights (%)", "test accuracy (%)", "the paper's (%)"]
    return table(header, rows)


VIEWS: Mapping[str, Callable[[Experiment, Results], list[str]]] = {
    "rates": _rates,
    "relative": _relative,
    "flow_in_training": _flow_in_training,
    "best_series": _best_series,
    "validation_curves": _validation_curves,
    "best_run": _best_run,
    "costs": _costs,
    "sizes": _sizes,
    "pruning_methods": _pruning_methods,
}
"""The tables of an experiment by the name of its view: paragraphs and tables of Markdown."""


def _columns(
    experiment: Experiment,
    series: Iterable[Series],
    results: Results,
    quantity: str | None = None,
) -> dict[str, dict[float, Point]]:
    """The points of each series by rate."""
    return {
        s.label: {point.rate: point for point in points_of(experiment, s, results, quantity)}
        for s in series
    }


def _rate_table(
    columns: Mapping[str, Mapping[float, Point]],
    decimals: int,
    paper: Mapping[tuple[str, float], tuple[float, float | None]],
) -> str:
    rows = []
    for rate in sorted({rate for column in columns.values() for rate in column}):
        points = [column.get(rate) for column in columns.values()]
        best = _clear_best([point for point in points if point is not None])
        cells = [
            "" if point is None else _cell(point, decimals, paper.get((label, rate)), point is best)
            for label, point in zip(columns, points, strict=True)
        ]
        rows.append([f"{rate:g}", *_trained_cells(points), *cells])
    return table(["q", "q_beta", "trained parameters", *columns], rows)


def _trained_cells(points: Iterable[Point | None]) -> list[str]:
    """q_beta and the number behind it; a weight more or less of the at-least-one rule aside."""
    for point in points:
        if point is not None and point.results:
            trained = point.results[0]["report"]["num_trained_parameters"]
            return [f"{point.real_rate:.4f}", f"{trained:,}"]
    return ["", ""]


def _clear_best(points: Sequence[Point]) -> Point | None:
    """The point above all others by more than both deviations, once all are complete."""
    if len(points) < 2 or any(len(p.values) < p.planned or len(p.values) < 2 for p in points):
        return None
    best = max(points, key=lambda point: point.mean)
    others = (point for point in points if point is not best)
    is_clear = all(best.mean - best.deviation > other.mean + other.deviation for other in others)
    return best if is_clear else None


def _cell(
    point: Point,
    decimals: int,
    paper: tuple[float, float | None] | None = None,
    bold: bool = False,
) -> str:
    """Mean and deviation, how many runs they are of where some are missing, the paper's value."""
    text = ""
    if point.values:
        text = f"{point.mean:.{decimals}f}" if math.isfinite(point.mean) else "not finite"
    if len(point.values) > 1 and math.isfinite(point.mean):
        text += f" ± {point.deviation:.{decimals}f}"
    if bold:
        text = f"**{text}**"
    notes = []
    if 0 < len(point.values) < point.planned:
        notes.append(f"{len(point.values)} of {point.planned}")
    if paper is not None:
        notes.append(f"paper {_printed(paper)}")
    return f"{text} ({'; '.join(notes)})".strip() if notes else text


def _printed(paper: tuple[float, float | None] | None) -> str:
    if paper is None:
        return ""
    mean, deviation = paper
    return f"{mean}" if deviation is None else f"{mean} ± {deviation}"


def _mean(paper: tuple[float, float | None] | None) -> float:
    return math.nan if paper is None else paper[0]


def _pruning(experiment: Experiment, results: Results) -> list[str]:
    """What became of networks whose frozen weights had shrunk, when these were set to zero."""
    rows = []
    tested = _columns(experiment, experiment.series, results, "test_accuracy")
    for label, column in tested.items():
        for rate, point in column.items():
            checks = [r["pruning"] for r in point.results if r.get("pruning") is not None]
            if checks:
                pruned = point.with_values(as_per_cent(c["after"]["accuracy"]) for c in checks)
                largest = [as_number(check["largest_frozen_weight"]) for check in checks]
                cells = [_cell(point, 2), _cell(pruned, 2), _largest_of(largest)]
                rows.append([label, f"{rate:g}", *cells])
    if not rows:
        return []
    header = ["method", "q", "test accuracy (%)", "pruned (%)", "largest frozen weight"]
    return [
        "Frozen weights that were decayed: the largest that is left with the weights of the best "
        "epoch, in any of the seeds, and the test accuracy once they are set to zero.",
        table(header, rows),
    ]


def _largest_of(values: Sequence[float]) -> str:
    return f"{max(values):.2g}" if all(map(math.isfinite, values)) else "not finite"


def _flow_by_epoch(point: Point) -> dict[int, str]:
    """Mean and deviation of the first run's gradient, by the epochs that were trained before."""
    if not point.results:
        return {}
    flow = point.results[0]["flow"]
    pairs = zip(flow["gradient_flow"], flow["gradient_flow_deviation"], strict=True)
    cells = ["not finite" if None in pair else "{:.3g} ± {:.2g}".format(*pair) for pair in pairs]
    return dict(zip(flow["epoch"], cells, strict=True))


def _some(values: Sequence[int]) -> list[int]:
    """The first, the last, and a few between them."""
    last = len(values) - 1
    chosen = {round(last * share) for share in (0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)}
    return [values[index] for index in sorted(chosen)] if values else []


def _epochs_until(goal: float, point: Point) -> str:
    counts = []
    for result in point.results:
        curve = map(as_per_cent, result["history"]["val_accuracy"])
        counts += [epoch for epoch, value in enumerate(curve, start=1) if value >= goal][:1]
    if len(counts) < len(point.results):
        return f"reached by {len(counts)} of {len(point.results)}"
    return f"{statistics.fmean(counts):.1f}" if counts else ""


def _best_cells(result: Mapping[str, Any] | None) -> list[str]:
    if result is None:
        return ["", ""]
    counted = result["report"]
    share = 100.0 * counted["num_trained_weights"] / counted["num_weights"]
    return [f"{share:.1f}", _per_cent(result["test_accuracy"])]


def _search_table(
    searched: Iterable[Series],
    best: Mapping[str, Mapping[str, Any] | None],
    winner: str | None,
) -> str:
    """A row for each learning rate, a column for each split."""
    cells: dict[float, dict[str, str]] = {}
    for s in searched:
        result = best[s.label]
        cell = ""
        if result is not None:
            cell = " / ".join(_per_cent(result[f"{k}_accuracy"]) for k in ("validation", "test"))
        split = f"{1 / s.settings['validation_fraction'] - 1:.0f}/1"
        row = cells.setdefault(s.settings["learning_rate"], {})
        row[split] = f"**{cell}**" if s.label == winner else cell
    splits = list(dict.fromkeys(split for row in cells.values() for split in row))
    rows = [[f"{rate:g}", *(row[split] for split in splits)] for rate, row in cells.items()]
    return table(["learning rate", *splits], rows)


def _cost_cells(point: Point, dense: float) -> list[str]:
    if not point.results:
        return [""] * 6
    num_weights = point.results[0]["report"]["num_weights"]
    trained = max(result["report"]["num_trained_weights"] for result in point.results)
    total, stored, moved, size = (
        statistics.fmean(result[name] for result in point.results)
        for name in ("total_weights", "stored_weights", "moved_weights", "file_bytes")
    )
    relative = point.mean / dense
    return [
        _share_of(total, num_weights),
        _share_of(stored, num_weights),
        f"{size:,.0f}",
        f"{_mark(moved <= trained < num_weights)} {_share_of(moved, num_weights)}",
        _mark(total <= trained < num_weights),
        "" if math.isnan(relative) else f"{_mark(relative >= _FAITHFUL)} {relative:.2f}",
    ]


def _share_of(count: float, num_weights: int) -> str:
    return f"{count:,.0f} = {count / num_weights:.4f} D"


def _mark(is_so: bool) -> str:
    return YES if is_so else NO


def _weights_and_others(experiment: Experiment) -> tuple[int, int]:
    facts = datasets.info(experiment.dataset)
    zeros = keras.initializers.Zeros()
    build = models.MODELS[experiment.model]
    counted = report(build(facts.num_classes, facts.image_shape, initializer=zeros))
    return counted.num_weights, counted.num_other


def _size_cells(size: PaperSize, point: Point) -> list[str]:
    real_rate, kib, factor = size.real_freeze_rate, size.size_kib, size.compression_factor
    if point.results:
        counted = point.results[0]["report"]
        real_rate, kib = counted["real_freeze_rate"], counted["network_kib"]
        factor = counted["compression_factor"]
    return [
        f"{real_rate:.4f}",
        f"{kib:,.1f}",
        f"{size.paper_size:,.1f}",
        *("" if f is None else f"{f:.1f}" for f in (factor, size.paper_compression_factor)),
    ]


def _ratio(accuracy: float, dense: float) -> str:
    return f"{accuracy / dense:.3f}" if dense and math.isfinite(accuracy / dense) else ""


def _per_cent(share: float | None) -> str:
    return "not finite" if share is None else f"{as_per_cent(share):.2f}"


def _divergences(experiment: Experiment, results: Results) -> list[str]:
    """Which runs ended early, as a paragraph."""
    found = []
    for label, column in _columns(experiment, experiment.series, results).items():
        for rate, point in column.items():
            count = sum(r.get("diverged_epoch") is not None for r in point.results)
            if count:
                found.append(f"{label} at q = {rate:g}, {count} of {len(point.results)} runs")
    if not found:
        return []
    shown = _SHOWN_OF_DIVERGED[experiment.quantity]
    return [f"The loss was no longer finite, which ended training; {shown}: {'; '.join(found)}."]


def _colophon(experiment: Experiment, results: Results) -> str:
    """How many runs are finished, what they took, and what with."""
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


def _cells_are(quantity: str, experiment: Experiment) -> str:
    """What stands in the cells of a table, as a sentence."""
    if experiment.seeds == 1:
        text = f"Cells: {quantity}, of one seed"
    else:
        text = (
            f"Cells: {quantity}, mean ± standard deviation over {seeds_in_words(experiment)}; in "
            "parentheses how many of them are finished where some are missing"
        )
    return text + ("; and the paper's value." if experiment.paper else ".")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
