"""The dense update strategy: the inner optimizer gets whole variables."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_freeze import _keras_private, backend, criteria
from keras_freeze.masks.frozen_variables import ReadMask, VariableMask, zero_frozen_entries
from keras_freeze.masks.mask import FreezeMask, mask_of_groups
from keras_freeze.masks.ranked import random_scores
from keras_freeze.masks.structure import choose, rescued
from keras_freeze.optimizer.grid_training import GridTraining
from keras_freeze.optimizer.inner_optimizer import averaging_optimizers
from keras_freeze.optimizer.state import Phase
from keras_freeze.optimizer.update import Step, Update, make_variable
from keras_freeze.parameters import Parameter, frozen_candidates, warn_of_unknown

if TYPE_CHECKING:
    from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer


class DenseUpdate(Update):
    """The inner optimizer updates whole variables; frozen entries are restored after each step.

    Args:
        optimizer, parameters: as for `Update`.
        mask: the mask; None if the first batch decides it by the optimizer's settings.
    """

    def __init__(
        self,
        optimizer: "FreezeOptimizer",
        parameters: Sequence[Parameter],
        mask: FreezeMask | None,
    ) -> None:
        super().__init__(optimizer, parameters, mask)
        self._criterion = optimizer.criterion
        self._seed = optimizer.seed
        self._structure = optimizer.structure
        self._candidates = {p.position: p.size for p in parameters if p.is_frozen_candidate}
        # Shapes and paths tell how many weights of which variables the first batch chooses.
        candidates = [parameters[position] for position in self._candidates]
        # Layers may have become untrainable since a mask or a configuration was saved.
        must_match = mask is None and not optimizer.plan.is_from_config
        self._groups = optimizer.groups(candidates, parameters, must_match)
        self._num_trained = sum(group.num_trained for group in self._groups)
        self._warns_of_unknown = not optimizer.trains_everything
        self._rescues = {
            p.position
            for group in self._groups
            for p in (candidates[member] for member in group.members)
            if p.size and group.rescues
        }
        # The masks of "random" have their values before the first batch.
        is_random = mask is None and self._criterion == criteria.RANDOM
        before = self._random_mask() if is_random else mask
        # How many weights the at-least-one rule has added, where that does not follow from masks.
        self._added = None
        if self._structure is not None:
            added = np.array(0 if before is None else before.num_rescued, np.int32)
            self._added = make_variable(added, "int32", "num_rescued")
        self._decided = make_variable(np.array(mask is not None), "bool", "mask_decided")
        self._masks = {
            position: make_variable(trained, "bool", f"mask_{position}")
            for position, trained in self._initial_masks(before).items()
        }
        # Whether the first batch of this process alone would decide. Asked for now: while JAX
        # traces a step, the variables have no values.
        variables = [p.variable for p in parameters]
        self._would_decide_alone = mask is None and backend.trains_alone(variables)
        # Whether the variable `_decided` need not be read from a device again.
        self._is_settled = False
        self._build_inner([p.variable for p in parameters])
        grid = GridTraining(optimizer, parameters)
        for p in parameters:
            if grid.covers(p.position):
                dtype = keras.backend.standardize_dtype(p.variable.dtype)
                name = f"grid_values_{p.position}"
                values = make_variable(backend.to_numpy(p.variable), dtype, name)
                read = functools.partial(_indices_of, self._masks.get(p.position), self._decided)
                self.grids[p.position] = grid.precise_values(p.position, values, read)

    def _shape(self, position: int) -> tuple[int, ...]:
        return tuple(self.parameters[position].variable.shape)

    def _random_mask(self) -> FreezeMask:
        """Return the mask of the criterion that needs no gradients."""
        return mask_of_groups(
            [random_scores(self._shape(p), self._seed, p) for p in self._candidates],
            self._groups,
            seed=self._seed,
            positions=list(self._candidates),
            paths=[self.parameters[p].path for p in self._candidates],
            structure=self._structure,
        )

    def _initial_masks(self, mask: FreezeMask | None) -> dict[int, np.ndarray]:
        if mask is None:
            return {position: np.ones(self._shape(position), bool) for position in self._candidates}
        return {entry.position: entry.trained for entry in mask.entries}

    @property
    def variables(self) -> list[Any]:
        added = [] if self._added is None else [self._added]
        return [*super().variables, self._decided, *self._masks.values(), *added]

    @property
    def phase(self) -> Phase:
        return Phase.DECIDED if self.is_decided else Phase.UNDECIDED

    @property
    def mask(self) -> FreezeMask | None:
        if not self._is_settled and not bool(backend.to_numpy(self._decided)):
            return None
        trained = {position: backend.to_numpy(mask) for position, mask in self._masks.items()}
        return self._make_mask(trained, self._count_rescued(trained))

    @property
    def variable_masks(self) -> list[VariableMask]:
        return [
            self._variable_mask(position, _reader_of_mask(mask, self._decided))
            for position, mask in self._masks.items()
        ]

    def _count_rescued(self, trained: dict[int, np.ndarray]) -> int:
        if self._added is not None:
            return int(backend.to_numpy(self._added))
        if not self.by_first_batch:
            return self.num_rescued
        return sum(int(np.count_nonzero(trained[p])) for p in self._candidates) - self._num_trained

    def accepts(self, mask: FreezeMask, compact: bool) -> bool:
        return not compact and [e.position for e in mask.entries] == list(self._masks)

    def replace_mask(self, mask: FreezeMask) -> None:
        for entry in mask.entries:
            self._masks[entry.position].assign(entry.trained)
        self.num_rescued = mask.num_rescued
        if self._added is not None:
            self._added.assign(mask.num_rescued)
        self._would_decide_alone = False
        self.by_first_batch = False
        self._decided.assign(True)

    def grid_state(self) -> dict[int, np.ndarray]:
        return {p: grid.state(self._trained(p)) for p, grid in self.grids.items()}

    def restore_grid(self, state: Mapping[int, np.ndarray]) -> None:
        for position in self.grids.keys() & state.keys():
            self.grids[position].restore(state[position], self._trained(position))

    def _trained(self, position: int) -> np.ndarray | None:
        """Return the mask of the variable at a position; None if it has none."""
        mask = self._masks.get(position)
        return None if mask is None else backend.to_numpy(mask)

    def apply(self, step: Step) -> None:
        own, variables, positions = zip(*step, strict=True)
        means = self.shared.means(own, variables, positions)
        step = list(zip(means, variables, positions, strict=True))
        needs_no_branch = backend.STEPS_ARE_EAGER or self._is_partial(step)
        if not self.by_first_batch or (needs_no_branch and self.is_decided):
            self._step(step)
            return
        frozen_candidates(self.parameters)  # raises if there are no weights to decide about
        if self._warns_of_unknown and not self.is_decided:
            warn_of_unknown(self.parameters, stacklevel=2)
        self._warns_of_unknown = False
        gradients = [gradient for gradient, _, _ in step]

        def step_with(gradients: list[Any]) -> Step:
            return [(g, v, p) for g, (_, v, p) in zip(gradients, step, strict=True)]

        decided_before = backend.read(self._decided)
        self._begin_grids(decided_before)
        backend.run_if(
            ops.logical_not(decided_before), lambda g: self._decide(step_with(g)), gradients
        )
        # With "zero", the first gradient belongs to the dense network, which is just gone.
        may_step = decided_before if self.frozen_weights == "zero" else backend.read(self._decided)
        backend.run_if(may_step, lambda g: self._step(step_with(g)), gradients)

    def _begin_grids(self, is_decided: Any) -> None:
        """Let what is trained on a grid start where it is when the mask is decided."""
        for position, grid in self.grids.items():
            variable = self.parameters[position].variable
            kept = (backend.where(is_decided, v, variable) for v in grid.variables)
            grid.begin_at(*kept)

    def _is_partial(self, step: Step) -> bool:
        """Return whether a step lacks weights, so that it cannot decide about them."""
        return not self._candidates.keys() <= {position for _, _, position in step}

    @property
    def is_decided(self) -> bool | None:
        """Whether there is a mask; None while JAX traces a function, where that is not known."""
        if self._is_settled:
            return True
        decided = backend.known_value(self._decided)
        if decided is None:
            return None
        self._is_settled = bool(decided) and backend.STEPS_ARE_EAGER
        return bool(decided)

    def forget_values(self) -> None:
        self._is_settled = False

    def disable(self) -> None:
        for mask in self._masks.values():
            mask.assign(np.zeros(tuple(mask.shape), bool))
        self._decided.assign(True)

    def _decide(self, step: Step) -> None:
        """Compute the mask of the weights and gradients of this batch (the paper's algorithm 1)."""
        if self._criterion == criteria.RANDOM:
            self._set_masks({position: mask.value for position, mask in self._masks.items()}, True)
            return
        self._check_decides_for_all()
        criteria.check_gradients_suffice(
            self._criterion, "Call `keras_freeze.freeze(model, x, y)` before the first step."
        )
        gradients = {position: gradient for gradient, _, position in step}
        missing = [self.parameters[p].path for p in self._candidates if p not in gradients]
        if missing:
            raise ValueError(
                "The first step decides which weights are trained, so that it needs the gradients "
                "of all of them. Call `keras_freeze.freeze` first, or apply all gradients at once. "
                f"Received: no gradients of {', '.join(missing)}"
            )
        found = [gradients[p] for p in self._candidates]
        dense = [None if g is None else backend.to_dense(g) for g in found]
        summed = backend.sum_over_replicas(dense)
        scores = [self._scores(p, g) for p, g in zip(self._candidates, summed, strict=True)]
        finite = [ops.all(ops.isfinite(s)) for s in scores]
        checks = [
            backend.require(
                ok,
                f"The saliency of {self.parameters[position].path!r} is not finite in the first "
                "batch. Look for NaN or infinite values in the data, the loss and the weights.",
            )
            for ok, position in zip(finite, self._candidates, strict=True)
        ]
        if self._num_trained:
            all_zero = ops.all(ops.concatenate(scores) == 0.0)
            backend.call_if(all_zero, criteria.warn_of_zero_scores)
        with backend.after(checks):
            # XLA cannot raise: there, a batch that is not finite does not decide.
            is_valid = ops.all(ops.stack(finite))
            masks, added = self._rescue(self._top(scores))
            self._set_masks(masks, is_valid)
            if self._added is not None:
                self._added.assign(ops.where(is_valid, added, self._added.value))

    def _check_decides_for_all(self) -> None:
        if self._would_decide_alone:
            raise ValueError(
                "Each of several processes would choose by its own batch, so that their masks "
                "would differ. Set a `keras.distribution.DataParallel` before the model is built, "
                "so that they train it together, or call `keras_freeze.freeze` in all of them. "
                f"Received: {backend.num_processes()} processes"
            )

    def _scores(self, position: int, gradient: Any) -> Any:
        parameter = self.parameters[position]
        weights = backend.read(parameter.variable)
        if gradient is not None:
            # TensorFlow does not know all sizes of some gradients while it traces.
            gradient = ops.reshape(ops.cast(gradient, "float32"), weights.shape)
            gradient = gradient / (self.inner.loss_scale_factor or 1.0)
        scores = ops.reshape(
            criteria.score(self._criterion, weights, gradient, parameter.path), [-1]
        )
        # XLA sorts -0.0 below 0.0, which are a tie.
        return ops.where(scores == 0.0, 0.0, scores)

    def _top(self, scores: list[Any]) -> dict[int, Any]:
        """Return the masks of the largest scores of each group, by position."""
        positions, top, masks = list(self._candidates), backend.top_k_mask, dict[int, Any]()
        for group in self._groups:
            of_group = [scores[member] for member in group.members]
            own = [positions[member] for member in group.members]
            shapes = list(map(self._shape, own))
            chosen = choose(self._structure, of_group, shapes, group.num_trained, ops, top)
            masks.update(zip(own, chosen, strict=True))
        return masks

    def _rescue(self, masks: dict[int, Any]) -> tuple[dict[int, Any], Any]:
        """Return masks with something trained in each variable, and how many weights that adds."""
        filled, added = dict(masks), ops.zeros((), "int32")
        for position in self._rescues:
            unit = rescued(self._structure, self._shape(position), self._seed, position)
            has_any = ops.any(masks[position])
            filled[position] = ops.where(has_any, masks[position], unit)
            count = np.count_nonzero(unit) * ops.cast(ops.logical_not(has_any), "int32")
            added = ops.add(added, count)
        return filled, added

    def _set_masks(self, masks: dict[int, Any], is_valid: Any) -> None:
        """Set the masks, and zero frozen weights for "zero", if `is_valid` holds."""
        for position, mask in masks.items():
            mask = ops.where(is_valid, mask, self._masks[position].value)
            self._masks[position].assign(mask)
            if self.frozen_weights == "zero":
                kept = ops.logical_or(mask, ops.logical_not(is_valid))
                zero_frozen_entries(self.parameters[position].variable, kept)
        self._decided.assign(is_valid)

    def _step(self, step: Step) -> None:
        self._check_complete(self._masks, step)
        for _, variable, position in step:
            if position in self.grids:
                self.grids[position].take_over(variable)
                variable.assign(self._trained_or(self.grids[position].values, variable, position))
        gradients = [self._masked(*part) for part in step]
        variables = [variable for _, variable, _ in step]
        # Moving averages may overwrite variables that the step does not mention.
        touched = [position for _, _, position in step if position in self._masks]
        if averaging_optimizers(self.inner):
            touched = list(self._masks)
        before = {p: backend.read(self.parameters[p].variable) for p in touched}
        with _unconstrained(variables):
            factor = self._update_inner(gradients, variables)
        for _, variable, position in step:
            if position in self.grids:
                self.grids[position].values.assign(variable)
                variable.assign(self.grids[position].points())
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
        # A copy within the branch of the `cond` in which this may be traced.
        gradient = self._with_l2(backend.read(gradient), variable)
        if position not in self._masks:
            return gradient
        # `where`, not a product: a frozen entry's NaN would survive the product.
        gradient = backend.to_dense(gradient)
        return ops.where(self._masks[position].value, gradient, ops.zeros_like(gradient))

    def _restore(self, position: int, frozen: Any) -> None:
        variable = self.parameters[position].variable
        variable.assign(self._trained_or(variable, frozen, position))

    def _trained_or(self, trained: Any, frozen: Any, position: int) -> Any:
        """Return the trained entries of one tensor with the frozen ones of another."""
        if position not in self._masks:
            return trained
        return backend.where(self._masks[position], trained, frozen)

    def copy_frozen_entries_to_averages(self) -> None:
        """Set frozen entries of moving averages to the weights, so that swapping both is exact."""
        for optimizer in averaging_optimizers(self.inner):
            averages = {id(v): average for v, average in _keras_private.moving_averages(optimizer)}
            for position, mask in self._masks.items():
                variable = self.parameters[position].variable
                average = averages.get(id(variable))
                if average is not None:
                    average.assign(backend.where(mask, average, variable))


def _indices_of(mask: Any, decided: Any) -> np.ndarray | None:
    """Return the flat indices of trained entries; None for all, or while that is not decided."""
    trained = None if mask is None else _reader_of_mask(mask, decided)()
    return None if trained is None else np.flatnonzero(trained)


def _reader_of_mask(mask: Any, decided: Any) -> ReadMask:
    """Return a function that returns a variable's mask; None while it is not decided."""

    def read() -> np.ndarray | None:
        is_decided = backend.known_value(decided)
        return backend.to_numpy(mask) if is_decided is not None and is_decided else None

    return read


@contextlib.contextmanager
def _unconstrained(variables: Sequence[Any]) -> Iterator[None]:
    """Keep the inner optimizer from applying constraints before frozen entries are restored."""
    constrained = [v for v in variables if getattr(v, "constraint", None) is not None]
    constraints = [variable.constraint for variable in constrained]
    for variable in constrained:
        variable.constraint = None
    try:
        yield
    finally:
        for variable, constraint in zip(constrained, constraints, strict=True):
            variable.constraint = constraint
