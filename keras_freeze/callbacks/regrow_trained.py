"""The callback that moves a mask to other weights while a network is trained."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_freeze import backend, criteria
from keras_freeze._utils.validation import check_int, check_number, value_error
from keras_freeze.callbacks.gradient_flow_history import EpochData
from keras_freeze.callbacks.mask_schedule import MaskSchedule, distances_to_frozen, num_batches
from keras_freeze.computed_masks import scores_of_train_step
from keras_freeze.criteria.scoring import scores_of_loss
from keras_freeze.gradients.data import (
    Batches,
    arrays_of,
    is_dataset,
    length_of,
    preprocessed,
    take,
)
from keras_freeze.gradients.train_step import has_own_train_step
from keras_freeze.masks.changing import has_diverged, join_at_random, join_largest, leave
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.masks.ranked import random_scores
from keras_freeze.masks.structure import Units
from keras_freeze.model_state import ModelOptimizers
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.optimizer.first_batch import may_choose_gradients
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.optimizer.trained_starts import weights_in
from keras_freeze.parameters import shorten
from keras_freeze.restricted.layers import restore_gradients, restrict_gradients

# Keeps random scores of different steps apart; an odd number with as many ones as zeros.
_STRIDE = 0x9E3779B97F4A7C15


class RegrowTrained(MaskSchedule):
    """Moves the mask every so many steps of `fit`: RigL and SET for frozen networks.

    In each layer a fraction of the trained weights leaves the mask and as many join it, so that
    the numbers stay. Those leave that have moved least: with `frozen_weights="keep"` they are the
    nearest to their values before training, which they get back bit for bit; with "zero" they are
    the smallest, as published, and become zero. Those with the largest scores by `criterion` join:
    "gradient" is RigL (Evci et al., "Rigging the Lottery", 2020), "random" is SET (Mocanu et al.,
    2018). They go on from their frozen values, with moments as before the first step; one that
    would leave and join at once just stays. Moments of the others are kept, and so are counts of
    steps. The training step is not compiled again; on JAX gradients are therefore not restricted
    to trained weights until `end`.

    With a `structure` of the FreezeOptimizer, whole columns, rows or blocks leave and join, and
    `fraction` is a share of these. Where blocks do not divide a kernel, they differ in size, and
    the number of weights with them.

    The mask of a network with weights that are NaN or infinite stays as it is.

    A `.freeze` file holds the last mask alone, and is as small as ever.

    Args:
        fraction: the share of a layer's trained weights that leaves the mask, above 0, at most 1;
            rounded down to whole weights. With an `end` it falls to 0 there along a cosine.
        frequency: how many steps there are between two changes.
        criterion: what joins: any criterion of a FreezeOptimizer. Defaults to "gradient".
        x, y, sample_weight: training data for the criterion, as in `freeze`. "random" needs none.
            A dataset is read again for each change, so that a generator is refused.
        steps: how many batches of a dataset each change uses. Defaults to 1.
        batch_size: of arrays: each change uses so many examples, the next ones. None: all.
        begin, end: the first and the last step after which the mask may change, in batches as the
            optimizer counts them. Defaults to 0 and None, which is never.

    Raises:
        TypeError, ValueError: for arguments out of range; for a criterion that needs data without
            `x`; in `fit`, for a model without a FreezeOptimizer, with `frozen_weights="decay"`,
            whose weights before training are not known, or with a mask that does not consist of the
            units of the optimizer's `structure`.

    Example:

    ```python
    regrow = keras_freeze.callbacks.RegrowTrained(
        0.3, frequency=100, x=x, y=y, batch_size=100, end=3000
    )
    model.fit(x, y, epochs=10, callbacks=[regrow])
    ```
    """

    def __init__(
        self,
        fraction: float = 0.3,
        frequency: int = 100,
        criterion: str | criteria.Criterion = "gradient",
        *,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        steps: int = 1,
        batch_size: int | None = None,
        begin: int = 0,
        end: int | None = None,
    ) -> None:
        super().__init__(begin, end, frequency)
        self._fraction = check_number("fraction", fraction, 0.0, 1.0)
        if self._fraction == 0:
            raise value_error("fraction", fraction, "a number above 0 and at most 1")
        self._criterion = criteria.check_criterion(criterion)
        if batch_size is not None:
            check_int("batch_size", batch_size, minimum=1)
        if x is None and criteria.needs_data(criterion):
            raise ValueError(
                "Argument `x` must be training data, with which the criterion chooses the weights "
                "that join the mask; criterion='random' needs none. "
                f"Received: x=None, criterion={criterion!r}"
            )
        self._steps, self._batch_size = check_int("steps", steps, minimum=1), batch_size
        self._data = None if x is None else _checked(x, y, sample_weight, steps, batch_size)

    def prepare(self, model: keras.Model, optimizer: FreezeOptimizer) -> None:
        _check_units(optimizer)
        if not backend.TRACES_MASKS or self._is_over(optimizer):
            return
        # There, restricted gradients are compiled for one mask.
        update = optimizer.compact_update
        if may_choose_gradients(model) or (update is not None and update.blocks):
            restore_gradients(model)
            optimizer.refuse_functions_with_blocks()

    def _is_over(self, optimizer: FreezeOptimizer) -> bool:
        return self._end is not None and num_batches(optimizer) >= self._end

    def change(
        self, model: keras.Model, optimizer: FreezeOptimizer, mask: FreezeMask, step: int
    ) -> None:
        fraction, structure = self._fraction_after(step), optimizer.structure
        moved = []
        for entry in weights_in(mask):
            if not entry.trained.all():
                distance = distances_to_frozen(optimizer, entry)
                if has_diverged(distance):
                    return  # there are no gradients to go by
                stays, number = leave(entry.trained, distance, fraction, structure)
                if number:
                    moved.append((entry, stays, number))
        if moved:
            growth = self._growth(model, optimizer, [entry for entry, _, _ in moved], step)
            seed = _seed(optimizer, step)
            trained = {
                entry.position: join_at_random(stays, number, seed, entry.position)
                if scores is None
                else join_largest(stays, scores, number, structure)
                for (entry, stays, number), scores in zip(moved, growth, strict=True)
            }
            is_compact = isinstance(optimizer.update, CompactUpdate)
            self.replace_masks(model, optimizer, mask, trained, is_compact, mask.num_rescued)
        if backend.TRACES_MASKS and step == self._end:
            restrict_gradients(model)

    def _fraction_after(self, step: int) -> float:
        if self._end is None:
            return self._fraction
        progress = (step - self._begin) / max(self._end - self._begin, 1)
        return self._fraction / 2 * (1 + math.cos(math.pi * progress))

    def _growth(
        self, model: keras.Model, optimizer: FreezeOptimizer, entries: list[MaskEntry], step: int
    ) -> Sequence[np.ndarray | None]:
        """Return the scores by which weights join the mask after a step; None: at random."""
        seed = _seed(optimizer, step)
        if self._criterion == criteria.RANDOM:
            if optimizer.structure is None:
                return [None] * len(entries)
            return [random_scores(e.trained.shape, seed, e.position) for e in entries]
        parameters = [optimizer.parameters[entry.position] for entry in entries]
        batches = self._batches(model, step)
        if batches is not None and has_own_train_step(model):
            return scores_of_train_step(
                model, parameters, batches, optimizer, self._criterion, seed
            )
        outer = ModelOptimizers(model).outer
        return scores_of_loss(
            model, parameters, batches, self._criterion, seed=seed, loss=None, outer=outer
        )

    def _batches(self, model: keras.Model, step: int) -> Batches | None:
        data = self._data
        if data is None:
            return None
        if self._batch_size is not None:
            data = _piece(data, self._batch_size, step // self._frequency)
        return Batches(*preprocessed(model, *data), self._steps, None)


def _check_units(optimizer: FreezeOptimizer) -> None:
    """Raise a ValueError for a mask with parts of units, for which whole ones would join it."""
    mask, structure = optimizer.mask, optimizer.structure
    if mask is None or structure is None or structure.pattern is not None:
        return
    parts = [
        entry.path
        for entry in weights_in(mask)
        if not Units(structure, entry.trained.shape).are_whole(entry.trained)
    ]
    if parts:
        raise ValueError(
            f"With structure={structure.units!r}, RegrowTrained needs a mask of whole columns, "
            "rows or blocks, as `keras_freeze.freeze` chooses it. "
            f"Received: a mask with parts of them in {shorten(parts)}"
        )


def _seed(optimizer: FreezeOptimizer, step: int) -> int:
    """Return a seed of what joins at random, another one for each step."""
    return (optimizer.seed + step * _STRIDE) % 2**64


def _piece(data: Any, batch_size: int, number: int) -> Any:
    """Return the batch with a number of arrays, which begin again after the last whole one."""
    start = number % max(length_of(data) // batch_size, 1) * batch_size
    return take(data, slice(start, start + batch_size))


def _checked(
    x: Any, y: Any, sample_weight: Any, steps: int, batch_size: int | None
) -> tuple[Any, Any, Any]:
    """Check data before training, of which each change reads some batches, and return them.

    Raises:
        TypeError, ValueError: as `EpochData`; for `steps` with arrays, `batch_size` with a dataset.
    """
    if is_dataset(x):
        EpochData(x, y, sample_weight, steps, batch_size)
        return x, y, sample_weight
    if steps != 1:
        raise ValueError(
            "Arrays are one batch; `steps` is for datasets, `batch_size` for arrays. "
            f"Received: steps={steps} with arrays"
        )
    return arrays_of(x, y, sample_weight)
