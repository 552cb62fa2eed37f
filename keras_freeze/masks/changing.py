"""Which weights leave a mask and which join it, while a network is trained (NumPy alone)."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from keras_freeze.masks.distributions import Group
from keras_freeze.masks.selection import indices_of_largest, select_top
from keras_freeze.masks.structure import Structure, Units, longest_prefix, parts_of, select_units

_LARGEST = float(np.finfo(np.float32).max)


def distances(values: np.ndarray, frozen_values: np.ndarray) -> np.ndarray:
    """Return how far values are from what freezing would make of them, as finite float32.

    Values that are not finite are the farthest.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(values.astype(np.float32) - frozen_values.astype(np.float32))
    return np.nan_to_num(difference, nan=_LARGEST, posinf=_LARGEST)


def has_diverged(distance: np.ndarray) -> bool:
    """Return whether some of these `distances` are of values that are not finite."""
    return bool((distance == _LARGEST).any())


def keep_largest(
    scores: Sequence[np.ndarray],
    trained: Sequence[np.ndarray],
    groups: Sequence[Group],
    structure: Structure | None = None,
) -> tuple[list[np.ndarray], int]:
    """Keep the largest scores of what is trained in its masks; no weight joins a mask.

    Args:
        scores: for each variable the scores of its trained weights, in the order of their flat
            indices: finite numbers that are not negative.
        trained: its mask now.
        groups: which variables are compared, and how many weights of each group stay trained. A
            variable of which none would stay keeps its largest score.
        structure: what stays or goes together, instead of single weights.

    Returns:
        The masks, and how many weights stay in addition since their variable would have none.

    Example:
        >>> masks = [np.array([True, True, False])]
        >>> keep_largest([np.array([1.0, 2.0])], masks, [Group((0,), 1, True)])
        ([array([False,  True, False])], 0)
    """
    kept: dict[int, np.ndarray] = {}
    num_rescued = 0
    for group in groups:
        parts = [_Trained(scores[i], trained[i], structure) for i in group.members]
        sizes = [part.sizes for part in parts]
        chosen = _longest_prefix([part.scores for part in parts], sizes, group.num_trained)
        for i, part, units in zip(group.members, parts, chosen, strict=True):
            if group.rescues and units.size and not units.any():
                units[part.scores.argmax()] = True
                num_rescued += int(part.sizes[units].sum())
            kept[i] = part.mask(units)
    return [kept[i] for i in range(len(scores))], num_rescued


def leave(
    trained: np.ndarray, distance: np.ndarray, fraction: float, structure: Structure | None = None
) -> tuple[np.ndarray, int]:
    """Take a fraction of the trained weights out of a mask, those with the smallest distances.

    Args:
        trained: the mask.
        distance: how far each of its weights is from what freezing would make of it.
        fraction: the share of weights, or with a structure of whole units, rounded down.
        structure: what leaves together, instead of single weights.

    Returns:
        The mask, and how many weights or units have left it.

    Example:
        >>> leave(np.array([True, False, True]), np.array([0.1, 0.2]), 0.5)
        (array([False, False,  True]), 1)
    """
    part = _Trained(distance, trained, structure)
    number = math.floor(Fraction(str(fraction)) * part.scores.size)
    (stay,) = select_top([part.scores], part.scores.size - number)
    return part.mask(stay), number


def join_largest(
    stays: np.ndarray, growth: np.ndarray, number: int, structure: Structure | None = None
) -> np.ndarray:
    """Return a mask that the weights, or whole units, with the largest scores have joined.

    Args:
        stays: the mask without what has left it, which competes with all other weights as in RigL.
        growth: the score of each weight.
        number: how many join it; of n:m fewer, where more would not be allowed.
        structure: what joins together, instead of single weights.

    Raises:
        ValueError: if a score is NaN or infinite.

    Example:
        >>> join_largest(np.array([True, False, False]), np.array([9.0, 3.0, 4.0]), 1)
        array([ True, False,  True])
    """
    if not np.isfinite(growth).all():
        raise ValueError(
            "The scores of the weights that may join the mask must be finite. "
            f"Received: {np.count_nonzero(~np.isfinite(growth))} NaN or infinite scores"
        )
    if structure is not None and structure.pattern is None:
        units = Units(structure, stays.shape)
        scores = units.scores(growth)
        scores[units.sizes(stays) > 0] = -np.inf
        best = np.argsort(-scores, kind="stable")[:number]
        joins = np.zeros(units.number, bool)
        joins[best[scores[best] > -np.inf]] = True
        return stays | units.mask(joins)
    if structure is None:
        mask = stays.copy()
        mask.reshape(-1)[indices_of_largest(growth, ~stays, number)] = True
        return mask
    first = np.minimum(growth, _LARGEST / 2, dtype=np.float32)
    first[stays] = _LARGEST
    return select_units(structure, [first], int(np.count_nonzero(stays)) + number)[0]


def join_at_random(stays: np.ndarray, number: int, seed: int, position: int) -> np.ndarray:
    """Return a mask that random weights have joined, each outside of it with equal probability.

    They are drawn by 64-bit words of Philox 4x64 with the key `(seed, position)`: the i-th of n
    weights outside is drawn by a word r with i = (r * n) >> 64, and counts once. Where more than a
    quarter of them join, each has a word instead, and those with the smallest join.

    Example:
        >>> int(join_at_random(np.array([True, False, False]), 1, seed=0, position=0).sum())
        2
    """
    mask = stays.copy()
    outside = np.flatnonzero(~mask)
    generator = np.random.Philox(key=np.array([seed, position], np.uint64))
    if 4 * number > outside.size:
        chosen = np.argsort(generator.random_raw(outside.size), kind="stable")[:number]
    else:
        chosen = np.zeros(0, np.int64)
        while chosen.size < number:
            drawn = _scaled(generator.random_raw(number - chosen.size), outside.size)
            chosen = np.unique(np.concatenate([chosen, drawn]))
    mask.reshape(-1)[outside[chosen]] = True
    return mask


class _Trained:
    """The trained weights of a variable one by one or, with a structure, by units.

    Attributes:
        scores: the score of each: of a unit the mean or the sum over its trained weights.
        sizes: how many trained weights each has.
    """

    def __init__(
        self, scores: np.ndarray, trained: np.ndarray, structure: Structure | None
    ) -> None:
        self._trained = trained
        self._units: Units | None = None
        self.scores = scores.astype(np.float32, copy=False)
        self.sizes = np.ones(scores.size, np.int64)
        if structure is None or structure.pattern is not None:
            self._where = np.flatnonzero(trained)
            return
        self._units = Units(structure, trained.shape)
        sizes = self._units.sizes(trained)
        self._where = np.flatnonzero(sizes)
        self.sizes = sizes[self._where]
        spread = np.zeros(trained.shape, np.float64)
        spread[trained] = scores
        sums = self._units.sums(spread)[self._where]
        means = sums if structure.score == "sum" else sums / self.sizes
        self.scores = np.minimum(means, _LARGEST).astype(np.float32)

    def mask(self, chosen: np.ndarray) -> np.ndarray:
        """Return the mask of those that are chosen by a boolean vector."""
        if self._units is None:
            mask = np.zeros(self._trained.shape, bool)
            mask.reshape(-1)[self._where[chosen]] = True
            return mask
        units = np.zeros(self._units.number, bool)
        units[self._where[chosen]] = True
        return self._units.mask(units) & self._trained


def _longest_prefix(
    scores: Sequence[np.ndarray], sizes: Sequence[np.ndarray], largest: int
) -> list[np.ndarray]:
    """Return which are the first, by descending scores, whose sizes add up to so much at most."""
    if all((one == 1).all() for one in sizes):
        return select_top(scores, min(largest, sum(one.size for one in scores)))
    together = longest_prefix(np.concatenate(scores), np.concatenate(sizes), largest, np)
    return parts_of(together, [one.size for one in scores])


def _scaled(words: np.ndarray, size: int) -> np.ndarray:
    """Return (word * size) >> 64 for 64-bit words and a size below 2^32."""
    low, high = words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)
    carry = (low * np.uint64(size)) >> np.uint64(32)
    return ((high * np.uint64(size) + carry) >> np.uint64(32)).astype(np.int64)
