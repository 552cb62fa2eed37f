"""Experiments that the paper does not have: which masks and methods train networks best."""

from collections.abc import Mapping
from typing import Any

from keras_freeze.paper.experiments.experiment import BEYOND, Experiment, Series
from keras_freeze.paper.masking import DISTRIBUTIONS

_FREEZENET = Series("FreezeNet", {"method": "freezenet"})
_SNIP = Series("SNIP", {"method": "snip"})
_METHODS = (
    Series("baseline", {"method": "baseline"}, rates=(0.0,)),
    _FREEZENET,
    Series("FreezeNet-WD", {"method": "freezenet-wd"}),
    _SNIP,
    Series("random mask", {"method": "random"}),
)

_CRITERIA: Mapping[str, Mapping[str, Any]] = {
    "snip": {"method": "freezenet"},
    "magnitude": {"method": "freezenet", "criterion": "magnitude"},
    "synflow": {"method": "freezenet", "criterion": "synflow"},
    "random": {"method": "random"},
}


def _of(model: str, prefix: str) -> tuple[Experiment, ...]:
    """Return the experiments on one network."""
    extreme = (0.99, 0.999)
    return (
        Experiment(
            f"{prefix}_distributions_and_criteria",
            BEYOND,
            "Where the freezing rate applies, and by which criterion",
            "Which distribution of the trained weights over the layers is best, and whether that "
            "depends on the criterion.",
            "mnist",
            model,
            tuple(
                Series(f"{criterion}, {distribution}", {**settings, "distribution": distribution})
                for criterion, settings in _CRITERIA.items()
                for distribution in DISTRIBUTIONS
            ),
            (0.9, *extreme),
            seeds=3,
        ),
        Experiment(
            f"{prefix}_shuffled_masks",
            BEYOND,
            "Masks that are shuffled within their layers",
            "Whether masks that are shuffled within their layers, or drawn with the rates of "
            "their rows and columns, are as good as the computed ones, which Frankle et al. "
            "(2009.08576) found for pruned networks.",
            "mnist",
            model,
            (
                _FREEZENET,
                *_with_masks("frozen", "freezenet"),
                Series("frozen, random mask", {"method": "random"}),
                _SNIP,
                *_with_masks("pruned", "snip"),
            ),
            (0.9, *extreme),
            seeds=3,
        ),
        Experiment(
            f"{prefix}_moving_masks",
            BEYOND,
            "Masks that change while the network is trained",
            "Whether gradual freezing, RigL or SET beats the paper's FreezeNet, whose mask stays.",
            "mnist",
            model,
            (
                _FREEZENET,
                _moving("gradual freezing", "gradual"),
                _moving("RigL", "rigl"),
                _moving("SET", "set"),
                Series(
                    "RigL, random ERK start",
                    {"method": "random", "distribution": "erk", "schedule": "rigl"},
                ),
            ),
            extreme,
            seeds=3,
        ),
        Experiment(
            f"{prefix}_methods",
            BEYOND,
            "The paper's methods side by side, and a random mask",
            "How far each method gets with the same number of trained weights, and whether the "
            "frozen weights of FreezeNet-WD vanish.",
            "mnist",
            model,
            _METHODS,
            (0.9, 0.95, 0.99, 0.995, 0.999),
        ),
        Experiment(
            f"{prefix}_seeds",
            BEYOND,
            "How much depends on the seed at an extreme rate",
            "How often a pruned network can be trained at all, and how far FreezeNets differ.",
            "mnist",
            model,
            (_FREEZENET, _SNIP),
            (0.999,),
            view="spread",
            seeds=10,
        ),
    )


def _with_masks(kind: str, method: str) -> tuple[Series, Series]:
    return (
        Series(f"{kind}, drawn", {"method": method, "mask": "drawn"}),
        Series(f"{kind}, shuffled", {"method": method, "mask": "shuffled"}),
    )


def _moving(label: str, schedule: str) -> Series:
    return Series(label, {"method": "freezenet", "schedule": schedule})


EXPERIMENTS = (*_of("lenet_300_100", "lenet300"), *_of("lenet_5_caffe", "lenet5"))
"""The experiments on both LeNets."""
