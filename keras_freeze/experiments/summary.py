"""The points of an experiment's figure: what its finished runs came to."""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from keras_freeze.experiments.experiment import Experiment, Series
from keras_freeze.runs import Results


class Quantity(NamedTuple):
    """What can be shown of a run.

    Attributes:
        name: for axes and table heads, with the unit.
        of: its value in the "result" of a run; NaN where the run has none.
        decimals: how many are printed.
    """

    name: str
    of: Callable[[Mapping[str, Any]], float]
    decimals: int


def _number(value: float | None) -> float:
    """The records of runs write a number that is not finite as None."""
    return math.nan if value is None else float(value)


def _per_cent(value: float | None) -> float:
    return 100.0 * _number(value)


QUANTITIES: Mapping[str, Quantity] = {
    "test_accuracy": Quantity(
        "test accuracy (%)", lambda result: _per_cent(result["test_accuracy"]), 2
    ),
    "validation_accuracy": Quantity(
        "validation accuracy (%)", lambda result: _per_cent(result["validation_accuracy"]), 2
    ),
    "training_accuracy": Quantity(
        "training accuracy of the last epoch (%)",
        lambda result: _per_cent(result["history"]["accuracy"][-1]),
        2,
    ),
    "gradient_flow": Quantity(
        "L1 norm of the gradient per trained parameter",
        lambda result: _number(result["gradient_flow"]),
        3,
    ),
}
"""The quantities by name."""


@dataclass(frozen=True)
class Point:
    """What the finished runs at one freezing rate of one series came to.

    Attributes:
        rate, real_rate: q that was asked for, and q_beta; NaN without a finished run.
        values: of the quantity, by seed.
        results: the "result" of each of these runs, in the same order.
        planned: how many runs there should be.
    """

    rate: float
    real_rate: float
    values: tuple[float, ...]
    results: tuple[Mapping[str, Any], ...]
    planned: int

    @property
    def mean(self) -> float:
        """Over the seeds; NaN without a finished run, or where one has no finite value."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """The sample's standard deviation; 0 for one value, NaN where the mean is."""
        if math.isnan(self.mean):
            return math.nan
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


def points_of(
    experiment: Experiment, series: Series, results: Results, quantity: str | None = None
) -> list[Point]:
    """The points of one series, by rate, finished or not.

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
