"""The settings of a FreezeOptimizer, checked: when it is made, and when they are changed."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_freeze import backend
from keras_freeze.criteria.criteria import check_criterion
from keras_freeze.masks.selection import check_freeze_rate
from keras_freeze.parameters import normalize_exclude

FROZEN_WEIGHTS = ("keep", "decay", "zero")


def check_l2(l2: Any) -> float:
    """A coefficient of at least 0, as a Python float."""
    if isinstance(l2, bool) or not isinstance(l2, (int, float, np.integer, np.floating)):
        raise TypeError(f"Argument `l2` must be a number of at least 0. Received: l2={l2!r}")
    if not 0.0 <= float(l2) < float("inf"):
        raise ValueError(f"Argument `l2` must be a number of at least 0. Received: l2={l2!r}")
    return float(l2)


def check_frozen_weights(frozen_weights: Any) -> str:
    """A treatment of frozen weights that exists."""
    if frozen_weights not in FROZEN_WEIGHTS:
        raise ValueError(
            f"Argument `frozen_weights` must be one of {', '.join(map(repr, FROZEN_WEIGHTS))}. "
            f"Received: frozen_weights={frozen_weights!r}"
        )
    return str(frozen_weights)


def check_decay(frozen_weights: str, l2: float, inner: Any) -> None:
    """Refuses what breaks the recurrence of FreezeNet-WD."""
    if frozen_weights == "decay":
        if l2 == 0.0:
            raise ValueError(
                "frozen_weights='decay' shrinks frozen weights by the coupled weight decay, so "
                f"that it needs l2 > 0. Received: l2={l2}"
            )
        refused = ("clipnorm", "clipvalue", "global_clipnorm", "use_ema", "weight_decay")
        used = [name for name in refused if getattr(inner, name)]
        if backend.keras_class(inner) is not keras.optimizers.SGD or used:
            raise ValueError(
                "frozen_weights='decay' needs keras.optimizers.SGD without "
                f"{', '.join(refused)}: only then do all frozen weights shrink by one factor. "
                f"Received: inner_optimizer={type(inner).__name__}"
                + (f" with {', '.join(used)}" if used else "")
            )


def check_seed(seed: Any) -> int:
    """A seed of 32 bits, as a Python int."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"Argument `seed` must be an int in [0, 2**32). Received: seed={seed!r}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"Argument `seed` must be an int in [0, 2**32). Received: seed={seed!r}")
    return int(seed)


CHECKS: dict[str, Callable[[Any], Any]] = {
    "freeze_rate": check_freeze_rate,
    "criterion": check_criterion,
    "l2": check_l2,
    "frozen_weights": check_frozen_weights,
    "exclude": normalize_exclude,
    "seed": check_seed,
}
"""What gives each setting its final form, or raises."""
