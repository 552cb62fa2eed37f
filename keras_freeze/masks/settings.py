"""The settings that a mask is decided with. Imports neither Keras nor NumPy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keras_freeze.masks.patterns import Patterns, rates_of_paths

if TYPE_CHECKING:
    from keras_freeze.masks.structure import Structure

GLOBAL = "global"

Distribution = str | Patterns
"""Where the freezing rate applies: a name, or patterns of paths and their rates."""


@dataclass(frozen=True)
class Settings:
    """The settings of a FreezeOptimizer that decide its mask, as files store them.

    Attributes:
        freeze_rate, frozen_weights, seed, distribution, structure: as for the FreezeOptimizer.
        criterion: a description of its criterion.
    """

    freeze_rate: float
    criterion: str
    frozen_weights: str
    seed: int
    distribution: Distribution = GLOBAL
    structure: "Structure | None" = None

    def agrees_with(self, other: "Settings", paths: Sequence[str]) -> bool:
        """Return whether both give the same mask and treatment; only "random" uses the seed.

        Args:
            other: the others.
            paths: of the weights in the mask. Settings may name the model as it was called when
                they were saved; see `rates_of_paths`.
        """
        mine, theirs = (
            (s.freeze_rate, s.criterion, s.frozen_weights, s.seed if s.criterion == "random" else 0)
            for s in (self, other)
        )
        same = mine == theirs and self.structure == other.structure
        return same and _agree(self.distribution, other.distribution, paths)

    def to_json(self) -> list[Any]:
        """Return the settings as a JSON array.

        Its end is left out as far as it says nothing: no structure, the distribution "global".
        """
        values = [self.freeze_rate, self.criterion, self.frozen_weights, self.seed]
        if self.structure is not None:
            return [*values, self.distribution, self.structure.to_json()]
        return values if self.distribution == GLOBAL else [*values, self.distribution]

    def __str__(self) -> str:
        distribution = self.distribution
        shown = dict(distribution) if isinstance(distribution, tuple) else distribution
        return (
            f"freeze_rate={self.freeze_rate}, criterion={self.criterion!r}, "
            f"frozen_weights={self.frozen_weights!r}"
            + (f", seed={self.seed}" if self.criterion == "random" else "")
            + (f", distribution={shown!r}" if shown != GLOBAL else "")
            + (f", structure={self.structure}" if self.structure is not None else "")
        )


def _agree(first: Distribution, second: Distribution, paths: Sequence[str]) -> bool:
    """Return whether two distributions are the same for these weights."""
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    one, other = (rates_of_paths(patterns, paths, must_match=False) for patterns in (first, second))
    return one == other
