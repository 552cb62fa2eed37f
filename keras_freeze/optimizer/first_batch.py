"""From the step that decides the mask to steps that know it, within one call of `fit`.

With the first-batch strategy a training step is traced before anybody knows which weights are
trained. `FirstSteps` stands for the model's train function until a batch has decided. The optimizer
then goes on with the compact update, in which its slots keep their values at trained entries.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras

from keras_freeze import backend
from keras_freeze._utils.threads import exclusive
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.optimizer.compact_update import count_trained
from keras_freeze.optimizer.inner_optimizer import is_one_of_several, slots_of, walk
from keras_freeze.optimizer.state import Phase

if TYPE_CHECKING:
    from keras_freeze.optimizer.masked_optimizer import MaskedOptimizer

followers: list[Callable[[keras.Model], Any]] = []
"""Called with a model whose optimizer has changed to the compact update."""


def continue_compactly_after(model: keras.Model, optimizer: "MaskedOptimizer") -> None:
    """Let `fit` of a model go on with the compact update once a batch has decided the mask."""
    outer = getattr(model, "optimizer", None)
    is_only = optimizer in walk(outer) and not is_one_of_several(optimizer, outer)
    if is_only and optimizer.can_become_compact:
        model.train_function = FirstSteps(model, optimizer)


class FirstSteps:
    """The train function of a model whose first batch decides which weights are trained."""

    def __init__(self, model: keras.Model, optimizer: "MaskedOptimizer") -> None:
        self._model = weakref.ref(model)  # which holds this object
        self._optimizer = optimizer
        before: Any = model.train_function
        self._function: Any = before._function if isinstance(before, FirstSteps) else before

    def __call__(self, *arguments: Any) -> Any:
        """Run the model's train function, with what Keras gives it."""
        model, optimizer = self._model(), self._optimizer
        assert model is not None
        if self._function is None:
            self._function = _new_train_function(model)
            model.train_function = self
        function = self._function
        backend.attach_state(model, arguments)
        if optimizer.phase is not Phase.UNDECIDED:
            continue_compactly(optimizer)
            function = _new_train_function(model)
        return function(*backend.detach_state(model, arguments))


def _new_train_function(model: keras.Model) -> Callable[..., Any]:
    model.make_train_function(force=True)
    function: Callable[..., Any] = model.train_function
    return function


def continue_compactly(optimizer: "MaskedOptimizer") -> None:
    """Change to the compact update if the first batch has decided the mask.

    The mask stays, and so do the slots of what is trained.
    """
    if optimizer.phase is not Phase.DECIDED or not optimizer.can_become_compact:
        return
    with exclusive(optimizer):
        inner, state = optimizer.inner_optimizer, optimizer.state
        assert state.mask is not None
        kept = _trained_part(slots_of(inner) or {}, state.mask, len(optimizer.parameters))
        optimizer.rebuild(replace(state, compact=True), optimizer.built_variables)
        new = slots_of(inner) or {}
        for name, values in kept.items():
            if not isinstance(values, list):
                new[name].assign(values)
                continue
            for slot, value in zip(new[name], values, strict=True):
                if slot is not None:
                    slot.assign(value)
    model = frozen_variables.model_of(optimizer)
    for follow in followers if model is not None else ():
        follow(model)


def _trained_part(slots: dict[str, Any], mask: FreezeMask, num_variables: int) -> dict[str, Any]:
    """Return the values of slots that the compact update has: those of trained entries."""
    trained = {e.position: e.trained for e in mask.entries if not e.trained.all()}
    counts = count_trained(mask, num_variables)

    def part(slot: Any, position: int | None = None) -> Any:
        if slot is None:
            return None
        if position in trained:
            return backend.to_numpy(slot)[trained[position]]
        return backend.read(slot)

    return {
        name: [part(v, i) for i, v in enumerate(value) if counts[i : i + 1] != [0]]
        if isinstance(value, list)
        else part(value)
        for name, value in slots.items()
    }
