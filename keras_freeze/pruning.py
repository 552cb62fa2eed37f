"""Pruning the frozen weights of a network, and checking what that does to its metrics."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_freeze import backend
from keras_freeze._utils.threads import check_not_trained_elsewhere
from keras_freeze.gradients.data import Passes, check_readable_again, preprocessed
from keras_freeze.gradients.loss import evaluate
from keras_freeze.gradients.preserve import KeptValues, attributes_kept, state_kept
from keras_freeze.masks.frozen_variables import zero_frozen_entries
from keras_freeze.model_state import ModelOptimizers, check_model, check_not_quantized, get_mask


@dataclass(frozen=True)
class PruningCheck:
    """What pruning the frozen weights removes, and what it does to the metrics.

    Attributes:
        largest_frozen_weight: the largest magnitude of a frozen weight; 0.0 if none is frozen.
        before, after: the metrics by name, with the frozen weights as they are and set to zero.
    """

    largest_frozen_weight: float
    before: Mapping[str, Any]
    after: Mapping[str, Any]

    @property
    def changes(self) -> dict[str, Any]:
        """`after` minus `before` for each metric; what is acceptable depends on the task."""
        return {name: self.after[name] - value for name, value in self.before.items()}


def check_pruning(
    model: keras.Model, x: Any, y: Any = None, *, batch_size: int | None = None
) -> PruningCheck:
    """Compare a frozen network with its pruned version, to tell whether `prune` is safe.

    FreezeNet-WD shrinks the frozen weights in every step, so that after enough of them they can be
    set to zero (section 4.2). The model is left as it was, bit for bit, its optimizer, metrics
    and random numbers included: training goes on as without the check, and `keras_freeze.prune`
    prunes the model.

    Args:
        model: a compiled model that is frozen, with any `frozen_weights`.
        x, y, batch_size: data, as `model.evaluate` takes them; they are read twice.

    Returns:
        The check.

    Raises:
        ValueError: if the model is not frozen, as `prune`; for data that are empty or do not fit
            the model; or if `x` can be read only once.
        TypeError: if `model` is not a `keras.Model`.

    Example:

    ```python
    check = keras_freeze.check_pruning(model, x_test, y_test)
    if abs(check.changes["accuracy"]) <= 0.001:
        keras_freeze.prune(model)
    ```
    """
    check_model(model)
    check_readable_again(x)
    data = preprocessed(model, x, y, None)
    Passes(*data, None, batch_size)  # refuses data that are empty or do not fit together
    check_not_quantized(model)
    # What the evaluations build, such as metrics, goes too: `fit` draws one random number less on
    # PyTorch where it finds them built.
    with attributes_kept(model):
        with _left_as_it_was(model):
            weights = [backend.to_numpy(v) for v in model.variables]
            prune(model)
            pruned = [_largest_pruned(*pair) for pair in zip(weights, model.variables, strict=True)]
            after = evaluate(model, x, y, batch_size)
        with _left_as_it_was(model):
            before = evaluate(model, x, y, batch_size)
    return PruningCheck(float(np.max(pruned)), before, after)


def _largest_pruned(before: np.ndarray, variable: Any) -> float:
    """Return the largest magnitude among the entries of a variable that have become zero."""
    has_become_zero = (backend.to_numpy(variable) == 0) & (before != 0)
    return float(np.abs(before[has_become_zero]).max(initial=0))


@contextlib.contextmanager
def _left_as_it_was(model: keras.Model) -> Iterator[None]:
    """Restore weights, optimizer, metrics that exist already, and random states."""
    freeze_optimizer = ModelOptimizers(model).single
    of_optimizer = [] if freeze_optimizer is None else freeze_optimizer.variables
    kept = KeptValues([*model.variables, *of_optimizer])
    with state_kept(model):
        try:
            yield
        finally:
            kept.put_back()


def prune(model: keras.Model) -> None:
    """Set the frozen weights of a model to zero; they stay frozen.

    Raises:
        ValueError: if the model is not frozen.
        RuntimeError: while another thread trains the model.
    """
    check_model(model)
    check_not_trained_elsewhere(model)
    mask = get_mask(model)
    if mask is None:
        ModelOptimizers(model).required().zero_frozen_weights()  # says why not
        return
    check_not_quantized(model)
    done = set()
    for optimizer in ModelOptimizers(model).in_force:
        if optimizer.mask is not None:
            optimizer.zero_frozen_weights()
            done |= {id(variable) for variable in optimizer.built_variables}
    for variable in model.variables:  # those that an optimizer of another model has frozen
        entry = mask.find(variable)
        if entry is not None and id(variable) not in done:
            zero_frozen_entries(variable, entry.trained)
