"""How a FreezeOptimizer is saved and loaded, by Keras and by TensorFlow's checkpoints."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_freeze import backend
from keras_freeze.initializers.of_layers import models_in_use
from keras_freeze.masks import frozen_variables
from keras_freeze.optimizer.inner_optimizer import is_one_of_several, walk
from keras_freeze.optimizer.state import State, inherited_state, relabel
from keras_freeze.optimizer.state_format import (
    check_origin,
    fitting_state,
    from_bytes,
    has_these_variables,
    read_state,
    skip_loading_once,
    to_bytes,
    write_state,
)
from keras_freeze.parameters import classify, shorten

if TYPE_CHECKING:
    from keras_freeze.optimizer.masked_optimizer import MaskedOptimizer

# One entry, also in Keras's files: no bare optimizer, into which such a file may be loaded, has
# only one variable.
_KEY = "freeze_state"


def save(optimizer: "MaskedOptimizer", store: Any) -> None:
    """Write a FreezeOptimizer's state to what Keras hands to `save_own_variables`."""
    content = content_of(optimizer) or _inherited_content(optimizer)
    _warn_of_custom_compile(optimizer)
    if content:
        store[_KEY] = to_bytes(content)


def load(optimizer: "MaskedOptimizer", store: Any) -> None:
    """Read a FreezeOptimizer's state from what Keras hands to `load_own_variables`.

    Raises:
        ValueError: if the state belongs to a network with other variables or to another inner
            optimizer, or cannot be read.
    """
    if _KEY in store.keys():  # noqa: SIM118 - stores are not mappings
        _load_content(optimizer, from_bytes(np.asarray(store[_KEY])))
    elif "header" in store.keys():  # noqa: SIM118 - of a file from an earlier version
        _load_content(optimizer, store)
    elif optimizer.built or len(store.keys()):
        warnings.warn(
            f"No mask was loaded into {optimizer.name!r}: the file has none where Keras looks for "
            "it, because it was saved before the first step or with another optimizer, or "
            "because only one of the two has a LossScaleOptimizer around the FreezeOptimizer.",
            stacklevel=3,
        )


def to_tensors(optimizer: "MaskedOptimizer") -> dict[str, Any]:
    """Return a FreezeOptimizer's state for TensorFlow's checkpoints."""
    content: dict[str, Any] = {}
    with backend.eager_scope():
        if not backend.is_traced():  # `tf.saved_model.save` asks in a graph that is never run
            content = content_of(optimizer)
    return {_KEY: ops.convert_to_tensor(to_bytes(content))}


def from_tensors(optimizer: "MaskedOptimizer", tensors: Mapping[str, Any]) -> None:
    """Read a FreezeOptimizer's state from TensorFlow's checkpoints.

    Raises:
        ValueError: as `load`, or if the inner optimizer would need other variables.
    """
    if backend.is_traced():  # for a SavedModel, from which no optimizer is loaded
        return
    content = from_bytes(backend.to_numpy(tensors[_KEY]))
    if content:
        _load_content(optimizer, content, is_deferred=True)


def from_first_tensors(optimizer: "MaskedOptimizer", tensors: Mapping[str, Any]) -> None:
    """Read the state before the inner optimizer's variables are restored, which follow from it.

    They do where the first batch decides: a checkpoint may be from before or after that.
    """
    content = from_bytes(np.asarray(tensors[_KEY]))
    decides = optimizer.update is not None and optimizer.update.by_first_batch
    if content and decides and read_state(content).by_first_batch:
        _load_content(optimizer, content)


def content_of(optimizer: "MaskedOptimizer") -> dict[str, Any]:
    """Return what checkpoints contain of a FreezeOptimizer; nothing if there is no state yet."""
    content: dict[str, Any] = {}
    if optimizer.built or optimizer.plan.state is not None:
        write_state(content, optimizer.state, optimizer.parameters, optimizer.inner_optimizer)
    return content


def first_paths_of(optimizer: "MaskedOptimizer") -> Sequence[str]:
    """Return the paths that `exclude` and patterns go by; none where the model is not known."""
    if optimizer.built:
        return [p.first_path for p in optimizer.parameters]
    known = optimizer.plan.paths
    for model in _models_in_use(optimizer):
        return [p.first_path for p in classify(model.trainable_variables, (), known)]
    return known or ()


def _models_in_use(optimizer: "MaskedOptimizer") -> list[keras.Model]:
    """Return models that are being saved or loaded and have only this FreezeOptimizer."""
    models = [model for model in models_in_use() if _trains_all_of(optimizer, model)]
    return [model for model in models if model.trainable_variables]


def _inherited_content(optimizer: "MaskedOptimizer") -> dict[str, Any]:
    """Return the content of an optimizer that will take a mask over once it is built."""
    content: dict[str, Any] = {}
    for model in _models_in_use(optimizer)[:1]:
        with contextlib.suppress(ValueError):  # of settings with which it cannot, as `fit` will say
            parameters = optimizer.classify(model.trainable_variables)
            state = inherited_state(optimizer, parameters)
            if state is not None:
                write_state(content, state, parameters, optimizer.inner_optimizer)
    return content


def _load_content(optimizer: "MaskedOptimizer", content: Any, is_deferred: bool = False) -> None:
    """Restore a state, before the inner optimizer's variables are loaded.

    With `is_deferred` these variables are loaded even if they are created later.
    """
    state = read_state(content)
    _check_settings(optimizer, state)
    is_built, parameters = optimizer.built, optimizer.parameters
    if is_built and optimizer.plan.is_from_config and not has_these_variables(content, parameters):
        _load_what_fits(optimizer, content)
        return
    check_origin(content, parameters, optimizer.inner_optimizer, is_loaded=is_built or is_deferred)
    if is_deferred and optimizer.must_rebuild(state):
        raise ValueError(
            "The checkpoint does not fit the variables that this FreezeOptimizer was built with: "
            "it has other numbers of trained weights, or the mask was decided by "
            "`keras_freeze.freeze` in one case and by the first batch in the other. Restore it "
            "into a model that has just been compiled, before the first step and without a call "
            "to `freeze`."
        )
    optimizer.restore(state)
    if not optimizer.built:
        _register_masks(optimizer, state)


def _check_settings(optimizer: "MaskedOptimizer", state: State) -> None:
    saved, mask = state.settings, state.mask
    if mask is None or saved is None:
        return
    if not saved.agrees_with(optimizer.settings, mask.paths):
        raise ValueError(
            f"The mask that is loaded was decided with {saved}. Compile the model with a "
            "FreezeOptimizer of the same settings, or call `keras_freeze.freeze(model, ...)` "
            "once the weights are loaded. "
            f"Received: a FreezeOptimizer with {optimizer.settings}"
        )


def _register_masks(optimizer: "MaskedOptimizer", state: State) -> None:
    """Register the masks of a state before the build, where the model can be found.

    Other models with the same layers then have their part of the mask.
    """
    models = _models_in_use(optimizer)
    if state.mask is None or not models:
        return
    parameters = optimizer.classify(models[0].trainable_variables)
    masks = [
        frozen_variables.VariableMask(
            parameters[entry.position].variable,
            entry.position,
            entry.is_weight,
            frozen_variables.constant_mask(entry.trained),
            state.starts.get(entry.position),
        )
        for entry in relabel(state.mask, parameters).entries
    ]
    frozen_variables.register(None, masks, optimizer.settings)


def _trains_all_of(optimizer: "MaskedOptimizer", model: keras.Model) -> bool:
    outer = getattr(model, "optimizer", None)
    return optimizer in walk(outer) and not is_one_of_several(optimizer, outer)


def _load_what_fits(optimizer: "MaskedOptimizer", content: Any) -> None:
    """Restore the mask of those variables that still exist; the inner optimizer is new."""
    state, lost = fitting_state(content, optimizer.parameters)
    optimizer.plan = replace(optimizer.plan, trained_counts=None)
    if state.mask is not None:
        state = replace(state, compact=optimizer.suits_compact(state.mask))
        optimizer.rebuild(state, optimizer.built_variables)
    optimizer.set_starts(state.starts)
    optimizer.set_trained_starts(state.trained_starts)
    skip_loading_once(optimizer.inner_optimizer)
    warnings.warn(
        "The model's trainable variables are not those that its FreezeOptimizer was built "
        "with: layers have been quantized, given LoRA or made untrainable since. The mask is "
        "kept where variables are still trained, all others are trained whole, and the inner "
        f"optimizer starts with a new state. No longer trained: {shorten(lost)}",
        stacklevel=4,
    )


def _warn_of_custom_compile(optimizer: "MaskedOptimizer") -> None:
    model = frozen_variables.model_of(optimizer)
    kind = type(model)
    if (
        model is not None
        and kind.compile is not keras.Model.compile
        and kind.compile_from_config is keras.Model.compile_from_config
    ):
        warnings.warn(
            f"{kind.__name__} has a custom `compile`, which `keras.models.load_model` does not "
            "call, so that the loaded model will have no FreezeOptimizer. After loading, compile "
            "it with one and call `model.load_weights` with the same file, which loads the mask; "
            "or save with `keras_freeze.save`.",
            stacklevel=3,
        )
