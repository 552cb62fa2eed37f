"""Which weights leave a mask and which join it, while a network is trained (NumPy alone)."""

from collections.abc import Sequence

import numpy as np

from keras_freeze.masks.distributions import Group
from keras_freeze.masks.selection import select_top


def distances(values: np.ndarray, frozen_values: np.ndarray) -> np.ndarray:
    """Return how far values are from what freezing would make of them, as finite float32.

    Values that are not finite are the farthest.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(values.astype(np.float32) - frozen_values.astype(np.float32))
    largest = float(np.finfo(np.float32).max)
    return np.nan_to_num(difference, nan=largest, posinf=largest)


def keep_largest(
    scores: Sequence[np.ndarray], trained: Sequence[np.ndarray], groups: Sequence[Group]
) -> list[np.ndarray]:
    """Return masks that keep the largest scores of what is trained; no weight joins a mask.

    Args:
        scores: one array for each variable, of numbers that are not negative.
        trained: its mask now.
        groups: which variables are compared, and how many weights of each group stay trained: no
            more than there are. A variable of which none would stay keeps its largest score.

    Example:
        >>> masks = [np.array([True, True, False])]
        >>> keep_largest([np.array([1.0, 2.0, 3.0])], masks, [Group((0,), 1, True)])
        [array([False,  True, False])]
    """
    masks: dict[int, np.ndarray] = {}
    for group in groups:
        ranked = [np.where(trained[i], scores[i], -1).astype(np.float32) for i in group.members]
        for i, chosen in zip(group.members, select_top(ranked, group.num_trained), strict=True):
            masks[i] = chosen & trained[i]
            if group.rescues and trained[i].any() and not masks[i].any():
                masks[i] = select_top([np.where(trained[i], scores[i], -1)], 1)[0]
    return [masks[i] for i in range(len(scores))]


def regrow(
    trained: np.ndarray, distance: np.ndarray, growth: np.ndarray, num_weights: int
) -> np.ndarray:
    """Return a mask in which the smallest distances have made room for the largest scores.

    As in RigL, a weight that has just left the mask competes for the room with all others.

    Args:
        trained: the mask.
        distance: how far each weight is from what freezing would make of it.
        growth: the score of each weight that is not trained.
        num_weights: how many leave the mask, and how many join it.

    Raises:
        ValueError: if a score is NaN or infinite.

    Example:
        >>> mask, distance = np.array([True, True, False, False]), np.array([0.1, 0.2, 0.0, 0.0])
        >>> regrow(mask, distance, np.array([0.0, 0.0, 3.0, 4.0]), 1)
        array([False,  True, False,  True])
    """
    inside = np.flatnonzero(trained)
    (stay,) = select_top([distance.reshape(-1)[inside]], inside.size - num_weights)
    mask = np.zeros(trained.shape, bool)
    mask.reshape(-1)[inside[stay]] = True
    outside = np.flatnonzero(~mask)
    (join,) = select_top([growth.reshape(-1)[outside]], num_weights)
    mask.reshape(-1)[outside[join]] = True
    return mask
