"""The two ways to let an inner optimizer update what is trained and leave the rest as it is.

`CompactUpdate` gives the inner optimizer only vectors of the trained weights, so that its moments
cost what is trained and nothing it does can reach a frozen weight. `FullShapeUpdate` gives it every
variable whole and restores the frozen entries afterwards; it can find the mask in the first batch,
and serves optimizers that mix the entries of a variable. Both give the same weights for an
optimizer that treats every coordinate alike.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_freeze import backend
from keras_freeze.masks.frozen_variables import Claim, ReadMask
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.optimizer.inner_optimizer import _with_averages
from keras_freeze.parameters import Parameter

# (gradient or None, variable, position of the variable)
Step = Sequence[tuple[Any, Any, int]]


class Update:
    """What both ways share: coupled L2, the scalar of FreezeNet-WD, and the mask's book-keeping.

    Args:
        inner: the optimizer that computes the updates.
        parameters: every variable of the wrapper, classified, in order.
        frozen_weights: "keep", "decay" or "zero".
        l2: coefficient of the coupled weight decay, which reaches everything that is trained.
        num_rescued: how many trained weights the at-least-one rule added.

    Attributes:
        found: whether the mask is, or will be, found in the first batch rather than given.
    """

    found = False

    def __init__(
        self,
        inner: Any,
        parameters: Sequence[Parameter],
        frozen_weights: str,
        l2: float,
        num_rescued: int = 0,
    ) -> None:
        self.inner = inner
        self.parameters = parameters
        self.frozen_weights = frozen_weights
        self.l2 = l2
        self.num_rescued = num_rescued
        # Under coupled L2 and SGD every frozen weight follows one linear recurrence, so that the
        # inner optimizer runs it once, on this scalar, and the weights follow by its ratio.
        self.decay_scale = (
            keras.Variable(1.0, dtype="float32", name="decay_scale")
            if frozen_weights == "decay"
            else None
        )

    @property
    def variables(self) -> list[Any]:
        """The update's own state."""
        return [] if self.decay_scale is None else [self.decay_scale]

    @property
    def mask(self) -> FreezeMask | None:
        """The mask, or None where it is not known yet."""
        raise NotImplementedError

    @property
    def claims(self) -> list[Claim]:
        """What this update says of each variable in its mask, decided or not.

        Whoever reads it keeps only the mask's own variables alive.
        """
        raise NotImplementedError

    def accepts(self, mask: FreezeMask, compact: bool) -> bool:
        """Whether `replace_mask` can take this mask over without new variables."""
        raise NotImplementedError

    def replace_mask(self, mask: FreezeMask) -> None:
        """Takes over a mask and leaves the inner optimizer's state alone."""
        raise NotImplementedError

    def apply(self, step: Step) -> None:
        """Updates the model's variables by one step of the inner optimizer."""
        raise NotImplementedError

    def retire(self) -> None:
        """Lets functions that were traced with this update change no weight any more."""
        raise NotImplementedError

    def _check_complete(self, masked: Iterable[int], step: Step) -> None:
        missing = set(masked) - {position for _, _, position in step}
        if missing and self.decay_scale is not None:
            paths = ", ".join(self.parameters[position].path for position in sorted(missing))
            raise ValueError(
                "With frozen_weights='decay' all frozen weights shrink together, so that each step "
                f"needs the gradients of all of them. Missing: {paths}"
            )

    def _build_inner(self, variables: list[Any]) -> None:
        self.inner.build(variables if self.decay_scale is None else [*variables, self.decay_scale])
        # Keras starts moving averages in the first step; an optimizer that is built again has it
        # behind it, and would average zeros in.
        for optimizer in _with_averages(self.inner):
            averages = optimizer._model_variables_moving_average
            for variable, average in zip(optimizer._trainable_variables, averages, strict=True):
                if average is not None:
                    average.assign(backend.read(variable))

    def _with_l2(self, gradient: Any, variable: Any) -> Any:
        """The gradient plus l2 * variable: PyTorch's weight decay, before momentum."""
        if self.l2 == 0.0 or gradient is None:
            return gradient
        return backend.to_dense(gradient) + self._l2_gradient(variable)

    def _l2_gradient(self, variable: Any) -> Any:
        # Gradients arrive multiplied by the loss scale, and the inner optimizer divides by it. And
        # it adds up those of all replicas, each of which brings its part.
        factor = self.l2 * (self.inner.loss_scale_factor or 1.0) / backend.num_replicas()
        return ops.multiply(ops.cast(factor, variable.dtype), variable)

    def _update_inner(self, gradients: list[Any], variables: list[Any]) -> Any:
        """One step of the inner optimizer; returns what frozen weights are multiplied by, or None.

        None means that they keep their value.
        """
        if self.decay_scale is None:
            if variables:
                self.inner.apply(gradients, variables)
            else:  # schedules go by the count, whether something is trained or not
                self.inner._iterations.assign_add(1)
            return None
        before = backend.read(self.decay_scale)
        self.inner.apply(
            [*gradients, self._l2_gradient(self.decay_scale)], [*variables, self.decay_scale]
        )
        return ops.where(before == 0.0, 0.0, ops.divide(self.decay_scale, before))

    def _claim(self, position: int, read: ReadMask) -> Claim:
        p = self.parameters[position]
        return Claim(p.variable, position, p.is_frozen_candidate, read)

    def _make_mask(self, trained: dict[int, np.ndarray], num_rescued: int) -> FreezeMask:
        """A FreezeMask from boolean arrays by position."""
        parameters = [self.parameters[position] for position in trained]
        entries = [
            MaskEntry(p.position, p.path, trained[p.position], p.is_frozen_candidate)
            for p in parameters
        ]
        return FreezeMask(entries, [p.variable for p in parameters], num_rescued)


def _variable(value: Any, dtype: str, name: str, path: str | None = None) -> Any:
    variable = keras.Variable(value, dtype=dtype, name=name, trainable=path is not None)
    if path is not None:
        # Under the kernel's own path, so that what goes by path or name (decay exclusions,
        # optimizer maps) treats the vector as it would the kernel.
        variable._path = path
    return variable
