"""Round the trained values of a model to a grid, so that a `.freeze` file takes a few bits each."""

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_freeze import backend
from keras_freeze._utils.threads import check_not_trained_elsewhere
from keras_freeze._utils.validation import check_number
from keras_freeze.gradients.data import Passes, check_readable_again, preprocessed
from keras_freeze.gradients.flow import FlowMeter
from keras_freeze.gradients.loss import evaluate
from keras_freeze.gradients.preserve import attributes_kept, state_kept
from keras_freeze.grids import Grid, OnGrid
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.model_state import ModelOptimizers, check_not_quantized, get_mask
from keras_freeze.placements import Placement, remember_grid
from keras_freeze.starts import Source
from keras_freeze.storage.coding.integers import Integers
from keras_freeze.storage.grid_values import SCALES, largest_difference, nearest, origins
from keras_freeze.storage.keras_model import bits_of, check_built, set_bits, variables_of
from keras_freeze.storage.loading import open_base
from keras_freeze.storage.saved_variable import SavedVariable, paths_of
from keras_freeze.storage.saving import sourced_variables, state_of
from keras_freeze.storage.sources import unexplained

# Batches from which curvatures are estimated: for each variable, one number.
_MOST_BATCHES = 64

# Curvatures count as at least this part of their mean.
_LEAST_CURVATURE = 1e-4

# Numbers of scales: how many it takes to halve a step, and the one that is tried first.
_OCTAVE = 4
_FIRST_SCALE = 9 * _OCTAVE

_Starts = dict[SavedVariable, tuple[Source, np.ndarray]]
_Points = dict[SavedVariable, OnGrid]
_Attempt = tuple[_Points, Mapping[str, float]]


@dataclass(frozen=True)
class QuantizedRow:
    """One variable that `quantize` has put on a grid.

    Attributes:
        path: The variable's path.
        num_values: How many of its values are trained.
        step: The distance between two points of the grid.
        bits_per_value: The size of its values in a `.freeze` file, in bits.
    """

    path: str
    num_values: int
    step: float
    bits_per_value: float


@dataclass(frozen=True)
class Quantization:
    """What `quantize` has done; `str()` gives it as a table.

    Attributes:
        rows: A `QuantizedRow` for each variable on a grid.
        before, after: Loss and metrics on the data, by name; empty without data.
    """

    rows: tuple[QuantizedRow, ...]
    before: Mapping[str, float]
    after: Mapping[str, float]

    @property
    def num_values(self) -> int:
        """How many values are on a grid."""
        return sum(row.num_values for row in self.rows)

    @property
    def bits_per_value(self) -> float:
        """The mean size of a value in a `.freeze` file, in bits; 32 before, for float32."""
        bits = sum(row.num_values * row.bits_per_value for row in self.rows)
        return bits / max(self.num_values, 1)

    def __str__(self) -> str:
        width = max((len(row.path) for row in self.rows), default=0)
        lines = [
            f"{row.path:<{width}}  {row.num_values:>10,} values  step {row.step:<9.3g}"
            f"{row.bits_per_value:6.2f} bits"
            for row in self.rows
        ]
        lines.append(f"{self.num_values:,} values, {self.bits_per_value:.2f} bits each")
        lines += [
            f"{name}: {self.before[name]:.6g} -> {self.after[name]:.6g}" for name in self.after
        ]
        return "\n".join(lines)


def quantize(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    *,
    base: keras.Model | str | os.PathLike[str] | None = None,
    tolerance: float = 0.01,
    step: float | None = None,
) -> Quantization:
    """Round the trained values of a model to a grid, in place, for a smaller file.

    Each trained value becomes its start plus an integer number of steps. The start is the value
    before training where that comes from a seed or from `base`, and 0 or 1 elsewhere, as for biases
    and the scales of normalizations. `save` then stores the integers, in a few bits each, and
    nothing is lost: what you evaluate is what is stored. Frozen weights do not change, nor do
    moving statistics, nor variables with a constraint.

    Given data, the steps are as long as the loss allows. Those of different variables are to each
    other as the inverse roots of their curvatures, which the squared gradients of up to 64 batches
    stand for; their common factor is the largest with which the loss changes by at most
    `tolerance`, up or down: of a network that is too sure of itself, it falls on new data while
    training is rounded away. Training that goes on leaves the grid: call `quantize` again after it.

    Args:
        model: a built model that is frozen, or was trained from `base` by any means; compiled, if
            there are data.
        x, y: data as `model.evaluate` takes them, which are read about ten times. Best are data
            that the model was not trained on. None: all variables have the same `step`.
        base: the model, or the path of its file, that the model was trained from, if it is to be
            saved with this base.
        tolerance: by how much the loss may change, relative to what it is.
        step: the distance between two points of the grid for all variables, instead of data.

    Returns:
        A `Quantization`: steps, bits per value, and loss and metrics before and after.

    Raises:
        ValueError: if the model is not built, or neither frozen nor given a `base`, or if nothing
            in it is trained; if its frozen weights come neither from a known seed nor from `base`;
            if neither or both of `x` and `step` are given; if the loss is 0 or not finite, or if no
            grid keeps it within `tolerance`; if `step` is too small. The model is then as it was.
        TypeError: if an argument has a wrong type.
        RuntimeError: while another thread trains the model.

    Example:

    ```python
    print(keras_freeze.quantize(model, x_validation, y_validation))
    keras_freeze.save(model, "digits.freeze")
    ```
    """
    mask = _checked_mask(model, x, y, base, step)
    tolerance = check_number("tolerance", tolerance, minimum=0.0)
    grid = None if step is None else Grid(step)
    base_variables = None if base is None else variables_of(open_base(base))
    variables, _ = sourced_variables(model, state_of(model), mask, base_variables)
    _check_starts_known(variables)
    starts = origins(model, variables, base_variables)
    starts = {saved: start for saved, start in starts.items() if saved.is_stored.any()}
    if not starts:
        raise ValueError(
            "The model must have trained weights that can be on a grid: of a float dtype, which "
            "JAX must hold as it is (float64 with `jax_enable_x64` alone), and without a "
            f"constraint. Received: model={model!r}"
        )
    before: Mapping[str, float] = {}
    after = before
    if grid is not None:
        points = _points(starts, dict.fromkeys(starts, grid))
        _check_complete(points, starts, grid)
        _Values(starts).assign(points)
    else:
        with attributes_kept(model):
            points, before, after = _search(model, x, y, starts, tolerance)
    for saved, point in points.items():
        remember_grid(saved.variable, Placement(point.grid, point.origin))
    return Quantization(tuple(_row(*item) for item in points.items()), before, after)


def _checked_mask(model: Any, x: Any, y: Any, base: Any, step: Any) -> FreezeMask | None:
    """Check arguments, and return the mask of the model; None for one that is a base's delta."""
    check_built(model, "model")
    check_not_trained_elsewhere(model)
    if (x is None) == (step is None):
        raise ValueError(
            "Give `quantize` either data as `x` and `y`, by which it chooses the steps, or one "
            f"`step`. Received: step={step!r} {'without' if x is None else 'and'} data"
        )
    if x is None and y is not None:
        raise ValueError("Argument `y` must be None without `x`. Received: x=None and targets")
    if x is not None:
        if not getattr(model, "compiled", False):
            raise ValueError(
                "The model must be compiled for `quantize` to evaluate it: compile it, or pass a "
                f"`step` instead of data. Received: model={model!r}"
            )
        check_readable_again(x)
        _passes(model, x, y)  # refuses data that are empty or do not fit together
    mask = get_mask(model)
    if mask is None and base is None:
        ModelOptimizers(model).required()  # says why not
        raise ValueError(
            "The model must be frozen: call `keras_freeze.freeze` or train it first, or pass the "
            f"`base` that it was trained from. Received: model={model!r}"
        )
    check_not_quantized(model)
    return mask


def _check_starts_known(variables: Sequence[SavedVariable]) -> None:
    lost = unexplained(variables)
    if lost:
        raise ValueError(
            f"It is not known where the frozen weights of {paths_of(lost)} come from, so that a "
            "file cannot leave them out and differences to them say nothing. Pass the model or "
            "file that they come from as `base`; or call `keras_freeze.reinitialize(model, "
            "seed=...)` before `freeze`."
        )


def _search(
    model: keras.Model, x: Any, y: Any, starts: _Starts, tolerance: float
) -> tuple[_Points, Mapping[str, float], Mapping[str, float]]:
    """Put the variables on the coarsest grid that the loss allows.

    Returns:
        The points, and loss and metrics before and after.
    """
    before = _evaluate(model, x, y)
    if not math.isfinite(before["loss"]):
        raise ValueError(
            f"The loss on `x` and `y` is {before['loss']}: look for NaN or infinite values in the "
            "data, the targets and the weights."
        )
    if before["loss"] == 0.0:
        raise ValueError(
            "The loss on `x` and `y` must not be 0, of which no share can be tolerated: pass other "
            f"data, or a `step` instead. Received: a loss of 0 and tolerance={tolerance!r}"
        )
    relative = _relative_steps(model, x, y, starts)
    largest = max(largest_difference(*item) / relative[item[0]] for item in starts.items()) or 1.0

    def attempt(number: int) -> _Attempt:
        scale = largest * SCALES[number]
        # Few digits take fewer bytes in a file.
        grids = {saved: Grid(float(f"{scale * relative[saved]:.2g}")) for saved in starts}
        points = _points(starts, grids)
        values.assign(points)
        return points, _evaluate(model, x, y)

    def is_good(attempt: _Attempt) -> bool:
        return abs(attempt[1]["loss"] - before["loss"]) <= tolerance * abs(before["loss"])

    with _Values(starts).put_back_at_an_error() as values:
        found = _coarsest(attempt, is_good)
        points, after = found
        if not is_good(found):
            raise ValueError(
                f"Argument `tolerance` must be larger for this model: with the finest grid, the "
                f"loss goes from {before['loss']!r} to {after['loss']!r}. "
                f"Received: tolerance={tolerance!r}"
            )
        values.assign(points)
    return points, before, after


def _coarsest(attempt: Callable[[int], _Attempt], is_good: Callable[[_Attempt], bool]) -> _Attempt:
    """Return the attempt with the coarsest of all good grids that are next to each other.

    The loss of a very coarse grid may be that of the model by chance: the search begins at a fine
    one, and goes on by factors of two until grids are no longer good, or, from a bad one, are.

    Args:
        attempt: tries the grid with one of `SCALES`, by number.
        is_good: whether an attempt is good enough.

    Returns:
        The attempt; that with the finest grid if none is good.
    """
    good = _FIRST_SCALE
    found = attempt(good)
    bad = good - _OCTAVE
    if is_good(found):
        while bad >= 0 and is_good(coarser := attempt(bad)):
            good, bad, found = bad, bad - _OCTAVE, coarser
        bad = max(bad, -1)
    else:
        while not is_good(found):
            if good == len(SCALES) - 1:
                return found
            good, bad = min(good + _OCTAVE, len(SCALES) - 1), good
            found = attempt(good)
    while good - bad > 1:
        middle = (good + bad) // 2
        if is_good(coarser := attempt(middle)):
            good, found = middle, coarser
        else:
            bad = middle
    return found


def _relative_steps(
    model: keras.Model, x: Any, y: Any, starts: _Starts
) -> dict[SavedVariable, float]:
    """Return for each variable one over the root of its curvature, relative to the mean.

    An error of a step's size then costs the same loss in each of them.
    """
    flows = FlowMeter(model).batch_flows(_passes(model, x, y))
    sums = {id(v): 0.0 for v in model.trainable_variables}
    with contextlib.closing(flows):
        for batch in itertools.islice(flows, _MOST_BATCHES):
            for variable, gradient in zip(model.trainable_variables, batch.gradients, strict=True):
                values = backend.to_numpy(gradient).astype(np.float64)
                sums[id(variable)] += float(np.square(values).mean()) if values.size else 0.0
    curvatures = np.array([sums[id(saved.variable)] for saved in starts])
    mean = curvatures.mean()
    if not 0 < mean < math.inf:
        return dict.fromkeys(starts, 1.0)
    curvatures = np.maximum(curvatures / mean, _LEAST_CURVATURE)
    return dict(zip(starts, (curvatures**-0.5).tolist(), strict=True))


def _points(starts: _Starts, grids: Mapping[SavedVariable, Grid]) -> _Points:
    """Return the points next to the variables' values, where there are such points."""
    points = {saved: nearest(saved, grids[saved], *start) for saved, start in starts.items()}
    return {saved: point for saved, point in points.items() if point is not None}


def _check_complete(points: _Points, starts: _Starts, grid: Grid) -> None:
    """Refuse a step with which finite values have no points."""
    missing = [s for s in starts if s not in points and np.isfinite(s.values()).all()]
    if missing:
        raise ValueError(
            "Argument `step` must be such that all trained values can be rounded. Those of "
            f"{paths_of(missing)} are more than 2**31 steps from their start, or too large once "
            f"they are rounded. Received: step={grid.step!r}"
        )


class _Values:
    """The values that variables have, of which those that are trained are replaced.

    They are those of the variables and not those that are saved, which differ for FreezeNet-WD.
    """

    def __init__(self, starts: _Starts) -> None:
        self._before = {saved: bits_of(saved.variable) for saved in starts}

    def assign(self, points: _Points) -> None:
        """Assign points; variables without points get the values that they had."""
        for saved, before in self._before.items():
            bits = before.copy()
            if saved in points:
                bits[saved.is_stored] = points[saved].bits
            set_bits(saved.variable, bits, saved.dtype)

    @contextlib.contextmanager
    def put_back_at_an_error(self) -> Iterator["_Values"]:
        """Assign the values that the variables had if the block fails."""
        try:
            yield self
        except BaseException:
            self.assign({})
            raise


def _passes(model: keras.Model, x: Any, y: Any) -> Passes:
    return Passes(*preprocessed(model, x, y, None), None, None)


def _evaluate(model: keras.Model, x: Any, y: Any) -> dict[str, float]:
    with state_kept(model):
        found = evaluate(model, x, y)
    if "loss" not in found:
        raise ValueError(
            "The model must have a loss: `model.evaluate` gives none, but it gives "
            f"{sorted(found)}. Pass a `step` instead of data. Received: model={model!r}"
        )
    return {name: float(value) for name, value in found.items() if np.ndim(value) == 0}


def _row(saved: SavedVariable, point: OnGrid) -> QuantizedRow:
    size = point.integers.size
    return QuantizedRow(saved.path, size, point.grid.step, Integers(point.integers).num_bits / size)
