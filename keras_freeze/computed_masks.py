"""Masks that a criterion computes: from the gradients of a loss, or of a model's `train_step`."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_freeze import backend, criteria
from keras_freeze.criteria.scoring import scores_of_gradients, scores_of_loss
from keras_freeze.gradients.data import Batches
from keras_freeze.gradients.processes import sum_of_processes
from keras_freeze.gradients.recording import RecordedGradients
from keras_freeze.gradients.train_step import recorded_gradients
from keras_freeze.masks.distributions import Group
from keras_freeze.masks.mask import FreezeMask, mask_of_groups
from keras_freeze.masks.structure import Structure
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.optimizer.processes import check_agreement
from keras_freeze.parameters import Parameter, frozen_candidates, warn_of_unknown


def mask_of_loss(
    model: keras.Model,
    parameters: list[Parameter],
    batches: Batches | None,
    optimizer: FreezeOptimizer,
    loss: Any,
    outer: Any,
) -> FreezeMask:
    """Compute a mask from the gradients of the loss that `fit` minimizes, in one step or several.

    Args:
        parameters: all variables that the FreezeOptimizer updates, classified.
        batches: None for a criterion that needs no data.
        optimizer: the FreezeOptimizer, with the settings.
        loss: one loss, as in `freeze`. None: the one that the model is compiled with.
        outer: the optimizer that `optimizer` is inside of, which may scale the loss.
    """
    candidates = _candidates(parameters, optimizer)
    check_agreement(optimizer, parameters)
    groups = optimizer.groups(candidates, parameters)
    score = functools.partial(
        scores_of_loss,
        model,
        candidates,
        batches,
        optimizer.criterion,
        seed=optimizer.seed,
        loss=loss,
        outer=outer,
    )
    masks = None
    for rate in _rates_before(optimizer):
        groups_before = optimizer.groups(candidates, parameters, rate=rate)
        structure = optimizer.structure and optimizer.structure.loosened(rate)
        scores = score(masks=masks)
        mask = _mask_of_scores(candidates, scores, masks, groups_before, optimizer.seed, structure)
        masks = [mask[p.variable] for p in candidates]
    scores = score(masks=masks)
    return _mask_of_scores(candidates, scores, masks, groups, optimizer.seed, optimizer.structure)


def _rates_before(optimizer: FreezeOptimizer) -> list[Callable[[float], float]]:
    """Return for each step before the last one what it makes of a final rate.

    There are none where frozen weights stay in the network: nothing would change between steps.
    """
    criterion = criteria.as_iterative(optimizer.criterion)
    if criterion is None or optimizer.frozen_weights != "zero":
        return []
    if optimizer.rates <= {0.0, 1.0} and not optimizer.freezes_at_rate_0:
        return []  # the scores decide nothing
    return [functools.partial(criterion.rate, step=step) for step in range(1, criterion.steps)]


def mask_of_recorded(
    recorded: RecordedGradients, variables: list[Any], num_batches: int
) -> FreezeMask:
    """Compute a mask from the gradients that a `train_step` has passed to a FreezeOptimizer.

    `variables` are all that the FreezeOptimizer updates; what came without a gradient is trained.
    `num_batches` is how many batches the gradients are the sums of.
    """
    optimizer = recorded.optimizer
    _check_suits_train_step(optimizer.criterion, num_batches)
    parameters = optimizer.classify(variables)
    check_agreement(optimizer, parameters)
    own = [recorded.gradients.get(id(p.variable)) for p in parameters]
    with backend.own_values(variables):
        found = sum_of_processes(own, variables)
        with_gradient = [p for p in parameters if found[p.position] is not None]
        candidates = _candidates(with_gradient, optimizer)
        groups = optimizer.groups(candidates, parameters)
        gradients = [found[p.position] for p in candidates]
        scores = scores_of_gradients(candidates, gradients, optimizer.criterion, optimizer.seed)
    return _mask_of_scores(candidates, scores, None, groups, optimizer.seed, optimizer.structure)


def scores_of_train_step(
    model: keras.Model,
    parameters: list[Parameter],
    batches: Batches,
    optimizer: FreezeOptimizer,
    criterion: str | criteria.Criterion,
    seed: int,
) -> list[np.ndarray]:
    """Compute scores of weights from the gradients that a `train_step` passes to an optimizer."""
    _check_suits_train_step(criterion, batches.num_wholes)
    gradients: dict[int, Any] = {}
    for recorded in recorded_gradients(model, batches):
        if recorded.optimizer is optimizer:
            gradients = recorded.gradients
    variables = [p.variable for p in parameters]
    with backend.own_values(variables):
        found = sum_of_processes([gradients.get(id(v)) for v in variables], variables)
        return scores_of_gradients(parameters, found, criterion, seed)


def _check_suits_train_step(criterion: str | criteria.Criterion, num_batches: int) -> None:
    """Check that the sum of gradients over batches is all that a criterion needs."""
    criteria.check_gradients_suffice(
        criterion,
        "A model's own `train_step` does not provide that: give `freeze` a `loss`, or use another "
        "criterion.",
    )
    if criterion == criteria.FISHER and num_batches > 1:
        raise ValueError(
            'The criterion "fisher" squares the gradient of each batch, and those of a model\'s '
            "own `train_step` are summed before: give `freeze` a `loss`, or one batch. "
            f"Received: {num_batches} batches"
        )


def _candidates(parameters: list[Parameter], optimizer: FreezeOptimizer) -> list[Parameter]:
    """Return the parameters whose entries may be frozen; warn of those of unknown names."""
    candidates = frozen_candidates(parameters)
    if not optimizer.trains_everything:
        warn_of_unknown(parameters, stacklevel=5)
    return candidates


def _mask_of_scores(
    candidates: list[Parameter],
    scores: list[np.ndarray],
    masks: list[np.ndarray] | None,
    groups: list[Group],
    seed: int,
    structure: Structure | None,
) -> FreezeMask:
    """Return the mask; `masks` tell what is in the network that has been scored."""
    left = scores if masks is None else [s[m] for s, m in zip(scores, masks, strict=True)]
    if any(array.size for array in left) and not any(array.any() for array in left):
        criteria.warn_of_zero_scores(stacklevel=5)
    return mask_of_groups(
        scores,
        groups,
        seed=seed,
        positions=[p.position for p in candidates],
        paths=[p.path for p in candidates],
        variables=[p.variable for p in candidates],
        structure=structure,
    )
