"""The phases of a FreezeOptimizer, and what it knows before it is built."""

import enum
from dataclasses import dataclass

from keras_freeze.optimizer.checkpoint import State


class Phase(enum.Enum):
    """The phase of a FreezeOptimizer.

    It begins `UNBUILT`. Its first build leads to `DECIDED` where a mask is given, to `WAITING`
    where a configuration gives the counts of a mask that is loaded later, and else to `UNDECIDED`
    until the first batch decides the mask. Another FreezeOptimizer may supersede its decision.
    """

    UNBUILT = "unbuilt"
    WAITING = "waiting for a mask to be loaded"
    UNDECIDED = "undecided until the first batch"
    DECIDED = "decided"
    SUPERSEDED = "superseded by another FreezeOptimizer"


@dataclass(frozen=True)
class BuildPlan:
    """What a FreezeOptimizer knows before it is built.

    Attributes:
        state: the state to build with, from `freeze` or from a file; None once it is built.
        trained_counts: from a configuration, how many entries of each variable are trained; None
            for a variable that has no mask. Valid until a state replaces it.
        is_from_config: whether the optimizer was made from a configuration.
    """

    state: State | None = None
    trained_counts: tuple[int | None, ...] | None = None
    is_from_config: bool = False
