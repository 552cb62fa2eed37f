"""Which weights leave a mask and which join it, while a network is trained (NumPy alone)."""

from collections.abc import Sequence

import numpy as np

from keras_freeze.masks.distributions import Group
from keras_freeze.masks.structure import Structure, largest_unit, select_units

_LARGEST = float(np.finfo(np.float32).max)


def distances(values: np.ndarray, frozen_values: np.ndarray) -> np.ndarray:
    """Return how far values are from what freezing would make of them, as finite float32.

    Values that are not finite are the farthest.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(values.astype(np.float32) - frozen_values.astype(np.float32))
    return np.nan_to_num(difference, nan=_LARGEST, posinf=_LARGEST)


def keep_largest(
    scores: Sequence[np.ndarray],
    trained: Sequence[np.ndarray],
    groups: Sequence[Group],
    structure: Structure | None = None,
) -> list[np.ndarray]:
    """Return masks that keep the largest scores of what is trained; no weight joins a mask.

    Args:
        scores: one array for each variable, of finite numbers that are not negative.
        trained: its mask now.
        groups: which variables are compared, and how many weights of each group stay trained: no
            more than there are. A variable of which none would stay keeps its largest score.
        structure: what stays or goes together, instead of single weights.

    Example:
        >>> masks = [np.array([True, True, False])]
        >>> keep_largest([np.array([1.0, 2.0, 3.0])], masks, [Group((0,), 1, True)])
        [array([False,  True, False])]
    """
    ranked = [_among(mask, one) for mask, one in zip(trained, scores, strict=True)]
    masks: dict[int, np.ndarray] = {}
    for group in groups:
        chosen = select_units(structure, [ranked[i] for i in group.members], group.num_trained)
        for i, mask in zip(group.members, chosen, strict=True):
            masks[i] = mask & trained[i]
            if group.rescues and trained[i].any() and not masks[i].any():
                masks[i] = largest_unit(structure, ranked[i]) & trained[i]
    return [masks[i] for i in range(len(scores))]


def regrow(
    trained: np.ndarray,
    distance: np.ndarray,
    growth: np.ndarray,
    num_weights: int,
    structure: Structure | None = None,
) -> np.ndarray:
    """Return a mask in which the smallest distances have made room for the largest scores.

    As in RigL, a weight that has just left the mask competes for the room with all others.

    Args:
        trained: the mask.
        distance: how far each weight is from what freezing would make of it.
        growth: the score of each weight that is not trained.
        num_weights: how many leave the mask, and how many join it. With a structure as many whole
            units as hold them.
        structure: what leaves or joins together, instead of single weights.

    Raises:
        ValueError: if a score of growth is NaN or infinite.

    Example:
        >>> mask, distance = np.array([True, True, False, False]), np.array([0.1, 0.2, 0.0, 0.0])
        >>> regrow(mask, distance, np.array([0.0, 0.0, 3.0, 4.0]), 1)
        array([False,  True, False,  True])
    """
    if not np.isfinite(growth).all():
        raise ValueError(
            "The scores of the weights that may join the mask must be finite. "
            f"Received: {np.count_nonzero(~np.isfinite(growth))} NaN or infinite scores"
        )
    num_trained = int(np.count_nonzero(trained))
    stays = select_units(structure, [_among(trained, distance)], num_trained - num_weights)[0]
    stays &= trained
    first = np.where(stays, _LARGEST, np.minimum(growth, _LARGEST / 2)).astype(np.float32)
    return select_units(structure, [first], num_trained)[0]


def _among(trained: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return scores in which all that is not trained is last."""
    return np.where(trained, scores, -1).astype(np.float32)
