"""The two ways to let an inner optimizer update what is trained and leave the rest as it is.

`CompactUpdate` gives the inner optimizer only vectors of the trained weights, so that its moments
cost what is trained and nothing it does can reach a frozen weight. `FullShapeUpdate` gives it every
variable whole and restores the frozen entries afterwards; it can find the mask in the first batch,
and serves optimizers that mix the entries of a variable. Both give the same weights for an
optimizer that treats every coordinate alike.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_freeze import backend, saliency
from keras_freeze.frozen_variables import Claim, ReadMask
from keras_freeze.mask import FreezeMask, MaskEntry, num_trained_weights, rescue_index
from keras_freeze.parameters import Parameter, frozen_candidates, warn_of_unknown

# Above so many entries, a copy of a variable takes longer than a few small operations.
_LARGE = 2**18
# Indices are 32-bit integers.
_MOST_ENTRIES = 2**31 - 1

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


class CompactUpdate(Update):
    """The inner optimizer sees one vector of trained weights per kernel.

    Args:
        trained_counts: how many entries of each variable are trained; None where the variable is
            outside the mask and trained whole.
        mask: the mask with these counts; None if it is read from a file later.

    Attributes:
        has_mask: whether the mask is known yet.
        indices: for the position of each variable that is trained in part, a variable with the
            flat, sorted indices of its trained entries.
        blocks: what else goes by the mask of one of these variables, by position: set by
            `sparse_gradients`.
        has_dropped_blocks: whether a function may use blocks that are no longer there.
    """

    def __init__(
        self,
        inner: Any,
        parameters: Sequence[Parameter],
        frozen_weights: str,
        l2: float,
        trained_counts: Sequence[int | None],
        mask: FreezeMask | None,
    ) -> None:
        num_rescued = 0 if mask is None else mask.num_rescued
        super().__init__(inner, parameters, frozen_weights, l2, num_rescued)
        self.trained_counts = list(trained_counts)
        self.has_mask = mask is not None
        self.indices: dict[int, Any] = {}
        self.blocks: dict[int, Any] = {}
        self.has_dropped_blocks = False
        self._values: dict[int, Any] = {}
        chosen = {} if mask is None else {e.position: e.trained for e in mask.entries}
        for position, count in self._partly_trained():
            variable = parameters[position].variable
            if parameters[position].size > _MOST_ENTRIES:
                raise ValueError(
                    f"A variable may have at most {_MOST_ENTRIES} entries. "
                    f"Received: {parameters[position].path!r} of shape {tuple(variable.shape)}"
                )
            indices = (
                np.flatnonzero(chosen[position]).astype("int32") if chosen else np.zeros(count, "i")
            )
            self.indices[position] = _variable(indices, "int32", f"trained_indices_{position}")
            values = backend.gather(variable, indices)
            dtype = keras.backend.standardize_dtype(variable.dtype)
            path = parameters[position].path
            self._values[position] = _variable(values, dtype, path.split("/")[-1], path)
        self._exclude_vectors_from_decay()
        self._build_inner([v for p in parameters if (v := self._seen_by_inner(p)) is not None])
        # Vectors are read from the weights in each step: a checkpoint has no use for them.
        backend.untrack(self.inner, "_trainable_variables")

    @property
    def variables(self) -> list[Any]:
        return [*super().variables, *self.indices.values()]

    @property
    def vectors(self) -> list[Any]:
        """What the inner optimizer sees of the variables that are trained in part."""
        return list(self._values.values())

    @property
    def mask(self) -> FreezeMask | None:
        if not self.has_mask:
            return None
        trained = {}
        for position, count in enumerate(self.trained_counts):
            if count is None:
                continue
            trained[position] = self.trained(position)
        return self._make_mask(trained, self.num_rescued)

    @property
    def claims(self) -> list[Claim]:
        if not self.has_mask:
            return []
        return [
            self._claim(position, _reader_of_indices(self.indices.get(position), p.variable.shape))
            for position, p in enumerate(self.parameters)
            if self.trained_counts[position] is not None
        ]

    def position_of(self, variable: Any) -> int | None:
        """A variable's position; None if it is not among those that are updated."""
        # By identity: in a layer's call, Keras may show other values than the variable's own.
        found = (p.position for p in self.parameters if p.variable is variable)
        return next(found, None)

    def trained(self, position: int) -> np.ndarray:
        """The mask of one variable."""
        shape = self.parameters[position].variable.shape
        return _reader_of_indices(self.indices.get(position), shape)()

    def accepts(self, mask: FreezeMask, compact: bool) -> bool:
        counts = {e.position: int(e.trained.sum()) for e in mask.entries}
        return compact and self.trained_counts == [counts.get(p.position) for p in self.parameters]

    def replace_mask(self, mask: FreezeMask) -> None:
        chosen = {e.position: e.trained for e in mask.entries}
        for position, indices in self.indices.items():
            indices.assign(np.flatnonzero(chosen[position]).astype("int32"))
        self.num_rescued = mask.num_rescued
        self.has_mask = True

    def drop_blocks(self) -> None:
        """Forgets `blocks`, which functions that were traced with them go on to use."""
        self.has_dropped_blocks = self.has_dropped_blocks or bool(self.blocks)
        self.blocks.clear()

    def update_blocks(self) -> None:
        """Tells `blocks` what the indices are now."""
        for position, block in self.blocks.items():
            block.assign(self.trained(position))

    def apply(self, step: Step) -> None:
        if not self.has_mask:
            raise ValueError(
                "This FreezeOptimizer was made from a configuration that says how many weights are "
                "trained but not which: load the state that was saved with it, or call "
                "`keras_freeze.freeze(model, ...)` first."
            )
        self._check_complete(self.indices, step)
        gradients, variables = [], []
        for gradient, variable, position in step:
            if position not in self.indices:
                gradients.append(self._with_l2(gradient, variable))
                variables.append(variable)
            elif self.trained_counts[position]:
                values, indices = self._values[position], self.indices[position]
                values.assign(backend.gather(variable, indices))
                if gradient is not None:
                    gradient = backend.gather_gradient(gradient, variable, indices)
                gradients.append(self._with_l2(gradient, values))
                variables.append(values)
        factor = self._update_inner(gradients, variables)
        changed = [
            (variable, position)
            for gradient, variable, position in step
            if position in self.indices and (gradient is not None or factor is not None)
        ]
        zero = None
        if any(self.parameters[position].size > _LARGE for _, position in changed):
            zero = backend.zero_after(variables)
        for variable, position in changed:
            self._write_back(variable, position, zero, factor)

    def retire(self) -> None:
        # XLA leaves out what it would write outside a variable.
        for position, indices in self.indices.items():
            outside = self.parameters[position].size
            indices.assign(np.full(tuple(indices.shape), outside, "int32"))

    def _write_back(self, variable: Any, position: int, zero: Any, factor: Any) -> None:
        indices, values = self.indices[position], self._values[position]
        if zero is not None:
            indices = indices + zero
        if factor is not None:
            backend.scale_and_scatter(variable, indices, values, factor)
        if not self.trained_counts[position]:
            return
        if factor is None:
            backend.scatter(variable, indices, values)
        if getattr(variable, "constraint", None) is not None:
            allowed = variable.constraint(variable)
            backend.scatter(variable, indices, backend.gather(allowed, indices))

    def _exclude_vectors_from_decay(self) -> None:
        """Excludes from decoupled decay the vectors of variables that the user has excluded."""
        excluded: set[Any] = getattr(self.inner, "_exclude_from_weight_decay", set())
        for position, values in self._values.items():
            if self.inner._var_key(self.parameters[position].variable) in excluded:
                excluded.add(self.inner._var_key(values))

    def _partly_trained(self) -> Iterator[tuple[int, int]]:
        for position, count in enumerate(self.trained_counts):
            if count is not None and count < self.parameters[position].size:
                yield position, count

    def _seen_by_inner(self, parameter: Parameter) -> Any:
        """What the inner optimizer is built with for a variable, or None."""
        if parameter.position not in self.indices:
            return parameter.variable
        return self._values[parameter.position] if self.trained_counts[parameter.position] else None


class FullShapeUpdate(Update):
    """The inner optimizer sees whole variables; frozen entries are restored after each step.

    Args:
        mask: the mask; None if the first batch decides it, by the following.
        freeze_rate, criterion, seed: how the mask is chosen.
    """

    def __init__(
        self,
        inner: Any,
        parameters: Sequence[Parameter],
        frozen_weights: str,
        l2: float,
        mask: FreezeMask | None,
        freeze_rate: float,
        criterion: str | saliency.Criterion,
        seed: int,
    ) -> None:
        super().__init__(inner, parameters, frozen_weights, l2)
        self._criterion = criterion
        self._seed = seed
        self._candidates = {p.position: p.size for p in parameters if p.is_frozen_candidate}
        self._num_trained = num_trained_weights(freeze_rate, sum(self._candidates.values()))
        self._warns_of_unknown = freeze_rate > 0
        self._rescued = {
            position: rescue_index(seed, position, size)
            for position, size in self._candidates.items()
            if size and freeze_rate < 1.0
        }
        self._decided = _variable(np.array(mask is not None), "bool", "mask_decided")
        self._masks = {
            position: _variable(trained, "bool", f"mask_{position}")
            for position, trained in self._initial_masks(mask, freeze_rate).items()
        }
        # Whether a mask came from elsewhere: while JAX traces a step, the variables do not tell.
        self._is_given = mask is not None
        if mask is not None:
            self.num_rescued = mask.num_rescued
        self._build_inner([p.variable for p in parameters])

    def _initial_masks(self, mask: FreezeMask | None, freeze_rate: float) -> dict[int, np.ndarray]:
        shapes = {p: tuple(self.parameters[p].variable.shape) for p in self._candidates}
        if mask is None and self._criterion == saliency.RANDOM:
            # It needs no gradients: it waits here until the first batch adopts it.
            scores = [saliency.random_scores(s, self._seed, p) for p, s in shapes.items()]
            mask = FreezeMask.from_scores(
                scores, freeze_rate, seed=self._seed, positions=list(shapes)
            )
        if mask is None:
            return {position: np.ones(shape, bool) for position, shape in shapes.items()}
        return {entry.position: entry.trained for entry in mask.entries}

    @property
    def variables(self) -> list[Any]:
        return [*super().variables, self._decided, *self._masks.values()]

    @property
    def mask(self) -> FreezeMask | None:
        if not bool(backend.to_numpy(self._decided)):
            return None
        trained = {position: backend.to_numpy(mask) for position, mask in self._masks.items()}
        return self._make_mask(trained, self._count_rescued(trained))

    @property
    def claims(self) -> list[Claim]:
        return [
            self._claim(position, _reader_of_mask(mask, self._decided))
            for position, mask in self._masks.items()
        ]

    def _count_rescued(self, trained: dict[int, np.ndarray]) -> int:
        if not self.found:
            return self.num_rescued
        return sum(int(trained[p].sum()) for p in self._candidates) - self._num_trained

    def accepts(self, mask: FreezeMask, compact: bool) -> bool:
        return not compact and [e.position for e in mask.entries] == list(self._masks)

    def replace_mask(self, mask: FreezeMask) -> None:
        for entry in mask.entries:
            self._masks[entry.position].assign(entry.trained)
        self.num_rescued = mask.num_rescued
        self._is_given = True
        self.found = False
        self._decided.assign(True)

    def apply(self, step: Step) -> None:
        if not self.found or (self._is_partial(step) and self.is_decided):
            self._step(step)
            return
        frozen_candidates(self.parameters)  # refuses to decide about nothing
        if self._warns_of_unknown and not self.is_decided:
            warn_of_unknown(self.parameters, stacklevel=2)
        self._warns_of_unknown = False
        gradients = [gradient for gradient, _, _ in step]

        def step_with(gradients: list[Any]) -> Step:
            return [(g, v, p) for g, (_, v, p) in zip(gradients, step, strict=True)]

        decided_before = backend.read(self._decided)
        backend.run_if(
            ops.logical_not(decided_before), lambda g: self._decide(step_with(g)), gradients
        )
        # The first gradient is the dense network's, which "zero" has just replaced.
        may_step = decided_before if self.frozen_weights == "zero" else backend.read(self._decided)
        backend.run_if(may_step, lambda g: self._step(step_with(g)), gradients)

    def _is_partial(self, step: Step) -> bool:
        """Whether a step leaves out weights, so that it cannot decide about them."""
        return not self._candidates.keys() <= {position for _, _, position in step}

    @property
    def is_decided(self) -> bool | None:
        """Whether there is a mask; None where that cannot be known."""
        decided = backend.known_value(self._decided)
        return None if decided is None else bool(decided)

    def retire(self) -> None:
        for mask in self._masks.values():
            mask.assign(np.zeros(tuple(mask.shape), bool))
        self._decided.assign(True)

    def _decide(self, step: Step) -> None:
        """Finds the mask from the weights and gradients of this batch (the paper's algorithm 1)."""
        if not self._is_given:
            saliency.check_one_process()
        if self._criterion == saliency.RANDOM:
            self._adopt({position: mask.value for position, mask in self._masks.items()}, True)
            return
        if saliency.as_grasp(self._criterion) is not None:
            raise ValueError(
                'The criterion "grasp" needs the Hessian of the loss, which an optimizer is not '
                "given: call `keras_freeze.freeze(model, x, y)` before the first step."
            )
        gradients = {position: gradient for gradient, _, position in step}
        missing = [self.parameters[p].path for p in self._candidates if p not in gradients]
        if missing:
            raise ValueError(
                "The first step decides which weights are trained, so that it needs the gradients "
                f"of all of them. Missing: {', '.join(missing)}. Call `keras_freeze.freeze` first, "
                "or apply all gradients at once."
            )
        summed = backend.sum_over_replicas([gradients[p] for p in self._candidates])
        scores = [self._scores(p, g) for p, g in zip(self._candidates, summed, strict=True)]
        finite = [ops.all(ops.isfinite(s)) for s in scores]
        checks = [
            backend.require(
                ok,
                f"The saliency of {self.parameters[position].path!r} is not finite in the first "
                "batch: look for NaN or infinite values in the data, the loss and the weights.",
            )
            for ok, position in zip(finite, self._candidates, strict=True)
        ]
        if self._num_trained:
            all_zero = ops.all(ops.concatenate(scores) == 0.0)
            backend.call_if(all_zero, saliency.warn_of_zero_scores)
        with backend.after(checks):
            # XLA cannot raise: there, a batch that is not finite decides nothing.
            self._adopt(self._top(scores), ops.all(ops.stack(finite)))

    def _scores(self, position: int, gradient: Any) -> Any:
        parameter = self.parameters[position]
        if gradient is not None:
            gradient = ops.cast(gradient, "float32")
            gradient = gradient / (self.inner.loss_scale_factor or 1.0)
        weights = backend.read(parameter.variable)
        scores = ops.reshape(
            saliency.score(self._criterion, weights, gradient, parameter.path), [-1]
        )
        # XLA sorts -0.0 below 0.0, which are a tie.
        return ops.where(scores == 0.0, 0.0, scores)

    def _top(self, scores: list[Any]) -> dict[int, Any]:
        flat = backend.top_k_mask(ops.concatenate(scores), self._num_trained)
        ends = np.cumsum(list(self._candidates.values()))
        masks = {}
        for (position, size), end in zip(self._candidates.items(), ends, strict=True):
            mask = flat[end - size : end]
            if position in self._rescued:
                one = np.arange(size) == self._rescued[position]
                mask = ops.where(ops.any(mask), mask, one)
            masks[position] = ops.reshape(mask, self.parameters[position].variable.shape)
        return masks

    def _adopt(self, masks: dict[int, Any], holds: Any) -> None:
        """Takes over masks if `holds`."""
        for position, mask in masks.items():
            mask = ops.where(holds, mask, self._masks[position].value)
            self._masks[position].assign(mask)
            if self.frozen_weights == "zero":
                kept = ops.logical_or(mask, ops.logical_not(holds))
                variable = self.parameters[position].variable
                zeros = ops.zeros(variable.shape, variable.dtype)
                variable.assign(ops.where(kept, variable.value, zeros))
        self._decided.assign(holds)

    def _step(self, step: Step) -> None:
        self._check_complete(self._masks, step)
        gradients = [self._masked(*part) for part in step]
        variables = [variable for _, variable, _ in step]
        # Moving averages may overwrite variables that the step does not mention.
        touched = [position for _, _, position in step if position in self._masks]
        if _with_averages(self.inner):
            touched = list(self._masks)
        before = {p: backend.read(self.parameters[p].variable) for p in touched}
        with _unconstrained(variables):
            factor = self._update_inner(gradients, variables)
        for position, frozen in before.items():
            if factor is not None:
                frozen = ops.multiply(frozen, ops.cast(factor, frozen.dtype))
            self._restore(position, frozen)
        for gradient, variable, position in step:
            if gradient is not None and getattr(variable, "constraint", None) is not None:
                frozen = backend.read(variable)
                variable.assign(variable.constraint(variable))
                if position in self._masks:
                    self._restore(position, frozen)
        self.copy_frozen_entries_to_averages()

    def _masked(self, gradient: Any, variable: Any, position: int) -> Any:
        if gradient is None:
            return None
        # A copy that belongs to the branch of the `cond` in which this may be traced.
        gradient = self._with_l2(backend.read(gradient), variable)
        if position not in self._masks:
            return gradient
        # `where`, not a product: a frozen entry's NaN would survive the product.
        gradient = backend.to_dense(gradient)
        return ops.where(self._masks[position].value, gradient, ops.zeros_like(gradient))

    def _restore(self, position: int, frozen: Any) -> None:
        variable = self.parameters[position].variable
        variable.assign(backend.where(self._masks[position], variable, frozen))

    def copy_frozen_entries_to_averages(self) -> None:
        """Keeps swapping a model's weights with their moving averages exact."""
        for optimizer in _with_averages(self.inner):
            for parameter in self.parameters:
                key = optimizer._var_key(parameter.variable)
                index = optimizer._trainable_variables_indices.get(key)
                if index is None or parameter.position not in self._masks:
                    continue
                average = optimizer._model_variables_moving_average[index]
                mask = self._masks[parameter.position]
                average.assign(backend.where(mask, average, parameter.variable))


def _reader_of_indices(indices: Any, shape: Sequence[int]) -> Callable[[], np.ndarray]:
    """What reads a variable's mask from the indices of what is trained; None means all of it."""

    def read() -> np.ndarray:
        array = np.full(tuple(shape), indices is None)
        if indices is not None:
            array.reshape(-1)[backend.to_numpy(indices)] = True
        return array

    return read


def _reader_of_mask(mask: Any, decided: Any) -> ReadMask:
    """What reads a variable's mask, once it is decided."""

    def read() -> np.ndarray | None:
        is_decided = backend.known_value(decided)
        return backend.to_numpy(mask) if is_decided is not None and is_decided else None

    return read


def unbuild(optimizer: Any) -> None:
    """Makes a built optimizer ready to be built again, for other variables."""
    optimizer._trainable_variables_indices = {}
    optimizer.built = False


def renewals(inner: Any) -> list[tuple[Any, Any]]:
    """An optimizer's parts, each with a new one that it can become; nothing is changed yet.

    Raises:
        ValueError: for an optimizer that cannot be made again from its configuration.
    """
    # All the state of a MultiOptimizer is that of its parts.
    parts = [part for part in with_parts(inner) if not hasattr(part, "optimizers")]
    return [(part, _made_again(part)) for part in parts]


def renew(inner: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Unbuilds an optimizer and drops its state, but for its iterations and its rate.

    The objects stay. Variables cannot just be taken out of them: TensorFlow then refuses to export
    their model.
    """
    for old, fresh in pairs:
        vars(old).clear()
        vars(old).update(vars(fresh))
    unbuild(inner)


def _made_again(optimizer: Any) -> Any:
    rate = optimizer._learning_rate
    try:
        if not isinstance(rate, keras.Variable):
            vars(optimizer)["_learning_rate"] = None  # functions may have no configuration
        config = optimizer.get_config()
        if not isinstance(rate, keras.Variable):
            config["learning_rate"] = rate
        fresh = type(optimizer).from_config(config)
    except Exception as error:
        raise ValueError(
            f"To start anew, {type(optimizer).__name__} must be made again by its `get_config` and "
            f"`from_config`, which failed: {error}"
        ) from error
    finally:
        vars(optimizer)["_learning_rate"] = rate
    fresh._iterations.assign(optimizer._iterations)
    for name, value in vars(optimizer).items():
        # Settings, which a subclass may have left out of its configuration.
        is_setting = isinstance(value, (bool, int, float, str, type(None)))
        if is_setting and not name.startswith("_") and name != "built":
            setattr(fresh, name, value)
    for name in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
        if hasattr(optimizer, name):
            setattr(fresh, name, getattr(optimizer, name))
    return fresh


def with_parts(optimizer: Any) -> list[Any]:
    """An optimizer and, of a MultiOptimizer, those it is made of."""
    return [optimizer, *getattr(optimizer, "optimizers", [])]


@contextlib.contextmanager
def _unconstrained(variables: Sequence[Any]) -> Iterator[None]:
    """Keeps the inner optimizer from constraining variables whose frozen entries it has moved."""
    constrained = [v for v in variables if getattr(v, "constraint", None) is not None]
    constraints = [variable.constraint for variable in constrained]
    for variable in constrained:
        variable.constraint = None
    try:
        yield
    finally:
        for variable, constraint in zip(constrained, constraints, strict=True):
            variable.constraint = constraint


def _with_averages(inner: Any) -> list[Any]:
    return [optimizer for optimizer in with_parts(inner) if optimizer.use_ema]


def _variable(value: Any, dtype: str, name: str, path: str | None = None) -> Any:
    variable = keras.Variable(value, dtype=dtype, name=name, trainable=path is not None)
    if path is not None:
        # Under the kernel's own path, so that what goes by path or name (decay exclusions,
        # optimizer maps) treats the vector as it would the kernel.
        variable._path = path
    return variable
