"""Recording the gradients that a training step passes to FreezeOptimizers, without updates.

While a `Recorder` is active in a thread, every FreezeOptimizer that is used in this thread records
its gradients in it and does not change variables, its own state or its inner optimizer.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras import ops

from keras_freeze import backend

_of_thread = threading.local()


class TracedGradientError(Exception):
    """A gradient has no value yet, because the step is being compiled."""


@dataclass
class RecordedGradients:
    """The gradients that one FreezeOptimizer was passed.

    Attributes:
        optimizer: the FreezeOptimizer.
        variables: every variable that came with a gradient or with None, by its id, in order of
            first appearance.
        gradients: the float32 sums of the gradients, by the id of their variable.
    """

    optimizer: Any
    variables: dict[int, Any] = field(default_factory=dict)
    gradients: dict[int, Any] = field(default_factory=dict)

    def add(self, variable: Any, gradient: Any, weight: float) -> None:
        """Add a gradient, times the weight of its batch."""
        self.variables.setdefault(id(variable), variable)
        if gradient is None:
            return
        if backend.is_tracer(gradient):
            raise TracedGradientError
        gradient = ops.multiply(ops.cast(backend.to_dense(gradient), "float32"), weight)
        before = self.gradients.get(id(variable))
        self.gradients[id(variable)] = gradient if before is None else before + gradient

    def copy(self) -> "RecordedGradients":
        """Return a copy to which more can be added."""
        return RecordedGradients(self.optimizer, dict(self.variables), dict(self.gradients))


class Recorder:
    """Collects the gradients that all FreezeOptimizers are passed.

    Attributes:
        weight: of the present batch, by which its gradients are multiplied.
        records: what each FreezeOptimizer was passed, by its id.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self.records: dict[int, RecordedGradients] = {}
        self._built_for: dict[int, list[Any]] = {}
        self._arrays: dict[int, tuple[Any, Any]] = {}

    def build(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Remember what a FreezeOptimizer would have been built for."""
        self._built_for[id(optimizer)] = list(variables)

    def know_arrays(self, variables: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Set which arrays stand for which variables in a stateless step."""
        # The arrays are kept, so that no other gets the id of one.
        self._arrays = {id(a): (a, v) for v, a in zip(variables, arrays, strict=True)}

    def record(self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any] | None) -> None:
        """Record gradients and their variables; None means those the optimizer is built for."""
        if variables is None:
            built_for = self._built_for.get(id(optimizer))
            variables = optimizer.built_variables if optimizer.built else built_for
        variables = checked_variables(grads, variables)
        record = self.records.setdefault(id(optimizer), RecordedGradients(optimizer))
        # The inner optimizer would divide by its loss scale.
        weight = self.weight / (optimizer.loss_scale_factor or 1.0)
        for gradient, variable in zip(grads, variables, strict=True):
            record.add(variable, gradient, weight)

    def record_stateless(self, optimizer: Any, grads: Sequence[Any], arrays: Any) -> None:
        """Record gradients where arrays stand for the variables."""
        known = [self._arrays.get(id(array)) for array in arrays]
        variables = [one[1] for one in known if one is not None]
        self.record(optimizer, grads, variables if len(variables) == len(known) else None)


def checked_variables(grads: Sequence[Any], variables: Sequence[Any] | None) -> list[Any]:
    """Return the variables of a step; None stands for those of an optimizer that is not built.

    Raises:
        ValueError: unless there is one for each gradient.
    """
    if variables is None:
        raise ValueError(
            "`apply(grads)` without variables needs an optimizer that is built: call "
            "`optimizer.build(variables)` first."
        )
    if len(variables) != len(grads):
        raise ValueError(
            "Argument `grads` must have one gradient for each variable. "
            f"Received: {len(grads)} gradients for {len(variables)} variables."
        )
    return list(variables)


def active_recorder() -> Recorder | None:
    """Return the Recorder of this thread; None if no gradients are being recorded."""
    return getattr(_of_thread, "recorder", None)


@contextlib.contextmanager
def recording() -> Iterator[Recorder]:
    """Let the FreezeOptimizers that are used in this thread record in a new Recorder."""
    before = active_recorder()
    _of_thread.recorder = Recorder()
    try:
        yield _of_thread.recorder
    finally:
        _of_thread.recorder = before
