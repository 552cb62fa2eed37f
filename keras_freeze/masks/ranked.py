"""Masks that follow from a ranking: the largest random numbers of a seed, or the largest starts.

Which entries of a variable are trained is then known once their number is, so that a file needs no
mask. The criteria "random" and "magnitude" give such masks, where the scores that decide are still
at hand. Needs NumPy alone.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from keras_freeze.masks.selection import select_top


class Ranking(NamedTuple):
    """What the entries of a variable are ordered by.

    Attributes:
        key: seed and stream of random numbers; None for the magnitudes of the variable's start.
    """

    key: tuple[int, int] | None


@dataclass(frozen=True)
class Ranked:
    """A mask that trains the entries with the largest scores.

    Attributes:
        num_trained: how many entries are trained.
        ranking: what the scores are.
    """

    num_trained: int
    ranking: Ranking

    def mask(self, shape: tuple[int, ...], start: np.ndarray | None) -> np.ndarray:
        """Return the mask of a variable of this shape.

        Args:
            shape: the shape.
            start: the values that it started from, for a ranking by magnitudes.

        Raises:
            ValueError: if a start is not finite.
        """
        if self.ranking.key is not None:
            scores = random_scores(shape, *self.ranking.key)
        else:
            assert start is not None
            with np.errstate(over="ignore"):  # infinities are refused
                scores = np.abs(start.astype(np.float32)).reshape(shape)
        return select_top([scores], self.num_trained)[0]


def random_scores(shape: tuple[int, ...], seed: int, position: int) -> np.ndarray:
    """Draw uniform scores in [0, 1) that depend on shape, seed and position alone.

    24 random bits each, from Philox's raw words, so that float32 holds them exactly.
    """
    generator = np.random.Philox(key=np.array([seed, position], np.uint64))
    words = generator.random_raw(int(np.prod(shape, dtype=np.int64)))
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)).reshape(shape)
