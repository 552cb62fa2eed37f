"""The state of a FreezeOptimizer: how far it has come, its mask, and what its next build is for."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze.masks import frozen_variables
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.masks.settings import Settings
from keras_freeze.optimizer.trained_starts import TrainedStarts
from keras_freeze.parameters import Parameter, same_path
from keras_freeze.starts import Start

if TYPE_CHECKING:
    from keras_freeze.optimizer.masked_optimizer import MaskedOptimizer


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
class State:
    """The state of a FreezeOptimizer besides its inner optimizer's.

    Attributes:
        mask: which weights are trained; None if that is not decided yet.
        compact: whether the update strategy is compact.
        decay_scale: FreezeNet-WD's scalar.
        by_first_batch: whether the first batch decided the mask. The step that decides updates
            whole variables, which rounds a little differently, and training that is resumed right
            after it must round the same.
        starts: what variables of the mask were drawn from, by position, where that is known.
        settings: the settings of the optimizer that decided; None where a file does not say.
        grid: the values in full precision and the starts of what is trained on a grid, by position.
        trained_starts: what is known of the trained weights before training.
    """

    mask: FreezeMask | None
    compact: bool
    decay_scale: Any = None
    by_first_batch: bool = False
    starts: Mapping[int, Start] = field(default_factory=dict)
    settings: Settings | None = None
    grid: Mapping[int, np.ndarray] = field(default_factory=dict)
    trained_starts: TrainedStarts = field(default_factory=TrainedStarts)


@dataclass(frozen=True)
class BuildPlan:
    """What a FreezeOptimizer knows before it is built.

    Attributes:
        state: the state to build with, from `freeze` or from a file; None once it is built.
        trained_counts: from a configuration, how many entries of each variable are trained; None
            for a variable that has no mask. Valid until a state replaces it.
        is_from_config: whether the optimizer was made from a configuration.
        inherits: whether `state` is that of another FreezeOptimizer, which has decided it.
        first_rate: the freezing rate at which the first batch decides; None for the optimizer's.
        paths: from a configuration, the paths that the variables had when the optimizer was first
            built; see `Parameter.first_path`.
    """

    state: State | None = None
    trained_counts: tuple[int | None, ...] | None = None
    is_from_config: bool = False
    inherits: bool = False
    first_rate: float | None = None
    paths: tuple[str, ...] | None = None


def inherited_state(optimizer: "MaskedOptimizer", parameters: Sequence[Parameter]) -> State | None:
    """Return a state with the mask of variables that are frozen already; None if none is.

    Raises:
        ValueError: if they are frozen with other settings.
    """
    variables = [p.variable for p in parameters]
    mask = frozen_variables.mask_of(variables)
    if mask is None:
        return None
    frozen_variables.check_agrees(mask, parameters, optimizer.settings)
    inherited = frozen_variables.trained_starts_of(variables)
    fits = inherited is not None and inherited.fit(mask)
    return State(
        mask,
        optimizer.suits_compact(mask),
        frozen_variables.decay_scale_of(variables),
        starts=frozen_variables.starts_of(variables),
        settings=optimizer.settings,
        trained_starts=inherited if fits else optimizer.trained_starts,
    )


def relabel(mask: FreezeMask, parameters: Sequence[Parameter]) -> FreezeMask:
    """Return a mask with the paths of these variables.

    Raises:
        ValueError: if a variable has another shape or, but for the model's name and automatic
            numbers, another path.
    """
    for entry in mask.entries:
        _check_fits(entry, parameters)
    chosen = [parameters[entry.position] for entry in mask.entries]
    entries = [
        MaskEntry(p.position, p.path, entry.trained, entry.is_weight)
        for p, entry in zip(chosen, mask.entries, strict=True)
    ]
    return FreezeMask(entries, [p.variable for p in chosen], mask.num_rescued)


def _check_fits(entry: MaskEntry, parameters: Sequence[Parameter]) -> None:
    present = "no variable"
    if entry.position < len(parameters):
        parameter = parameters[entry.position]
        shape = tuple(parameter.variable.shape)
        if shape == entry.trained.shape and same_path(parameter.path, entry.path):
            return
        present = f"{parameter.path!r} of shape {shape}"
    raise ValueError(
        f"The mask that is loaded has {entry.path!r} of shape {entry.trained.shape} as variable "
        f"{entry.position}, and this network has {present} there: the mask belongs to another "
        "network, or its layers come in another order."
    )
