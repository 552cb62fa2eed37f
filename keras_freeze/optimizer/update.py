"""The update strategies: how an inner optimizer trains some entries and leaves the others.

`CompactUpdate` gives the inner optimizer only vectors of the trained weights, so that its moments
take memory for trained weights alone and nothing it does can reach a frozen weight. `DenseUpdate`
gives it whole variables and restores the frozen entries afterwards; it can decide the mask by the
first batch, and serves optimizers that mix the entries of a variable. Both give the same weights
for an optimizer that treats every coordinate alike.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_freeze import _keras_private, backend
from keras_freeze._utils.typing import Optimizer, Variable
from keras_freeze.masks.frozen_variables import ReadMask, VariableMask
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.optimizer.grid_training import PreciseValues
from keras_freeze.optimizer.inner_optimizer import averaging_optimizers
from keras_freeze.optimizer.processes import SharedGradients
from keras_freeze.optimizer.state import Phase
from keras_freeze.parameters import Parameter

if TYPE_CHECKING:
    from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer

# (gradient or None, variable, position of the variable)
Step = Sequence[tuple[Any, Any, int]]


class Update:
    """Base class of the update strategies: coupled L2, FreezeNet-WD's scalar, and the mask.

    Args:
        optimizer: the FreezeOptimizer, of which only the settings and the inner optimizer are kept.
        parameters: every variable of the FreezeOptimizer, classified, in order.
        mask: the mask; None if it is decided or loaded later.

    Attributes:
        inner: the optimizer that computes the updates.
        num_rescued: how many trained weights the at-least-one rule added.
        by_first_batch: whether the first batch decides, or has decided, the mask.
        grids: the values in full precision of variables that are trained on a grid, by position.
        shared: the means of gradients over processes that train together.
    """

    by_first_batch = False

    def __init__(
        self,
        optimizer: "FreezeOptimizer",
        parameters: Sequence[Parameter],
        mask: FreezeMask | None,
    ) -> None:
        self.inner: Optimizer = optimizer.inner_optimizer
        self.parameters = parameters
        self.frozen_weights = optimizer.frozen_weights
        self.l2 = optimizer.l2
        self.num_rescued = 0 if mask is None else mask.num_rescued
        self.grids: dict[int, PreciseValues] = {}
        self.shared = SharedGradients(parameters)
        # Under coupled L2 and SGD every frozen weight follows one linear recurrence: the inner
        # optimizer computes it once, for this scalar, and frozen weights are multiplied by its
        # ratio.
        self.decay_scale = (
            keras.Variable(1.0, dtype="float32", name="decay_scale")
            if self.frozen_weights == "decay"
            else None
        )

    @property
    def variables(self) -> list[Any]:
        """The variables that follow from the state, except those of `grids`."""
        return [] if self.decay_scale is None else [self.decay_scale]

    @property
    def grid_variables(self) -> list[Any]:
        """The values in full precision, and the starts, of what is trained on a grid."""
        return [v for grid in self.grids.values() for v in grid.variables]

    @property
    def phase(self) -> Phase:
        """`Phase.WAITING`, `Phase.UNDECIDED` or `Phase.DECIDED`."""
        raise NotImplementedError

    @property
    def mask(self) -> FreezeMask | None:
        """The mask; None where it is not known yet."""
        raise NotImplementedError

    @property
    def variable_masks(self) -> list[VariableMask]:
        """The mask of each variable that has one, decided or not, to be registered.

        Their `read` refers to the variables of the mask alone, not to this object.
        """
        raise NotImplementedError

    def accepts(self, mask: FreezeMask, compact: bool) -> bool:
        """Return whether `replace_mask` can set this mask without new variables."""
        raise NotImplementedError

    def replace_mask(self, mask: FreezeMask) -> None:
        """Set the mask; the inner optimizer's state does not change."""
        raise NotImplementedError

    def apply(self, step: Step) -> None:
        """Update the model's variables by one step of the inner optimizer."""
        raise NotImplementedError

    def disable(self) -> None:
        """Keep functions that were traced with this update from changing any weight."""
        raise NotImplementedError

    def grid_state(self) -> dict[int, np.ndarray]:
        """Return the `PreciseValues.state` of trained entries, by position."""
        raise NotImplementedError

    def restore_grid(self, state: Mapping[int, np.ndarray]) -> None:
        """Set what `grid_state` returned."""
        raise NotImplementedError

    def forget_values(self) -> None:
        """Forget what was read from `variables`, which have been assigned to."""

    def _check_complete(self, masked: Iterable[int], step: Step) -> None:
        missing = set(masked) - {position for _, _, position in step}
        if missing and self.decay_scale is not None:
            paths = ", ".join(self.parameters[position].path for position in sorted(missing))
            raise ValueError(
                "With frozen_weights='decay' all frozen weights shrink together, so that each step "
                f"needs the gradients of all of them. Received: no gradients of {paths}"
            )

    def _build_inner(self, variables: list[Any]) -> None:
        if self.decay_scale is not None:
            variables = [*variables, self.decay_scale]
        with backend.slots_of_zeros(self.inner):
            self.inner.build(variables)
        # Keras initializes moving averages in the first step, which an optimizer that is built
        # again has behind it: it would average in zeros.
        for optimizer in averaging_optimizers(self.inner):
            for variable, average in _keras_private.moving_averages(optimizer):
                average.assign(backend.read(variable))

    def _with_l2(self, gradient: Any, variable: Any) -> Any:
        """Return the gradient plus l2 * variable: PyTorch's weight decay, before momentum."""
        if self.l2 == 0.0 or gradient is None:
            return gradient
        return backend.to_dense(gradient) + self._l2_gradient(variable)

    def _l2_gradient(self, variable: Any) -> Any:
        # Gradients arrive multiplied by the loss scale, and the inner optimizer divides by it. It
        # also sums the gradients of all replicas, so that each contributes its part.
        factor = self.l2 * (self.inner.loss_scale_factor or 1.0) / backend.num_replicas()
        return ops.multiply(ops.cast(factor, variable.dtype), variable)

    def _update_inner(self, gradients: list[Any], variables: list[Any]) -> Any:
        """Run one step of the inner optimizer.

        Returns:
            The factor that frozen weights are multiplied by; None where they keep their values.
        """
        if self.decay_scale is None:
            if variables:
                self.inner.apply(gradients, variables)
            else:  # schedules depend on the count, whether something is trained or not
                _keras_private.iterations_variable(self.inner).assign_add(1)
            return None
        before = backend.read(self.decay_scale)
        self.inner.apply(
            [*gradients, self._l2_gradient(self.decay_scale)], [*variables, self.decay_scale]
        )
        return ops.where(before == 0.0, 0.0, ops.divide(self.decay_scale, before))

    def _variable_mask(self, position: int, read: ReadMask) -> VariableMask:
        p = self.parameters[position]
        return VariableMask(p.variable, position, p.is_frozen_candidate, read)

    def _make_mask(self, trained: dict[int, np.ndarray], num_rescued: int) -> FreezeMask:
        """Make a FreezeMask of boolean arrays, given by position."""
        parameters = [self.parameters[position] for position in trained]
        entries = [
            MaskEntry(p.position, p.path, trained[p.position], p.is_frozen_candidate)
            for p in parameters
        ]
        return FreezeMask(entries, [p.variable for p in parameters], num_rescued)


def make_variable(value: Any, dtype: str, name: str, path: str | None = None) -> Variable:
    """Create a variable of an update, with a path a trainable one."""
    variable = keras.Variable(value, dtype=dtype, name=name, trainable=path is not None)
    if path is not None:
        _keras_private.set_path(variable, path)
    return variable
