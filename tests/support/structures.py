"""Masks with a structure by brute force, entry by entry: the oracle of the tests of structures."""

import collections
import math
from fractions import Fraction

import numpy as np


def mask_by_hand(scores, budget, structure, score="mean"):
    """The masks of a group of variables, without the at-least-one rule."""
    masks = [np.zeros(array.shape, bool) for array in scores]
    if isinstance(structure, str) and ":" in structure:
        n, m = map(int, structure.split(":"))
        left = []
        for number, array in enumerate(scores):
            tuples = collections.defaultdict(list)
            for index in np.ndindex(array.shape):
                tuples[place_in_pattern(index, m)].append((-float(array[index]), index))
            left += [(s, number, index) for one in tuples.values() for s, index in sorted(one)[:n]]
        for _, number, index in sorted(left)[:budget]:
            masks[number][index] = True
        return masks
    units = []
    for number, array in enumerate(scores):
        for key, indices in sorted(units_of(array.shape, structure).items()):
            value = sum_of_pairs([array[index] for index in indices])
            if score == "mean":
                value = value * (np.float32(1) / np.float32(len(indices)))
            units.append((-float(value), number, key, indices))
    total = 0
    for _, number, _, indices in sorted(units):
        total += len(indices)
        if total > budget:
            break
        for index in indices:
            masks[number][index] = True
    return masks


def units_of(shape, structure):
    """The indices of the entries of each column, row or block, by where it is."""
    units = collections.defaultdict(list)
    for index in np.ndindex(shape):
        row, column = (0, 0, *index)[-2:]
        if structure == "column":
            key = column
        elif structure == "row":
            key = row
        else:
            height, width = structure
            key = (*index[:-2], row // height, column // width)
        units[key].append(index)
    if structure == "row":  # by position within the row, then by column
        return {key: sorted(indices) for key, indices in units.items()}
    return units


def place_in_pattern(index, m):
    """What the entries of one tuple of n:m have in common."""
    if len(index) < 2:
        return tuple(i // m for i in index)
    *before, row, column = index
    return (*before, row // m, column)


def sum_of_pairs(values):
    """The float32 sum of which the documentation says how it is computed."""
    values = [np.float32(value) for value in values]
    while len(values) > 1:
        half = len(values) // 2
        kept = len(values) - half
        values = [values[i] + values[kept + i] for i in range(half)] + values[half:kept]
    return values[0]


def budget_of(rate, shapes):
    return math.floor((1 - Fraction(str(rate))) * sum(math.prod(shape) for shape in shapes))
