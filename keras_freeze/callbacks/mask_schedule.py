"""What callbacks that change the mask while `fit` trains have in common."""

import math
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from keras_freeze import _keras_private, backend
from keras_freeze._utils.validation import check_int, value_error
from keras_freeze.masks.changing import distances
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.model_state import ModelOptimizers
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.optimizer.first_batch import make_train_function_again
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.optimizer.mask_changes import change_mask, has_known_slots
from keras_freeze.optimizer.trained_starts import is_pruned, know_trained_starts
from keras_freeze.restricted.layers import restrict_where_trained


class MaskSchedule(keras.callbacks.Callback):
    """Base class of callbacks that change the mask after training steps `begin` + n `frequency`.

    A step is one batch. The optimizer counts them, also where it accumulates gradients of several,
    so that training that is resumed goes on with the schedule; batches that a LossScaleOptimizer
    skips do not count. What has to be known for the next change is in the optimizer's state.

    Args:
        begin, end: the first and the last step after which the mask changes; an `end` of None is
            never reached.
        frequency: the number of steps between two changes.
    """

    def __init__(self, begin: int, end: int | None, frequency: int) -> None:
        super().__init__()
        self._begin = check_int("begin", begin)
        self._end = None if end is None else check_int("end", end)
        if self._end is not None and self._end < self._begin:
            raise value_error("end", end, f"at least `begin`, which is {begin}")
        self._frequency = check_int("frequency", frequency, minimum=1)
        self._optimizer: FreezeOptimizer | None = None
        self._snapshot: dict[int, np.ndarray] | None = None
        self._first = self._last = 0
        self._num_batches = 0  # of the epoch, when the optimizer had counted `_first` steps
        self._steps_per_batch: int | None = None  # the most so far; None before the first batch

    def change(
        self, model: keras.Model, optimizer: FreezeOptimizer, mask: FreezeMask, step: int
    ) -> None:
        """Change the mask after the training step with this number; for subclasses."""
        raise NotImplementedError

    def prepare(self, model: keras.Model, optimizer: FreezeOptimizer) -> None:
        """Get ready for training, before its first step; for subclasses."""

    def changed_until(self, recorded: int | None, num_steps: int) -> int:
        """Return the step until which changes have been made, before training goes on.

        Args:
            recorded: the last one in the optimizer's state; None if there is none.
            num_steps: how many steps have been made.
        """
        return num_steps if recorded is None else min(recorded, num_steps)

    def on_train_begin(self, logs: Any = None) -> None:
        self._optimizer = self._snapshot = self._steps_per_batch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        model = self.model  # on JAX this writes to its variables what has been trained
        # Not in `on_train_begin`, in which BackupAndRestore loads what was trained before.
        if self._optimizer is None:
            self._optimizer = _optimizer_of(model, type(self).__name__)
            self.prepare(model, self._optimizer)
            self._look_at_starts(self._optimizer)
            recorded = self._optimizer.trained_starts.last_steps.get(type(self).__name__)
            until = self.changed_until(recorded, num_batches(self._optimizer))
            self._record(self._optimizer, until)
        self._first, self._num_batches = num_batches(self._optimizer), 0
        # A checkpoint may have been saved after a step and before the change that comes after it.
        self._change_if_due(self._optimizer, self._first)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert self._optimizer is not None
        if self._snapshot is not None:
            backend.synchronize_variables(self.model)
            self._look_at_starts(self._optimizer)
        # Reading the count takes time. It may be lower, where batches have been skipped.
        passed = batch + 1 - self._num_batches
        most = self._steps_per_batch
        if most is None or self._due(self._first + most * passed) is not None:
            backend.synchronize_variables(self.model)
            step = num_batches(self._optimizer)
            self._steps_per_batch = max(most or 1, math.ceil((step - self._first) / passed))
            self._first, self._num_batches = step, batch + 1
            self._change_if_due(self._optimizer, step)

    def _due(self, step: int) -> int | None:
        """Return the step after which a change is due; None if there is none until this one."""
        due = self.last_due(step)
        return None if due is None or due <= self._last else due

    def _change_if_due(self, optimizer: FreezeOptimizer, step: int) -> None:
        due = self._due(step)
        if due is None:
            return
        model = self.model  # on JAX this writes to its variables, as in `on_epoch_begin`
        mask = optimizer.mask
        if mask is None:  # the first batch has not decided yet
            return
        self.change(model, optimizer, mask, due)
        self._record(optimizer, due)

    def _record(self, optimizer: FreezeOptimizer, step: int) -> None:
        """Remember until which step changes have been made, in the optimizer's state, too."""
        self._last = step
        known = optimizer.trained_starts
        last_steps = {**known.last_steps, type(self).__name__: step}
        optimizer.set_trained_starts(replace(known, last_steps=last_steps))

    def last_due(self, step: int) -> int | None:
        """Return the last step until this one after which the mask changes."""
        if step < self._begin:
            return None
        if self._end is not None and step >= self._end:
            return self._end
        return step - (step - self._begin) % self._frequency

    def _look_at_starts(self, optimizer: FreezeOptimizer) -> None:
        """Remember what trained weights were before training, for the time when they leave."""
        mask, snapshot = optimizer.mask, self._snapshot
        if mask is None:  # the first batch decides
            self._snapshot = {
                p.position: backend.to_numpy(p.variable)
                for p in optimizer.parameters
                if p.is_frozen_candidate
            }
            return
        self._snapshot = None
        if optimizer.frozen_weights != "keep":
            return
        if is_pruned(optimizer, mask):
            raise ValueError(
                f"{type(self).__name__} lets weights go back to their values before training, and "
                "all frozen weights of this model are zero, as after `keras_freeze.prune`. Use a "
                "FreezeOptimizer with frozen_weights='zero'. Received: frozen_weights='keep'"
            )
        if not know_trained_starts(optimizer, snapshot):
            raise ValueError(
                f"{type(self).__name__} lets weights go back to their values before training, "
                "and these are not known: since the model was frozen, its weights have been "
                "trained or set, and no initializer with a seed gives them. Give the callback to "
                "the first `fit` after `freeze`, or call `keras_freeze.reinitialize` before that."
            )

    def replace_masks(
        self,
        model: keras.Model,
        optimizer: FreezeOptimizer,
        mask: FreezeMask,
        trained: dict[int, np.ndarray],
        compact: bool,
        num_rescued: int = 0,
    ) -> None:
        """Set the masks of variables, by position; others keep what they have in `mask`."""
        entries = [
            MaskEntry(e.position, e.path, trained.get(e.position, e.trained), e.is_weight)
            for e in mask.entries
        ]
        new = FreezeMask(entries, num_rescued=num_rescued)
        if new == mask and compact == isinstance(optimizer.update, CompactUpdate):
            return
        if change_mask(optimizer, new, compact):
            restrict_where_trained(model)
            make_train_function_again(model)


def num_batches(optimizer: FreezeOptimizer) -> int:
    """Return how many batches an optimizer has been given, also where it accumulates gradients."""
    count = _keras_private.iterations_variable(optimizer.inner_optimizer)
    return int(backend.to_numpy(count))


def distances_to_frozen(optimizer: FreezeOptimizer, entry: MaskEntry) -> np.ndarray:
    """Return how far the trained weights of a variable are from what freezing would make of them.

    That is their value before training, or zero in a pruned network.
    """
    variable = optimizer.parameters[entry.position].variable
    values = backend.values_at(variable, np.flatnonzero(entry.trained))
    if optimizer.frozen_weights == "keep":
        return distances(values, optimizer.trained_starts.values[entry.position])
    return distances(values, np.zeros_like(values))


def _optimizer_of(model: keras.Model, name: str) -> FreezeOptimizer:
    """Return the FreezeOptimizer of a model, if its mask can change.

    Raises:
        ValueError: if it cannot, or if there is none or several.
    """
    optimizers = ModelOptimizers(model)
    optimizer = optimizers.required()
    if not optimizer.built:
        with backend.strategy_scope(optimizers.outer):
            optimizers.outer.build(model.trainable_variables)
    if optimizer.frozen_weights == "decay":
        raise ValueError(
            f"{name} needs a FreezeOptimizer with frozen_weights='keep' or 'zero'. With 'decay' "
            "frozen weights have no value to go back to. Received: frozen_weights='decay'"
        )
    if not has_known_slots(optimizer):
        kind = type(optimizer.inner_optimizer).__name__
        raise ValueError(
            f"{name} needs an inner optimizer that has one variable, or none, for each variable "
            f"that it updates, as attributes that are lists. Received: {kind}"
        )
    return optimizer
