"""The mask and the state of a FreezeOptimizer."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras

from keras_freeze import _keras_private, backend, criteria
from keras_freeze._utils.threads import exclusive
from keras_freeze._utils.typing import Variable
from keras_freeze.initializers.of_layers import starts_of
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.masks.settings import Distribution, Settings
from keras_freeze.masks.structure import Structure
from keras_freeze.optimizer import saving, weight_setting
from keras_freeze.optimizer.arguments import check_precision
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.optimizer.delegation import DelegatingOptimizer
from keras_freeze.optimizer.dense_update import DenseUpdate
from keras_freeze.optimizer.inner_optimizer import (
    fresh_copies,
    reset_to,
    slots_of,
    unbuild,
    walk,
)
from keras_freeze.optimizer.processes import check_agreement
from keras_freeze.optimizer.state import BuildPlan, Phase, State, relabel
from keras_freeze.optimizer.strategy import is_coordinate_wise, suits_compact
from keras_freeze.optimizer.trace_guard import TraceGuard
from keras_freeze.optimizer.trained_starts import TrainedStarts, digest_of_trained
from keras_freeze.optimizer.update import Update
from keras_freeze.parameters import Parameter, classify
from keras_freeze.starts import Start


class MaskedOptimizer(DelegatingOptimizer):
    """Base class of FreezeOptimizer: its phase, its mask, and its state as files contain it.

    Attributes:
        update: the update strategy that changes the variables; None before the build.
        plan: what the next build starts from.
        trained_starts: what is known of the trained weights before training.
    """

    update: Update | None = None
    plan = BuildPlan()

    trained_starts: TrainedStarts

    # Settings, as arguments of FreezeOptimizer.
    freeze_rate: float
    criterion: str | criteria.Criterion
    frozen_weights: str
    seed: int
    l2: float
    grid: float | None
    exclude: tuple[str, ...]
    distribution: Distribution
    structure: Structure | None

    def __init__(self, name: str | None) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self._traces = TraceGuard()
        # In `__dict__`, where TensorFlow's checkpoints do not find it.
        self.__dict__["_starts"] = {}
        self.__dict__["trained_starts"] = TrainedStarts()
        self.__dict__["agreed_update"] = None

    @property
    def settings(self) -> Settings:
        """The settings that another FreezeOptimizer must have to inherit this one's mask."""
        names = criteria.in_words(self.criterion), self.frozen_weights
        return Settings(self.freeze_rate, *names, self.seed, self.distribution, self.structure)

    @property
    def phase(self) -> Phase:
        """The `Phase` of this optimizer: unbuilt, waiting, undecided, decided or superseded."""
        if self.update is None:
            return Phase.UNBUILT
        return Phase.SUPERSEDED if frozen_variables.is_superseded(self) else self.update.phase

    @property
    def mask(self) -> FreezeMask | None:
        """The `FreezeMask`, True where a weight is trained; None as long as it is not decided."""
        if self.update is not None:
            return self.update.mask
        return None if self.plan.state is None else self.plan.state.mask

    @property
    def built_variables(self) -> list[Variable]:
        """The variables that this optimizer was built with."""
        return _keras_private.built_variables(self)

    @property
    def parameters(self) -> Sequence[Parameter]:
        """The variables that this optimizer was built with, classified."""
        return [] if self.update is None else self.update.parameters

    @property
    def compact_update(self) -> CompactUpdate | None:
        """The compact update; None without a mask, or with a dense update."""
        if isinstance(self.update, CompactUpdate) and self.update.phase is Phase.DECIDED:
            return self.update
        return None

    @property
    def can_become_compact(self) -> bool:
        """Whether the update is dense for no other reason than that the first batch decides.

        Functions that were traced for it must be such that Keras makes them again.
        """
        is_waiting = isinstance(self.update, DenseUpdate) and self.update.by_first_batch
        if not is_waiting or not self.is_coordinate_wise:
            return False
        has_functions = self._traces.has_others or len(self._traces.models) > 1
        return not has_functions and slots_of(self.inner_optimizer) is not None

    @property
    def variables(self) -> list[Any]:
        """The state: the variables of the mask, of the grid, and of the inner optimizer."""
        grid = [] if self.update is None else self.update.grid_variables
        return [*self.mask_variables, *grid, *self.inner_optimizer.variables]

    @property
    def num_trace_markers(self) -> int:
        """How many of `variables`, the first ones, have no value."""
        return len(self._traces.markers)

    @property
    def mask_variables(self) -> list[Any]:
        """The variables that follow from the mask, and FreezeNet-WD's scalar."""
        return [*self._traces.markers, *([] if self.update is None else self.update.variables)]

    @property
    def is_coordinate_wise(self) -> bool:
        """Whether the inner optimizer is known to update each coordinate by itself."""
        return is_coordinate_wise(self.inner_optimizer)

    def suits_compact(self, mask: FreezeMask) -> bool:
        """Return whether the inner optimizer can do with the trained weights of a mask alone."""
        return suits_compact(self.inner_optimizer, mask)

    def rebuild(self, state: State | None, variables: Sequence[Variable]) -> None:
        """Build this optimizer, again if necessary, for a state and variables.

        Raises:
            ValueError: if the state belongs to another network; nothing has changed then.
        """
        parameters = self._checked(variables)
        if state is not None and state.mask is not None:
            relabel(state.mask, parameters)  # raises now, while nothing has changed
        self._check_shared(parameters, None if state is None else state.mask)
        if self.update is not None:
            with backend.strategy_scope(self):
                copies = fresh_copies(self.inner_optimizer)
            frozen_variables.keep_current_masks(self)
            self.update.disable()
            self.update = None
            reset_to(self.inner_optimizer, copies)
            unbuild(self)
            self.refuse_traced_functions()
        self.plan = replace(self.plan, state=state, trained_counts=None)
        self.build(list(variables))

    def classify(self, variables: Sequence[Any]) -> list[Parameter]:
        """Return what variables are to this optimizer; see `keras_freeze.parameters.classify`."""
        return classify(variables, self.exclude, self.plan.paths)

    def _checked(self, variables: Sequence[Variable]) -> list[Parameter]:
        backend.check_strategy(variables, list(walk(self)))
        parameters = self.classify(variables)
        check_precision(parameters, self.frozen_weights)
        return parameters

    def set_mask(
        self,
        mask: FreezeMask,
        variables: Sequence[Variable],
        starts: Mapping[int, Start] | None = None,
    ) -> None:
        """Set the mask and reset the inner optimizer, except its iterations and learning rate.

        Call `keras_freeze.freeze` instead, which checks the mask and updates the model.

        Args:
            mask: which entries are trained; variables that it does not contain are trained whole.
            variables: the variables that the mask's positions refer to.
            starts: what the variables of the mask were drawn from, where that is known.
        """
        with exclusive(self):
            self.__dict__["_starts"] = dict(starts or {})
            self.rebuild(State(mask, compact=self.suits_compact(mask)), variables)
            self.start_here()
            if self.frozen_weights == "zero":
                self.zero_frozen_weights()

    def reset(self) -> None:
        """Reset the inner optimizer, iterations included, and keep the mask."""
        with exclusive(self):
            mask = self.mask
            if self.built:
                state = None if mask is None else State(mask, compact=self.suits_compact(mask))
                self.rebuild(state, self.built_variables)
            for optimizer in walk(self.inner_optimizer):
                _keras_private.iterations_variable(optimizer).assign(0)
            self.start_here()

    def set_trained_starts(self, trained_starts: TrainedStarts) -> None:
        """Set `trained_starts`."""
        self.__dict__["trained_starts"] = trained_starts
        frozen_variables.remember_trained_starts(self, trained_starts)

    def start_here(self) -> None:
        """Remember by a digest that trained weights are as they were before training."""
        mask = self.mask if self.built else None
        digest = None if mask is None else digest_of_trained(self.parameters, mask)
        self.set_trained_starts(TrainedStarts(digest))

    def zero_frozen_weights(self) -> None:
        """Set every frozen weight to zero.

        Raises:
            ValueError: if there is no mask yet.
        """
        mask = self.mask
        if mask is None or not self.built:
            raise ValueError("No weight is frozen yet: call `keras_freeze.freeze(model, x, y)`.")
        variables = self.built_variables
        for entry in mask.entries:
            frozen_variables.zero_frozen_entries(variables[entry.position], entry.trained)
        if isinstance(self.update, DenseUpdate):
            self.update.copy_frozen_entries_to_averages()

    @property
    def has_refused_functions(self) -> bool:
        """Whether there has been another mask for which functions may have been traced."""
        return self._traces.generation > 0

    def refuse_traced_functions(self) -> None:
        """Let functions fail that were traced for the mask until now."""
        self._traces.invalidate()

    def refuse_functions_with_blocks(self) -> None:
        """Let functions fail that were traced with restricted gradients which are gone since."""
        update = self.compact_update
        if update is not None and update.has_dropped_blocks:
            update.has_dropped_blocks = False
            self.refuse_traced_functions()

    def propagate_mask(self, before: FreezeMask | None) -> None:
        """Tell the registry and restricted gradients about a mask that was set in place."""
        self._register()
        self.__dict__["agreed_update"] = None
        update = self.compact_update
        if update is None:
            return
        update.update_blocks()
        is_constant = backend.TRACES_MASKS and bool(update.blocks)
        if (update.has_dropped_blocks or is_constant) and update.mask != before:
            update.has_dropped_blocks = False
            self.refuse_traced_functions()

    def check_counts(self) -> None:
        """Check that this optimizer is not waiting for the state of a network of another shape.

        Raises:
            ValueError: if it was made from a configuration for other variables.
        """
        counts = self.plan.trained_counts
        if counts is not None and self.built and not isinstance(self.update, CompactUpdate):
            raise ValueError(
                "This FreezeOptimizer was made from the configuration of another network, which "
                f"counts trained entries of {len(counts)} variables. "
                f"Received: {len(self.built_variables)} variables."
            )

    def _check_agreement(self) -> None:
        """Check, in the first step of an update and its mask, that other processes have the same.

        Where processes share variables, that is checked before: in the step, these have no values.

        Raises:
            ValueError: in all processes, if they do not.
        """
        is_agreed = self.update is self.__dict__["agreed_update"] or backend.STEPS_ARE_STATELESS
        if not is_agreed:
            check_agreement(self, self.parameters)
            self.__dict__["agreed_update"] = self.update

    def _check_shared(self, parameters: Sequence[Parameter], mask: FreezeMask | None) -> None:
        """Check, before a mask is set, that processes which share the variables set the same.

        Raises:
            ValueError: in all processes, if they do not.
        """
        if backend.are_shared([p.variable for p in parameters]):
            check_agreement(self, parameters, mask)

    def _register(self) -> None:
        assert self.update is not None
        masks = [
            replace(mask, start=self.starts.get(mask.position))
            for mask in self.update.variable_masks
        ]
        frozen_variables.register(self, masks, self.settings, self.update.decay_scale)
        frozen_variables.remember_trained_starts(self, self.trained_starts)

    @property
    def starts(self) -> Mapping[int, Start]:
        """What variables of the mask were drawn from, by position, where that is known."""
        starts: Mapping[int, Start] = self.__dict__["_starts"]
        return starts

    def set_starts(self, starts: Mapping[int, Start]) -> None:
        """Set `starts`."""
        self.__dict__["_starts"] = dict(starts)
        if self.update is not None:
            self._register()

    def remember_starts(self, model: keras.Model) -> None:
        """Set `starts` from the initializers of a model's layers."""
        if self.mask is not None:
            parameters = self.parameters or self.classify(model.trainable_variables)
            self.set_starts(starts_of(model, [parameters[e.position] for e in self.mask.entries]))

    @property
    def state(self) -> State:
        """The state besides the inner optimizer's: mask, update strategy, decay, starts."""
        update = self.update
        if update is None:
            return replace(self.plan.state or State(None, compact=False), starts=self.starts)
        scale = None if update.decay_scale is None else backend.to_numpy(update.decay_scale)
        return State(
            mask=update.mask,
            compact=isinstance(update, CompactUpdate),
            decay_scale=scale,
            by_first_batch=update.by_first_batch,
            starts=self.starts,
            settings=self.settings,
            grid=update.grid_state(),
            trained_starts=self.trained_starts,
        )

    def restore(self, state: State) -> None:
        """Set the state; an optimizer that is not built yet is built with it.

        Raises:
            ValueError: if the state belongs to a network with other variables.
        """
        with exclusive(self):
            update = self.update
            if update is not None:
                self._check_shared(update.parameters, state.mask)
            self.__dict__["_starts"] = dict(state.starts)
            if update is None:
                self.plan = replace(self.plan, state=state)
            elif self.must_rebuild(state):
                self.rebuild(state, self.built_variables)
            elif state.mask is not None:
                before = update.mask
                frozen_variables.keep_current_masks(self)
                update.replace_mask(relabel(state.mask, update.parameters))
                update.by_first_batch = state.by_first_batch
                self.propagate_mask(before)
                update.restore_grid(state.grid)
                if state.decay_scale is not None and update.decay_scale is not None:
                    update.decay_scale.assign(state.decay_scale)
            self.set_trained_starts(state.trained_starts)
            self.set_starts(state.starts)

    def must_rebuild(self, state: State) -> bool:
        """Return whether this optimizer is built with other variables than a state needs."""
        update = self.update
        if update is None:
            return False
        if state.mask is None:
            return update.mask is not None
        return not update.accepts(relabel(state.mask, update.parameters), state.compact)

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Set `variables`, those of the inner optimizer included.

        Args:
            weights: one array for each of `variables`; where the first batch has decided the mask,
                also for each of those that there were before.

        Raises:
            ValueError: if the optimizer is not built, or numbers or shapes differ.
        """
        weight_setting.set_weights(self, weights)

    def save_own_variables(self, store: Any) -> None:
        """Write the mask; Keras saves the inner optimizer beside it."""
        saving.save(self, store)

    def load_own_variables(self, store: Any) -> None:
        """Read the mask; an optimizer that is not built yet is built with it.

        Raises:
            ValueError: if the state belongs to a network with other variables, or to another inner
                optimizer, or cannot be read.
        """
        saving.load(self, store)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Let the inner optimizer set the final values of variables, such as moving averages.

        Warns if training has not decided a mask.
        """
        super().finalize_variable_values(var_list)
        if sys.exc_info()[1] is not None:  # with JAX, Keras comes here after an error in `fit`, too
            return
        if isinstance(self.update, DenseUpdate) and self.update.is_decided is False:
            warnings.warn(
                "No step has decided which weights are trained, and nothing was trained: no batch "
                "had gradients that are finite. Look for NaN or infinite values in the data, the "
                "loss and the weights.",
                RuntimeWarning,
                stacklevel=2,
            )

    # Hooks of TensorFlow, which saves the variables by itself, except those of the mask.

    def _trackable_children(self, save_type: str = "checkpoint", **arguments: Any) -> Any:
        saved = _keras_private.checkpoint_being_restored(self)
        if saved:
            saving.from_first_tensors(self, saved)
        children = super()._trackable_children(save_type, **arguments)
        if save_type == "checkpoint":
            return children
        # A SavedModel needs all that its functions read.
        compact = self.compact_update
        grid = [] if self.update is None else self.update.grid_variables
        read = [v.value for v in (self._traces.variable, *self.mask_variables, *grid)]
        if compact is not None:
            read += [vector.value for vector in compact.vectors]
            read += [v for block in compact.blocks.values() for v in block.variables]
        return {**children, **{f"read_{number}": v for number, v in enumerate(read)}}

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return saving.to_tensors(self)

    def _restore_from_tensors(self, tensors: Mapping[str, Any]) -> None:
        saving.from_tensors(self, tensors)
