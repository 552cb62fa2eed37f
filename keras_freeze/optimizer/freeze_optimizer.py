"""FreezeOptimizer: an optimizer that trains a few of a network's weights and freezes the rest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras

from keras_freeze import _keras_private, backend
from keras_freeze._utils.threads import exclusive
from keras_freeze._utils.typing import Optimizer, Variable
from keras_freeze.criteria.criteria import Criterion
from keras_freeze.gradients.recording import active_recorder, checked_variables
from keras_freeze.initializers.of_layers import model_in_use, starts_of
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.distributions import Group, groups_of
from keras_freeze.masks.settings import GLOBAL
from keras_freeze.masks.structure import Structure
from keras_freeze.optimizer import saving
from keras_freeze.optimizer.arguments import (
    CHECKS,
    check_decay,
    check_grid,
    check_inner_optimizer,
    may_change_in_loading,
    names_for_config,
    warn_of_adafactor,
    warn_of_constraints,
)
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.optimizer.first_batch import continue_compactly, prepare_for_mask
from keras_freeze.optimizer.masked_optimizer import MaskedOptimizer
from keras_freeze.optimizer.processes import check_agreement
from keras_freeze.optimizer.state import BuildPlan, Phase, inherited_state
from keras_freeze.optimizer.strategy import make_update
from keras_freeze.parameters import Parameter, path_of, shorten


@keras.saving.register_keras_serializable(package="keras_freeze")
class FreezeOptimizer(MaskedOptimizer):
    """An optimizer that trains the most salient weights and keeps the rest bit for bit (FreezeNet).

    Wraps any Keras optimizer. Which weights are trained is decided once, by
    `keras_freeze.freeze(model, x, y)` or, without it, by the first batch that reaches the
    optimizer (the paper's algorithm 1). Biases, normalization parameters and parameters of layers
    that this package does not know are always trained.

    Clipping, accumulation, moving averages and decoupled weight decay belong to the inner
    optimizer, which only ever sees what is trained. Adafactor, Lamb and Muon mix the entries of a
    variable: they see it whole, with zero gradients for what is frozen, which for them is not the
    same as training a part.

    One model trains on several devices or machines where model and optimizers are created in the
    scope of a `tf.distribute.MirroredStrategy` or `MultiWorkerMirroredStrategy`. The first batch is
    then that of all replicas together.

    Args:
        inner_optimizer: a Keras optimizer that is not built yet, or the name of one.
        freeze_rate: q, the share of the weights that is frozen; from 0 (nothing: exactly the inner
            optimizer) to 1 (only biases and normalization are trained). Exactly
            floor((1 - q) |W|) weights of the network are trained, plus one in each layer that would
            have none; `distribution` says in which layers. Defaults to 0.9.
        criterion: which weights are trained: the largest "snip" (|gradient * weight|, equation 1),
            "gradient" (|gradient|), "magnitude" (|weight|), "smallest_magnitude" (-|weight|),
            "fisher" (squared gradient, summed over batches), "random", "grasp" (weight * (Hessian *
            gradient), signed; settings: `keras_freeze.criteria.GraSP`), "synflow" (settings:
            `keras_freeze.criteria.SynFlow`), a `keras_freeze.criteria.IterativeSNIP`, `FORCE` or
            other `IterativeCriterion`, or those where a function of weights and gradients (both
            float32, of one variable's shape; made of `keras.ops`) is largest. GraSP and the
            criteria in steps need a call to `freeze`. Defaults to "snip".
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
        grid: None trains in full precision. A number is the step of a grid: after each step of
            training, every trained parameter is rounded to its start (what a seed or the
            pretrained network gave it) plus an integer number of steps, and the values before
            rounding live in this optimizer alone. `keras_freeze.save` then stores the integers, in
            a few bits each. The step is rounded to ten significant bits, with which all backends
            compute the same points; it must be a float32 number. Parameters with a constraint,
            integers and scales of float8 are not rounded. Defaults to None.
        distribution: where the rate applies. "global": to the whole network, whose largest scores
            are trained. "uniform": to each weight variable, with the same share of each. "erk":
            Erdős-Rényi kernels, where the share of a variable that is trained is proportional to
            the sum of its dimensions divided by their product, and at most 1. A mapping from
            patterns of paths to rates, such as `{"conv*": 0.5, "fc?/kernel": 0.95}`: to each
            variable that a pattern matches applies its own rate, that of the first such pattern,
            and to all others together `freeze_rate`. Patterns are those of `fnmatch`, and match
            whole components of a path, without the model's name. Defaults to "global".
        structure: what is trained or frozen together. None: single weights. "column": whole output
            channels (the last axis of a weight). "row": whole input channels (the axis before). A
            pair of ints, `(height, width)`: blocks. "n:m", such as "2:4": at most n of m weights
            that follow each other along the input axis, whatever the rate. A `masks.Structure`
            also says how columns, rows and blocks are scored: by the mean of their scores or by the
            sum. As many are trained, the largest scores first, as fit into floor((1 - q) |W|).
            Defaults to None.
        name: the optimizer's name.

    Raises:
        TypeError, ValueError: for arguments out of range, a `LossScaleOptimizer` inside (it belongs
            outside), an inner optimizer that has been used already, or a `grid` with one that has
            `use_ema=True`.

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
        inner_optimizer: str | Optimizer,
        freeze_rate: float = 0.9,
        *,
        criterion: str | Criterion = "snip",
        frozen_weights: str = "keep",
        l2: float = 0.0,
        exclude: Any = (),
        seed: int = 0,
        grid: float | None = None,
        distribution: str | Mapping[str, float] = "global",
        structure: str | tuple[int, int] | Structure | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise ValueError(
                f"FreezeOptimizer does not take {', '.join(map(repr, sorted(kwargs)))}: give it to "
                "the inner optimizer, which updates what is trained. "
                f"Received: {kwargs}"
            )
        backend.prepare_for_fit()
        inner_optimizer = check_inner_optimizer(inner_optimizer)
        super().__init__(name)
        self.inner_optimizer = inner_optimizer
        self.freeze_rate = freeze_rate
        self.criterion = criterion
        self.l2 = l2
        self.frozen_weights = frozen_weights
        self.exclude = exclude
        self.seed = seed
        self.grid = grid
        self.distribution = distribution  # type: ignore[assignment] # __setattr__ converts it
        self.structure = structure  # type: ignore[assignment] # as above
        check_grid(self.grid, inner_optimizer)
        check_decay(self.frozen_weights, self.l2, inner_optimizer)

    def __setattr__(self, name: str, value: Any) -> None:
        """Check settings, which cannot be changed once a mask may depend on them."""
        if name in CHECKS:
            value = CHECKS[name](value)
            if self.built or self.plan.state is not None:
                raise ValueError(
                    f"`{name}` of a FreezeOptimizer cannot be changed once it is built, since the "
                    "mask depends on it. Compile the model with a new FreezeOptimizer, and call "
                    "`keras_freeze.freeze(model, ..., overwrite=True)` to compute a new mask. "
                    f"Received: {name}={value!r}"
                )
        super().__setattr__(name, value)

    @property
    def rates(self) -> set[float]:
        """All freezing rates: the one of the network, and those of the distribution's patterns."""
        if self.plan.first_rate is not None:
            return {self.plan.first_rate}
        distribution = self.distribution
        own = [rate for _, rate in distribution] if isinstance(distribution, tuple) else []
        return {self.freeze_rate, *own}

    @property
    def trains_everything(self) -> bool:
        """Whether no weight is frozen, whatever its score."""
        return not any(self.rates) and not self.freezes_at_rate_0

    @property
    def freezes_at_rate_0(self) -> bool:
        """Whether weights are frozen at any rate, by their scores: with a structure n:m."""
        return self.structure is not None and self.structure.freezes_at_rate_0

    def groups(
        self,
        candidates: Sequence[Parameter],
        parameters: Sequence[Parameter],
        must_match: bool = True,
        rate: Callable[[float], float] | None = None,
        freeze_rate: float | None = None,
    ) -> list[Group]:
        """Return which weights are compared with each other, and how many of them are trained.

        Args:
            candidates: the weights that have scores.
            parameters: all variables; patterns may match weights that have no score.
            must_match: whether a pattern of the distribution that matches no weight is an error.
            rate: what a step on the way makes of each final rate. None: that.
            freeze_rate: the final rate of the network; None: the optimizer's.

        Raises:
            ValueError: if one matches none.
        """
        first = self.plan.first_rate
        if rate is None:
            rate = float if first is None else lambda _: first
        distribution = self.distribution
        if isinstance(distribution, tuple):
            distribution = tuple((pattern, rate(own)) for pattern, own in distribution)
        return groups_of(
            distribution,
            rate(self.freeze_rate if freeze_rate is None else freeze_rate),
            [tuple(p.variable.shape) for p in candidates],
            [p.first_path for p in candidates],
            [p.first_path for p in parameters if p.is_frozen_candidate],
            must_match,
        )

    def build(self, variables: Sequence[Variable]) -> None:
        """Create the state for the variables that will be updated; called by Keras or `freeze`.

        Where another FreezeOptimizer has frozen some of them already, this one inherits its mask.

        Args:
            variables: the trainable variables of the model, in order.

        Raises:
            ValueError: if an entry of `exclude` or a pattern of `distribution` matches none of
                them, if a state that was loaded before belongs to another network, or if variables
                are frozen already with other settings.
        """
        if self.built:
            return
        recorder = active_recorder()
        if recorder is not None:
            recorder.build(self, variables)
            return
        check_grid(self.grid, self.inner_optimizer)  # which may have been set since
        parameters = self._checked(variables)
        # While a graph is traced, as in `fit`, values assigned here would be lost with the trace.
        with (
            backend.eager_scope(),
            backend.strategy_scope(self),
            keras.name_scope(self.name),
        ):
            self._inherit_state(parameters)
            state = self.plan.state
            self._check_shared(parameters, None if state is None else state.mask)
            self._find_model([p for p in parameters if p.is_frozen_candidate])
            if backend.CREATES_VARIABLES_TOGETHER:
                check_agreement(self, parameters)
            self.update = make_update(self, parameters)
            super().build(list(variables))
            if state is None and self.update.phase is Phase.DECIDED:  # everything is trained
                self.start_here()
            self.plan = replace(self.plan, state=None, inherits=False, first_rate=None)
            self._register()
            # Where the update becomes compact after the first batch, it has warned before that.
            if not isinstance(self.update, CompactUpdate) or not self.update.by_first_batch:
                warn_of_constraints(parameters, self.frozen_weights, self.mask)
                warn_of_adafactor(self.inner_optimizer, self.mask)
        model = frozen_variables.model_of(self)
        if model is not None:
            prepare_for_mask(model, self)

    def _inherit_state(self, parameters: Sequence[Parameter]) -> None:
        """Plan to build with the mask of variables that are frozen already, if some are."""
        if self.plan.state is not None or frozen_variables.is_overwriting():
            return
        state = inherited_state(self, parameters)
        if state is not None:
            self.__dict__["_starts"] = state.starts
            self.__dict__["trained_starts"] = state.trained_starts
            self.plan = replace(self.plan, state=state, inherits=True)

    def _find_model(self, candidates: Sequence[Parameter]) -> None:
        """Remember the model, and what its weights were drawn from if the first batch decides."""
        model = frozen_variables.model_of(self)
        if model is None:
            model = model_in_use([p.variable for p in candidates])
        if model is None:
            return
        frozen_variables.remember_model(self, model)
        is_undecided = self.plan.state is None and self.plan.trained_counts is None
        if is_undecided and not self.trains_everything:
            self.__dict__["_starts"] = starts_of(model, candidates)

    @backend.not_converted
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Update the trained entries of the variables; decide the mask if there is none yet.

        Args:
            grads: gradients, None where there is none.
            trainable_variables: their variables; those the optimizer was built with if None.

        Raises:
            ValueError: for unknown variables; if there is no mask and a gradient is not finite; if
                processes that train together differ in settings, variables, mask or weights.
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
        if backend.STEPS_ARE_EAGER:
            continue_compactly(self)
        assert self.update is not None
        self.check_counts()
        if frozen_variables.is_superseded(self):
            raise ValueError(
                "Another FreezeOptimizer has decided since which of these weights are trained. "
                "Continue with that one, or compile the model with a new one, which inherits its "
                f"mask. Received: {self.name!r} with the variables "
                f"{shorten([path_of(v) for v in variables], limit=3)}"
            )
        step = [
            (gradient, variable, self._get_variable_index(variable))
            for gradient, variable in zip(grads, variables, strict=True)
        ]
        self._check_agreement()
        checks = self._traces.checks()
        # Where nothing is frozen, a fixed order would make TensorFlow round differently from the
        # bare inner optimizer.
        order = backend.after(checks if self.update.variables else [])
        with order, backend.without_gradients(), keras.name_scope(self.name):
            self.update.apply(step)

    def stateless_apply(
        self, optimizer_variables: Any, grads: Sequence[Any], trainable_variables: Any
    ) -> Any:
        """Call `apply` without side effects, for JAX.

        Args:
            optimizer_variables, trainable_variables: arrays, the values of `variables` and of the
                variables the optimizer was built with.
            grads: their gradients.

        Returns:
            The new values of `trainable_variables` and of `optimizer_variables`.
        """
        recorder = active_recorder()
        if recorder is not None:
            recorder.record_stateless(self, list(grads), trainable_variables)
            return trainable_variables, optimizer_variables
        values = backend.whole(trainable_variables)
        return super().stateless_apply(optimizer_variables, grads, values)

    def _variables_of_step(
        self, grads: list[Any], trainable_variables: Sequence[Any] | None
    ) -> list[Any]:
        if trainable_variables is None:
            return checked_variables(grads, self.built_variables if self.built else None)
        variables = list(trainable_variables)
        self.build(variables)
        self._check_variables_are_known(variables)
        return checked_variables(grads, variables)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments and, for a compact update, the counts it needs."""
        criterion = self.criterion
        if not isinstance(criterion, str):
            criterion = keras.saving.serialize_keras_object(criterion)
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        exclude, distribution = names_for_config(self.exclude, self.distribution, self.parameters)
        config = {
            "name": self.name,
            "inner_optimizer": _with_public_classes(inner),
            "freeze_rate": self.freeze_rate,
            "criterion": criterion,
            "frozen_weights": self.frozen_weights,
            "l2": self.l2,
            "exclude": exclude,
            "seed": self.seed,
        }
        counts: Sequence[int | None] | None = self.plan.trained_counts
        if isinstance(self.update, CompactUpdate):
            counts = self.update.trained_counts
        if self.grid is not None:
            config["grid"] = self.grid
        if self.distribution != GLOBAL:
            config["distribution"] = distribution
        if self.structure is not None:
            config["structure"] = self.structure.to_json()
        if counts is not None:
            config["trained_counts"] = list(counts)
        if self.exclude or isinstance(self.distribution, tuple):  # only these go by paths
            paths = saving.first_paths_of(self)
            if may_change_in_loading(paths):
                config["paths"] = list(paths)
        return config

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> "FreezeOptimizer":
        """Make an optimizer from what `get_config` returned."""
        arguments = dict(config)
        for key in ("inner_optimizer", "criterion"):
            if isinstance(arguments.get(key), dict):
                arguments[key] = keras.saving.deserialize_keras_object(
                    arguments[key], custom_objects=custom_objects
                )
        counts, paths = arguments.pop("trained_counts", None), arguments.pop("paths", None)
        optimizer = cls(**arguments)
        optimizer.plan = BuildPlan(
            trained_counts=None if counts is None else tuple(counts),
            is_from_config=True,
            paths=None if paths is None else tuple(paths),
        )
        return optimizer


def _with_public_classes(config: Any) -> Any:
    """Return a configuration in which optimizers have the names that every backend knows."""
    if isinstance(config, (list, tuple)):
        return [_with_public_classes(value) for value in config]
    if not isinstance(config, dict):
        return config
    config = {key: _with_public_classes(value) for key, value in config.items()}
    if _keras_private.is_torch_optimizer_module(str(config.get("module"))):
        config.update(module="keras.optimizers", registered_name=None)
    return config
