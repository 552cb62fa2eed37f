"""From the step that decides the mask to steps that know it, within one call of `fit`.

With the first-batch strategy a training step is traced before anybody knows which weights are
trained. `TrainFunction` stands for the model's train function until a batch has decided. The
optimizer then goes on with the compact update, in which slots keep their values at trained entries.
"""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from keras_freeze import _keras_private, backend
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.optimizer.inner_optimizer import is_one_of_several, walk
from keras_freeze.optimizer.mask_changes import change_update
from keras_freeze.optimizer.state import Phase

if TYPE_CHECKING:
    from keras_freeze.optimizer.masked_optimizer import MaskedOptimizer

followers: list[Callable[[keras.Model], bool]] = []
"""Called with a model that `fit` is about to train with a mask; they return whether they have
changed how its training step is computed."""


def prepare_for_mask(model: keras.Model, optimizer: "MaskedOptimizer") -> None:
    """Let `fit` of a model do what its optimizer's mask allows, as soon as there is one."""
    outer = getattr(model, "optimizer", None)
    if optimizer not in walk(outer) or is_one_of_several(optimizer, outer):
        return
    is_compact = isinstance(optimizer.update, CompactUpdate)
    function: Any = model.train_function
    is_ours = isinstance(function, TrainFunction)
    if function is not None and not is_ours and not _keras_private.is_train_function(function):
        return  # someone has wrapped another around it, which could not be made again
    if is_compact or optimizer.can_become_compact:
        function = TrainFunction(model, optimizer)
        if optimizer.has_refused_functions:
            function.forget()
        model.train_function = function
    elif optimizer.has_refused_functions:
        make_train_function_again(model)


def make_train_function_again(model: keras.Model) -> None:
    """Replace a train function that was traced for another mask, also while `fit` runs."""
    function: Any = model.train_function
    if isinstance(function, TrainFunction):
        function.forget()
    elif function is not None:
        _new_train_function(model)


def gradients_are_chosen(model: keras.Model, for_good: bool = False) -> None:
    """Tell that the `followers` need not be called for the mask that a model has now.

    With `for_good`, they need not be called for that of the first batch either.
    """
    function: Any = model.train_function
    if isinstance(function, TrainFunction) and (for_good or not function.waits_for_first_batch):
        function.has_followers = False


def may_choose_gradients(model: keras.Model) -> bool:
    """Return whether the `followers` may be called for the mask that a model has or gets."""
    function: Any = model.train_function
    return isinstance(function, TrainFunction) and function.has_followers


class TrainFunction:
    """The train function of a model until its optimizer has a mask and the step makes use of it.

    Attributes:
        has_followers: whether the `followers` are called for the mask.
    """

    def __init__(self, model: keras.Model, optimizer: "MaskedOptimizer") -> None:
        self._model = weakref.ref(model)  # which holds this object
        self._optimizer = optimizer
        self._is_settled = False
        self.has_followers = True
        before: Any = model.train_function
        self._function: Any = before._function if isinstance(before, TrainFunction) else before

    def __call__(self, *arguments: Any) -> Any:
        """Run the model's train function, with what Keras gives it."""
        model = self._model()
        if model is not None and not self._is_settled:
            following = backend.between_steps(model, arguments, lambda: self._prepare(model))
            return self._function(*following)
        return self._function(*arguments)

    @property
    def waits_for_first_batch(self) -> bool:
        """Whether the optimizer is going to change to the compact update."""
        return not self._is_settled and self._optimizer.can_become_compact

    def forget(self) -> None:
        """Let the model make its train function again before the next step."""
        self._function = None

    def _prepare(self, model: keras.Model) -> None:
        """Get ready for the next step, and make use of the mask if there is one."""
        # Someone may have set a function around this one, which stays.
        around: Any = model.train_function
        if self._optimizer.phase is Phase.DECIDED:
            if continue_compactly(self._optimizer):
                self.forget()
            changes = [follow(model) for follow in followers] if self.has_followers else []
            if any(changes):
                self.forget()
            self._is_settled = True
        if self._function is None:
            self._function = _new_train_function(model)
        is_done = self._is_settled and around is self
        model.train_function = self._function if is_done else around


def _new_train_function(model: keras.Model) -> Any:
    model.train_function = None  # not `force=True`, which a method of the user's may not know
    model.make_train_function()
    return model.train_function


def continue_compactly(optimizer: "MaskedOptimizer") -> bool:
    """Change to the compact update if the first batch has decided the mask.

    The mask stays, and so do the slots of what is trained.

    Returns:
        Whether the update has changed.
    """
    if not optimizer.can_become_compact or optimizer.phase is not Phase.DECIDED:
        return False
    change_update(optimizer, compact=True)
    return True
