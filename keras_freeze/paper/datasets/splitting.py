"""The validation split."""

from typing import Any

import numpy as np

from keras_freeze._utils.validation import check_number, value_error


def split_indices(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Hold out a share of a training set for validation, every class by the same share.

    The two parts never overlap and are the whole set together.

    Args:
        labels: integers, (n,).
        fraction: the share to hold out, between 0 and 1: 0.1 is the paper's 9/1, 0.05 its 19/1,
            0.25 its 3/1. Exactly `round(fraction * n)` examples are held out, and of each class
            its share of them up to rounding.
        seed: a non-negative integer.

    Returns:
        int64 positions of the training examples, in random order, and of the validation examples,
        ascending.

    Raises:
        ValueError: nothing would be left on one side.
    """
    count = len(labels)
    num_held_out = round(fraction * count)
    if not 0 < num_held_out < count:
        accepted = f"a share that leaves images on both sides of the split of {count}"
        raise value_error("validation_fraction", fraction, accepted)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
    order = rng.permutation(count)
    # How far down its own class, in random order, an example stands: from 0 to 1.
    standing = np.empty(count)
    for label in np.unique(labels):
        members = order[labels[order] == label]
        standing[members] = (np.arange(len(members)) + 0.5) / len(members)
    held_out = np.zeros(count, bool)
    held_out[order[np.argsort(standing[order], kind="stable")][:num_held_out]] = True
    # Shuffled again: in `order`, what is left of the first places is not a random sample.
    return rng.permutation(np.flatnonzero(~held_out)), np.flatnonzero(held_out)


def check_fraction(name: str, value: Any) -> float:
    """Return a share between 0 and 1, both excluded, as a Python float."""
    fraction = check_number(name, value, 0.0, 1.0)
    if fraction in (0.0, 1.0):
        raise value_error(name, value, "a number between 0 and 1, both excluded")
    return fraction
