"""The gradient flow: how much gradient reaches what a network trains (section 4.3, figure 4)."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from keras_freeze import backend
from keras_freeze._utils.validation import check_one_of
from keras_freeze.gradients.data import Passes, length_of, preprocessed
from keras_freeze.gradients.loss import data_errors, loss_function, loss_scale
from keras_freeze.gradients.preserve import state_kept
from keras_freeze.model_state import ModelOptimizers, check_model, get_mask, is_built

REDUCTIONS = ("gradients", "norms")


def gradient_flow(
    model: keras.Model,
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    steps: int | None = None,
    batch_size: int | None = None,
    reduce: str = "gradients",
    loss: Any = None,
) -> float:
    """Compute the L1 norm of the gradient of the trained parameters, divided by their number.

    Trained are the weights that the model's mask trains, biases and normalization. Without
    a mask that is every trainable parameter. In a pruned network no gradient passes a layer whose
    paths are cut, but what lies behind, such as the last bias, still has one.

    The gradient is that of the loss which `fit` minimizes, in training mode, without the
    optimizer's `l2`: BatchNormalization uses the statistics of each batch, Dropout drops. The model
    is left as it was, moving statistics and random state included.

    Batches count by their size, so that neither their number nor a smaller last one matters. A
    loss that is summed over the batch instead of averaged gives as many times the value as a batch
    has samples. Such factors cancel in the ratio to the dense network's flow.

    Args:
        model: a model that is compiled, unless `loss` is given. It may be unfrozen.
        x, y, sample_weight: arrays, or structures of arrays, of any length; or `x` is a
            `tf.data.Dataset`, a `keras.utils.PyDataset` or another iterable of the batches that
            `fit` takes.
        steps: how many batches to use, the first ones. None: all.
        batch_size: of arrays. None: 32, as in `fit`.
        reduce: "gradients" takes the mean of the gradients over the data, then its norm, which is
            how we read the paper's "accumulated" (figure 4 left); "norms" takes the norm of each
            batch's gradient, then their mean, in which noise from batch to batch does not cancel
            (see `GradientFlowHistory`).
        loss: one loss, as in `freeze`, instead of the compiled one.

    Returns:
        The flow, at least 0, of the true gradient also where the optimizer scales the loss.

    Raises:
        ValueError: for a model without a loss, or in which nothing is trained; for data that are
            empty, endless without `steps`, shorter than `steps`, or of a wrong shape; for a loss or
            gradient that is not finite.
        TypeError: for arguments of a wrong type.

    Example:

    ```python
    relative = keras_freeze.gradient_flow(frozen, x, y) / keras_freeze.gradient_flow(dense, x, y)
    ```
    """
    check_one_of("reduce", reduce, REDUCTIONS)
    check_model(model)
    data = Passes(*preprocessed(model, x, y, sample_weight), steps, batch_size)
    num_samples, norms, total = 0, 0.0, None
    # Closed at an error, too, so that the model gets its state back before anyone sees it.
    with contextlib.closing(FlowMeter(model, loss).batch_flows(data)) as batches:
        for number, batch in enumerate(batches):
            if not math.isfinite(batch.flow):
                raise ValueError(
                    f"The loss or its gradient is not finite for batch {number}: look for NaN or "
                    "infinite values in the data, for labels out of range, and for weights that "
                    "are not finite."
                )
            num_samples += batch.size
            norms += batch.size * batch.flow
            if reduce == "gradients":
                weighted = [batch.size * gradient for gradient in batch.gradients]
                total = weighted if total is None else list(map(ops.add, total, weighted))
    sum_over_data = norms if total is None else _mean_magnitude(total)
    return sum_over_data / num_samples


class FlowStatistics(NamedTuple):
    """The gradient flow over the batches of a data set.

    Attributes:
        mean: of the flows of the batches, weighted by their sizes.
        deviation: their standard deviation, likewise (with N, not N - 1).
    """

    mean: float
    deviation: float


class BatchFlow(NamedTuple):
    """The gradient flow of one batch.

    Attributes:
        size: how many samples it has.
        flow: the L1 norm of its gradient, divided by the number of trained parameters.
        gradients: this gradient, for each trainable variable a float32 tensor of what is trained.
    """

    size: int
    flow: float
    gradients: list[Any]


class FlowMeter:
    """Measures gradient flows of one model, any number of times, by one compiled function."""

    def __init__(self, model: keras.Model, loss: Any = None) -> None:
        check_model(model)
        self._model = model
        self._loss = loss_function(model, loss, temperature=1.0)
        self._gradients: Callable[..., tuple[Any, list[Any]]] = self._trained_gradients
        if not model.run_eagerly:
            self._gradients = backend.compiled(self._trained_gradients, model)

    def statistics(self, data: Iterable[Any]) -> FlowStatistics:
        """Compute mean and deviation of the flow over batches; NaN if one of them is not finite.

        `data` yields (x, y, sample_weight) for each batch, as `Passes` does. Other errors are those
        of `gradient_flow`.
        """
        sizes, flows = zip(*((b.size, b.flow) for b in self.batch_flows(data)), strict=True)
        if not np.isfinite(flows).all():
            return FlowStatistics(math.nan, math.nan)
        shares = np.asarray(sizes) / np.sum(sizes)  # of one batch exactly 1
        mean = np.dot(shares, flows)
        variance = np.dot(shares, (np.asarray(flows) - mean) ** 2)
        return FlowStatistics(float(mean), math.sqrt(variance))

    def batch_flows(self, data: Iterable[Any]) -> Generator[BatchFlow, None, None]:
        """Yield the flow of each batch of `data`, and leave the model as it was."""
        batches = iter(data)
        first = next(batches, None)
        if first is None:
            raise ValueError("Argument `x` must hold at least one batch. Received: no batch.")
        with state_kept(self._model):
            if not is_built(self._model):
                with data_errors(0):
                    self._model(first[0])
        with state_kept(self._model):  # now also of variables that the build has made
            scale = loss_scale(ModelOptimizers(self._model).outer)
            indices = _trained_indices(self._model)
            for number, batch in enumerate(itertools.chain([first], batches)):
                with backend.outside_strategy(), data_errors(number):
                    gradients, scale = self._unscaled(batch, indices, scale)
                yield BatchFlow(length_of(batch[0]), _mean_magnitude(gradients), gradients)

    def _unscaled(self, batch: Any, indices: list[Any], scale: float) -> tuple[list[Any], float]:
        """Compute the gradients, and the loss scale that was small enough for them."""
        loss, gradients = self._gradients(*batch, indices, ops.convert_to_tensor(scale))
        while scale > 1.0 and math.isfinite(loss) and not math.isfinite(_mean_magnitude(gradients)):
            scale /= 2.0
            loss, gradients = self._gradients(*batch, indices, ops.convert_to_tensor(scale))
        return gradients, scale

    def _trained_gradients(
        self, x: Any, y: Any, sample_weight: Any, indices: list[Any], scale: Any
    ) -> tuple[Any, list[Any]]:
        variables = self._model.trainable_variables
        loss, gradients = backend.gradients(
            functools.partial(self._loss, x, y, sample_weight), variables, scale
        )
        dense = [
            ops.cast(ops.zeros(v.shape) if g is None else g, "float32") / scale
            for g, v in zip(gradients, variables, strict=True)
        ]
        trained = [
            g if index is None else backend.gather(g, index)
            for g, index in zip(dense, indices, strict=True)
        ]
        return loss, trained


def _mean_magnitude(gradients: list[Any]) -> float:
    """Compute the L1 norm of all gradients together, divided by the number of their entries."""
    norm = sum(float(ops.sum(ops.abs(gradient))) for gradient in gradients)
    return norm / sum(math.prod(gradient.shape) for gradient in gradients)


def _trained_indices(model: keras.Model) -> list[Any]:
    """Return the flat indices of each variable's trained entries, None if all of it is trained."""
    mask = get_mask(model)
    variables = model.trainable_variables
    # None outside the mask, where all is trained: a bias, for example.
    entries = [None if mask is None else mask.find(variable) for variable in variables]
    indices = [
        None
        if entry is None or entry.trained.all()
        else ops.convert_to_tensor(np.flatnonzero(entry.trained), "int32")
        for entry in entries
    ]
    sizes = [
        math.prod((variable if index is None else index).shape)
        for variable, index in zip(variables, indices, strict=True)
    ]
    if not sum(sizes):
        raise ValueError(f"Nothing in the model is trained. Received: model={model!r}")
    return indices
