"""What an experiment is: curves over freezing rates, each point a mean over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from keras_freeze._utils.validation import check_int, type_error, value_error
from keras_freeze.masks.selection import check_freeze_rate
from keras_freeze.paper.recipes import recipe_for
from keras_freeze.paper.run import SETTINGS, Run
from keras_freeze.paper.titles import title_of

BEYOND = "Beyond the paper"
"""The source of experiments that the paper does not have."""


@dataclass(frozen=True)
class Series:
    """One curve of a figure, or one column of a table.

    Attributes:
        label: its name there.
        settings: what its runs differ in from those of other series: settings of `Run` by name.
        rates: the only freezing rates it has. None: those of the experiment.
    """

    label: str
    settings: Mapping[str, Any]
    rates: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Experiment:
    """One figure or table of the paper, or one that it does not have.

    Attributes:
        name: its name on the command line.
        source: its number in the paper, or `BEYOND`.
        title: its subject, in a few words.
        statement: what the paper says that it shows; beyond the paper, what it is to tell.
        dataset, model: what all runs share, as `keras_freeze.runs.Run` takes them, unless a series
            says otherwise.
        series: the curves or columns.
        rates: the freezing rates.
        quantity: what is shown of each run, a name of `QUANTITIES`.
        view: how it is shown, a name of `keras_freeze.paper.views.VIEWS`.
        seeds: number of seeds; the runs of all series share seeds 0, 1, 2, ...
        settings: other settings of `Run` that all runs share, by name.
        paper: the paper's numbers, mean and standard deviation (or None), by label and rate, in
            the unit that the quantity is shown in.
        changes: what was changed of it, in words.
    """

    name: str
    source: str
    title: str
    statement: str
    dataset: str
    model: str
    series: tuple[Series, ...]
    rates: tuple[float, ...]
    quantity: str = "test_accuracy"
    view: str = "rates"
    seeds: int = 5
    settings: Mapping[str, Any] = field(default_factory=dict)
    paper: Mapping[tuple[str, float], tuple[float, float | None]] = field(default_factory=dict)
    changes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """Number, title and network, for tables and figures."""
        network = title_of(self.model)
        if not self.compares_datasets:
            network = f"{network} on {title_of(self.dataset)}"
        return f"{self.source}: {self.title} ({network})"

    @property
    def is_of_paper(self) -> bool:
        """Whether the paper has it."""
        return self.source != BEYOND

    @property
    def compares_datasets(self) -> bool:
        """Whether its series are on different data sets."""
        return any("dataset" in series.settings for series in self.series)

    def rates_of(self, series: Series) -> tuple[float, ...]:
        """Return the freezing rates of one series."""
        return self.rates if series.rates is None else series.rates

    def runs_of(self, series: Series, rate: float) -> list[Run]:
        """Return the runs behind one point, one for each seed."""
        settings = {
            "dataset": self.dataset,
            "model": self.model,
            **self.settings,
            **series.settings,
        }
        return [Run(freeze_rate=rate, seed=seed, **settings) for seed in range(self.seeds)]

    @property
    def runs(self) -> list[Run]:
        """All runs, each once; first those of seed 0, so that a part of them is a whole figure."""
        columns = [
            self.runs_of(series, rate) for series in self.series for rate in self.rates_of(series)
        ]
        return list(dict.fromkeys(run for row in zip(*columns, strict=True) for run in row))

    def changed(
        self,
        *,
        seeds: int | None = None,
        rates: Sequence[float] | None = None,
        **settings: Any,
    ) -> "Experiment":
        """Return the experiment with less work or on another network; `changes` says so in words.

        Args:
            seeds: number of seeds.
            rates: freezing rates instead of the experiment's; series with other rates, such as the
                dense baseline, keep them.
            **settings: settings of `keras_freeze.runs.Run` for all runs, such as `epochs` (the
                schedule is shortened in proportion), `steps_per_epoch`, or another `model` or
                `dataset` than the paper's, whose numbers are then left out. None changes nothing.

        Raises:
            ValueError, TypeError: for unknown names, numbers out of range, and another data set
                where the experiment compares data sets.

        Example:
            >>> EXPERIMENTS["lenet5_extreme_rates"].changed(seeds=2).changes
            ('2 of 5 seeds',)
        """
        if not _SHARED.issuperset(settings):
            raise TypeError(f"changed() got an unexpected argument among: {', '.join(settings)}")
        result = self
        for name in sorted(settings, key=SETTINGS.index):
            if settings[name] is not None:
                result = result._with_setting(name, settings[name])
        changes = list(result.changes)
        if seeds is not None:
            seeds = check_int("seeds", seeds, minimum=1)
            if seeds != self.seeds:
                changes.append(f"{seeds} of {self.seeds} seeds")
            result = replace(result, seeds=seeds)
        if rates is not None:
            chosen = _check_rates(rates)
            if chosen != self.rates:
                changes.append("rates " + ", ".join(f"{rate:g}" for rate in chosen))
            result = replace(result, rates=chosen)
        return replace(result, changes=tuple(changes))

    def _with_setting(self, name: str, value: Any) -> "Experiment":
        if name == "dataset" and value != self.dataset and self.compares_datasets:
            raise value_error(name, value, f"None for {self.name}, which compares data sets")
        if name in ("dataset", "model"):
            result = replace(self, **{name: value})
        else:
            result = replace(self, settings={**self.settings, name: value})
        runs = [experiment.runs_of(experiment.series[0], 0.5)[0] for experiment in (self, result)]
        usual, value = (getattr(run, name) for run in runs)  # a Run has checked it
        if name == "epochs":
            usual = recipe_for(self.dataset).epochs
        if value == usual:
            return result
        if name in ("dataset", "model"):
            change = f"{title_of(value)} instead of {title_of(usual)}"
            result = replace(result, paper={})
        elif name == "epochs":
            change = f"{value} of {usual} epochs, the schedule shortened in proportion"
        elif name == "steps_per_epoch":
            change = f"only the first {value} batches of training, validation and test images"
        else:
            change = f"{name.replace('_', ' ')} {value}"
        return replace(result, changes=(*self.changes, change))


# What the runs of an experiment may have in common.
_SHARED = {*SETTINGS} - {"method", "freeze_rate", "seed", "measure"}


def _check_rates(rates: Sequence[float]) -> tuple[float, ...]:
    if isinstance(rates, (str, Real)):
        raise type_error("rates", rates, "a sequence of freezing rates")
    chosen = tuple(sorted({check_freeze_rate(rate) for rate in rates}))
    if not chosen:
        raise value_error("rates", rates, "at least one freezing rate")
    return chosen
