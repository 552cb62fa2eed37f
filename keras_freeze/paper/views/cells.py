"""What the tables of the views share: cells in Markdown."""

import math
from collections.abc import Iterable, Mapping, Sequence

from keras_freeze.paper.experiments.experiment import Experiment, Series
from keras_freeze.paper.experiments.markdown import markdown_table
from keras_freeze.paper.experiments.summary import (
    Point,
    as_per_cent,
    points_by_label,
    seeds_in_words,
)
from keras_freeze.paper.results import Results


def columns_of(
    experiment: Experiment,
    series: Iterable[Series],
    results: Results,
    quantity: str | None = None,
) -> dict[str, dict[float, Point]]:
    """Return the points of each series by label and rate."""
    columns = points_by_label(experiment, series, results, quantity)
    return {label: {p.rate: p for p in points} for label, points in columns.items()}


def rate_table(
    columns: Mapping[str, Mapping[float, Point]],
    decimals: int,
    paper: Mapping[tuple[str, float], tuple[float, float | None]],
) -> str:
    """Return a table with a row for each freezing rate and a column for each series."""
    rows = []
    for rate in sorted({rate for column in columns.values() for rate in column}):
        points = [column.get(rate) for column in columns.values()]
        best = _clear_best([point for point in points if point is not None])
        cells = [
            "" if point is None else cell(point, decimals, paper.get((label, rate)), point is best)
            for label, point in zip(columns, points, strict=True)
        ]
        rows.append([f"{rate:g}", *_trained_cells(points), *cells])
    return markdown_table(["q", "q_beta", "trained parameters", *columns], rows)


def _trained_cells(points: Iterable[Point | None]) -> list[str]:
    """Return q_beta and the number of trained parameters, of the first run that is finished."""
    for point in points:
        if point is not None and point.results:
            trained = point.results[0]["report"]["num_trained_parameters"]
            return [f"{point.real_rate:.4f}", f"{trained:,}"]
    return ["", ""]


def _clear_best(points: Sequence[Point]) -> Point | None:
    """Return the point above all others by more than both deviations, once all are complete."""
    if len(points) < 2 or any(len(p.values) < p.planned or len(p.values) < 2 for p in points):
        return None
    best = max(points, key=lambda point: point.mean)
    others = (point for point in points if point is not best)
    is_clear = all(best.mean - best.deviation > other.mean + other.deviation for other in others)
    return best if is_clear else None


def cell(
    point: Point,
    decimals: int,
    paper: tuple[float, float | None] | None = None,
    bold: bool = False,
) -> str:
    """Return mean and deviation, the number of runs where some are missing, the paper's value."""
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
        notes.append(f"paper {printed(paper)}")
    return f"{text} ({'; '.join(notes)})".strip() if notes else text


def printed(paper: tuple[float, float | None] | None) -> str:
    """Return a number of the paper as it is printed there."""
    if paper is None:
        return ""
    mean, deviation = paper
    return f"{mean}" if deviation is None else f"{mean} ± {deviation}"


def per_cent(share: float | None) -> str:
    """Return a share in per cent."""
    return "not finite" if share is None else f"{as_per_cent(share):.2f}"


def cells_are(quantity: str, experiment: Experiment) -> str:
    """Return what the cells of a table hold, as a sentence."""
    if experiment.seeds == 1:
        text = f"Cells: {quantity}, of one seed"
    else:
        text = (
            f"Cells: {quantity}, mean ± standard deviation over {seeds_in_words(experiment)}; in "
            "parentheses how many of them are finished where some are missing"
        )
    return text + ("; and the paper's value." if experiment.paper else ".")
