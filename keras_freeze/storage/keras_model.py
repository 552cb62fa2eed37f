"""Access to a Keras model: its configuration, and its variables as bit patterns."""

import copy
import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_freeze import _keras_private, backend
from keras_freeze._utils.bits import WIDTHS, as_bits, from_bits, little_endian, numpy_dtype
from keras_freeze._utils.validation import check_instance, value_error
from keras_freeze.initializers import seeded
from keras_freeze.model_state import ModelOptimizers, freeze_optimizers_in, is_built
from keras_freeze.parameters import path_of
from keras_freeze.storage.checks.configuration import check_configuration, dictionaries_in
from keras_freeze.storage.errors import FreezeFileError, first_reason
from keras_freeze.storage.vocabularies import check_assets, check_configured

COMPILED = "compile_config"
"""The key of what a model is compiled with."""

# The keys of `get_compile_config` of a model that does not override it.
_COMPILE_ARGUMENTS = {
    "optimizer",
    "loss",
    "loss_weights",
    "metrics",
    "weighted_metrics",
    "run_eagerly",
    "steps_per_execution",
    "jit_compile",
}


def check_built(model: Any, name: str) -> None:
    """Raise TypeError for an argument that is no `keras.Model`, ValueError for an unbuilt one."""
    check_instance(name, model, keras.Model, "a keras.Model")
    backend.synchronize_variables(model)  # in callbacks between two steps
    if not is_built(model):
        raise value_error(name, model, "a built model: call it on a batch of data first")


def variables_of(model: keras.Model) -> list[Any]:
    """Return all variables of a model, each once, including statistics and random states."""
    backend.synchronize_variables(model)  # in callbacks between two steps
    return list({id(variable): variable for variable in model.variables}.values())


def is_random_state(variable: Any) -> bool:
    """Return whether a variable is the state of a random generator, as in `Dropout`."""
    return path_of(variable).endswith("seed_generator_state")


def dtype_of(variable: Any) -> str:
    """Return the name of a variable's dtype; raise ValueError if a file cannot hold it."""
    dtype = str(keras.backend.standardize_dtype(variable.dtype))
    if dtype not in WIDTHS:
        raise ValueError(
            f"The variable {path_of(variable)!r} has dtype {dtype}. A `.freeze` file can hold "
            f"{', '.join(WIDTHS)}."
        )
    return dtype


@dataclass(frozen=True)
class Snapshot:
    """The values that a variable had, in the place of the variable.

    Attributes:
        path, shape, dtype: those of the variable.
        bits: its values as bit patterns.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bits: np.ndarray

    @classmethod
    def of(cls, variable: Any) -> "Snapshot":
        """Return a snapshot of a variable as it is."""
        shape = tuple(variable.shape)
        return cls(path_of(variable), shape, dtype_of(variable), bits_of(variable))


def bits_of(variable: Any) -> np.ndarray:
    """Return the values of a variable or snapshot as a vector of bit patterns."""
    if isinstance(variable, Snapshot):
        return variable.bits.copy()
    values = backend.to_numpy(variable)  # some backends hold other dtypes
    return as_bits(values.astype(numpy_dtype(dtype_of(variable)), copy=False))


def set_bits(variable: Any, bits: np.ndarray, dtype: str) -> None:
    """Assign bit patterns of a dtype, which is that of the variable or another integer dtype.

    Raises:
        FreezeFileError: If the variable cannot hold a value.
    """
    values = values_for(variable, bits, dtype).reshape(tuple(variable.shape))
    backend.assign(variable, values)


def values_for(variable: Any, bits: np.ndarray, dtype: str) -> np.ndarray:
    """Return the values that `set_bits` assigns, as a vector of the variable's dtype."""
    saved = from_bits(bits, dtype)
    values = saved.astype(numpy_dtype(dtype_of(variable)), copy=False)
    if dtype != dtype_of(variable) and not np.array_equal(values, saved):
        raise FreezeFileError(
            f"The values of {path_of(variable)!r} are saved as {dtype}, and {dtype_of(variable)}, "
            "its dtype with this backend, cannot represent them."
        )
    held = values.astype(backend.held_dtype(values.dtype), copy=False)
    if held is not values and not np.array_equal(held, values, equal_nan=True):
        raise FreezeFileError(
            f"The values of {path_of(variable)!r} are saved as {dtype}, which JAX rounds to 32 "
            "bits. Load the file where `jax_enable_x64` is set: "
            '`jax.config.update("jax_enable_x64", True)`, or the environment variable '
            "JAX_ENABLE_X64=1."
        )
    return values


def are_integers(dtype: str, other: str) -> bool:
    """Return whether both are dtypes of counters or random states, which backends choose."""
    return {dtype, other} <= {"int32", "int64", "uint32"}


def fingerprint(variables: Sequence[Any]) -> str:
    """Return SHA-256 in hexadecimal over shapes, dtypes and values of a base's variables.

    Random states are left out: they change whenever the base is used for training.
    """
    digest = hashlib.sha256()
    for variable in variables:
        if is_random_state(variable):
            continue
        digest.update(f"{tuple(variable.shape)} {dtype_of(variable)}\n".encode())
        digest.update(little_endian(bits_of(variable)))
    return digest.hexdigest()


def config_of(model: keras.Model) -> dict[str, Any]:
    """Return the model as Keras serializes it: architecture, build and compile configuration.

    Raises:
        ValueError: If the model contains Python code or files, which a `.freeze` file cannot hold.
    """
    check_assets(model)
    with _keras_private.object_sharing_scope(), warnings.catch_warnings():
        # An error below; and Keras does not warn of those of a Lambda layer.
        warnings.filterwarnings("ignore", message="The object being serialized includes a `lam")
        config = keras.saving.serialize_keras_object(model)
    if "optimizer" in (config.get("compile_config") or {}) and model.optimizer is not None:
        # The optimizer as it is: whether Keras wraps it in a LossScaleOptimizer depends on the
        # global dtype policy.
        optimizer = keras.saving.serialize_keras_object(model.optimizer)
        config["compile_config"]["optimizer"] = optimizer
    shared: dict[int, int] = {}
    for described in dictionaries_in(config):
        if described.get("class_name") == "__lambda__":
            raise ValueError(
                "The model contains a lambda function, which a `.freeze` file cannot hold. Use a "
                "named function that is registered with "
                "`keras.saving.register_keras_serializable`."
            )
        if {"class_name", "config", "shared_object_id"} <= described.keys():  # a memory address
            number = shared.setdefault(described["shared_object_id"], len(shared))
            described["shared_object_id"] = number
    return config


OF_BASE = "base"
"""The key that stands for the architecture of the base in a file of a model that shares it."""


def shared_with_base(config: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's configuration without its architecture if that is the base's.

    In its place is a digest, by which `of_base` recognizes it.
    """
    digest = _digest_of_architecture(base)
    if _digest_of_architecture(config) != digest:
        return dict(config)
    return {OF_BASE: digest, COMPILED: config.get(COMPILED)}


def of_base(config: Mapping[str, Any], base: keras.Model | None) -> Mapping[str, Any]:
    """Return the whole configuration of what `shared_with_base` returned.

    Raises:
        FreezeFileError: If the base has another architecture.
    """
    if OF_BASE not in config or base is None:
        return config
    found = config_of(base)
    if _digest_of_architecture(found) != config[OF_BASE]:
        raise FreezeFileError(
            "The file was saved on a base of the same values, but of other settings: activations, "
            "dtype policies, `trainable` or others of its layers. Pass the base as it was then."
        )
    return {**found, COMPILED: config.get(COMPILED)}


def _digest_of_architecture(config: Mapping[str, Any]) -> str:
    """Return a digest of what of a configuration says how to build a model."""
    described = json.loads(json.dumps({k: v for k, v in config.items() if k != COMPILED}))
    for part in dictionaries_in(described):
        # A clone shares other dtype policies; layers that are shared show in the variables, too.
        part.pop("shared_object_id", None)
    # Automatic names count what the process has made so far.
    text = re.sub(r'_\d+"', '"', json.dumps(described, sort_keys=True))
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16]


def set_trainable(model: keras.Model, trainable: Sequence[bool]) -> None:
    """Make variables untrainable that were so when the model was saved.

    `trainable` says of each variable whether it was trainable. The configuration of a model need
    not say so.
    """
    untrainable = {
        id(variable)
        for variable, was_trainable in zip(variables_of(model), trainable, strict=True)
        if not was_trainable
    }
    for layer in _keras_private.all_layers(model):
        if not layer.trainable:
            continue
        lost = [
            variable
            for variable in _keras_private.own_variables(layer)
            if variable.trainable and id(variable) in untrainable
        ]
        if lost and all(id(variable) in untrainable for variable in layer.variables):
            layer.trainable = False  # BatchNormalization then works as in inference
        for variable in lost:
            variable.trainable = False


def build_model(
    config: Mapping[str, Any], compile: bool, custom_objects: Mapping[str, Any] | None = None
) -> keras.Model:
    """Build the model that `config_of` described; its values are still to be set.

    Raises:
        FreezeFileError: If the configuration names what a file may not name, or if Keras cannot
            build the model.
    """
    check_configuration(config, custom_objects)
    check_configured(config)
    # The file decides what Keras does here, so that errors of any type are possible.
    try:
        described = copy.deepcopy(dict(config))
        if not compile:
            described["compile_config"] = None
        elif set(described.get("compile_config") or {}) == _COMPILE_ARGUMENTS:
            # The optimizer is described as it was: Keras is not to add a LossScaleOptimizer.
            described["compile_config"]["auto_scale_loss"] = False
        with _keras_private.object_sharing_scope(), seeded.blank():
            model = keras.saving.deserialize_keras_object(
                described, custom_objects=dict(custom_objects or {}), safe_mode=True
            )
            if compile and isinstance(model, keras.Model):
                _restore_compiled_optimizer(model, config, custom_objects)
        for optimizer in ModelOptimizers(model).all if isinstance(model, keras.Model) else ():
            optimizer.check_counts()
    except Exception as error:
        raise FreezeFileError(
            f"Keras cannot build the model from its configuration: {first_reason(error)} (Import "
            "the modules that register custom classes and functions, or pass `custom_objects`.)"
        ) from error
    if not isinstance(model, keras.Model):
        raise FreezeFileError(
            f"The configuration is that of a {type(model).__name__}, which is not a model."
        )
    return model


def _restore_compiled_optimizer(
    model: keras.Model, described: Mapping[str, Any], custom_objects: Mapping[str, Any] | None
) -> None:
    """Set the saved FreezeOptimizer of a model that compiles itself in its constructor.

    Keras does not compile a model that overrides `compile`.
    """
    optimizer = (described.get("compile_config") or {}).get("optimizer")
    if optimizer is None or not model.compiled or ModelOptimizers(model).all:
        return
    # Keras changes what it reads, and may have read it before.
    optimizer = keras.saving.deserialize_keras_object(
        copy.deepcopy(optimizer), custom_objects=dict(custom_objects or {}), safe_mode=True
    )
    if freeze_optimizers_in(optimizer):
        model.optimizer = optimizer
        model.train_function = None


def optimizer_variables(model: keras.Model) -> list[Any]:
    """Return the variables of a model's optimizer except those that follow from its mask.

    These are learning rate, iterations, moments, averages and loss scale; an empty list if the
    optimizer is not built.
    """
    optimizers = ModelOptimizers(model)
    optimizer = optimizers.outer
    if optimizer is None or not optimizer.built:
        return []
    freeze_optimizer = optimizers.single
    given = [] if freeze_optimizer is None else freeze_optimizer.mask_variables
    ids = {id(variable) for variable in given}
    return list({id(v): v for v in optimizer.variables if id(v) not in ids}.values())


def finish_loading(model: keras.Model, changed: Iterable[Any]) -> None:
    """Let layers update what they derive from variables that changed, as `Normalization` does.

    Functions of the model that are compiled have what was derived before, and are made again.
    """
    ids = {id(variable) for variable in changed}
    is_derived_anew = False
    for layer in _keras_private.all_layers(model):
        if hasattr(layer, "finalize_state") and any(id(v) in ids for v in layer.variables):
            layer.finalize_state()
            is_derived_anew = True
    if not is_derived_anew:
        return
    for kind in ("train", "test", "predict"):
        if getattr(model, f"{kind}_function", None) is not None:
            setattr(model, f"{kind}_function", None)
            getattr(model, f"make_{kind}_function")()
