"""How the mask of a run comes about, and how it moves: what `Run` has names for."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import keras
import numpy as np

from keras_freeze.callbacks.gradual_freezing import GradualFreezing
from keras_freeze.callbacks.regrow_trained import RegrowTrained
from keras_freeze.freezing import freeze
from keras_freeze.masks.mask import FreezeMask, MaskEntry

if TYPE_CHECKING:
    import tensorflow as tf

    from keras_freeze.paper.run import Run

DISTRIBUTIONS = ("global", "uniform", "erk")
"""What a run can say on where its freezing rate applies."""

MASKS = ("computed", "drawn", "shuffled")
"""What a run's mask can be."""

GRADUAL = "gradual"

SCHEDULES = (GRADUAL, "rigl", "set")
"""How the mask of a run can change in training."""

_CHANGES = 50  # in as many parts the steps of a training are divided by changes of the mask
_REGROWN = 0.3  # RigL's share of the trained weights that the first change moves
_SHUFFLE_STREAM = 2**32  # of a run's seed; those below are the order of the data


def freeze_network(run: "Run", network: keras.Model, data: "tf.data.Dataset", steps: int) -> None:
    """Freeze a network with the mask of a run, before its first step.

    Args:
        run: the settings.
        network: a network that is compiled with the run's FreezeOptimizer.
        data: batches of training data, of which the first `steps` are used.
        steps: how many batches decide.
    """
    start = network.get_weights()
    mask = freeze(network, data, steps=steps, drawn=run.mask == "drawn")
    if run.mask == "shuffled":
        network.set_weights(start)  # where frozen weights are zero now
        freeze(network, mask=shuffled(mask, run.seed), overwrite=True)


def shuffled(mask: FreezeMask, seed: int) -> FreezeMask:
    """Return a mask that trains as many weights of each variable, at random places.

    Args:
        mask: any mask.
        seed: the same mask and seed give the same result.

    Example:
        >>> shuffled(mask, seed=0).num_trained == mask.num_trained
        True
    """
    entries = []
    for entry in mask.entries:
        generator = np.random.default_rng([seed, _SHUFFLE_STREAM, entry.position])
        trained = generator.permutation(entry.trained.ravel()).reshape(entry.trained.shape)
        entries.append(MaskEntry(entry.position, entry.path, trained, entry.is_weight))
    return FreezeMask(entries, num_rescued=mask.num_rescued)


def schedule_callbacks(
    run: "Run", batches: "Callable[[], tf.data.Dataset]", steps_per_epoch: int
) -> list[keras.callbacks.Callback]:
    """Return the callback that changes the mask of a run while it is trained, or none.

    Args:
        run: the settings.
        batches: a function that returns the training batches.
        steps_per_epoch: how many steps an epoch has.
    """
    if run.schedule is None:
        return []
    end = _end(run, steps_per_epoch)
    frequency = steps_between_changes(run.recipe.epochs * steps_per_epoch)
    if run.schedule == GRADUAL:
        return [GradualFreezing(0.0, run.freeze_rate, 0, end, frequency)]
    if run.schedule == "set":
        return [RegrowTrained(_REGROWN, frequency, "random", end=end)]
    # The first batch of the data is another one on each pass.
    return [RegrowTrained(_REGROWN, frequency, "gradient", x=batches(), end=end)]


def steps_between_changes(num_steps: int) -> int:
    """Return how many steps there are from one change of the mask to the next."""
    return max(1, num_steps // _CHANGES)


def first_epoch_with_last_mask(run: "Run", steps_per_epoch: int) -> int:
    """Return the first epoch, from 1, at whose end the mask is that of the end of training."""
    if run.schedule is None:
        return 1
    return max(1, math.ceil(_end(run, steps_per_epoch) / steps_per_epoch))


def _end(run: "Run", steps_per_epoch: int) -> int:
    """Return the step after which the mask changes for the last time."""
    num_steps = run.recipe.epochs * steps_per_epoch
    if run.schedule == GRADUAL:
        # What is still frozen at a lower learning rate can hardly be made up for.
        return min([num_steps // 2, *run.recipe.drop_steps(steps_per_epoch)])
    return num_steps * 3 // 4
