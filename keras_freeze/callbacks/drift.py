"""Drift: whether frozen weights still have the values that they had."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from keras_freeze import backend
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.parameters import path_of


class Drift(NamedTuple):
    """Which frozen weights have changed.

    Attributes:
        counts: how many, by the path of each variable that has frozen weights.
        deviation: the largest relative distance from the common factor; None but for "decay".
    """

    counts: dict[str, int]
    deviation: float | None


class FrozenWeights:
    """Remembers what frozen weights are, to tell later which of them have changed.

    As long as there is no mask, every variable may turn out to have frozen weights.
    """

    def __init__(self, optimizer: FreezeOptimizer, variables: Sequence[Any]) -> None:
        self._optimizer = optimizer
        self._variables = list(variables)
        self._labels = numbered([path_of(variable) for variable in variables])
        self._was_decided = optimizer.mask is not None
        # Before the optimizer is built, its mask does not know the variables.
        self._mask = optimizer.mask if optimizer.built else None
        self._starts = [backend.to_numpy(variable) for variable in variables]
        if optimizer.frozen_weights == "zero":
            self._starts = [np.zeros_like(start) for start in self._starts]
        self._steps_before = self._num_steps()

    def drift(self) -> Drift | None:
        """Return which frozen weights have changed; None without a mask.

        What a new mask freezes is compared from now on."""
        state = self._optimizer.state
        if state.mask is None:
            return None
        before = self._mask
        if before is None:
            # The first batch finds the mask before it changes a weight. A mask that was given
            # during training may have come in any step.
            before = state.mask if state.by_first_batch or self._was_decided else FreezeMask([])
        frozen = [_frozen_in(state.mask, variable) for variable in self._variables]
        watched = [
            now & _frozen_in(before, variable)
            for now, variable in zip(frozen, self._variables, strict=True)
        ]
        counts, deviation = self._compare(watched)
        self._remember([now & ~part for now, part in zip(frozen, watched, strict=True)])
        self._mask = state.mask
        named = zip(self._labels, counts, frozen, strict=True)
        return Drift({label: count for label, count, now in named if now.any()}, deviation)

    def _compare(self, watched: Sequence[np.ndarray]) -> tuple[list[int], float | None]:
        if self._optimizer.frozen_weights == "decay":
            return self._compare_with_common_factor(watched)
        counts = [
            int(np.count_nonzero(part & (_bits(backend.to_numpy(variable)) != _bits(start))))
            for part, variable, start in zip(watched, self._variables, self._starts, strict=True)
        ]
        return counts, None

    def _compare_with_common_factor(
        self, watched: Sequence[np.ndarray]
    ) -> tuple[list[int], float | None]:
        starts = [start[part] for start, part in zip(self._starts, watched, strict=True)]
        values = [
            backend.to_numpy(variable)[part]
            for variable, part in zip(self._variables, watched, strict=True)
        ]
        factor = _common_factor(starts, values)
        deviations = [_deviations(*pair, factor) for pair in zip(starts, values, strict=True)]
        # A weight and the median are each rounded once a step, by half an epsilon at most; one
        # step more for the start. NaN counts, too.
        num_roundings = max(0, self._num_steps() - self._steps_before) + 1
        counts = [
            int(np.count_nonzero(~(deviation <= num_roundings * _limits(start).eps)))
            for deviation, start in zip(deviations, starts, strict=True)
        ]
        return counts, float(np.concatenate(deviations).max(initial=0.0))

    def _remember(self, new: list[np.ndarray]) -> None:
        """Remember the present values of what has just been frozen."""
        treatment = self._optimizer.frozen_weights
        if treatment == "zero" or not any(part.any() for part in new):
            return
        if treatment == "decay":  # one factor for all needs one start for all
            new = [np.ones_like(part) for part in new]
            self._steps_before = self._num_steps()
        for start, variable, part in zip(self._starts, self._variables, new, strict=True):
            np.copyto(start, backend.to_numpy(variable), where=part)

    def _num_steps(self) -> int:
        return int(backend.to_numpy(self._optimizer.iterations))


def _frozen_in(mask: FreezeMask, variable: Any) -> np.ndarray:
    entry = mask.find(variable)  # None outside the mask, where all is trained: a bias, for example
    return np.zeros(tuple(variable.shape), bool) if entry is None else ~entry.trained


def _bits(array: np.ndarray) -> np.ndarray:
    """Return bit patterns, which distinguish -0.0 from 0.0 and in which a NaN equals itself."""
    return array.view(f"u{array.itemsize}")


def _common_factor(starts: Sequence[np.ndarray], values: Sequence[np.ndarray]) -> float:
    """Return the median of values / starts, which a few changed weights do not affect."""
    start, value = (np.concatenate(arrays).astype("float64") for arrays in (starts, values))
    ratios = value[start != 0] / start[start != 0]
    return float(np.median(ratios)) if ratios.size else 1.0


def _deviations(start: np.ndarray, value: np.ndarray, factor: float) -> np.ndarray:
    """Return how far values are from factor * start, relative to that."""
    limits = _limits(start)
    # Below this, numbers have fewer bits, or are taken for zero.
    smallest = float(limits.tiny) / float(limits.eps)
    with np.errstate(invalid="ignore"):  # of a training that has diverged
        expected = start.astype("float64") * factor
        return np.abs(value - expected) / np.maximum(np.abs(expected), smallest)


def _limits(array: np.ndarray) -> Any:
    return ml_dtypes.finfo(array.dtype)  # knows bfloat16, too


def numbered(paths: Sequence[str]) -> list[str]:
    """Return the paths, with a number where several variables have the same."""
    seen: Counter[str] = Counter()
    labels = []
    for path in paths:
        seen[path] += 1
        labels.append(path if seen[path] == 1 else f"{path}_{seen[path]}")
    return labels
