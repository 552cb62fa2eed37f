"""What an experiment is: curves over freezing rates, each point a mean over seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any

from keras_freeze.masks.selection import check_freeze_rate
from keras_freeze.paper import datasets, models
from keras_freeze.paper.runs import Run
from keras_freeze.paper.training import check_choice, recipe_for


@dataclass(frozen=True)
class Series:
    """One curve of a figure, or one column of a table.

    Attributes:
        label: its name there.
        settings: what its runs differ in from those of other series: fields of `Run`.
        rates: the only freezing rates it has; None for those of the experiment.
    """

    label: str
    settings: Mapping[str, Any]
    rates: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Experiment:
    """One figure or table of the paper.

    Attributes:
        name: what it is called on the command line.
        source: its number in the paper.
        title: what it is about, in a few words.
        statement: what the paper says that it shows.
        dataset, model: that all runs share, as `keras_freeze.runs.Run` takes them, unless a series
            says otherwise.
        series: the curves or columns.
        rates: the freezing rates.
        quantity: what is shown of each run, a name of `QUANTITIES`.
        view: how it is shown, a name of `VIEWS`.
        seeds: how many; the runs of all series share seeds 0, 1, 2, ...
        epochs, steps_per_epoch: shorten all runs; None for the recipe's.
        paper: the paper's numbers, mean and deviation (or None), by label and rate, in the unit
            that the quantity is shown in.
        changes: what was changed of the paper's experiment, in words.
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
    epochs: int | None = None
    steps_per_epoch: int | None = None
    paper: Mapping[tuple[str, float], tuple[float, float | None]] = field(default_factory=dict)
    changes: tuple[str, ...] = ()

    @property
    def heading(self) -> str:
        """Number, title and network, for tables and figures."""
        several = any("dataset" in series.settings for series in self.series)
        network = self.model if several else f"{self.model} on {self.dataset}"
        return f"{self.source}: {self.title} ({network})"

    def rates_of(self, series: Series) -> tuple[float, ...]:
        """The freezing rates of one series."""
        return self.rates if series.rates is None else series.rates

    def runs_of(self, series: Series, rate: float) -> list[Run]:
        """The runs behind one point, one for each seed."""
        settings = {
            "dataset": self.dataset,
            "model": self.model,
            "epochs": self.epochs,
            "steps_per_epoch": self.steps_per_epoch,
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
        epochs: int | None = None,
        seeds: int | None = None,
        rates: Sequence[float] | None = None,
        steps_per_epoch: int | None = None,
        model: str | None = None,
        dataset: str | None = None,
    ) -> "Experiment":
        """The experiment with less work or on another network; what was changed is kept in words.

        Args:
            epochs: of each run; the schedule is shortened in proportion.
            seeds: how many.
            rates: freezing rates instead of the experiment's; series with rates of their own, such
                as the dense baseline, keep them.
            steps_per_epoch: how many batches of each pass are used.
            model, dataset: others than the paper's, whose numbers are then left out.

        Raises:
            ValueError, TypeError: for unknown names, numbers out of range, and another data set
                where the experiment compares data sets.

        Example:
            >>> EXPERIMENTS["lenet5_extreme_rates"].changed(seeds=2).changes
            ('2 of 5 seeds',)
        """
        result, changes = self, list(self.changes)
        if dataset is not None and dataset != self.dataset:
            check_choice("dataset", dataset, dict.fromkeys(datasets.NAMES))
            if any("dataset" in series.settings for series in self.series):
                raise ValueError(
                    f"dataset: {self.name} compares data sets, so that it cannot be run on another "
                    f"one. Received: dataset={dataset!r}"
                )
            changes.append(f"{dataset} instead of {self.dataset}")
            result = replace(result, dataset=dataset, paper={})
        if model is not None and model != self.model:
            check_choice("model", model, models.MODELS)
            changes.append(f"{model} instead of {self.model}")
            result = replace(result, model=model, paper={})
        if epochs is not None:
            usual = recipe_for(result.dataset).epochs
            recipe_for(result.dataset, epochs=epochs)  # checks it
            if epochs != usual:
                changes.append(f"{epochs} of {usual} epochs, the schedule shortened in proportion")
            result = replace(result, epochs=epochs)
        if steps_per_epoch is not None:
            _check_count("steps_per_epoch", steps_per_epoch)
            changes.append(
                f"only the first {steps_per_epoch} batches of training, validation and test images"
            )
            result = replace(result, steps_per_epoch=steps_per_epoch)
        if seeds is not None:
            _check_count("seeds", seeds)
            if seeds != self.seeds:
                changes.append(f"{seeds} of {self.seeds} seeds")
            result = replace(result, seeds=seeds)
        if rates is not None:
            chosen = _check_rates(rates)
            if chosen != self.rates:
                changes.append("rates " + ", ".join(f"{rate:g}" for rate in chosen))
            result = replace(result, rates=chosen)
        return replace(result, changes=tuple(changes))


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer. Received: {name}={value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1. Received: {name}={value!r}")


def _check_rates(rates: Sequence[float]) -> tuple[float, ...]:
    if isinstance(rates, (str, Real)):
        raise TypeError(f"rates must be a sequence of freezing rates. Received: rates={rates!r}")
    chosen = tuple(sorted({check_freeze_rate(rate) for rate in rates}))
    if not chosen:
        raise ValueError(f"rates must be one freezing rate at least. Received: rates={rates!r}")
    return chosen
