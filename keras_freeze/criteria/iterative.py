"""Criteria in steps: a network is pruned to its rate little by little, and scored in between."""

from collections.abc import Mapping
from typing import Any

import keras
from keras import ops

from keras_freeze._utils.validation import check_int

SYNFLOW = "synflow"


class IterativeCriterion:
    """A criterion that scores a network several times while it is pruned; to be subclassed.

    It needs a call to `freeze`. In step t of T the network is scored, and its mask is computed as
    for a rate of `rate(freeze_rate, t)`, the last one at `freeze_rate` itself; so are the other
    rates of a `distribution`. What this means for a weight outside the mask depends on the
    FreezeOptimizer:

    - `frozen_weights="zero"` (pruning, as published): it is zero in the next step, so that the
      gradients are those of the pruned network.
    - "keep" and "decay": a frozen weight stays in the network. No score would change between
      steps, so that there is only one: the mask is that of the whole network's scores.

    The gradients are those of the loss that `fit` minimizes, as for "snip": of a dataset the sum
    over the first `steps` batches that `freeze` is given. Each step uses the same batches, with the
    same Dropout. Each also trains at least one weight of every layer, as every mask does. The model
    is left as it was.

    A subclass defines `score`. It may define `rate`, and extends `get_config` if its constructor
    takes more than `steps`. To be loaded from a file, it is registered with
    `keras.saving.register_keras_serializable` or passed as one of the `custom_objects`.

    Args:
        steps: the number T of steps.

    Raises:
        TypeError, ValueError: unless `steps` is a positive integer.

    Example:

    ```python
    @keras.saving.register_keras_serializable()
    class GradualMagnitude(keras_freeze.criteria.IterativeCriterion):
        def score(self, weights, gradients, mask):
            return keras.ops.abs(weights)

        def rate(self, freeze_rate, step):
            return freeze_rate * step / self.steps


    optimizer = keras_freeze.FreezeOptimizer(
        "sgd", 0.99, criterion=GradualMagnitude(steps=5), frozen_weights="zero"
    )
    ```
    """

    def __init__(self, steps: int) -> None:
        self.steps = check_int("steps", steps, minimum=1)

    def score(self, weights: Any, gradients: Any, mask: Any) -> Any:
        """Compute the scores of one variable; the largest of the whole network stay.

        Made of `keras.ops`; the three arguments and the result are tensors of the variable's shape.

        Args:
            weights: float32, before anything was pruned.
            gradients: float32, of the loss over the weights of the network as it is in this step.
            mask: boolean, which weights are in the network in this step. For a weight not to come
                back, let its score be smaller than all others.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `score`")

    def rate(self, freeze_rate: float, step: int) -> float:
        """Return the freezing rate after one of the steps 1, ..., T - 1.

        The share of weights that is left shrinks by one factor in each step:
        1 - (1 - q)^(step / T), rounded to twelve decimals.

        Args:
            freeze_rate: the rate q after the last step.
            step: the step, from 1.
        """
        return round(1.0 - (1.0 - freeze_rate) ** (step / self.steps), 12)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"steps": self.steps}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "IterativeCriterion":
        """Make the criterion from what `get_config` has returned."""
        return cls(**config)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return bool(self.get_config() == other.get_config())

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


@keras.saving.register_keras_serializable(package="keras_freeze")
class IterativeSNIP(IterativeCriterion):
    """SNIP in T steps: |gradient * weight| of the network that the steps before have left.

    What has been pruned does not come back (de Jorge et al., 2021, "Iterative SNIP"). With
    `steps=1`, or where frozen weights are not zero, it is "snip". See `IterativeCriterion`.

    Args:
        steps: the number T of steps. The share of weights that is left shrinks by one factor in
            each. Defaults to 10.

    Raises:
        TypeError, ValueError: unless `steps` is a positive integer.

    Example:

    ```python
    criterion = keras_freeze.criteria.IterativeSNIP(steps=20)
    optimizer = keras_freeze.FreezeOptimizer(
        "sgd", 0.99, criterion=criterion, frozen_weights="zero"
    )
    ```
    """

    def __init__(self, steps: int = 10) -> None:
        super().__init__(steps)

    def score(self, weights: Any, gradients: Any, mask: Any) -> Any:
        """Compute |gradient * weight|, and -1 for what has been pruned."""
        return _of_what_is_left(weights, gradients, mask)


@keras.saving.register_keras_serializable(package="keras_freeze")
class FORCE(IterativeCriterion):
    """FORCE: |gradient of the pruned network * weight before pruning|, in T steps.

    All weights compete in each step, so that what has been pruned may come back (de Jorge et al.,
    2021). With `steps=1`, or where frozen weights are not zero, it is "snip". See
    `IterativeCriterion`.

    Args:
        steps: the number T of steps. The share of weights that is left shrinks by one factor in
            each. Defaults to 10.

    Raises:
        TypeError, ValueError: unless `steps` is a positive integer.

    Example:

    ```python
    criterion = keras_freeze.criteria.FORCE()
    optimizer = keras_freeze.FreezeOptimizer(
        "sgd", 0.99, criterion=criterion, frozen_weights="zero"
    )
    ```
    """

    def __init__(self, steps: int = 10) -> None:
        super().__init__(steps)

    def score(self, weights: Any, gradients: Any, mask: Any) -> Any:
        """Compute |gradient * weight| for all weights."""
        return ops.abs(ops.multiply(gradients, weights))


@keras.saving.register_keras_serializable(package="keras_freeze")
class SynFlow(IterativeCriterion):
    """SynFlow's score |weight * dR/dweight|, which needs no data; "synflow" means `SynFlow()`.

    R is the sum of the outputs of a network whose parameters and moving statistics are replaced by
    their absolute values, in inference mode, for an input of ones of the model's input shape
    (Tanaka et al., 2020; statistics too, as the published code does). As published it prunes in
    100 steps, with `frozen_weights="zero"`; elsewhere the mask is that of one step. What has been
    pruned does not come back. See `IterativeCriterion`.

    Where the model does not tell the shape of its inputs, it is that of one example of `x`.
    Otherwise `freeze(model)` needs no `x` and no loss. Layers compute in double precision, since R
    grows beyond float32 in networks of some twenty layers; a layer that casts to float32 by itself
    does not. Where R is not between 2^-60 and 2^60, all scores are divided by one power of two.

    Meant for ReLU and its like. R is the sum of logits, since that of probabilities is constant:
    where the last layer of the model is a softmax or sigmoid, or has one of them or its logarithm
    as its activation, R is that of its inputs. Probabilities that come about in another way are
    refused. For token ids, an input of ones would score one row of an embedding alone.

    Args:
        steps: the number T of steps. The share of weights that is left shrinks by one factor in
            each. Defaults to 100.

    Raises:
        TypeError, ValueError: unless `steps` is a positive integer. `freeze` raises ValueError for
            token ids, for probabilities or a loss of them whose logits are not known, where R does
            not depend on the weights, and where R or a score is not finite.

    Example:

    ```python
    optimizer = keras_freeze.FreezeOptimizer(
        "sgd", 0.99, criterion="synflow", frozen_weights="zero"
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    keras_freeze.freeze(model)
    ```
    """

    def __init__(self, steps: int = 100) -> None:
        super().__init__(steps)

    def score(self, weights: Any, gradients: Any, mask: Any) -> Any:
        """Compute |gradient * weight|, and -1 for what has been pruned."""
        return _of_what_is_left(weights, gradients, mask)


def _of_what_is_left(weights: Any, gradients: Any, mask: Any) -> Any:
    # Many scores may be zero, as those of pixels that are always black: below all of them.
    return ops.where(mask, ops.abs(ops.multiply(gradients, weights)), -1.0)


def as_iterative(criterion: Any) -> IterativeCriterion | None:
    """Return the criterion in steps that a criterion is or names; None for every other one."""
    if isinstance(criterion, str):
        return SynFlow() if criterion == SYNFLOW else None
    return criterion if isinstance(criterion, IterativeCriterion) else None
