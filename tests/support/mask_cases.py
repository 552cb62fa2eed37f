"""A mask made by hand, for tests of what a mask offers and of its files."""

import numpy as np

from keras_freeze.masks.mask import FreezeMask, MaskEntry


def mask_of_two_weights():
    """Two weights whose paths end alike, and a bias that is trained whole."""
    generator = np.random.default_rng(1)
    return FreezeMask(
        [
            MaskEntry(4, "net/b/fc1/kernel", generator.random((3, 4)) < 0.5),
            MaskEntry(0, "net/a/fc1/kernel", generator.random((5, 3)) < 0.5),
            MaskEntry(2, "net/a/fc2/bias", np.ones(3, bool), is_weight=False),
        ],
        num_rescued=1,
    )
