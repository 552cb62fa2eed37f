"""The paper's methods and the hyperparameters that it trains with, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras

from keras_freeze._utils.validation import check_int, check_number, check_one_of
from keras_freeze.criteria.criteria import Criterion
from keras_freeze.criteria.grasp_criterion import GraSP
from keras_freeze.initializers import INITIALIZERS
from keras_freeze.paper import datasets
from keras_freeze.paper.datasets.splitting import check_fraction

LEARNING_RATES = tuple(0.1 * 2.0**n for n in range(-4, 5))
"""The paper's grid of learning rates (supplement, "Learning Rate Experiments")."""


class Method(NamedTuple):
    """What the name of a method stands for.

    Attributes:
        criterion: which weights are trained; see `FreezeOptimizer`.
        frozen_weights: what becomes of the others; see `FreezeOptimizer`.
        freeze_rate: the only freezing rate of the method. None: any.
    """

    criterion: str | Criterion
    frozen_weights: str
    freeze_rate: float | None = None


METHODS: Mapping[str, Method] = {
    "baseline": Method("snip", "keep", freeze_rate=0.0),
    "freezenet": Method("snip", "keep"),
    "freezenet-wd": Method("snip", "decay"),
    "snip": Method("snip", "zero"),
    "random": Method("random", "keep"),
    # As in the published code, whose score the paper uses.
    "grasp": Method(GraSP(samples_per_class=10), "zero"),
}
"""The paper's methods by name."""


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of SGD with momentum and a learning rate that is divided by ten in steps.

    Attributes:
        epochs: number of passes over the training images.
        batch_size: images per step.
        learning_rate: learning rate of the first steps.
        drop_every: divide the rate by ten each time after this number of steps. None: never.
        drop_after: divide it by ten after each of these epochs, which may be fractions.
        momentum: momentum of SGD.
        l2: coefficient of the coupled weight decay; see `FreezeOptimizer`.
        initializer: name of the kernels' initializer; see `keras_freeze.initializers.get`.
        validation_fraction: share of the training set that is held out to choose the best epoch.
    """

    epochs: int
    batch_size: int
    learning_rate: float
    drop_every: int | None = None
    drop_after: tuple[float, ...] = ()
    momentum: float = 0.9
    l2: float = 5e-4
    initializer: str = "xavier_normal"
    validation_fraction: float = 0.1

    def shortened(self, epochs: int) -> "Recipe":
        """Return the same schedule in another number of epochs, its drops moved in proportion."""
        scale = epochs / self.epochs
        every = None if self.drop_every is None else max(1, round(self.drop_every * scale))
        after = tuple(epoch * scale for epoch in self.drop_after)
        return replace(self, epochs=epochs, drop_every=every, drop_after=after)

    def drop_steps(self, steps_per_epoch: int) -> list[int]:
        """Return the numbers of steps after each of which the rate is divided by ten.

        Example:
            >>> recipe_for("cifar10").drop_steps(352)
            [30000, 60000]
        """
        total = self.epochs * steps_per_epoch
        steps = {round(epoch * steps_per_epoch) for epoch in self.drop_after}
        if self.drop_every is not None:
            steps.update(range(self.drop_every, total, self.drop_every))
        return sorted(step for step in steps if 0 < step < total)

    def schedule(self, steps_per_epoch: int) -> Any:
        """Return the learning rate as a Keras schedule, or as a number if it never drops."""
        drops = self.drop_steps(steps_per_epoch)
        if not drops:
            return self.learning_rate
        # Keras keeps a value up to and with the boundary, and counts steps from 0.
        return keras.optimizers.schedules.PiecewiseConstantDecay(
            [step - 1 for step in drops],
            [self.learning_rate / 10**number for number in range(len(drops) + 1)],
        )


RECIPES = {
    # MNIST's recipe for 4,000 images: smaller batches, for as many steps as a minute has. At
    # MNIST's rate of 0.1 a dense LeNet-5-Caffe sometimes never recovers from its first steps.
    "mnist_5k": Recipe(
        40,
        50,
        0.05,
        drop_after=(20, 30),
        validation_fraction=datasets.info("mnist_5k").validation_fraction,
    ),
    "mnist": Recipe(250, 100, 0.1, drop_every=25_000),
    "cifar10": Recipe(250, 128, 0.1, drop_every=30_000),
    "cifar100": Recipe(250, 128, 0.1, drop_every=30_000, initializer="kaiming_uniform"),
    "tiny_imagenet": Recipe(100, 128, 0.01, drop_after=(30, 60, 80), initializer="kaiming_uniform"),
}
"""The paper's hyperparameters by data set."""


def recipe_for(dataset: str, **changes: Any) -> Recipe:
    """Return the paper's hyperparameters for a data set, or the same with some of them replaced.

    They are those of the supplement, "Training Hyperparameters" and "Tiny ImageNet Experiment".
    "mnist_5k" has a recipe of this package, derived from MNIST's, that takes about a minute.

    Args:
        dataset: a name of `keras_freeze.datasets.NAMES`.
        **changes: `epochs`, `learning_rate`, `l2`, `initializer` or `validation_fraction`, as
            `keras_freeze.runs.Run` takes them. None: the recipe's. `epochs` shortens the schedule
            in proportion: 25 epochs instead of MNIST's 250 divide the learning rate by ten every
            2,500 steps instead of every 25,000.

    Returns:
        A `Recipe`.

    Raises:
        ValueError: for an unknown name or a number out of range.
        TypeError: for a value of another type, or a hyperparameter that cannot be replaced.

    Example:
        >>> recipe_for("mnist", epochs=25).drop_every
        2500
    """
    recipe = RECIPES[check_one_of("dataset", dataset, RECIPES)]
    for name, value in changes.items():
        if name not in _CHECKS:
            raise TypeError(f"recipe_for() cannot replace {name!r}, only {', '.join(_CHECKS)}")
        if value is None:
            continue
        value = _CHECKS[name](value)
        recipe = recipe.shortened(value) if name == "epochs" else replace(recipe, **{name: value})
    return recipe


_CHECKS: Mapping[str, Any] = {
    "epochs": lambda value: check_int("epochs", value, minimum=1),
    "learning_rate": lambda value: check_number("learning_rate", value, positive=True),
    "l2": lambda value: check_number("l2", value, minimum=0.0),
    "initializer": lambda value: check_one_of("initializer", value, INITIALIZERS),
    "validation_fraction": lambda value: check_fraction("validation_fraction", value),
}
