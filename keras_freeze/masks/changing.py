"""Which weights leave a mask and which join it, while a network is trained (NumPy alone)."""

from collections.abc import Sequence

import numpy as np

from keras_freeze.masks.distributions import Group
from keras_freeze.masks.selection import select_top
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
        scores: for each variable the scores of its trained weights, in the order of their flat
            indices: finite numbers that are not negative.
        trained: its mask now.
        groups: which variables are compared, and how many weights of each group stay trained. A
            variable of which none would stay keeps its largest score.
        structure: what stays or goes together, instead of single weights.

    Example:
        >>> masks = [np.array([True, True, False])]
        >>> keep_largest([np.array([1.0, 2.0])], masks, [Group((0,), 1, True)])
        [array([False,  True, False])]
    """
    kept: dict[int, np.ndarray] = {}
    for group in groups:
        parts = [(scores[i], trained[i]) for i in group.members]
        chosen = _keep(parts, group.num_trained, structure)
        for i, mask in zip(group.members, chosen, strict=True):
            kept[i] = mask
            if group.rescues and scores[i].size and not mask.any():
                largest = largest_unit(structure, _spread(scores[i], trained[i]))
                kept[i] = largest & trained[i]
    return [kept[i] for i in range(len(scores))]


def _keep(
    parts: Sequence[tuple[np.ndarray, np.ndarray]], num_trained: int, structure: Structure | None
) -> list[np.ndarray]:
    """Return masks that keep the largest scores; parts are scores of trained weights and masks."""
    if structure is not None:
        chosen = select_units(structure, [_spread(*part) for part in parts], num_trained)
        return [mask & trained for mask, (_, trained) in zip(chosen, parts, strict=True)]
    most = sum(scores.size for scores, _ in parts)
    chosen = select_top([scores for scores, _ in parts], min(num_trained, most))
    masks = []
    for stays, (_, trained) in zip(chosen, parts, strict=True):
        mask = np.zeros(trained.shape, bool)
        mask.reshape(-1)[np.flatnonzero(trained)[stays]] = True
        masks.append(mask)
    return masks


def _spread(scores: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Return the scores of all weights: what is not trained comes last."""
    array = np.full(trained.shape, -1, np.float32)
    array[trained] = scores
    return array


def leave(
    trained: np.ndarray, distance: np.ndarray, number: int, structure: Structure | None = None
) -> np.ndarray:
    """Return a mask without those trained weights that have the smallest distances.

    Args:
        trained: the mask.
        distance: how far each of its weights is from what freezing would make of it.
        number: how many leave it; with a structure, as few whole units as hold so many.
        structure: what leaves together, instead of single weights.

    Example:
        >>> leave(np.array([True, False, True]), np.array([0.1, 0.2]), 1)
        array([False, False,  True])
    """
    return _keep([(distance, trained)], distance.size - number, structure)[0]


def join_largest(
    stays: np.ndarray, growth: np.ndarray, num_trained: int, structure: Structure | None = None
) -> np.ndarray:
    """Return a mask that the weights with the largest scores have joined.

    Args:
        stays: the mask without what has left it, which competes with all other weights as in RigL.
        growth: the score of each weight.
        num_trained: how many weights the mask has then.
        structure: what joins together, instead of single weights.

    Raises:
        ValueError: if a score is NaN or infinite.

    Example:
        >>> join_largest(np.array([True, False, False]), np.array([9.0, 3.0, 4.0]), 2)
        array([ True, False,  True])
    """
    if not np.isfinite(growth).all():
        raise ValueError(
            "The scores of the weights that may join the mask must be finite. "
            f"Received: {np.count_nonzero(~np.isfinite(growth))} NaN or infinite scores"
        )
    first = np.minimum(growth, _LARGEST / 2, dtype=np.float32)
    first[stays] = _LARGEST
    if structure is None:
        return select_top([first], num_trained)[0]
    return select_units(structure, [first], num_trained)[0]


def join_at_random(stays: np.ndarray, num_trained: int, seed: int, position: int) -> np.ndarray:
    """Return a mask that random weights have joined, each outside of it with equal probability.

    The indices are `(r * size) >> 64` for 64-bit words r of Philox 4x64 with the key `(seed,
    position)`; one that is trained already counts for nothing.

    Example:
        >>> int(join_at_random(np.array([True, False, False]), 2, seed=0, position=0).sum())
        2
    """
    mask = stays.copy()
    flat = mask.reshape(-1)
    generator = np.random.Philox(key=np.array([seed, position], np.uint64))
    missing = num_trained - int(np.count_nonzero(mask))
    while missing:
        words = generator.random_raw(missing)
        indices = _scaled(words, flat.size)
        new = indices[~flat[indices]]
        flat[new] = True  # the same index may come twice
        missing = num_trained - int(np.count_nonzero(flat))
    return mask


def _scaled(words: np.ndarray, size: int) -> np.ndarray:
    """Return (word * size) >> 64 for 64-bit words and a size below 2^32."""
    low, high = words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)
    carry = (low * np.uint64(size)) >> np.uint64(32)
    return ((high * np.uint64(size) + carry) >> np.uint64(32)).astype(np.int64)
