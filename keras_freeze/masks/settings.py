"""What a mask was decided by: needs neither Keras nor NumPy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """What a FreezeOptimizer was told about freezing, as it goes into files.

    Attributes:
        freeze_rate, frozen_weights, seed: as of the FreezeOptimizer.
        criterion: its criterion in words.
    """

    freeze_rate: float
    criterion: str
    frozen_weights: str
    seed: int

    def agrees_with(self, other: "Settings") -> bool:
        """Whether both ask for the same mask and treatment; only some criteria use the seed."""
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
