"""Pairwise coverage of parameters, which decides what the contract suite runs."""

import itertools
import math

import pytest
from pairwise import most_different, pairs_of, pairwise

SIZES = [(2, 2), (20, 20, 5, 6, 2), (4, 1, 3)]


@pytest.mark.cases(2)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_pair_of_values_is_in_a_row(sizes):
    rows = pairwise(map(range, sizes))
    covered = set().union(*map(pairs_of, rows))
    pairs = itertools.combinations(sizes, 2)
    assert len(covered) == sum(math.prod(pair) for pair in pairs)
    assert len(set(rows)) == len(rows)


def test_rows_are_few_and_the_first_ones_show_every_value():
    axes = [range(20), range(20), range(5), range(6), range(2)]
    rows = pairwise(axes)
    assert 400 <= len(rows) <= 440
    for column, axis in zip(zip(*rows[:20], strict=True), axes, strict=True):
        assert set(column) == set(axis)


def test_chosen_rows_differ_as_much_as_possible():
    rows = list(itertools.product("abc", "xy"))
    chosen = [rows[i] for i in most_different(rows, 4)]
    assert chosen[:2] == [("a", "x"), ("b", "y")]
    assert {value for row in chosen for value in row} == set("abcxy")
    assert most_different(rows, 9) == most_different(rows, 6)
    assert most_different(rows, 0) == []
