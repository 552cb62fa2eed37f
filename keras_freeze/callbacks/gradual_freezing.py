"""The callback that freezes more and more weights."""

import functools
import warnings
from collections.abc import Sequence

import keras
import numpy as np

from keras_freeze import backend
from keras_freeze._utils.validation import check_int, check_number
from keras_freeze.callbacks.mask_schedule import MaskSchedule, distances_to_frozen, num_batches
from keras_freeze.masks.changing import keep_largest
from keras_freeze.masks.distributions import Group
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.masks.selection import check_freeze_rate
from keras_freeze.optimizer.first_batch import make_train_function_again
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.optimizer.mask_changes import decide_at_rate
from keras_freeze.optimizer.state import Phase
from keras_freeze.optimizer.trained_starts import weights_in


class GradualFreezing(MaskSchedule):
    """Freezes more and more weights while `fit` trains, as gradual pruning removes them.

    After training step t, from `begin` to `end`, the freezing rate is

        final_rate + (initial_rate - final_rate) * (1 - (t - begin) / (end - begin)) ** power

    (Zhu & Gupta, "To prune, or not to prune", 2017). The weights that are frozen are those for
    which that changes least: with `frozen_weights="keep"` those nearest to their values before
    training, which they get back bit for bit; with "zero" the smallest, which become zero, as in
    magnitude pruning. Moments of the others are kept. The FreezeOptimizer's `distribution` tells
    where a rate applies; each rate of a mapping is approached in the same way, from `initial_rate`.
    Every layer keeps at least one trained weight.

    The model begins with its own mask, that of `freeze(..., freeze_rate=initial_rate)`, say. A
    model that is not frozen is trained whole if `initial_rate` is 0; else its first batch decides,
    at `initial_rate`, and so it does with the structure "n:m", which always freezes some. (For a
    criterion in steps, call `freeze`.) The FreezeOptimizer's own `freeze_rate` is not used and
    stays as it is.

    Until `end`, the inner optimizer has moments of all weights on TensorFlow and JAX, so that the
    training step need not be compiled again for each rate; then of trained weights alone. What
    weights were before training is kept in memory and in checkpoints while they are trained.

    Args:
        initial_rate: the freezing rate until step `begin`, in [0, 1].
        final_rate: the rate from step `end` on, from `initial_rate` to 1.
        begin, end: steps, which are batches as the optimizer counts them, so that training that is
            resumed goes on.
        frequency: how many steps there are between two changes. Defaults to 100.
        power: of the schedule; 1 is linear. Defaults to 3.

    Raises:
        TypeError, ValueError: for arguments out of range; in `fit`, for a model without a
            FreezeOptimizer, with `frozen_weights="decay"`, with a mask of a higher rate than
            `initial_rate`, or whose weights before training are not known.

    Warns where no weight has been trained yet when some are to be frozen: the first ones stay.

    Example:

    ```python
    model.compile(keras_freeze.FreezeOptimizer("adam"), loss="sparse_categorical_crossentropy")
    gradual = keras_freeze.callbacks.GradualFreezing(0.0, 0.99, begin=0, end=1000)
    model.fit(x, y, epochs=20, callbacks=[gradual])
    ```
    """

    def __init__(
        self,
        initial_rate: float,
        final_rate: float,
        begin: int,
        end: int,
        frequency: int = 100,
        power: float = 3,
    ) -> None:
        super().__init__(begin, check_int("end", end), frequency)
        self._end: int  # which is not None here
        self._initial_rate = _checked("initial_rate", initial_rate, 0.0)
        self._final_rate = _checked("final_rate", final_rate, self._initial_rate)
        self._power = check_number("power", power, positive=True)

    def rate(self, step: int) -> float:
        """Return the freezing rate after a training step."""
        return self._rate(step, self._final_rate)

    def _rate(self, step: int, final_rate: float) -> float:
        if step >= self._end:
            return final_rate
        if step <= self._begin:
            return self._initial_rate
        progress = (step - self._begin) / (self._end - self._begin)
        return final_rate + (self._initial_rate - final_rate) * (1 - progress) ** self._power

    def prepare(self, model: keras.Model, optimizer: FreezeOptimizer) -> None:
        mask = optimizer.mask
        if mask is None:
            if optimizer.phase is Phase.UNDECIDED:
                decide_at_rate(optimizer, self._initial_rate)
                optimizer.remember_starts(model)
                make_train_function_again(model)
            return
        # Whole units may be fewer weights than the rate allows.
        is_new = num_batches(optimizer) <= self._begin and optimizer.structure is None
        budget = sum(group.num_trained for group in self._groups(optimizer, mask, self._begin))
        if is_new and mask.num_trained < budget:
            has_rates = isinstance(optimizer.distribution, tuple)  # which `freeze` applies as final
            call = f"`keras_freeze.freeze(model, x, y, freeze_rate={self._initial_rate})`"
            raise ValueError(
                "GradualFreezing only freezes weights that are trained, and the model's mask has "
                f"a rate of {mask.freeze_rate:.6g}. Do not freeze the model before"
                + ("" if has_rates else f", or at the initial rate, by {call}")
                + f". Received: initial_rate={self._initial_rate}"
            )

    def changed_until(self, recorded: int | None, num_steps: int) -> int:
        due = self.last_due(num_steps)
        # The rate of another schedule, or of one that has begun before, applies at once.
        return -1 if due is None or due != recorded else due

    def change(
        self, model: keras.Model, optimizer: FreezeOptimizer, mask: FreezeMask, step: int
    ) -> None:
        entries, groups = weights_in(mask), self._groups(optimizer, mask, step)
        masks, num_rescued = {}, mask.num_rescued
        # Else a weight that was rescued would take another's place once the mask is loaded.
        if not _are_reached(groups, entries, num_rescued):
            scores = [distances_to_frozen(optimizer, entry) for entry in entries]
            _warn_if_untrained(scores, step, num_batches(optimizer))
            now = [entry.trained for entry in entries]
            trained, num_rescued = keep_largest(scores, now, groups, optimizer.structure)
            masks = {e.position: one for e, one in zip(entries, trained, strict=True)}
        # Elsewhere, each number of trained weights would need a training step of its own.
        has_vectors = backend.STEPS_ARE_EAGER or step >= self._end
        is_compact = has_vectors and optimizer.is_coordinate_wise
        self.replace_masks(model, optimizer, mask, masks, is_compact, num_rescued)

    def _groups(self, optimizer: FreezeOptimizer, mask: FreezeMask, step: int) -> list[Group]:
        return optimizer.groups(
            [optimizer.parameters[entry.position] for entry in weights_in(mask)],
            optimizer.parameters,
            must_match=False,
            rate=functools.partial(self._rate, step),
            freeze_rate=self._final_rate,
        )


def _are_reached(groups: Sequence[Group], entries: Sequence[MaskEntry], num_rescued: int) -> bool:
    """Return whether no more weights are trained than groups allow, besides rescued ones."""
    num_more = 0
    for group in groups:
        num_trained = sum(int(np.count_nonzero(entries[i].trained)) for i in group.members)
        more = num_trained - group.num_trained
        if more > 0 and not group.rescues:
            return False
        num_more += max(more, 0)
    return num_more <= num_rescued


def _warn_if_untrained(scores: Sequence[np.ndarray], step: int, num_steps: int) -> None:
    if not any(score.any() for score in scores):
        warnings.warn(
            f"GradualFreezing freezes weights at step {step} of its schedule, and none has been "
            "trained yet, so that the first weights of the network stay. Let `begin` be later than "
            f"the {num_steps} steps that the optimizer has counted, or compile the model with a "
            "new one, which counts from 0.",
            stacklevel=2,
        )


def _checked(name: str, rate: float, minimum: float) -> float:
    check_number(name, rate, minimum, 1.0)
    return check_freeze_rate(rate)
