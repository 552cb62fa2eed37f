"""When a restricted weight gradient is faster than a full one."""

from collections.abc import Sequence

import numpy as np

from keras_freeze import backend

# To take only some rows, only some columns, or both.
WAYS = ((True, False), (False, True), (True, True))

# By how much it must be cheaper: these are estimates.
_MARGIN = 0.9


def active_parts(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and the columns that hold a trained weight."""
    rows, columns = matrices.any(axis=(0, 2)), matrices.any(axis=(0, 1))
    return np.flatnonzero(rows), np.flatnonzero(columns)


def cheapest_block(
    matrices: np.ndarray,
    places: tuple[int, int],
    ways: Sequence[tuple[bool, bool]] = WAYS,
    costs: tuple[float, float, float] = backend.PRODUCT_COSTS,
) -> tuple[bool, bool] | None:
    """Return whether to take only some rows, and only some columns; None to leave a kernel alone.

    Args:
        matrices: a mask of shape (places, rows, columns).
        places: how many places inputs and outputs have; each has one number for a channel.
        ways: those among which to choose.
        costs: of a multiplication, of a collected number and of the rest, in multiplications of the
            ordinary gradient.
    """
    if not matrices.any():
        return True, True
    counted = works(matrices, places)
    of_ways = {way: float(np.dot(counted[way], costs)) for way in ways}
    best = min(of_ways, key=lambda way: of_ways[way])
    return best if of_ways[best] < _MARGIN * places[1] * matrices.size else None


def works(
    matrices: np.ndarray, places: tuple[int, int]
) -> dict[tuple[bool, bool], tuple[int, int, int]]:
    """Count the work of a restricted gradient for one example.

    Args:
        matrices, places: as of `cheapest_block`.

    Returns:
        For each choice of taking only the active rows and only the active columns: how many
        multiplications, how many numbers that are collected first, and 1: what has `costs`.
    """
    active_rows, active_columns = (len(active) for active in active_parts(matrices))
    inputs, outputs = places
    num_matrices, all_rows, all_columns = matrices.shape
    counted = {}
    for takes_rows, takes_columns in WAYS:
        rows = active_rows if takes_rows else all_rows
        columns = active_columns if takes_columns else all_columns
        collected = takes_rows * inputs * active_rows + takes_columns * outputs * active_columns
        counted[takes_rows, takes_columns] = outputs * num_matrices * rows * columns, collected, 1
    return counted
