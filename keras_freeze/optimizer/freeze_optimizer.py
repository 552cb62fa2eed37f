"""FreezeOptimizer: an optimizer that trains a few of a network's weights and freezes the rest."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_freeze import backend, criteria
from keras_freeze._utils.threads import exclusive
from keras_freeze.criteria.criteria import Criterion
from keras_freeze.gradients.recording import active_recorder
from keras_freeze.initializers.of_layers import model_in_use, models_in_use, starts_of
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.masks.settings import Settings
from keras_freeze.optimizer.arguments import CHECKS, check_decay
from keras_freeze.optimizer.checkpoint import (
    State,
    check_origin,
    fitting_state,
    from_bytes,
    has_these_variables,
    read_state,
    relabel,
    skip_loading_once,
    to_bytes,
    write_state,
)
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.optimizer.dense_update import FullShapeUpdate
from keras_freeze.optimizer.inner_optimizer import renew, renewals, unbuild, with_parts
from keras_freeze.optimizer.update import Update
from keras_freeze.parameters import Parameter, classify, path_of, shorten
from keras_freeze.starts import Start

# Optimizers that treat every coordinate alike, so that training a vector of the trained entries
# is the same as training the whole variable with a masked gradient. Exact classes: a subclass may
# do anything.
COORDINATE_WISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    keras.optimizers.ScheduleFreeAdamW,
)


@keras.saving.register_keras_serializable(package="keras_freeze")
class FreezeOptimizer(keras.optimizers.Optimizer):
    """Trains the most salient weights of a network and keeps the others bit for bit (FreezeNet).

    Wraps any Keras optimizer. Which weights are trained is decided once, by
    `keras_freeze.freeze(model, x, y)` or, without it, by the first batch that reaches the
    optimizer (the paper's algorithm 1). Biases, normalisation parameters and parameters of layers
    that this package does not know are always trained.

    Clipping, accumulation, moving averages and decoupled weight decay belong to the inner
    optimizer, which only ever sees what is trained. Adafactor, Lamb and Muon mix the entries of a
    variable: they see it whole, with zero gradients for what is frozen, which for them is not the
    same as training a part.

    One model trains on several devices where model and optimizers are created in the scope of a
    `tf.distribute.MirroredStrategy`. The first batch is then that of all replicas together.

    Args:
        inner_optimizer: a Keras optimizer that is not built yet, or the name of one.
        freeze_rate: q, the share of the weights that is frozen; from 0 (nothing: exactly the inner
            optimizer) to 1 (only biases and normalisation are trained). Exactly
            floor((1 - q) |W|) weights of the whole network are trained, plus one in each layer
            that would have none. Defaults to 0.9.
        criterion: which weights are trained: the largest "snip" (|gradient * weight|, equation 1),
            "magnitude" (|weight|), "random", "grasp" (weight * (Hessian * gradient), signed; see
            `keras_freeze.criteria.GraSP`, which takes settings; it needs a call to `freeze`), or
            those where a function of weights and gradients (both float32, of one variable's shape;
            made of `keras.ops`) is largest. Defaults to "snip".
        frozen_weights: "keep" leaves frozen weights as they are (FreezeNet), "zero" sets them to
            zero (pruning: with "snip" this is SNIP), "decay" lets coupled weight decay shrink them
            (FreezeNet-WD; needs `l2 > 0` and a plain `SGD`). Defaults to "keep".
        l2: coefficient of the coupled weight decay of the paper: `l2 * w` is added to the gradient
            of every trained parameter, biases included, before momentum. Keras's `weight_decay` is
            another method. Defaults to 0.
        exclude: layers, layer names or variable paths that are always trained, such as a new head;
            they do not count as weights.
        seed: of the "random" criterion and of the weight that a layer without any trained weight
            is given. Defaults to 0.
        name: the optimizer's name.

    Raises:
        TypeError, ValueError: for arguments out of range, a `LossScaleOptimizer` inside (it belongs
            outside), or an inner optimizer that has been used already.

    Example:

    ```python
    model.compile(
        optimizer=FreezeOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), freeze_rate=0.99),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(x, y)
    model.optimizer.mask.num_trained
    ```
    """

    def __init__(
        self,
        inner_optimizer: Any,
        freeze_rate: float = 0.9,
        *,
        criterion: str | Criterion = "snip",
        frozen_weights: str = "keep",
        l2: float = 0.0,
        exclude: Any = (),
        seed: int = 0,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise ValueError(
                f"FreezeOptimizer does not take {', '.join(map(repr, sorted(kwargs)))}: give it to "
                "the inner optimizer, which updates what is trained. "
                f"Received: {kwargs}"
            )
        inner_optimizer = _check_inner(inner_optimizer)
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.freeze_rate = freeze_rate
        self.criterion = criterion
        self.l2 = l2
        self.frozen_weights = frozen_weights
        self.exclude = exclude
        self.seed = seed
        check_decay(self.frozen_weights, self.l2, inner_optimizer)
        self._updates: Update | None = None
        # What the next build starts from: a mask from `freeze` or from a file, or, of an optimizer
        # that was made from a configuration, only how many entries of each variable are trained.
        self._pending: State | None = None
        self._trained_counts: tuple[int | None, ...] | None = None
        # Whether Keras makes this optimizer from a file, whose state it hands over next.
        self._is_from_config = False
        # Counts rebuilds, so that a graph traced before one fails instead of training on a mask
        # that is gone.
        self._generation = 0
        # Not as an attribute that `tf.train.Checkpoint` sees: it counts in this process only.
        self.__dict__["_current_generation"] = keras.Variable(0, dtype="int32", trainable=False)
        self._trace_markers = backend.trace_markers(self._generation)
        # Nor this: it is no part of what TensorFlow saves by itself.
        self.__dict__["_starts"] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks settings, which cannot be changed any more once a mask may depend on them."""
        if name in CHECKS:
            value = CHECKS[name](value)
            if getattr(self, "built", False) or getattr(self, "_pending", None) is not None:
                raise ValueError(
                    f"`{name}` of a FreezeOptimizer cannot be changed once it is built: the mask "
                    "goes by it. Compile the model with a new FreezeOptimizer, and call "
                    "`keras_freeze.freeze(model, ..., overwrite=True)` to decide anew. "
                    f"Received: {name}={value!r}"
                )
        super().__setattr__(name, value)

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the state for the variables that will be updated; called by Keras or `freeze`.

        Where another FreezeOptimizer has frozen some of them already, its mask is taken over.

        Args:
            variables: the trainable variables of the model, in order.

        Raises:
            ValueError: if an entry of `exclude` names none of them, if a state that was loaded
                before belongs to another network, or if variables are frozen already with another
                rate, criterion or treatment.
        """
        if self.built:
            return
        recorder = active_recorder()
        if recorder is not None:
            recorder.build(self, variables)
            return
        parameters = self._check_variables(variables)
        # While a graph is traced, as in `fit`, values assigned here would be lost with the trace.
        with (
            backend.eager_scope(),
            backend.strategy_scope(self),
            keras.name_scope(self.name),
        ):
            self._updates = self._make_updates(parameters)
            candidates = [p for p in parameters if p.is_frozen_candidate]
            model = model_in_use([p.variable for p in candidates])
            if model is not None:
                frozen_variables.remember_model(self, model)
                if self._updates.found and self._updates.mask is None:  # the first batch decides
                    self.__dict__["_starts"] = starts_of(model, candidates)
            super().build(list(variables))
            self._pending = None
            self._register()
            self._warn_of_constraints(parameters)

    def _warn_of_constraints(self, parameters: Sequence[Parameter]) -> None:
        """Says which constraints cannot hold, as they cannot reach frozen entries."""
        if self.frozen_weights == "zero":  # zeros leave it to the trained entries to comply
            return
        mask = self.mask
        partly = [p.position for p in parameters if p.is_frozen_candidate]
        if mask is not None:
            partly = [entry.position for entry in mask.entries if not entry.trained.all()]
        constrained = [
            f"{type(constraint).__name__} of {parameters[position].path!r}"
            for position in partly
            if (constraint := getattr(parameters[position].variable, "constraint", None))
        ]
        if constrained:
            warnings.warn(
                "Constraints cannot hold where entries are frozen, since those keep their values; "
                "they are applied to the trained entries alone. Take the constraint away, "
                "`exclude` the layer, or use frozen_weights='zero'. "
                f"Received: {', '.join(constrained)}",
                stacklevel=2,
            )

    def _register(self) -> None:
        """Says of the variables what is frozen in them."""
        assert self._updates is not None
        claims = [
            replace(claim, start=self.starts.get(claim.position)) for claim in self._updates.claims
        ]
        frozen_variables.register(self, claims, self.settings, self._updates.decay_scale)

    @property
    def settings(self) -> Settings:
        """What another FreezeOptimizer has to agree with to take over this one's mask."""
        criterion = criteria.in_words(self.criterion)
        return Settings(self.freeze_rate, criterion, self.frozen_weights, self.seed)

    def _taken_over(self, parameters: Sequence[Parameter]) -> State | None:
        """The state that variables bring along which are frozen already; None if none is."""
        variables = [p.variable for p in parameters]
        mask = frozen_variables.mask_of(variables)
        if mask is None or frozen_variables.is_overwriting():
            return None
        frozen_variables.check_agrees(mask, parameters, self.settings)
        scale = frozen_variables.decay_scale_of(variables)
        self.__dict__["_starts"] = frozen_variables.starts_of(variables)
        return State(mask, self.suits_compact(mask), scale)

    def _make_updates(self, parameters: Sequence[Parameter]) -> Update:
        arguments = (self.inner_optimizer, parameters, self.frozen_weights, self.l2)
        state = self._taken_over(parameters) if self._pending is None else self._pending
        # Keras builds the optimizer of a legacy `.h5` file for no variables.
        if state is None and parameters and self._counts_fit(parameters):
            assert self._trained_counts is not None
            return CompactUpdate(*arguments, self._trained_counts, None)
        if state is None and self.freeze_rate == 0.0:
            state = State(_everything_trained(parameters), compact=True)
        mask = None
        if state is not None and state.mask is not None:
            mask = relabel(state.mask, parameters)
        updates: Update
        if mask is not None and state is not None and state.compact:
            updates = CompactUpdate(*arguments, _count_trained(mask, len(parameters)), mask)
        else:
            updates = FullShapeUpdate(*arguments, mask, self.freeze_rate, self.criterion, self.seed)
            updates.found = mask is None or (state is not None and state.found)
        if state is not None and state.decay_scale is not None and updates.decay_scale is not None:
            updates.decay_scale.assign(state.decay_scale)
        return updates

    def _check_variables(self, variables: Sequence[Any]) -> list[Parameter]:
        backend.check_strategy(variables, [self, *with_parts(self.inner_optimizer)])
        parameters = classify(variables, self.exclude)
        for p in parameters if self.frozen_weights == "decay" else ():
            dtype = keras.backend.standardize_dtype(p.variable.dtype)
            if p.is_frozen_candidate and dtype not in ("float32", "float64"):
                raise ValueError(
                    "frozen_weights='decay' multiplies weights by factors next to 1, for which "
                    "they must be float32, as they are in mixed precision, or float64. "
                    f"Received: {p.path!r} of dtype {dtype}"
                )
        return parameters

    def _counts_fit(self, parameters: Sequence[Parameter]) -> bool:
        """Whether a configuration has told how many entries of these variables are trained."""
        counts = self._trained_counts
        return (
            counts is not None
            and len(counts) == len(parameters)
            and all(c is None or c <= p.size for c, p in zip(counts, parameters, strict=True))
        )

    def check_counts(self) -> None:
        """Checks that this optimizer does not wait for the state of one with other variables.

        Raises:
            ValueError: if it was made from the configuration of one, and not loaded since.
        """
        counts = self._trained_counts
        if counts is not None and self.built and not isinstance(self._updates, CompactUpdate):
            raise ValueError(
                "This FreezeOptimizer was made from the configuration of another network: it "
                f"counts trained entries of {len(counts)} variables. "
                f"Received: {len(self._trainable_variables)} variables."
            )

    @property
    def mask(self) -> FreezeMask | None:
        """The `FreezeMask`, True where a weight is trained; None as long as it is not decided."""
        if self._updates is not None:
            return self._updates.mask
        return None if self._pending is None else self._pending.mask

    @property
    def compact_update(self) -> CompactUpdate | None:
        """What updates only the trained entries; None where there is no mask or another way."""
        updates = self._updates
        return updates if isinstance(updates, CompactUpdate) and updates.has_mask else None

    def set_mask(
        self, mask: FreezeMask, variables: Sequence[Any], starts: Mapping[int, Start] | None = None
    ) -> None:
        """Takes over a mask; the inner optimizer starts anew but for its iterations and its rate.

        `keras_freeze.freeze` is the way to call this: it checks the mask and tells the model.

        Args:
            mask: which entries are trained; what it does not cover is trained whole.
            variables: the variables that the mask's positions mean.
            starts: what those of the mask were drawn from, where that is known.
        """
        with exclusive(self):
            self._rebuild(State(mask, compact=self.suits_compact(mask)), variables)
            self.set_starts(starts or {})
            if self.frozen_weights == "zero":
                self.zero_frozen_weights()

    def reset(self) -> None:
        """Starts the inner optimizer anew, with zero iterations and the same mask."""
        with exclusive(self):
            mask = self.mask
            if self.built:
                state = None if mask is None else State(mask, compact=self.suits_compact(mask))
                self._rebuild(state, self._trainable_variables)
            for optimizer in with_parts(self.inner_optimizer):
                optimizer._iterations.assign(0)

    @property
    def starts(self) -> Mapping[int, Start]:
        """What variables of the mask were drawn from, by their positions, where that is known."""
        starts: Mapping[int, Start] = self.__dict__["_starts"]
        return starts

    def set_starts(self, starts: Mapping[int, Start]) -> None:
        """Remembers what variables of the mask were drawn from."""
        self.__dict__["_starts"] = dict(starts)
        if self._updates is not None:
            self._register()

    def remember_starts(self, model: keras.Model) -> None:
        """Looks in the model's layers what variables of the mask were drawn from."""
        if self.mask is not None:
            parameters = self._parameters or classify(model.trainable_variables, self.exclude)
            self.set_starts(starts_of(model, [parameters[e.position] for e in self.mask.entries]))

    def zero_frozen_weights(self) -> None:
        """Sets every frozen weight to zero.

        Raises:
            ValueError: if there is no mask yet.
        """
        mask = self.mask
        if mask is None or not self.built:
            raise ValueError("No weight is frozen yet: call `keras_freeze.freeze(model, x, y)`.")
        for entry in mask.entries:
            variable = self._trainable_variables[entry.position]
            zeros = ops.zeros(variable.shape, variable.dtype)
            variable.assign(ops.where(entry.trained, variable.value, zeros))
        if isinstance(self._updates, FullShapeUpdate):
            self._updates.copy_frozen_entries_to_averages()

    def suits_compact(self, mask: FreezeMask) -> bool:
        """Whether the inner optimizer can do with the trained weights of a mask alone."""
        everything_trained = all(entry.trained.all() for entry in mask.entries)
        inner = self.inner_optimizer
        can_be_compact = backend.keras_class(inner) in COORDINATE_WISE and not inner.use_ema
        return everything_trained or can_be_compact

    def _rebuild(self, state: State | None, variables: Sequence[Any]) -> None:
        parameters = self._check_variables(variables)
        if state is not None and state.mask is not None:
            relabel(state.mask, parameters)  # refuses now, while nothing has changed
        if self._updates is not None:
            with backend.strategy_scope(self):
                pairs = renewals(self.inner_optimizer)
            self._settle()
            self._updates.retire()
            self._updates = None
            renew(self.inner_optimizer, pairs)
            unbuild(self)
            self.refuse_traced_functions()
        self._pending = state
        self._trained_counts = None
        self.build(list(variables))

    def refuse_traced_functions(self) -> None:
        """Lets functions fail that were traced for the mask as it was."""
        self._generation += 1
        self._current_generation.assign(self._generation)
        self._trace_markers = backend.trace_markers(self._generation)

    def _settle(self) -> None:
        """Keeps what is said of the variables as it is, before the mask changes in place."""
        if self._updates is not None:
            frozen_variables.settle(self, [claim.variable for claim in self._updates.claims])

    def _follow_mask(self, before: FreezeMask | None) -> None:
        """Lets what goes by the mask know that it may have changed."""
        self._register()
        update = self.compact_update
        if update is None:
            return
        update.update_blocks()
        if update.has_dropped_blocks and update.mask != before:
            update.has_dropped_blocks = False
            self.refuse_traced_functions()

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Updates the trained entries of the variables; decides the mask if there is none yet.

        Args:
            grads: gradients, None where there is none.
            trainable_variables: their variables; those the optimizer was built with if None.

        Raises:
            ValueError: for unknown variables; if there is no mask and a gradient is not finite, or
                several processes would each decide one.
        """
        grads = list(grads)
        if grads:
            with exclusive(self):
                self._apply(grads, trainable_variables)

    def _apply(self, grads: list[Any], trainable_variables: Sequence[Any] | None) -> None:
        recorder = active_recorder()
        if recorder is not None:
            recorder.record(self, grads, trainable_variables)
            return
        variables = self._variables_of_step(grads, trainable_variables)
        assert self._updates is not None
        self.check_counts()
        if frozen_variables.is_overruled(self):
            raise ValueError(
                "Another FreezeOptimizer has decided since which of these weights are trained. "
                "Train on with that one, or compile the model with a new one, which takes its mask "
                f"over. Received: {self.name!r} with the variables "
                f"{shorten([path_of(v) for v in variables], limit=3)}"
            )
        step = [
            (gradient, variable, self._get_variable_index(variable))
            for gradient, variable in zip(grads, variables, strict=True)
        ]
        checks = []
        if backend.is_traced():
            checks = [
                backend.require(
                    ops.equal(self._current_generation, self._generation),
                    "This function was traced before the freezing mask was replaced. Trace it "
                    "again: for `fit`, compile the model; otherwise make a new tf.function.",
                )
            ]
        # Where nothing is frozen, a fixed order would make TensorFlow round otherwise than it does
        # for the bare inner optimizer.
        order = backend.after(checks if self._updates.variables else [])
        with order, backend.without_gradients(), keras.name_scope(self.name):
            self._updates.apply(step)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        """`apply` for JAX: returns the new values of model and optimizer variables.

        Args:
            optimizer_variables, trainable_variables: arrays, the values of `variables` and of the
                variables the optimizer was built with.
            grads: their gradients.
        """
        recorder = active_recorder()
        if recorder is not None:
            recorder.record_stateless(self, list(grads), trainable_variables)
            return trainable_variables, optimizer_variables
        return super().stateless_apply(optimizer_variables, grads, trainable_variables)

    def _variables_of_step(
        self, grads: list[Any], trainable_variables: Sequence[Any] | None
    ) -> list[Any]:
        if trainable_variables is None:
            if not self.built:
                raise ValueError(
                    "`apply(grads)` without variables needs an optimizer that is built: call "
                    "`optimizer.build(variables)` first."
                )
            variables = list(self._trainable_variables)
        else:
            variables = list(trainable_variables)
            self.build(variables)
            self._check_variables_are_known(variables)
        if len(variables) != len(grads):
            raise ValueError(
                "Argument `grads` must have one gradient for each variable. "
                f"Received: {len(grads)} gradients for {len(variables)} variables."
            )
        return variables

    def apply_gradients(self, grads_and_vars: Any) -> Any:
        """`apply` for pairs of gradient and variable; returns the iterations, as Keras does."""
        grads, variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, variables)
        return self.inner_optimizer._iterations

    @property
    def variables(self) -> list[Any]:
        """The state: the mask's own variables, then those of the inner optimizer."""
        return [*self.mask_variables, *self.inner_optimizer.variables]

    @property
    def mask_variables(self) -> list[Any]:
        """The variables that `state` gives again: those of the mask, and FreezeNet-WD's scalar."""
        return [*self._trace_markers, *([] if self._updates is None else self._updates.variables)]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets `variables`, those of the inner optimizer included.

        Raises:
            ValueError: if the optimizer is not built, or numbers or shapes differ.
        """
        variables = self.variables
        if not self.built:
            raise ValueError("`set_weights` needs an optimizer that is built.")
        if len(weights) != len(variables):
            raise ValueError(
                f"Argument `weights` must have {len(variables)} arrays. Received: {len(weights)}."
            )
        # Markers hold nothing, and are of another shape for each mask.
        settable = list(zip(variables, weights, strict=True))[len(self._trace_markers) :]
        for variable, weight in settable:
            if tuple(variable.shape) != tuple(np.shape(weight)):
                raise ValueError(
                    f"Argument `weights`: the optimizer variable {variable.path!r} has shape "
                    f"{tuple(variable.shape)}. Received: shape {tuple(np.shape(weight))}."
                )
        before = self.mask
        self._settle()
        for variable, weight in settable:
            variable.assign(weight)
        self._follow_mask(before)

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate, which can be set."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def optimizers(self) -> Any:
        """The parts of an inner `MultiOptimizer`, whose rates Keras's callbacks set.

        Raises:
            AttributeError: for another inner optimizer, which has none.
        """
        return self.inner_optimizer.optimizers

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of steps."""
        return self.inner_optimizer.iterations

    @property
    def loss_scale_factor(self) -> Any:
        """The inner optimizer's loss scale; `LossScaleOptimizer` takes it away."""
        inner = getattr(self, "inner_optimizer", None)
        return None if inner is None else inner.loss_scale_factor

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        inner = getattr(self, "inner_optimizer", None)
        if inner is not None:
            inner.loss_scale_factor = value

    # Keras's SwapEMAWeights looks for these two where this optimizer is itself inside another.
    # While it is being built the answer is no: the averages are the inner optimizer's.
    @property
    def use_ema(self) -> bool:
        """Whether the inner optimizer keeps moving averages."""
        return self.built and self.inner_optimizer.use_ema

    @use_ema.setter
    def use_ema(self, value: bool) -> None:
        if value:
            raise ValueError("Give `use_ema` to the inner optimizer. Received: use_ema=True")

    @property
    def _model_variables_moving_average(self) -> Any:
        return self.inner_optimizer._model_variables_moving_average

    def scale_loss(self, loss: Any) -> Any:
        """The loss times the inner optimizer's loss scale."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Lets the inner optimizer set final values, such as moving averages.

        Warns where training has found no mask.
        """
        self.inner_optimizer.finalize_variable_values(var_list)
        if isinstance(self._updates, FullShapeUpdate) and self._updates.is_decided is False:
            warnings.warn(
                "No step has decided which weights are trained, and nothing was trained: no batch "
                "had gradients that are finite. Look for NaN or infinite values in the data, the "
                "loss and the weights.",
                RuntimeWarning,
                stacklevel=2,
            )

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Excludes variables from the inner optimizer's decoupled `weight_decay`, not from `l2`."""
        self.inner_optimizer.exclude_from_weight_decay(var_list=var_list, var_names=var_names)

    def save_own_variables(self, store: Any) -> None:
        """Writes the mask; Keras saves the inner optimizer beside it."""
        content = self._content()
        self._warn_of_custom_compile()
        if content:
            # In one entry: no bare optimizer, into which it may be loaded, has only one variable.
            store["freeze_state"] = to_bytes(content)

    def _warn_of_custom_compile(self) -> None:
        model = frozen_variables.model_of(self)
        kind = type(model)
        if (
            model is not None
            and kind.compile is not keras.Model.compile
            and kind.compile_from_config is keras.Model.compile_from_config
        ):
            warnings.warn(
                f"The `compile` of {kind.__name__} is its own, and `keras.models.load_model` does "
                "not call it: it brings no FreezeOptimizer back. After it, compile the model with "
                "one and call `model.load_weights` with the same file, which brings the mask; or "
                "save with `keras_freeze.save`.",
                stacklevel=2,
            )

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = {}
        if self.built or self._pending is not None:
            write_state(content, self.state, self._parameters, self.inner_optimizer)
        return content

    def load_own_variables(self, store: Any) -> None:
        """Reads the mask; an optimizer that is not built yet takes it over when it is built.

        Raises:
            ValueError: if the state belongs to a network with other variables, or to another inner
                optimizer, or cannot be read.
        """
        if "freeze_state" in store.keys():  # noqa: SIM118 - stores are no mappings
            self._load(from_bytes(np.asarray(store["freeze_state"])))
        elif "header" in store.keys():  # noqa: SIM118 - of a file from an earlier version
            self._load(store)
        elif self.built or len(store.keys()):
            warnings.warn(
                f"No mask was loaded into {self.name!r}: the file has none where Keras looks for "
                "it, because it was saved before the first step or with another optimizer, or "
                "because only one of the two has a LossScaleOptimizer around.",
                stacklevel=2,
            )

    def _load(self, store: Any, is_deferred: bool = False) -> None:
        """Takes over a state, before the inner optimizer's variables are loaded.

        Args:
            store: what `write_state` has written.
            is_deferred: whether these variables are loaded even if they are created later.
        """
        state = read_state(store)
        self._check_settings(state)
        is_loaded = self.built or is_deferred
        if self.built and self._is_from_config and not has_these_variables(store, self._parameters):
            self._load_what_fits(store)
            return
        check_origin(store, self._parameters, self.inner_optimizer, is_loaded=is_loaded)
        if is_deferred and self._must_rebuild(state):
            raise ValueError(
                "The checkpoint was saved with other numbers of trained weights, or the other way "
                "round about who decides the mask, `keras_freeze.freeze` or the first batch, than "
                "this FreezeOptimizer is built for. Restore it into a model that has just been "
                "compiled, before the first step and without a call to `freeze`."
            )
        self.restore(state)
        if not self.built:
            self._register_pending(state)

    def _check_settings(self, state: State) -> None:
        saved = state.settings
        if state.mask is not None and saved is not None and not saved.agrees_with(self.settings):
            raise ValueError(
                f"The mask that is loaded was decided with {saved}. Compile the model with a "
                "FreezeOptimizer of the same settings, or let `keras_freeze.freeze(model, ...)` "
                "decide anew once the weights are loaded. Received: a FreezeOptimizer with "
                f"{self.settings}"
            )

    def _register_pending(self, state: State) -> None:
        """Says what a state freezes that waits for its optimizer, where the model is at hand.

        Parts of the model know their part of the mask then.
        """
        models = [
            model for model in models_in_use() if _is_in(self, getattr(model, "optimizer", None))
        ]
        if state.mask is None or not models or not models[0].trainable_variables:
            return
        parameters = classify(models[0].trainable_variables, self.exclude)
        mask = relabel(state.mask, parameters)
        claims = [
            frozen_variables.Claim(
                parameters[entry.position].variable,
                entry.position,
                entry.is_weight,
                frozen_variables.constant(entry.trained),
                state.starts.get(entry.position),
            )
            for entry in mask.entries
        ]
        frozen_variables.register(None, claims, self.settings)

    def _load_what_fits(self, store: Any) -> None:
        """Takes over the mask of the variables that are still there; the inner optimizer is new."""
        state, lost = fitting_state(store, self._parameters)
        self._trained_counts = None
        if state.mask is not None:
            state = replace(state, compact=self.suits_compact(state.mask))
            self._rebuild(state, self._trainable_variables)
        self.set_starts(state.starts)
        skip_loading_once(self.inner_optimizer)
        warnings.warn(
            "The model's trainable variables are not those that its FreezeOptimizer was built "
            "with: layers have been quantized, given LoRA or made untrainable since. The mask is "
            "kept where variables are still trained, all others are trained whole, and the inner "
            f"optimizer starts anew. No longer trained: {shorten(lost)}",
            stacklevel=2,
        )

    @property
    def _parameters(self) -> Sequence[Parameter]:
        return [] if self._updates is None else self._updates.parameters

    # TensorFlow calls these three. It saves the variables by itself, but for the mask's.
    def _trackable_children(self, save_type: str = "checkpoint", **arguments: Any) -> Any:
        children = super()._trackable_children(save_type, **arguments)
        if save_type == "checkpoint":
            return children
        # A SavedModel needs all that its functions read.
        compact = self.compact_update
        blocks = [] if compact is None else compact.blocks.values()
        vectors = [] if compact is None else compact.vectors
        read = [v.value for v in (self._current_generation, *self.mask_variables, *vectors)]
        read += [variable for block in blocks for variable in block.variables]
        return {**children, **{f"read_{number}": v for number, v in enumerate(read)}}

    def _serialize_to_tensors(self) -> dict[str, Any]:
        content: dict[str, Any] = {}
        with backend.eager_scope():
            if not backend.is_traced():  # `tf.saved_model.save` asks in a graph that nobody runs
                content = self._content()
        return {"freeze_state": ops.convert_to_tensor(to_bytes(content))}

    def _restore_from_tensors(self, tensors: Mapping[str, Any]) -> None:
        if backend.is_traced():  # for a SavedModel, from which no optimizer is loaded
            return
        store = from_bytes(backend.to_numpy(tensors["freeze_state"]))
        if store:
            self._load(store, is_deferred=True)

    @property
    def state(self) -> State:
        """What this optimizer is besides its inner optimizer: mask, way of updating, decay."""
        updates = self._updates
        if updates is None:
            pending = State(None, compact=False) if self._pending is None else self._pending
            return replace(pending, starts=self.starts)
        scale = None if updates.decay_scale is None else backend.to_numpy(updates.decay_scale)
        is_compact = isinstance(updates, CompactUpdate)
        return State(updates.mask, is_compact, scale, updates.found, self.starts, self.settings)

    def restore(self, state: State) -> None:
        """Takes over a state; an optimizer that is not built yet does so when it is built.

        Raises:
            ValueError: if the state belongs to a network with other variables.
        """
        with exclusive(self):
            self._restore(state)

    def _restore(self, state: State) -> None:
        updates = self._updates
        if updates is None:
            self._pending = state
        elif self._must_rebuild(state):
            self._rebuild(state, self._trainable_variables)
        elif state.mask is not None:
            before = updates.mask
            self._settle()
            updates.replace_mask(relabel(state.mask, updates.parameters))
            updates.found = state.found
            self._follow_mask(before)
            if state.decay_scale is not None and updates.decay_scale is not None:
                updates.decay_scale.assign(state.decay_scale)
        self.set_starts(state.starts)

    def _must_rebuild(self, state: State) -> bool:
        """Whether a state needs other variables than this optimizer, if it is built, has."""
        updates = self._updates
        if updates is None:
            return False
        if state.mask is None:
            return updates.mask is not None
        return not updates.accepts(relabel(state.mask, updates.parameters), state.compact)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments and, where the optimizer is compact, the counts it needs."""
        criterion = self.criterion
        if not isinstance(criterion, str):
            criterion = keras.saving.serialize_keras_object(criterion)
        config = {
            "name": self.name,
            "inner_optimizer": _with_public_classes(
                keras.saving.serialize_keras_object(self.inner_optimizer)
            ),
            "freeze_rate": self.freeze_rate,
            "criterion": criterion,
            "frozen_weights": self.frozen_weights,
            "l2": self.l2,
            "exclude": list(self._exclude_without_model_name()),
            "seed": self.seed,
        }
        if isinstance(self._updates, CompactUpdate):
            config["trained_counts"] = list(self._updates.trained_counts)
        elif self._trained_counts is not None:
            config["trained_counts"] = list(self._trained_counts)
        return config

    def _exclude_without_model_name(self) -> list[str]:
        # A loaded model's variables have lost the model's name from their paths.
        if not self.built:
            return list(self.exclude)
        prefixes = {path_of(v).split("/")[0] for v in self._trainable_variables}
        prefix = prefixes.pop() + "/" if len(prefixes) == 1 else "/"
        return [entry.removeprefix(prefix) for entry in self.exclude]

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> "FreezeOptimizer":
        """An optimizer from what `get_config` gave; `config` stays as it is."""
        arguments = dict(config)
        for key in ("inner_optimizer", "criterion"):
            if isinstance(arguments.get(key), dict):
                arguments[key] = keras.saving.deserialize_keras_object(
                    arguments[key], custom_objects=custom_objects
                )
        counts = arguments.pop("trained_counts", None)
        optimizer = cls(**arguments)
        optimizer._trained_counts = None if counts is None else tuple(counts)
        optimizer._is_from_config = True
        return optimizer


def _is_in(optimizer: FreezeOptimizer, outer: Any) -> bool:
    """Whether an optimizer is `outer` itself, or inside of it."""
    while outer is not None and outer is not optimizer:
        outer = getattr(outer, "inner_optimizer", None)
    return outer is optimizer


def _with_public_classes(config: Any) -> Any:
    """Names optimizers as every backend knows them: for PyTorch, Keras has classes of its own."""
    if isinstance(config, (list, tuple)):
        return [_with_public_classes(value) for value in config]
    if not isinstance(config, dict):
        return config
    config = {key: _with_public_classes(value) for key, value in config.items()}
    if str(config.get("module")).startswith("keras.src.backend.torch.optimizers."):
        config.update(module="keras.optimizers", registered_name=None)
    return config


def _everything_trained(parameters: Sequence[Parameter]) -> FreezeMask:
    return FreezeMask(
        [
            MaskEntry(p.position, p.path, np.ones(tuple(p.variable.shape), bool))
            for p in parameters
            if p.is_frozen_candidate
        ]
    )


def _count_trained(mask: FreezeMask, num_variables: int) -> list[int | None]:
    counts: list[int | None] = [None] * num_variables
    for entry in mask.entries:
        counts[entry.position] = int(entry.trained.sum())
    return counts


def _check_inner(inner: Any) -> Any:
    if isinstance(inner, str):
        inner = keras.optimizers.get(inner)
    if not isinstance(inner, keras.optimizers.Optimizer):
        raise TypeError(
            "Argument `inner_optimizer` must be a Keras optimizer or the name of one. "
            f"Received: inner_optimizer={inner!r} of type {type(inner)}"
        )
    if isinstance(inner, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "Argument `inner_optimizer`: put the loss scaling outside, as "
            "`LossScaleOptimizer(FreezeOptimizer(...))`; the other way round, a scaled gradient "
            f"would decide the mask. Received: inner_optimizer={inner!r}"
        )
    if isinstance(inner, FreezeOptimizer):
        raise ValueError(
            "Argument `inner_optimizer` must not be a FreezeOptimizer itself. "
            f"Received: inner_optimizer={inner!r}"
        )
    if inner.built:
        raise ValueError(
            "Argument `inner_optimizer` must be new: this one is already built for a model. "
            f"Received: inner_optimizer={inner!r}"
        )
    return inner
