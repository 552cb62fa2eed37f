"""Masks that a criterion computes: from the gradients of a loss, or of a model's `train_step`."""

from typing import Any

import keras
import numpy as np

from keras_freeze import backend, criteria
from keras_freeze.criteria.scoring import scores_of_gradients, scores_of_loss
from keras_freeze.gradients.data import Batches
from keras_freeze.gradients.processes import sum_of_processes
from keras_freeze.gradients.recording import RecordedGradients
from keras_freeze.masks.distributions import Group
from keras_freeze.masks.mask import FreezeMask, mask_of_groups
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.optimizer.processes import check_agreement
from keras_freeze.parameters import Parameter, classify, frozen_candidates, warn_of_unknown


def mask_of_loss(
    model: keras.Model,
    parameters: list[Parameter],
    batches: Batches,
    optimizer: FreezeOptimizer,
    loss: Any,
    outer: Any,
) -> FreezeMask:
    """Compute a mask from the gradients of the loss that `fit` minimizes.

    Args:
        parameters: all variables that the FreezeOptimizer updates, classified.
        optimizer: the FreezeOptimizer, with the settings.
        loss: one loss, as in `freeze`. None: the one that the model is compiled with.
        outer: the optimizer that `optimizer` is inside of, which may scale the loss.
    """
    candidates = _candidates(parameters, optimizer)
    check_agreement(optimizer, parameters)
    groups = optimizer.groups(candidates, parameters)
    scores = scores_of_loss(
        model, candidates, batches, optimizer.criterion, seed=optimizer.seed, loss=loss, outer=outer
    )
    return _mask_of_scores(candidates, scores, groups, optimizer)


def mask_of_recorded(recorded: RecordedGradients, variables: list[Any]) -> FreezeMask:
    """Compute a mask from the gradients that a `train_step` has passed to a FreezeOptimizer.

    `variables` are all that the FreezeOptimizer updates; what came without a gradient is trained.
    """
    optimizer = recorded.optimizer
    if criteria.as_grasp(optimizer.criterion) is not None:
        raise ValueError(
            'The criterion "grasp" needs the Hessian of the loss, which a model\'s own '
            "`train_step` does not provide: give `freeze` a `loss`, or use another criterion."
        )
    parameters = classify(variables, optimizer.exclude)
    with_gradient = [p for p in parameters if id(p.variable) in recorded.gradients]
    candidates = _candidates(with_gradient, optimizer)
    check_agreement(optimizer, parameters)
    groups = optimizer.groups(candidates, parameters)
    found = [recorded.gradients[id(p.variable)] for p in candidates]
    with backend.own_values(variables):
        gradients = sum_of_processes(found, [p.variable for p in candidates])
        scores = scores_of_gradients(candidates, gradients, optimizer.criterion, optimizer.seed)
    return _mask_of_scores(candidates, scores, groups, optimizer)


def _candidates(parameters: list[Parameter], optimizer: FreezeOptimizer) -> list[Parameter]:
    """Return the parameters whose entries may be frozen; warn of those of unknown names."""
    candidates = frozen_candidates(parameters)
    if not optimizer.trains_everything:
        warn_of_unknown(parameters, stacklevel=5)
    return candidates


def _mask_of_scores(
    candidates: list[Parameter],
    scores: list[np.ndarray],
    groups: list[Group],
    optimizer: FreezeOptimizer,
) -> FreezeMask:
    if not any(array.any() for array in scores):
        criteria.warn_of_zero_scores(stacklevel=5)
    return mask_of_groups(
        scores,
        groups,
        seed=optimizer.seed,
        positions=[p.position for p in candidates],
        paths=[p.path for p in candidates],
        variables=[p.variable for p in candidates],
    )
