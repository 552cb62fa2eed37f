"""Decide which values of a variable a `.freeze` file stores as integers on a grid."""

import bisect
import math
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_freeze._utils.bits import as_bits, from_bits
from keras_freeze.grids import Bits, Grid, OnGrid
from keras_freeze.initializers.of_layers import initializers_of, source_of
from keras_freeze.placements import Placement, may_be_rounded, placements_of
from keras_freeze.starts import BASE, CONSTANT, SEED, Source
from keras_freeze.storage.coding.integers import Integers
from keras_freeze.storage.origin import guess
from keras_freeze.storage.saved_variable import SavedVariable, paths_of
from keras_freeze.storage.sources import align

SCALES = 2.0 ** (1 - np.arange(24 * 4) / 4)
"""Steps to try, of the largest difference: from twice of it down, each 2^(1/4) times the next."""

_Starts = dict[SavedVariable, tuple[Source, np.ndarray]]

# About what is left of values as they are, of which the exponents are coded.
_SHARE_OF_BITS = 0.8


def set_grids(
    model: keras.Model, variables: Sequence[SavedVariable], base: Sequence[Any] | None
) -> None:
    """Set `on_grid` of variables that are on a grid, by `quantize`, `load` or training.

    Args:
        model: the model.
        variables: its variables, whose sources are known.
        base: the variables of the base, or None.
    """
    lost = []
    placed = {saved: placements_of(saved.variable) for saved in variables}
    placed = {saved: placements for saved, placements in placed.items() if placements}
    candidates = _candidates(model, variables, base) if placed else {}
    for saved, placements in placed.items():
        if saved not in candidates:
            continue
        known = [_with_starts(saved, one, candidates[saved], base) for one in placements]
        points = (_points(saved, *one) for one in known if one is not None)
        saved.on_grid = next((found for found in points if found is not None), None)
        unknown = [p for p, one in zip(placements, known, strict=True) if one is None]
        if saved.on_grid is None and any(_is_on(saved, one) for one in unknown):
            lost.append(saved)
    if lost:
        warnings.warn(
            f"The values of {paths_of(lost)} are on a grid, but the file has to store them as they "
            "are, since it cannot say where they started. For a smaller file, initialize such "
            "layers by `keras_freeze.initializers` or `keras_freeze.reinitialize` before training, "
            "or pass the network that was trained on as `base`.",
            stacklevel=3,
        )


def _is_on(saved: SavedVariable, placement: Placement) -> bool:
    """Return whether the stored values are on a grid whose starts only this process knows."""
    if placement.read is None:
        return False
    starts = placement.all_starts(saved.values())[saved.is_stored]
    points = _exact(saved, placement.grid, Source(CONSTANT), starts)
    return points is not None and bool(points.integers.any())


def _with_starts(
    saved: SavedVariable,
    placement: Placement,
    candidates: Sequence[Source],
    base: Sequence[Any] | None,
) -> tuple[Grid, Source, np.ndarray] | None:
    """Return the grid, the origin and the starts of stored values; None if nobody can say."""
    if placement.origin is not None:
        starts = _starts(saved, placement.origin, base)
        return None if starts is None else (placement.grid, placement.origin, starts)
    known = placement.all_starts(saved.values())[saved.is_stored]
    bits = as_bits(known)
    if bits.size and (bits == bits[0]).all():
        return placement.grid, Source(CONSTANT, pattern=int(bits[0])), known
    for source in candidates:
        starts = _starts(saved, source, base)
        if starts is not None and np.array_equal(as_bits(starts), bits):
            return placement.grid, source, starts
    return None


def _points(saved: SavedVariable, grid: Grid, origin: Source, starts: np.ndarray) -> OnGrid | None:
    """Return the stored values as points of a grid; None if they are not, or take fewer bits."""
    points = _exact(saved, grid, origin, starts)
    if points is None:
        return None
    # On a very fine grid, the values as they are take fewer bits.
    is_small = Integers(points.integers).num_bits < _SHARE_OF_BITS * 8 * points.bits.nbytes
    return points if is_small else None


def _exact(saved: SavedVariable, grid: Grid, origin: Source, starts: np.ndarray) -> OnGrid | None:
    """Return the stored values as points of a grid; None if they are not."""
    points = nearest(saved, grid, origin, starts)
    is_exact = points is not None and np.array_equal(points.bits, saved.bits[saved.is_stored])
    return points if is_exact else None


def round_to_grid(
    model: keras.Model,
    variables: Sequence[SavedVariable],
    base: Sequence[Any] | None,
    grid: Grid | Bits,
) -> None:
    """Set `on_grid` of all variables that are trained, except those that have one."""
    starts = {
        saved: found
        for saved, found in origins(model, variables, base).items()
        if saved.on_grid is None
    }
    if isinstance(grid, Bits):
        grid = _grid_of_size(starts, grid)
    for saved, (origin, values) in starts.items():
        saved.on_grid = nearest(saved, grid, origin, values)


def _grid_of_size(starts: _Starts, size: Bits) -> Grid:
    """Return the finest grid on which values take so few bits; a coarse one if none does."""
    largest = max((largest_difference(*item) for item in starts.items()), default=0.0) or 1.0
    with np.errstate(over="ignore"):
        steps = [float(f"{step:.2g}") for step in largest * SCALES]
    grids = [Grid(step) for step in steps if 0.0 < step < math.inf]

    def is_small(grid: Grid) -> bool:
        with np.errstate(over="ignore"):
            points = [nearest(saved, grid, *found) for saved, found in starts.items()]
        integers = [point.integers for point in points if point is not None]
        bits = sum(Integers(one).num_bits for one in integers)
        return bits <= size.per_value * sum(one.size for one in integers)

    first_large = bisect.bisect_left(grids, True, key=lambda grid: not is_small(grid))
    return grids[max(first_large - 1, 0)]


def largest_difference(saved: SavedVariable, start: tuple[Source, np.ndarray]) -> float:
    """Return how far the stored values of a variable are from their starts, at most."""
    values = saved.values()[saved.is_stored].astype(np.float64)
    differences = np.abs(values - start[1].astype(np.float64))
    return float(differences[np.isfinite(differences)].max(initial=0.0))


def is_possible(saved: SavedVariable) -> bool:
    """Return whether a variable has trained values, which may be rounded to a grid."""
    if not saved.trainable or not may_be_rounded(saved.variable):
        return False
    if saved.source is not None:
        return saved.entry is not None
    # Otherwise frozen weights are stored, too, which are not to be rounded.
    return saved.entry is None or not saved.sourced.any()


def nearest(saved: SavedVariable, grid: Grid, origin: Source, starts: np.ndarray) -> OnGrid | None:
    """Return the points next to the stored values of a variable; None if there are none."""
    values = saved.values()[saved.is_stored]
    integers = grid.nearest(values, starts)
    if integers is None or not np.isfinite(grid.values(starts, integers)).all():
        return None
    return OnGrid(grid, origin, starts, integers)


def origins(
    model: keras.Model, variables: Sequence[SavedVariable], base: Sequence[Any] | None
) -> dict[SavedVariable, tuple[Source, np.ndarray]]:
    """Return where the stored values of each trained variable started, and these starts."""
    candidates = _candidates(model, variables, base)
    return {saved: _first_origin(saved, found, base) for saved, found in candidates.items()}


def _candidates(
    model: keras.Model, variables: Sequence[SavedVariable], base: Sequence[Any] | None
) -> dict[SavedVariable, list[Source]]:
    """Return what the starts of each trained variable may come from, the likeliest first."""
    in_base = align([saved.variable for saved in variables], base or ())
    held = initializers_of(model)
    found = {}
    for index, saved in enumerate(variables):
        if not is_possible(saved):
            continue
        sources = [saved.source, None if saved.start is None else saved.start.source]
        if index in in_base:
            sources.insert(1, Source(BASE, index=in_base[index]))
        if id(saved.variable) in held:
            sources.append(source_of(*held[id(saved.variable)]))
        # Those of an initializer of Keras only where the file has this source in any case.
        found[saved] = [
            source
            for source in sources
            if source is not None and (source.kind in (BASE, SEED) or source is saved.source)
        ]
    return found


def _first_origin(
    saved: SavedVariable, candidates: Sequence[Source], base: Sequence[Any] | None
) -> tuple[Source, np.ndarray]:
    for source in candidates:
        starts = None if source.kind == CONSTANT else _starts(saved, source, base)
        if starts is not None:
            return source, starts
    values = saved.values()[saved.is_stored]
    one = values.dtype.type(1)
    with np.errstate(all="ignore"):
        is_near_one = np.abs(values - one).sum() < np.abs(values).sum()
    constant = one if is_near_one else one - one
    source = Source(CONSTANT, pattern=int(as_bits(constant)[0]))
    return source, np.full(values.shape, constant)


def _starts(saved: SavedVariable, origin: Source, base: Sequence[Any] | None) -> np.ndarray | None:
    """Return the starts of the stored values; None if the origin does not give any."""
    (bits,) = guess([(origin, saved.shape, saved.dtype)], base)
    return None if bits is None else from_bits(bits, saved.dtype)[saved.is_stored]
