"""Initializers whose values a seed determines bit for bit on every machine and backend."""

from keras_freeze.initializers.drawing import draw
from keras_freeze.initializers.generator import GENERATOR
from keras_freeze.initializers.portable import (
    Orthogonal,
    RandomNormal,
    RandomUniform,
    TruncatedNormal,
    VarianceScaling,
    portable_version,
)
from keras_freeze.initializers.seeded import (
    CONSTANTS,
    DISTRIBUTIONS,
    INITIALIZERS,
    ConstantSigma,
    KaimingUniform,
    PlusMinusSigma,
    SeededInitializer,
    StandardNormal,
    XavierNormal,
    compute_fans,
    get,
)

__all__ = [
    "CONSTANTS",
    "DISTRIBUTIONS",
    "GENERATOR",
    "INITIALIZERS",
    "ConstantSigma",
    "KaimingUniform",
    "Orthogonal",
    "PlusMinusSigma",
    "RandomNormal",
    "RandomUniform",
    "SeededInitializer",
    "StandardNormal",
    "TruncatedNormal",
    "VarianceScaling",
    "XavierNormal",
    "compute_fans",
    "draw",
    "get",
    "portable_version",
]
