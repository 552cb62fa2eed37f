"""Masks with a structure: whole columns, rows or blocks of a weight, or n of each m entries.

The functions are made of what NumPy and `keras.ops` have in common and take one of them as `xp`, so
that `freeze` and the first batch choose alike. Needs NumPy alone. Sums of scores are those of pairs
of float32 numbers in a fixed order, which is the same, to the last bit, in both and on every
backend.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from keras_freeze._utils.validation import (
    check_int,
    check_one_of,
    received,
    type_error,
    value_error,
)
from keras_freeze.masks.selection import rescue_index, select_top

_SCORES = ("mean", "sum")
_LARGEST = 2**31
_ACCEPTED = (
    "'column', 'row', 'n:m' such as '2:4' with 1 <= n <= m, or a pair of positive ints, the height "
    "and width of blocks"
)


@dataclass(frozen=True)
class Structure:
    """What is trained or frozen together, and how that is scored.

    The last axis of a weight has its columns (the outputs of most layers), the one before it its
    rows (the inputs); all axes before them, such as the positions of a convolution, belong to every
    row and column. A weight of one axis is one row of columns.

    Args:
        units: `"column"`: whole columns, of a convolution over all its positions. `"row"`: whole
            rows. A pair of ints: blocks of this height (rows) and width (columns), side by side at
            each position, smaller where an axis ends. `"n:m"`, such as `"2:4"`: single weights, of
            which at most n are trained of m that follow each other along a column (of what is left
            at its end, n too); of a weight of one axis, along that axis.
        score: what a column, row or block is ordered by: the `"mean"` or the `"sum"` of the
            scores of its weights. The mean is per weight that is trained: with the sum, units that
            are large would come first in a network whose layers differ in size. `"n:m"` has the
            scores of single weights. Defaults to `"mean"`.

    Raises:
        TypeError: If `units` is neither a string nor a pair of ints.
        ValueError: If it is another string or a number is below 1, if n is above m, if `score` is
            another string, or if it is `"sum"` with `"n:m"`.

    Example:
        >>> Structure("column", score="sum")
        Structure(units='column', score='sum')
    """

    units: str | tuple[int, int]
    score: str = "mean"

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", _checked_units(self.units))
        check_one_of("score", self.score, _SCORES)
        if self.pattern is not None and self.score != "mean":
            raise value_error("score", self.score, f"'mean' with single weights ({self.units!r})")

    @property
    def pattern(self) -> tuple[int, int] | None:
        """The numbers n and m of `"n:m"`; None for others."""
        if isinstance(self.units, str) and ":" in self.units:
            n, m = map(int, self.units.split(":"))
            return n, m
        return None

    @property
    def freezes_at_rate_0(self) -> bool:
        """Whether weights are frozen at any freezing rate: of n:m, with n below m."""
        return self.pattern is not None and self.pattern[0] < self.pattern[1]

    def loosened(self, rate: Callable[[float], float]) -> "Structure":
        """Return the structure of an earlier step of a criterion in steps.

        Args:
            rate: what the step makes of a final freezing rate. That of n:m is 1 - n/m.
        """
        if self.pattern is None:
            return self
        n, m = self.pattern
        # Rates are rounded to twelve decimals, and another rule may exceed the final one.
        larger = math.ceil(round(m * (1 - rate(1 - n / m)), 6))
        return Structure(f"{min(max(n, larger), m)}:{m}")

    def to_json(self) -> list[Any]:
        """Return the structure as a JSON array, which `check_structure` accepts."""
        return [self.units if isinstance(self.units, str) else list(self.units), self.score]

    def __str__(self) -> str:
        return repr(self.units) if self.score == "mean" else repr(self)


def check_structure(structure: Any) -> Structure | None:
    """Return a structure in its final form; None for single weights.

    Args:
        structure: None, a `Structure`, the first argument of one, or a list of both its arguments,
            as JSON has it.

    Raises:
        TypeError, ValueError: For anything else; see `Structure`.

    Example:
        >>> check_structure("2:4")
        Structure(units='2:4', score='mean')
    """
    if structure is None or isinstance(structure, Structure):
        return structure
    is_pair = isinstance(structure, (list, tuple)) and len(structure) == 2
    if is_pair and isinstance(structure[1], str):
        return Structure(*structure)
    return Structure(structure)


def _checked_units(units: Any) -> str | tuple[int, int]:
    if isinstance(units, str):
        match = re.fullmatch(r"([1-9][0-9]{0,8}):([1-9][0-9]{0,8})", units)
        if units in ("column", "row") or (match and int(match[1]) <= int(match[2])):
            return units
        raise value_error("structure", units, _ACCEPTED)
    if not isinstance(units, (list, tuple)) or len(units) != 2:
        raise type_error("structure", units, f"None, {_ACCEPTED}, or a Structure")
    try:
        height, width = (check_int("structure", n, minimum=1, end=_LARGEST) for n in units)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"Argument `structure` must be {_ACCEPTED}. {received('structure', units)}"
        ) from None
    return height, width


class _Tiling(NamedTuple):
    """How the entries of a weight are divided among its units: tiles of matrices.

    Attributes:
        shape: The shape of the weight.
        axes: It as three axes: positions, rows and columns.
        transposed: Whether the rows come before the positions in the matrices.
        matrices: Number, height and width of the matrices.
        tile: Height and width of a tile.
    """

    shape: tuple[int, ...]
    axes: tuple[int, int, int]
    transposed: bool
    matrices: tuple[int, int, int]
    tile: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int, int]:
        """How many tiles there are along each axis of the matrices."""
        number, height, width = self.matrices
        return number, -(-height // self.tile[0]), -(-width // self.tile[1])

    def split(self, array: Any, xp: Any, fill: float = 0.0) -> Any:
        """Return the entries of each tile as one row, `fill` where it extends over an edge."""
        array = xp.reshape(array, self.axes)
        if self.transposed:
            array = xp.transpose(array, (1, 0, 2))
        array = xp.reshape(array, self.matrices)
        (number, rows, columns), (height, width) = self.grid, self.tile
        margins = (
            (0, 0),
            (0, rows * height - self.matrices[1]),
            (0, columns * width - array.shape[2]),
        )
        if any(after for _, after in margins):
            array = xp.pad(array, margins, "constant", constant_values=fill)
        array = xp.reshape(array, (number, rows, height, columns, width))
        array = xp.transpose(array, (0, 1, 3, 2, 4))
        return xp.reshape(array, (number * rows * columns, height * width))

    def join(self, tiles: Any, xp: Any) -> Any:
        """Return an array of the weight's shape from what `split` returns for it."""
        (number, rows, columns), (height, width) = self.grid, self.tile
        array = xp.reshape(tiles, (number, rows, columns, height, width))
        array = xp.transpose(array, (0, 1, 3, 2, 4))
        array = xp.reshape(array, (number, rows * height, columns * width))
        array = array[:, : self.matrices[1], : self.matrices[2]]
        if self.transposed:
            array = xp.reshape(array, (self.axes[1], self.axes[0], self.axes[2]))
            array = xp.transpose(array, (1, 0, 2))
        return xp.reshape(array, self.shape)

    def sizes(self) -> np.ndarray:
        """Return how many entries each tile has."""
        number, *lengths = self.matrices
        rows, columns = (
            np.minimum(step, length - np.arange(0, length, step))
            for step, length in zip(self.tile, lengths, strict=True)
        )
        return np.tile(np.outer(rows, columns).reshape(-1), number)


def _tiling(structure: Structure, shape: tuple[int, ...]) -> _Tiling:
    rows, columns = (1, 1, *shape)[-2:]
    positions = math.prod(shape[:-2])
    if structure.pattern is not None and len(shape) == 1:
        rows, columns = columns, rows
    axes = positions, rows, columns
    if structure.units == "row":
        width = positions * columns
        return _Tiling(shape, axes, True, (1, rows, width), (1, max(width, 1)))
    if structure.units == "column":
        height = positions * rows
        return _Tiling(shape, axes, False, (1, height, columns), (max(height, 1), 1))
    if structure.pattern is not None:
        tile = structure.pattern[1], 1
    else:
        assert isinstance(structure.units, tuple)
        tile = structure.units
    tile = min(tile[0], max(rows, 1)), min(tile[1], max(columns, 1))
    return _Tiling(shape, axes, False, axes, tile)


def choose(
    structure: Structure | None,
    scores: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    num_trained: int,
    xp: Any,
    top: Callable[[Any, int], Any],
) -> list[Any]:
    """Return boolean arrays of these shapes that train at most `num_trained` weights.

    Columns, rows and blocks are trained in the order of their scores, the largest first and of
    equal ones the first, as long as all together have at most `num_trained` weights. Of n:m, the
    weights with the largest scores are trained among those that are the n largest of their m;
    without a structure, among all.

    Args:
        structure: The structure.
        scores: One array for each variable, of its size, float32, without -0.0.
        shapes: The shapes of the variables.
        num_trained: How many weights may be trained.
        xp: The module `numpy`, or `keras.ops`.
        top: Returns the mask of the k largest of a vector, of equal ones the first.
    """
    if structure is None:
        return _choose_weights(scores, shapes, num_trained, xp, top)
    if xp is not np and sum(map(math.prod, shapes)) >= _LARGEST:
        raise ValueError(
            f"With a structure, the first batch chooses among fewer than {_LARGEST} weights: call "
            "`keras_freeze.freeze` instead."
        )
    tilings = [_tiling(structure, shape) for shape in shapes]
    sizes = [tiling.sizes() for tiling in tilings]
    if structure.pattern is not None:
        n, _ = structure.pattern
        left = [_n_largest(t, s, n, xp) for t, s in zip(tilings, scores, strict=True)]
        most = sum(int(np.minimum(part, n).sum()) for part in sizes)
        return _choose_weights(left, shapes, min(num_trained, most), xp, top)
    units = [_unit_scores(t, s, structure, xp) for t, s in zip(tilings, scores, strict=True)]
    flat = longest_prefix(xp.concatenate(units), np.concatenate(sizes), num_trained, xp)
    parts = parts_of(flat, [part.size for part in sizes])
    return [_whole_units(t, part, xp) for t, part in zip(tilings, parts, strict=True)]


def _choose_weights(
    scores: Sequence[Any],
    shapes: Sequence[tuple[int, ...]],
    num_trained: int,
    xp: Any,
    top: Callable[[Any, int], Any],
) -> list[Any]:
    flat = top(xp.concatenate([xp.reshape(array, (-1,)) for array in scores]), num_trained)
    parts = parts_of(flat, [math.prod(shape) for shape in shapes])
    return [xp.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]


def select_units(
    structure: Structure | None, scores: Sequence[np.ndarray], num_trained: int
) -> list[np.ndarray]:
    """Return what `choose` does for finite scores in NumPy arrays of the variables' shapes.

    Example:
        >>> scores = [np.array([[1.0, 4.0], [4.0, 2.0]], np.float32)]
        >>> select_units(Structure("column"), scores, 3)[0]
        array([[False,  True],
               [False,  True]])
    """
    if not scores:
        return []
    with np.errstate(over="ignore"):  # infinite sums are the largest
        positive = [array + np.float32(0) for array in scores]  # no -0.0
        return choose(structure, positive, [a.shape for a in scores], num_trained, np, _top)


class Units:
    """The columns, rows or blocks of a variable, as the places of vectors.

    Args:
        structure: the structure, other than n:m.
        shape: the shape of the variable.

    Attributes:
        number: how many there are.
    """

    def __init__(self, structure: Structure, shape: tuple[int, ...]) -> None:
        self._structure = structure
        self._tiling = _tiling(structure, shape)
        self.number = math.prod(self._tiling.grid)

    def sizes(self, mask: np.ndarray) -> np.ndarray:
        """Return how many entries of each unit are in a mask."""
        return self._tiling.split(mask, np, fill=False).sum(axis=1, dtype=np.int64)

    def are_whole(self, mask: np.ndarray) -> bool:
        """Return whether a mask has all entries of a unit or none."""
        sizes = self.sizes(mask)
        return bool(((sizes == 0) | (sizes == self.sizes(np.ones_like(mask)))).all())

    def sums(self, array: np.ndarray) -> np.ndarray:
        """Return the sums of an array of the variable's shape over each unit, in its dtype."""
        return self._tiling.split(array, np).sum(axis=1)

    def scores(self, array: np.ndarray) -> np.ndarray:
        """Return the score of each unit by those of its entries, as `choose` does."""
        with np.errstate(over="ignore"):
            return _unit_scores(self._tiling, array.astype(np.float32), self._structure, np)

    def mask(self, units: np.ndarray) -> np.ndarray:
        """Return the mask of the units that are True in a boolean vector."""
        return _whole_units(self._tiling, units, np)


def rescued(
    structure: Structure | None, shape: tuple[int, ...], seed: int, position: int
) -> np.ndarray:
    """Return the mask of a variable that has what the at-least-one rule adds, and nothing else.

    One unit is drawn as `rescue_index` draws one weight.
    """
    if structure is None or structure.pattern is not None:
        mask = np.zeros(shape, bool)
        mask.reshape(-1)[rescue_index(seed, position, mask.size)] = True
        return mask
    tiling = _tiling(structure, shape)
    number = math.prod(tiling.grid)
    return _whole_units(tiling, np.arange(number) == rescue_index(seed, position, number), np)


def _top(scores: np.ndarray, k: int) -> np.ndarray:
    mask = scores > -np.inf
    mask[mask] = select_top([scores[mask]], k)[0]
    return mask


def _n_largest(tiling: _Tiling, scores: Any, n: int, xp: Any) -> Any:
    """Return the n largest scores of each tile, of equal ones the first, and -inf for others."""
    order = _descending(tiling.split(scores, xp, fill=-np.inf), xp)
    is_left = tiling.join(xp.argsort(order, axis=-1) < n, xp)
    return xp.where(is_left, xp.reshape(scores, tiling.shape), -np.inf)


def _unit_scores(tiling: _Tiling, scores: Any, structure: Structure, xp: Any) -> Any:
    sums = _sum_of_pairs(tiling.split(scores, xp), xp)
    if structure.score == "mean":
        # XLA would turn a division by a constant into this, and round differently.
        sums = xp.multiply(sums, np.float32(1) / tiling.sizes().astype(np.float32))
    return xp.where(sums == 0.0, 0.0, sums)  # no -0.0


def _sum_of_pairs(array: Any, xp: Any) -> Any:
    """Return the sums of rows: the second half is added to the first until one number is left."""
    width = array.shape[1]
    while width > 1:
        half, kept = width // 2, width - width // 2
        sums = array[:, :half] + array[:, kept:width]
        array = sums if half == kept else xp.concatenate([sums, array[:, half:kept]], axis=1)
        width = kept
    return xp.reshape(array, (-1,))


def longest_prefix(scores: Any, sizes: np.ndarray, largest: int, xp: Any) -> Any:
    """Return which units are the first, by descending scores, whose sizes add up to so much."""
    order = _descending(scores, xp)
    sizes = sizes if xp is np else sizes.astype(np.int32)
    fits = xp.cumsum(xp.take(sizes, order)) <= largest
    return xp.take(fits, xp.argsort(order))


def _descending(scores: Any, xp: Any) -> Any:
    """Return the indices along the last axis that sort scores, of equal ones the first first."""
    if xp is np:
        return np.argsort(-scores, axis=-1, kind="stable")
    return xp.argsort(-scores, axis=-1)  # stable on every backend


def _whole_units(tiling: _Tiling, units: Any, xp: Any) -> Any:
    height, width = tiling.tile
    units = xp.reshape(units, (math.prod(tiling.grid), 1))
    return tiling.join(xp.broadcast_to(units, (math.prod(tiling.grid), height * width)), xp)


def parts_of(vector: Any, lengths: Sequence[int]) -> list[Any]:
    """Return the parts of a vector that have these lengths, one after the other."""
    ends = np.cumsum(lengths).tolist()
    return [vector[end - length : end] for end, length in zip(ends, lengths, strict=True)]
