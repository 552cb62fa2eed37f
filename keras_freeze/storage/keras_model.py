"""What a `.freeze` file needs from a Keras model: its configuration, and its variables as bits."""

import copy
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_freeze import _keras_private, backend
from keras_freeze._version import __version__
from keras_freeze.initializers import seeded
from keras_freeze.model_state import (
    freeze_optimizer_of,
    freeze_optimizers_in,
    freeze_optimizers_of,
    is_built,
    optimizer_of,
)
from keras_freeze.parameters import path_of
from keras_freeze.storage.allowed import check_configuration
from keras_freeze._utils.bits import as_bits, from_bits, little_endian, numpy_dtype
from keras_freeze.storage.errors import FreezeFileError, first_reason
from keras_freeze._utils.bits import WIDTHS
from keras_freeze.storage.vocabularies import check_assets, check_configured

# What `get_compile_config` gives for a model that does not override it.
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


def variables_of(model: keras.Model) -> list[Any]:
    """All variables of a model, each once: trained or not, statistics and random states too."""
    return list({id(variable): variable for variable in model.variables}.values())


def is_random_state(variable: Any) -> bool:
    """Whether it is the state of a generator, as Dropout has one."""
    return path_of(variable).endswith("seed_generator_state")


def dtype_of(variable: Any) -> str:
    """The name of a variable's dtype.

    Raises:
        ValueError: for one that a `.freeze` file cannot hold.
    """
    dtype = str(keras.backend.standardize_dtype(variable.dtype))
    if dtype not in WIDTHS:
        raise ValueError(
            f"The variable {path_of(variable)!r} has dtype {dtype}. A `.freeze` file holds "
            f"{', '.join(WIDTHS)}."
        )
    return dtype


def bits_of(variable: Any) -> np.ndarray:
    """A variable's values as a vector of bit patterns, unsigned integers of their width."""
    return as_bits(backend.to_numpy(variable), dtype_of(variable))


def set_bits(variable: Any, bits: np.ndarray, dtype: str) -> None:
    """Gives a variable the values of bit patterns of its dtype, or of another integer.

    Raises:
        FreezeFileError: if its own integers are too short for a value.
    """
    saved = from_bits(bits, dtype)
    values = saved.astype(numpy_dtype(dtype_of(variable)), copy=False)
    if dtype != dtype_of(variable) and not np.array_equal(values, saved):
        raise FreezeFileError(
            f"{path_of(variable)!r} is saved as {dtype}, with values that {dtype_of(variable)} "
            "does not have."
        )
    variable.assign(values.reshape(tuple(variable.shape)))


def are_integers(dtype: str, other: str) -> bool:
    """Whether both are dtypes of counters and random states, which differ between backends."""
    return {dtype, other} <= {"int32", "int64", "uint32"}


def fingerprint(variables: Sequence[Any]) -> str:
    """SHA-256, in hexadecimal, over shapes, dtypes and values of a base's variables.

    Random states are left out: they move whenever the base is used for training.
    """
    digest = hashlib.sha256()
    for variable in variables:
        if is_random_state(variable):
            continue
        digest.update(f"{tuple(variable.shape)} {dtype_of(variable)}\n".encode())
        digest.update(little_endian(bits_of(variable)))
    return digest.hexdigest()


def config_of(model: keras.Model) -> dict[str, Any]:
    """The model as Keras serializes it: architecture, how it is built, how it is compiled.

    Raises:
        ValueError: if it has Python code or files in it, which a `.freeze` file does not take.
    """
    if not is_built(model):
        raise ValueError("Argument `model` is not built: call it on a batch of data first.")
    check_assets(model)
    try:
        with _keras_private.object_sharing_scope(), warnings.catch_warnings():
            warnings.filterwarnings("error", message="The object being serialized includes a `lam")
            config = keras.saving.serialize_keras_object(model)
    except UserWarning as error:
        raise _lambda_error() from error
    if "optimizer" in (config.get("compile_config") or {}) and model.optimizer is not None:
        # The optimizer as it is: Keras puts a LossScaleOptimizer around what it was given only if
        # the dtype policy of the moment says so.
        optimizer = keras.saving.serialize_keras_object(model.optimizer)
        config["compile_config"]["optimizer"] = optimizer
    shared: dict[int, int] = {}
    for described in _objects_in(config):
        if described["class_name"] == "__lambda__":  # a Lambda layer's, without a warning
            raise _lambda_error()
        if "shared_object_id" in described:  # an address in memory
            number = shared.setdefault(described["shared_object_id"], len(shared))
            described["shared_object_id"] = number
    return config


def build_model(
    config: Mapping[str, Any], compile: bool, custom_objects: Mapping[str, Any] | None = None
) -> keras.Model:
    """The model that `config_of` described, with values that are still to be set.

    Args:
        config: the configuration.
        compile: whether the model is compiled as it was.
        custom_objects: classes and functions by name, beside those that are registered.

    Raises:
        FreezeFileError: if it names what a file may not, or Keras cannot build it.
    """
    check_configuration(config, custom_objects)
    check_configured(config)
    # Whatever the file asks for, an error of any kind means that it cannot be had.
    try:
        described = copy.deepcopy(dict(config))
        if not compile:
            described["compile_config"] = None
        elif set(described.get("compile_config") or {}) == _COMPILE_ARGUMENTS:
            # The optimizer is described as it was: no LossScaleOptimizer is to come around it.
            described["compile_config"]["auto_scale_loss"] = False
        with _keras_private.object_sharing_scope(), seeded.blank():
            model = keras.saving.deserialize_keras_object(
                described, custom_objects=dict(custom_objects or {}), safe_mode=True
            )
            if compile and isinstance(model, keras.Model):
                _bring_optimizer_back(model, described, custom_objects)
        for optimizer in freeze_optimizers_of(model) if isinstance(model, keras.Model) else ():
            optimizer.check_counts()
    except Exception as error:
        raise FreezeFileError(
            f"Keras cannot build the model from its configuration: {first_reason(error)} (Classes "
            "and functions of your own have to be imported, so that they are registered.)"
        ) from error
    if not isinstance(model, keras.Model):
        raise FreezeFileError(f"The configuration is that of a {type(model).__name__}, no model.")
    return model


def _bring_optimizer_back(
    model: keras.Model, described: Mapping[str, Any], custom_objects: Mapping[str, Any] | None
) -> None:
    """Gives a model that compiles itself in its constructor the FreezeOptimizer it was saved with.

    Keras does not compile a model whose `compile` is its own.
    """
    optimizer = (described.get("compile_config") or {}).get("optimizer")
    if optimizer is None or not model.compiled or freeze_optimizers_of(model):
        return
    optimizer = keras.saving.deserialize_keras_object(
        optimizer, custom_objects=dict(custom_objects or {}), safe_mode=True
    )
    if freeze_optimizers_in(optimizer):
        model.optimizer = optimizer
        model.train_function = None


def optimizer_variables(model: keras.Model) -> list[Any]:
    """The variables of a model's optimizer, but for those that its mask gives; none if not built.

    Learning rate, iterations, moments, averages and loss scale are among them.
    """
    optimizer = optimizer_of(model)
    if optimizer is None or not optimizer.built:
        return []
    freeze_optimizer = freeze_optimizer_of(model)
    given = [] if freeze_optimizer is None else freeze_optimizer.mask_variables
    ids = {id(variable) for variable in given}
    return list({id(v): v for v in optimizer.variables if id(v) not in ids}.values())


def versions() -> dict[str, str]:
    """The versions of what makes a model, by name."""
    return {
        "keras_freeze": __version__,
        "keras": keras.__version__,
        keras.backend.backend(): backend.VERSION,
    }


def finish_loading(model: keras.Model) -> None:
    """Lets layers take over what they derive from their variables, as Normalization does."""
    for layer in _keras_private.all_layers(model):
        # Discretization has nothing to derive them from, and would forget what it has.
        if hasattr(layer, "finalize_state") and layer.variables:
            layer.finalize_state()


def _objects_in(config: Any) -> Iterator[dict[str, Any]]:
    if isinstance(config, dict):
        if "class_name" in config and "config" in config:
            yield config
        config = config.values()
    elif not isinstance(config, (list, tuple)):
        return
    for value in config:
        yield from _objects_in(value)


def _lambda_error() -> ValueError:
    return ValueError(
        "The model contains a lambda function, which would have to be stored as code. Use a "
        "function that is registered with keras.saving.register_keras_serializable."
    )
