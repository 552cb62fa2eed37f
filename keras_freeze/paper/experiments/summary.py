"""The points of an experiment's figure: means and deviations of its finished runs."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from keras_freeze.paper.experiments.experiment import Experiment, Series
from keras_freeze.paper.results import Results


class Quantity(NamedTuple):
    """What can be shown of a run.

    Attributes:
        name: for axes and table heads, with the unit.
        of: returns its value in the "result" of a run; NaN where the run has none.
        decimals: number of decimals that are printed.
    """

    name: str
    of: Callable[[Mapping[str, Any]], float]
    decimals: int


def as_number(value: float | None) -> float:
    """Return a number of a record, which holds None for one that is not finite."""
    return math.nan if value is None else float(value)


def as_per_cent(share: float | None) -> float:
    """Return a share of a record in per cent."""
    return 100.0 * as_number(share)


def _training_accuracy(result: Mapping[str, Any]) -> float:
    """Return that of the last epoch, which a run that diverged does not have."""
    accuracies = result["history"]["accuracy"]
    if result.get("diverged_epoch") is not None or not accuracies:
        return math.nan
    return as_per_cent(accuracies[-1])


QUANTITIES: Mapping[str, Quantity] = {
    "test_accuracy": Quantity(
        "test accuracy (%)", lambda result: as_per_cent(result["test_accuracy"]), 2
    ),
    "validation_accuracy": Quantity(
        "validation accuracy (%)", lambda result: as_per_cent(result["validation_accuracy"]), 2
    ),
    "training_accuracy": Quantity("training accuracy of the last epoch (%)", _training_accuracy, 2),
    "gradient_flow": Quantity(
        "L1 norm of the gradient per trained parameter",
        lambda result: as_number(result["gradient_flow"]),
        3,
    ),
}
"""The quantities by name."""


@dataclass(frozen=True)
class Point:
    """The finished runs at one freezing rate of one series.

    Attributes:
        rate: the freezing rate q.
        real_rate: q_beta; NaN without a finished run.
        values: the quantity, by seed.
        results: the "result" of each of these runs, in the same order.
        planned: number of runs, finished or not.
    """

    rate: float
    real_rate: float
    values: tuple[float, ...]
    results: tuple[Mapping[str, Any], ...]
    planned: int

    @property
    def mean(self) -> float:
        """The mean over the seeds; NaN without a finished run, or where one has no finite value."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """The sample's standard deviation; 0 for one value, NaN where the mean is not finite."""
        if not math.isfinite(self.mean):
            return math.nan
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def with_values(self, values: Iterable[float]) -> "Point":
        """Return the same runs with other values."""
        return replace(self, values=tuple(values))

    def relative_to(self, dense: float) -> "Point":
        """Return the point divided by the dense network's mean; without values if that is NaN."""
        return self.with_values(() if math.isnan(dense) else (v / dense for v in self.values))


def points_of(
    experiment: Experiment, series: Series, results: Results, quantity: str | None = None
) -> list[Point]:
    """Return the points of one series, by rate, finished or not.

    Args:
        experiment: the experiment, changed as its runs were.
        series: one of its series.
        results: what has been run so far.
        quantity: a name of `QUANTITIES`; None for the experiment's own.
    """
    of = QUANTITIES[experiment.quantity if quantity is None else quantity].of
    points = []
    for rate in experiment.rates_of(series):
        runs = experiment.runs_of(series, rate)
        found = tuple(results[run]["result"] for run in runs if run in results)
        real = found[0]["report"]["real_freeze_rate"] if found else math.nan
        points.append(Point(rate, real, tuple(map(of, found)), found, len(runs)))
    return points


def points_by_label(
    experiment: Experiment,
    series: Iterable[Series],
    results: Results,
    quantity: str | None = None,
) -> dict[str, list[Point]]:
    """Return the points of several series by label.

    Args:
        experiment, results, quantity: as in `points_of`.
        series: some of its series.
    """
    return {s.label: points_of(experiment, s, results, quantity) for s in series}


def points_at(
    experiment: Experiment, results: Results, rate: float, quantity: str | None = None
) -> dict[str, Point]:
    """Return the points of all series at one freezing rate, and the dense network's, by label.

    Args:
        experiment, results, quantity: as in `points_of`.
        rate: one of the experiment's.
    """
    return {
        series.label: point
        for series in experiment.series
        for point in points_of(experiment, series, results, quantity)
        if point.rate == rate or is_dense(series)
    }


def is_dense(series: Series) -> bool:
    """Return whether it is the dense network, which has no freezing rate to be compared at."""
    return series.rates == (0.0,)


def dense_mean(experiment: Experiment, results: Results) -> float:
    """Return the mean of the series "baseline"; NaN where it is unknown or 0.

    Args:
        experiment, results: as in `points_of`.
    """
    (dense,) = (s for s in experiment.series if s.label == "baseline")
    (point,) = points_of(experiment, dense, results)
    return point.mean if point.mean and math.isfinite(point.mean) else math.nan


def best_in_validation(point: Point) -> Mapping[str, Any] | None:
    """Return the first result with the best validation accuracy; None without a finished run."""
    return max(point.results, key=_validation_accuracy, default=None)


def _validation_accuracy(result: Mapping[str, Any]) -> float:
    accuracy = result["validation_accuracy"]
    return -math.inf if accuracy is None else accuracy


def label_of_largest(values: Mapping[str, float]) -> str | None:
    """Return the first label with the largest value; None if no value is finite."""
    finite = [label for label, value in values.items() if math.isfinite(value)]
    return max(finite, key=values.__getitem__, default=None)


def grasp_search(
    experiment: Experiment, points: Mapping[str, Point]
) -> tuple[list[Series], str | None]:
    """Return GraSP's series in a comparison of methods, and the label of the best one.

    Args:
        experiment: the comparison (table 4).
        points: at one freezing rate, by label.

    Returns:
        The series, and the label of the one with the best run in validation, or None.
    """
    searched = [s for s in experiment.series if s.settings["method"] == "grasp"]
    best = {s.label: best_in_validation(points[s.label]) for s in searched}
    accuracies = {
        label: _validation_accuracy(result) for label, result in best.items() if result is not None
    }
    return searched, label_of_largest(accuracies)


def by_dataset(series: Iterable[Series]) -> list[list[Series]]:
    """Return the series in groups that share a data set."""
    groups: dict[Any, list[Series]] = {}
    for s in series:
        groups.setdefault(s.settings.get("dataset"), []).append(s)
    return list(groups.values())


def seeds_in_words(experiment: Experiment) -> str:
    """Return the number of seeds in words."""
    return "one seed" if experiment.seeds == 1 else f"{experiment.seeds} seeds"
