"""The scores of one step of an iterative criterion: of a network that is pruned for it."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_freeze import backend, criteria
from keras_freeze.gradients.data import Batches
from keras_freeze.gradients.loss import check_takes_logits, loss_gradients
from keras_freeze.gradients.preserve import variables_kept
from keras_freeze.gradients.synaptic_flow import probability_layers, synaptic_flow_gradients
from keras_freeze.parameters import Parameter


def iterative_scores(
    model: keras.Model,
    parameters: Sequence[Parameter],
    batches: Batches | None,
    criterion: criteria.IterativeCriterion,
    masks: Sequence[np.ndarray] | None,
    loss: Any,
    scale: float,
) -> list[np.ndarray]:
    """Compute the float32 scores of weights; the model is left as it was.

    Args:
        batches: None for SynFlow, which needs no data.
        masks: which weights are in the network, one for each of `parameters`; the others are zero
            meanwhile. None for all of them.
        loss, scale: as of `loss_gradients`.
    """
    variables = [p.variable for p in parameters]
    is_whole = masks is None
    if masks is None:
        masks = [np.ones(tuple(v.shape), bool) for v in variables]
    with _pruned(variables, masks):
        if isinstance(criterion, criteria.SynFlow):
            _check_gives_logits(model, loss)
            gradients = synaptic_flow_gradients(model, variables, batches, is_whole)
        else:
            assert batches is not None
            gradients = loss_gradients(model, variables, batches, loss, scale)
    return [
        backend.to_numpy(
            criteria.score(functools.partial(_score, criterion, mask), p.variable, gradient, p.path)
        )
        for p, gradient, mask in zip(parameters, gradients, masks, strict=True)
    ]


def _score(
    criterion: criteria.IterativeCriterion, mask: np.ndarray, weights: Any, gradients: Any
) -> Any:
    return criterion.score(weights, gradients, ops.convert_to_tensor(mask))


@contextlib.contextmanager
def _pruned(variables: Sequence[Any], masks: Sequence[np.ndarray]) -> Iterator[None]:
    """Set what is outside of masks to zero, and restore it afterwards."""
    with variables_kept(variables):
        for variable, mask in zip(variables, masks, strict=True):
            if not mask.all():
                value = backend.read(variable)
                variable.assign(ops.where(ops.convert_to_tensor(mask), value, 0.0))
        yield


def _check_gives_logits(model: keras.Model, loss: Any) -> None:
    layers = probability_layers(model)
    if layers and None not in layers:
        return  # they are left out, so that the loss says nothing about what is summed
    check_takes_logits(
        model,
        loss,
        why='The criterion "synflow" sums the outputs of the model',
        instead="another criterion",
    )
