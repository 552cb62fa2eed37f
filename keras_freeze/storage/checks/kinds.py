"""Kinds of objects in a configuration: which ones a place takes, and of which kind each one is."""

import enum
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_freeze.storage.checks import names


class Kind(enum.Flag):
    """Kinds of objects. A place takes a union of them; `NONE` takes plain data only."""

    NONE = 0
    LAYER = enum.auto()
    OPERATION = enum.auto()
    INITIALIZER = enum.auto()
    REGULARIZER = enum.auto()
    CONSTRAINT = enum.auto()
    ACTIVATION = enum.auto()
    LOSS = enum.auto()
    METRIC = enum.auto()
    OPTIMIZER = enum.auto()
    OPTIMIZER_MAP = enum.auto()
    SCHEDULE = enum.auto()
    POLICY = enum.auto()
    QUANTIZATION = enum.auto()
    SEED = enum.auto()
    TEXT = enum.auto()  # functions of a TextVectorization
    CRITERION = enum.auto()  # functions of a FreezeOptimizer
    ARRAY = enum.auto()
    TENSOR = enum.auto()  # a symbolic tensor, or a slice of one: arguments of a call


_FUNCTIONS = (
    Kind.INITIALIZER
    | Kind.REGULARIZER
    | Kind.CONSTRAINT
    | Kind.ACTIVATION
    | Kind.LOSS
    | Kind.METRIC
    | Kind.SCHEDULE
    | Kind.TEXT
    | Kind.CRITERION
)
"""The kinds that can be functions."""

ANY = ~Kind.OPERATION & ~Kind.OPTIMIZER_MAP & ~Kind.TENSOR
"""The kinds that the configuration of a custom class may have under any other name."""

_PLACES = {
    "layer": Kind.LAYER,
    "backward_layer": Kind.LAYER,
    "cell": Kind.LAYER,
    "cells": Kind.LAYER,
    "layers": Kind.LAYER | Kind.OPERATION,
    "dtype": Kind.POLICY,
    "policy_map": Kind.POLICY,
    "default_policy": Kind.POLICY,
    "quantization_config": Kind.QUANTIZATION,
    "weight_quantizer": Kind.QUANTIZATION,
    "activation_quantizer": Kind.QUANTIZATION,
    "learning_rate": Kind.SCHEDULE,
    "optimizer_map": Kind.OPTIMIZER | Kind.OPTIMIZER_MAP,
    "loss": Kind.LOSS,
    "metrics": Kind.METRIC | Kind.LOSS,
    "weighted_metrics": Kind.METRIC | Kind.LOSS,
    "fn": Kind.METRIC | Kind.LOSS,
    "seed": Kind.SEED,
    "standardize": Kind.TEXT,
    "split": Kind.TEXT,
    "criterion": Kind.CRITERION,
    **dict.fromkeys(("value", "scale", "offset", "mask_value"), Kind.ARRAY),
}
"""The kinds that the configuration of a Keras class may have, by name."""

_ENDINGS = {
    "initializer": Kind.INITIALIZER,
    "regularizer": Kind.REGULARIZER,
    "constraint": Kind.CONSTRAINT,
    "activation": Kind.ACTIVATION | Kind.LAYER,
    "optimizer": Kind.OPTIMIZER,
}
"""The same by the last word of a name, for custom classes too."""

_BASES: dict[Kind, type] = {
    Kind.LAYER: keras.Layer,
    Kind.INITIALIZER: keras.initializers.Initializer,
    Kind.REGULARIZER: keras.regularizers.Regularizer,
    Kind.CONSTRAINT: keras.constraints.Constraint,
    Kind.LOSS: keras.losses.Loss,
    Kind.METRIC: keras.metrics.Metric,
    Kind.OPTIMIZER: keras.optimizers.Optimizer,
    Kind.SCHEDULE: keras.optimizers.schedules.LearningRateSchedule,
    Kind.POLICY: keras.DTypePolicy,
    Kind.OPERATION: keras.Operation,
}

_CLASSES: Sequence[tuple[str, frozenset[str], Kind]] = (
    ("keras", frozenset({"Sequential", "Model"}), Kind.LAYER),
    ("keras.src.models.functional", frozenset({"Functional"}), Kind.LAYER),
    ("keras.layers", names.LAYERS, Kind.LAYER),
    ("keras.initializers", names.INITIALIZERS, Kind.INITIALIZER),
    ("keras.regularizers", names.REGULARIZERS, Kind.REGULARIZER),
    ("keras.constraints", names.CONSTRAINTS, Kind.CONSTRAINT),
    ("keras.losses", names.LOSSES, Kind.LOSS),
    ("keras.metrics", names.METRICS, Kind.METRIC),
    ("keras.optimizers", names.OPTIMIZERS, Kind.OPTIMIZER),
    ("keras.optimizers", frozenset({"OptimizerMap"}), Kind.OPTIMIZER_MAP),
    ("keras.optimizers.schedules", names.SCHEDULES, Kind.SCHEDULE),
    ("keras", frozenset({"DTypePolicy", "FloatDTypePolicy"}), Kind.POLICY),
    ("keras.dtype_policies", names.POLICIES, Kind.POLICY),
    ("keras.quantizers", names.QUANTIZATION, Kind.QUANTIZATION),
    ("keras.random", frozenset({"SeedGenerator"}), Kind.SEED),
    *((module, known, Kind.OPERATION) for module, known in names.OPERATIONS.items()),
)

KERAS_FUNCTIONS: Mapping[Kind, tuple[frozenset[str], frozenset[str]]] = {
    Kind.ACTIVATION: (frozenset({"keras.activations"}), names.ACTIVATION_FUNCTIONS),
    Kind.LOSS: (frozenset({"keras.losses", "keras.metrics"}), names.LOSS_FUNCTIONS),
    Kind.METRIC: (frozenset({"keras.losses", "keras.metrics"}), names.METRIC_FUNCTIONS),
}


def place_of(key: Any, is_custom: bool) -> Kind:
    """Return the kinds that the configuration of an object may have under a name."""
    ending = str(key).rsplit("_", 1)[-1]
    if ending in _ENDINGS:
        return _ENDINGS[ending]
    place = _PLACES.get(str(key), Kind.NONE)
    return ANY | place if is_custom and key != "dtype" else place


def keras_kinds(module: Any, name: str) -> Kind:
    """Return the kinds of the instances of a Keras class; `NONE` if it is not on the list."""
    kinds = Kind.NONE
    for known_module, known, kind in _CLASSES:
        if module == known_module and name in known:
            kinds |= kind
    # Keras has other classes for the same optimizers with PyTorch.
    own = f"keras.src.backend.torch.optimizers.torch_{name.lower()}"
    if keras.backend.backend() == "torch" and name in names.OPTIMIZERS and module == own:
        kinds |= Kind.OPTIMIZER
    return kinds


def kinds_of(found: Any) -> Kind:
    """Return the kinds of a registered class, of its instances, or of a registered function."""
    if not callable(found):
        return Kind.NONE
    if str(getattr(found, "__module__", "")).split(".")[0] == "keras":
        # Keras's classes have to be on the list, even if they are registered.
        is_class = inspect.isclass(found)
        return keras_kinds(_public_module(found), found.__name__) if is_class else Kind.NONE
    if not inspect.isclass(found):
        return _FUNCTIONS
    kinds = Kind.NONE
    for kind, base in _BASES.items():
        if issubclass(found, base):
            kinds |= kind
    return kinds or ANY


def _public_module(found: Any) -> str:
    for module, known, _ in _CLASSES:
        if found.__name__ in known:
            public: Any = keras
            for part in module.split(".")[1:]:
                public = getattr(public, part, None)
            if getattr(public, found.__name__, None) is found:
                return module
    return ""
