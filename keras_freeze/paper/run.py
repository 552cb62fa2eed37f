"""The settings of a run. No other module writes them out: it takes a `Run` or reads its fields."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any

import keras

from keras_freeze._utils.text import jsonable
from keras_freeze._utils.validation import check_int, check_one_of, type_error, value_error
from keras_freeze.criteria.criteria import Criterion, check_criterion
from keras_freeze.initializers import INITIALIZERS
from keras_freeze.masks.selection import check_freeze_rate
from keras_freeze.paper.masking import DISTRIBUTIONS, GRADUAL, MASKS, SCHEDULES
from keras_freeze.paper.measures import MEASURES
from keras_freeze.paper.models import MODELS
from keras_freeze.paper.recipes import METHODS, Recipe, recipe_for
from keras_freeze.paper.training_result import versions


@dataclass(frozen=True)
class Run:
    """The settings of one run; equal settings are the same run, wherever it is repeated.

    What is None when a Run is made takes its value from the data set's recipe at once; batch size,
    momentum and the steps after which the learning rate drops always come from the recipe.

    Attributes:
        dataset: the data set, a name of `keras_freeze.datasets.NAMES`; "mnist_5k" needs no
            download.
        model: the network, a name of `keras_freeze.models.MODELS`.
        method: the method, a name of `keras_freeze.training.METHODS`.
        freeze_rate: the freezing rate q, the share of the weights that are not trained, from 0 to
            1; "baseline" trains everything whatever it is.
        seed: seed of the weights, the validation split, the order of the data, the augmentation
            and the mask; an integer in [0, 2**32).
        measure: what is measured, a name of `keras_freeze.runs.MEASURES`.
        epochs: number of epochs; fewer than the recipe's shorten its schedule in proportion.
        learning_rate: learning rate of the first steps.
        l2: coefficient of the coupled weight decay, at least 0.
        initializer: name of the kernels' initializer; see `keras_freeze.initializers.get`.
        reinitializer: name of the initializer that all weights are drawn from again, with another
            seed, once the mask is computed (algorithm S1). None: they are not.
        validation_fraction: share of the training set that is held out for validation, between 0
            and 1.
        steps_per_epoch: number of batches of each pass over the training, validation and test
            images that are used, for a quick look. None: all.
        criterion: criterion that chooses the trained weights, instead of the method's; see
            `keras_freeze.FreezeOptimizer`. A function can be trained with, but its results cannot
            be written to a file.
        distribution: where the freezing rate applies: "global", "uniform" or "erk"; see
            `keras_freeze.FreezeOptimizer`.
        mask: how the mask comes about: "computed" by the criterion; "drawn" with the rates of its
            rows and columns, as `keras_freeze.freeze(drawn=True)` does; or "shuffled", computed
            and then permuted at random within each variable.
        schedule: how the mask changes in training, 50 times per training at most. "gradual" trains
            all weights at first and freezes ever more until the learning rate drops or half of the
            steps are made (`keras_freeze.callbacks.GradualFreezing`); the criterion is not used.
            "rigl" and "set" exchange a part of the trained weights for others, chosen by their
            gradients or at random, until three quarters of the steps are made
            (`keras_freeze.callbacks.RegrowTrained`). Only an epoch that ends with the last mask
            can be the best. None: the mask does not change.

    Raises:
        ValueError, TypeError: for unknown names, numbers out of range and settings that exclude
            each other. A network that does not fit the images is detected when the run is executed.

    Example:
        >>> Run("mnist", "lenet_5_caffe", "freezenet", 0.99).epochs
        250
    """

    dataset: str
    model: str
    method: str
    freeze_rate: float
    seed: int = 0
    measure: str = "training"
    epochs: int | None = None
    learning_rate: float | None = None
    l2: float | None = None
    initializer: str | None = None
    reinitializer: str | None = None
    validation_fraction: float | None = None
    steps_per_epoch: int | None = None
    criterion: str | Criterion | None = None
    distribution: str = "global"
    mask: str = "computed"
    schedule: str | None = None

    def __post_init__(self) -> None:
        check_one_of("measure", self.measure, MEASURES)
        check_one_of("model", self.model, MODELS)
        if self.reinitializer is not None:
            check_one_of("reinitializer", self.reinitializer, INITIALIZERS)
        if self.criterion is not None:
            check_criterion(self.criterion)
        check_one_of("distribution", self.distribution, DISTRIBUTIONS)
        check_one_of("mask", self.mask, MASKS)
        rate = check_freeze_rate(self.freeze_rate)
        only_rate = METHODS[check_one_of("method", self.method, METHODS)].freeze_rate
        steps = self.steps_per_epoch
        checked = {
            "seed": check_int("seed", self.seed, end=2**32),
            "freeze_rate": rate if only_rate is None else only_rate,
            "steps_per_epoch": None if steps is None else check_int("steps_per_epoch", steps, 1),
            **{name: getattr(self.recipe, name) for name in _OF_RECIPE},
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.schedule is not None:
            self._check_schedule()

    def _check_schedule(self) -> None:
        check_one_of("schedule", self.schedule, SCHEDULES)
        if self.frozen_weights == "decay":
            accepted = "None with a method whose frozen weights decay"
        elif self.measure in ("gradient_flow", "costs"):
            accepted = f"None with measure={self.measure!r}, which does not train"
        elif self.schedule == GRADUAL and self.mask != "computed":
            accepted = f"'rigl', 'set' or None with mask={self.mask!r}"
        else:
            return
        raise value_error("schedule", self.schedule, accepted)

    @property
    def recipe(self) -> Recipe:
        """The hyperparameters: the data set's, with the run's own settings in their place."""
        return recipe_for(self.dataset, **{name: getattr(self, name) for name in _OF_RECIPE})

    @property
    def frozen_weights(self) -> str:
        """What becomes of the weights that are not trained; see `keras_freeze.FreezeOptimizer`."""
        return METHODS[self.method].frozen_weights

    @property
    def chosen_criterion(self) -> str | Criterion:
        """The run's criterion, or else its method's."""
        return METHODS[self.method].criterion if self.criterion is None else self.criterion

    @property
    def label(self) -> str:
        """The settings in a few words, which differ between any two runs."""
        usual = recipe_for(self.dataset)
        parts = [f"{self.model} on {self.dataset}", self.method, f"q = {self.freeze_rate:g}"]
        parts += [
            f"{name.replace('_', ' ')} {_short(getattr(self, name))}"
            for name in _OF_RECIPE
            if getattr(self, name) != getattr(usual, name)
        ]
        if self.criterion is not None:
            parts.append(f"criterion {self.criterion}")
        if self.distribution != "global":
            parts.append(f"{self.distribution} distribution")
        if self.mask != "computed":
            parts.append(f"{self.mask} mask")
        if self.schedule is not None:
            parts.append(f"{self.schedule} schedule")
        if self.reinitializer is not None:
            parts.append(f"re-initialized by {self.reinitializer}")
        if self.steps_per_epoch is not None:
            parts.append(f"{self.steps_per_epoch} steps per epoch")
        if self.measure != "training":
            parts.append(self.measure.replace("_", " "))
        return ", ".join([*parts, f"seed {self.seed}"])

    def execute(
        self,
        *,
        data_dir: str | os.PathLike[str] | None = None,
        callbacks: Sequence[keras.callbacks.Callback] = (),
        verbose: bool = True,
        backup: str | os.PathLike[str] | None = None,
    ) -> dict[str, Any]:
        """Train or measure, and return the record for `Results.append`.

        Args:
            data_dir: where TFDS keeps prepared data sets. None: its default.
            callbacks: more Keras callbacks, where the run trains.
            verbose: whether to show progress on standard error.
            backup: a file that a run whose measure is "training" writes its state to, at the end
                of an epoch and once a minute at most. Where the file exists, the same run goes on
                from there, and its result is the same bits as without an interruption; you
                remove it when you have the record. What `callbacks` have in memory is not in it,
                and a run with a `schedule` has none. None: there is no file.

        Returns:
            A dictionary for JSON: "run" (the settings), "finished" (when) and "result".
        """
        start = time.perf_counter()
        result = MEASURES[self.measure](
            self, data_dir=data_dir, callbacks=callbacks, verbose=verbose, backup=backup
        )
        seconds = time.perf_counter() - start
        result = {"seconds": seconds, "versions": versions(), **result}
        finished = datetime.now(UTC).isoformat(timespec="seconds")
        return {"run": dict(vars(self)), "finished": finished, "result": jsonable(result)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Run":
        """Return the run of a record.

        Settings that the version which wrote it did not know have their defaults.
        """
        settings = record.get("run") if isinstance(record, Mapping) else None
        if not isinstance(settings, Mapping) or not isinstance(record.get("result"), Mapping):
            raise type_error("record", record, 'a dictionary with dictionaries "run" and "result"')
        return cls(**{name: value for name, value in settings.items() if name in SETTINGS})


SETTINGS = tuple(field.name for field in fields(Run))
"""The names of all settings."""

# What a run takes from its recipe where it says nothing.
_OF_RECIPE = tuple(name for name in SETTINGS if name in {field.name for field in fields(Recipe)})


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
