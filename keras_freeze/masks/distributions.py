"""Where a freezing rate applies: how many weights of which variables are trained (NumPy alone).

A distribution is `"global"`, `"uniform"`, `"erk"`, or a rate for each of some patterns of paths.
The numbers follow from shapes and paths, so that they are known before any score is.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from keras_freeze._utils.validation import received, type_error, value_error
from keras_freeze.masks.patterns import rates_of_paths
from keras_freeze.masks.selection import (
    check_freeze_rate,
    num_trained_weights,
    select_top,
)
from keras_freeze.masks.settings import GLOBAL, Distribution
from keras_freeze.masks.structure import Structure, rescued, select_units

_NAMES = (GLOBAL, "uniform", "erk")
_ACCEPTED = f"{', '.join(map(repr, _NAMES))}, or a mapping from patterns of paths to rates"


class Group(NamedTuple):
    """Variables whose weights are compared with each other, and how many of these are trained.

    Attributes:
        members: the variables, by their index in a list.
        num_trained: how many weights with the largest scores are trained.
        rescues: whether a variable without a trained weight gets one in addition.
    """

    members: tuple[int, ...]
    num_trained: int
    rescues: bool


def check_distribution(distribution: Any) -> Distribution:
    """Return a distribution in its final form: a name, or a tuple of pairs of pattern and rate.

    A mapping becomes such pairs in its order; pairs, as JSON has them, are accepted, too.

    Raises:
        TypeError: If it is neither a string nor a mapping, or if a rate is not a number.
        ValueError: If it is another string, empty, or has an empty pattern or component of one, a
            pattern twice, or a rate outside [0, 1].

    Example:
        >>> check_distribution({"conv*": 0.5, "fc?/kernel": 0.95})
        (('conv*', 0.5), ('fc?/kernel', 0.95))
    """
    if isinstance(distribution, str):
        if distribution not in _NAMES:
            raise value_error("distribution", distribution, _ACCEPTED)
        return distribution
    pairs = distribution.items() if isinstance(distribution, Mapping) else distribution
    if not isinstance(distribution, (Mapping, list, tuple)) or not all(map(_is_pair, pairs)):
        raise type_error("distribution", distribution, _ACCEPTED)
    checked = tuple((pattern, _rate_of(pattern, rate)) for pattern, rate in pairs)
    patterns = [pattern for pattern, _ in checked]
    if not patterns or not all(part for pattern in patterns for part in pattern.split("/")):
        accepted = "one or more patterns such as 'conv*' or 'fc?/kernel', without empty components"
        raise value_error("distribution", distribution, f"a mapping of {accepted}")
    if len(set(patterns)) < len(patterns):
        raise value_error("distribution", distribution, "a mapping of different patterns")
    return checked


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and isinstance(value[0], str)


def _rate_of(pattern: str, rate: Any) -> float:
    try:
        return check_freeze_rate(rate)
    except (TypeError, ValueError) as error:
        raise type(error)(
            "Argument `distribution` must have a number in [0, 1] as the rate of each pattern. "
            + received(f"distribution[{pattern!r}]", rate)
        ) from None


def groups_of(
    distribution: Distribution,
    freeze_rate: float,
    shapes: Sequence[tuple[int, ...]],
    paths: Sequence[str],
    all_paths: Sequence[str] | None = None,
    must_match: bool = True,
) -> list[Group]:
    """Return which weights are compared with each other, and how many of each group are trained.

    * `"global"`: one group, of which floor((1 - q) |W|) weights are trained.
    * `"uniform"`: a group for each variable, with the same share of each.
    * `"erk"`: a group for each variable; see `erk_shares`.
    * pairs: a group for each variable that a pattern matches, with its own rate, of which
      floor((1 - rate) size) are trained; and one group of all others, with `freeze_rate`.

    With "uniform" and "erk" these shares are whole numbers whose sum is exactly
    floor((1 - q) |W|): those with the largest fractions are rounded up, of equal ones the first.

    Args:
        distribution: what `check_distribution` returns.
        freeze_rate: The freezing rate q in [0, 1].
        shapes: The shapes of the weight variables, in order.
        paths: Their paths.
        all_paths: The paths that patterns may match, if these are more than `paths`.
        must_match: Whether a pattern for which no path is left is an error.

    Raises:
        TypeError: If the rate is not a number.
        ValueError: If the rate is outside [0, 1], or if a pattern matches none of the paths, or
            only some that an earlier pattern matches already.

    Example:
        >>> [group.num_trained for group in groups_of("uniform", 0.9, [(5, 3), (5, 6)], ["a", "b"])]
        [1, 3]
    """
    rate = check_freeze_rate(freeze_rate)
    sizes = [math.prod(shape) for shape in shapes]
    if isinstance(distribution, tuple):
        rates = rates_of_paths(distribution, all_paths or paths, must_match)
        return _groups_by_rate(rates, rate, sizes, paths)
    if distribution == GLOBAL:
        return [Group(tuple(range(len(sizes))), num_trained_weights(rate, sum(sizes)), rate < 1)]
    if distribution == "uniform":
        shares = [(1 - Fraction(str(rate))) * size for size in sizes]
    else:
        shares = erk_shares(rate, shapes)
    counts = round_to_sum(shares)
    return [Group((index,), count, rate < 1) for index, count in enumerate(counts)]


def erk_shares(freeze_rate: float, shapes: Sequence[tuple[int, ...]]) -> list[Fraction]:
    """Return how many weights of each shape Erdős-Rényi kernels train, as exact fractions.

    The density of a kernel is proportional to the sum of its dimensions divided by their product
    (Evci et al., "Rigging the Lottery", 2020), scaled such that a share of 1 - q of all weights is
    trained. Where a density would exceed 1, all of the kernel is trained, and the scale is found
    again for the others. A scalar counts as a kernel of one dimension.

    Args:
        freeze_rate: The freezing rate q in [0, 1].
        shapes: The shapes of the weights.

    Raises:
        TypeError: If the rate is not a number.
        ValueError: If it is outside [0, 1].

    Example:
        >>> [float(share) for share in erk_shares(0.9, [(2, 3), (40, 60)])]
        [6.0, 234.6]
    """
    density = 1 - Fraction(str(check_freeze_rate(freeze_rate)))
    sizes = [math.prod(shape) for shape in shapes]
    sums = [sum(shape or (1,)) if size else 0 for shape, size in zip(shapes, sizes, strict=True)]
    is_dense = [False] * len(sizes)
    while True:
        others = [i for i, dense in enumerate(is_dense) if not dense]
        trained = density * sum(sizes) - sum(sizes[i] for i, dense in enumerate(is_dense) if dense)
        scale = trained / max(sum(sums[i] for i in others), 1)
        too_dense = [i for i in others if scale * sums[i] > sizes[i]]
        if not too_dense:
            return [
                Fraction(size) if dense else scale * dimensions
                for size, dimensions, dense in zip(sizes, sums, is_dense, strict=True)
            ]
        for i in too_dense:
            is_dense[i] = True


def round_to_sum(shares: Sequence[Fraction]) -> list[int]:
    """Round numbers down or up such that they add up to the sum of all, rounded down.

    Those with the largest fractions are rounded up (largest remainders); of equal ones, the first.

    Example:
        >>> round_to_sum([Fraction(1, 2), Fraction(3, 4), Fraction(3, 4)])
        [0, 1, 1]
    """
    counts = [math.floor(share) for share in shares]
    missing = math.floor(sum(shares, Fraction(0))) - sum(counts)
    by_fraction = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for index in by_fraction[:missing]:
        counts[index] += 1
    return counts


def _groups_by_rate(
    rates: Mapping[str, float], freeze_rate: float, sizes: Sequence[int], paths: Sequence[str]
) -> list[Group]:
    own = [(index, rates[path]) for index, path in enumerate(paths) if path in rates]
    groups = [Group((i,), num_trained_weights(rate, sizes[i]), rate < 1) for i, rate in own]
    rest = tuple(index for index, path in enumerate(paths) if path not in rates)
    if rest:
        num_trained = num_trained_weights(freeze_rate, sum(sizes[index] for index in rest))
        groups.append(Group(rest, num_trained, freeze_rate < 1))
    return groups


def select_groups(
    scores: Sequence[np.ndarray],
    groups: Sequence[Group],
    seed: int,
    positions: Sequence[int],
    structure: Structure | None = None,
) -> tuple[list[np.ndarray], int]:
    """Mark the largest scores of each group, and one weight of each variable left without.

    Args:
        scores: One array for each variable.
        groups: What `groups_of` returns for them.
        seed, positions: What the at-least-one rule draws from.
        structure: What is trained together, instead of single weights.

    Returns:
        A boolean array for each variable, and how many weights the rule has added.

    Raises:
        ValueError: If a score is NaN or infinite.
    """
    selected: dict[int, np.ndarray] = {}
    num_rescued = 0
    for group in groups:
        of_group = [scores[index] for index in group.members]
        if structure is None:
            chosen = select_top(of_group, group.num_trained)
        else:
            chosen = select_units(structure, of_group, group.num_trained)
        selected.update(zip(group.members, chosen, strict=True))
        for index, mask in zip(group.members, chosen, strict=True):
            if group.rescues and mask.size and not mask.any():
                selected[index] = rescued(structure, mask.shape, seed, positions[index])
                num_rescued += int(np.count_nonzero(selected[index]))
    return [selected[index] for index in range(len(scores))], num_rescued
