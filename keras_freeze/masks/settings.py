"""The settings that a mask is decided with. Imports neither Keras nor NumPy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The settings of a FreezeOptimizer that decide its mask, as files store them.

    Attributes:
        freeze_rate, frozen_weights, seed: as for the FreezeOptimizer.
        criterion: a description of its criterion.
    """

    freeze_rate: float
    criterion: str
    frozen_weights: str
    seed: int

    def agrees_with(self, other: "Settings") -> bool:
        """Return whether both give the same mask and treatment; only "random" uses the seed."""
        mine, theirs = (
            (s.freeze_rate, s.criterion, s.frozen_weights, s.seed if s.criterion == "random" else 0)
            for s in (self, other)
        )
        return mine == theirs

    def __str__(self) -> str:
        return (
            f"freeze_rate={self.freeze_rate}, criterion={self.criterion!r}, "
            f"frozen_weights={self.frozen_weights!r}"
            + (f", seed={self.seed}" if self.criterion == "random" else "")
        )
