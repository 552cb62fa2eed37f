"""Fewer cases than all combinations: every pair of values of two parameters is in one of them."""

import itertools
from collections import Counter


def pairs_of(row):
    """What a row covers: (axis, value, other axis, other value)."""
    return {
        (i, first, j, second)
        for (i, first), (j, second) in itertools.combinations(enumerate(row), 2)
    }


def pairwise(axes):
    """Rows with one value of each axis, in which each pair of values of two axes occurs.

    Greedy: a row begins with the value that most missing pairs contain, and each other axis adds
    the value that completes most of them. The first rows differ in as many values as possible.
    """
    axes = [list(axis) for axis in axes]
    missing = {
        (i, first, j, second)
        for (i, one), (j, other) in itertools.combinations(enumerate(axes), 2)
        for first, second in itertools.product(one, other)
    }
    counts = Counter(part for pair in missing for part in (pair[:2], pair[2:]))
    rows = []
    while missing:
        row = _next_row(axes, missing, counts)
        rows.append(row)
        covered = pairs_of(row) & missing
        missing -= covered
        counts.subtract(part for pair in covered for part in (pair[:2], pair[2:]))
    return rows


def _next_row(axes, missing, counts):
    parts = [(i, value) for i, axis in enumerate(axes) for value in axis]
    row = dict([max(parts, key=lambda part: counts[part])])

    def gain(part):
        """How many missing pairs it completes; then, how many it is in."""
        pairs = ((*min(part, other), *max(part, other)) for other in row.items())
        return sum(pair in missing for pair in pairs), counts[part]

    for i in sorted(set(range(len(axes))) - set(row), key=lambda i: -len(axes[i])):
        row.update([max(((i, value) for value in axes[i]), key=gain)])
    return tuple(row[i] for i in range(len(axes)))


def most_different(rows, number):
    """The positions of `number` rows that together show as many values, then pairs, as possible."""
    rows = [tuple(row) for row in rows]
    values = [set(enumerate(row)) for row in rows]
    pairs = [pairs_of(row) for row in rows]
    seen_values, seen_pairs, chosen = set(), set(), []
    for _ in range(min(number, len(rows))):
        best = max(
            (i for i in range(len(rows)) if i not in chosen),
            key=lambda i: (len(values[i] - seen_values), len(pairs[i] - seen_pairs)),
        )
        chosen.append(best)
        seen_values |= values[best]
        seen_pairs |= pairs[best]
    return chosen
