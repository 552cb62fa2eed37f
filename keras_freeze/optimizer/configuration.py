"""The configuration of a FreezeOptimizer: what `get_config` returns and `from_config` reads."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras

from keras_freeze import _keras_private
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.parameters import path_of

if TYPE_CHECKING:
    from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer


def to_config(optimizer: "FreezeOptimizer") -> dict[str, Any]:
    """Return the constructor's arguments and, for a compact update, the counts that it needs."""
    criterion = optimizer.criterion
    if not isinstance(criterion, str):
        criterion = keras.saving.serialize_keras_object(criterion)
    config = {
        "name": optimizer.name,
        "inner_optimizer": _with_public_classes(
            keras.saving.serialize_keras_object(optimizer.inner_optimizer)
        ),
        "freeze_rate": optimizer.freeze_rate,
        "criterion": criterion,
        "frozen_weights": optimizer.frozen_weights,
        "l2": optimizer.l2,
        "exclude": list(_exclude_without_model_name(optimizer)),
        "seed": optimizer.seed,
    }
    counts = optimizer.plan.trained_counts
    if isinstance(optimizer.update, CompactUpdate):
        counts = tuple(optimizer.update.trained_counts)
    if counts is not None:
        config["trained_counts"] = list(counts)
    return config


def read_config(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None
) -> tuple[dict[str, Any], tuple[int | None, ...] | None]:
    """Return what `to_config` wrote: the constructor's arguments, and the counts or None."""
    arguments = dict(config)
    for key in ("inner_optimizer", "criterion"):
        if isinstance(arguments.get(key), dict):
            arguments[key] = keras.saving.deserialize_keras_object(
                arguments[key], custom_objects=custom_objects
            )
    counts = arguments.pop("trained_counts", None)
    return arguments, None if counts is None else tuple(counts)


def _exclude_without_model_name(optimizer: "FreezeOptimizer") -> list[str]:
    # The variables of a loaded model no longer have the model's name in their paths.
    if not optimizer.built:
        return list(optimizer.exclude)
    prefixes = {path_of(v).split("/")[0] for v in optimizer.built_variables}
    prefix = prefixes.pop() + "/" if len(prefixes) == 1 else "/"
    return [entry.removeprefix(prefix) for entry in optimizer.exclude]


def _with_public_classes(config: Any) -> Any:
    """Return a configuration in which optimizers have the names that every backend knows."""
    if isinstance(config, (list, tuple)):
        return [_with_public_classes(value) for value in config]
    if not isinstance(config, dict):
        return config
    config = {key: _with_public_classes(value) for key, value in config.items()}
    if _keras_private.is_torch_optimizer_module(str(config.get("module"))):
        config.update(module="keras.optimizers", registered_name=None)
    return config
