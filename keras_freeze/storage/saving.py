"""Save a model as a seed, an entropy-coded mask and the trained values."""

import dataclasses
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_freeze import backend, initializers
from keras_freeze._utils.files import check_replaceable, is_same_file
from keras_freeze._utils.validation import check_bool, value_error
from keras_freeze.grids import STORED_DTYPES, Bits, Grid
from keras_freeze.initializers.of_layers import initializers_of, versions
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.masks.settings import Settings
from keras_freeze.model_state import ModelOptimizers, get_mask
from keras_freeze.optimizer.state import State
from keras_freeze.parameters import path_of
from keras_freeze.storage.changes import set_changes
from keras_freeze.storage.checks.configuration import check_configuration
from keras_freeze.storage.checks.creation import only_announced
from keras_freeze.storage.coding.masks import encode_masks
from keras_freeze.storage.coding.values import encode_values
from keras_freeze.storage.container import write_container
from keras_freeze.storage.errors import FreezeFileError, check_path
from keras_freeze.storage.grid_values import round_to_grid, set_grids
from keras_freeze.storage.header import Header, OptimizerState, Slot
from keras_freeze.storage.keras_model import (
    COMPILED,
    bits_of,
    build_model,
    check_built,
    config_of,
    dtype_of,
    fingerprint,
    optimizer_variables,
    set_bits,
    set_trainable,
    shared_with_base,
    variables_of,
)
from keras_freeze.storage.loading import open_base
from keras_freeze.storage.restoring import check_variables
from keras_freeze.storage.saved_variable import SavedVariable, saved_variables
from keras_freeze.storage.sources import (
    check_explained,
    find_rankings,
    find_sources,
    find_starts_of_whole,
    set_starts,
    warn_if_not_portable,
)
from keras_freeze.storage.vocabularies import set_vocabularies, vocabularies_of


def save(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    base: keras.Model | str | os.PathLike[str] | None = None,
    values: str | Grid | Bits = "float32",
    include_optimizer: bool = False,
    include_frozen: bool = False,
    include_compile: bool = True,
) -> None:
    """Save a model as a seed, an entropy-coded mask and the trained values (section 3.3).

    The file holds everything that `load` needs to restore the same model bit for bit: architecture
    and compile configuration, mask, trained weights, biases, normalization parameters and
    statistics. Instead of frozen weights it holds where they come from: a seed, a constant such as
    zero, or a base. The write is atomic: an interrupted save leaves an older file as it was.

    With `frozen_weights="decay"` (FreezeNet-WD), the frozen weights are rounded in every step.
    `save` first sets those of the model to one factor times their initial values, rounded once.

    A warning says so if the file relies on initializers of Keras, which draw other numbers with
    another backend or version: such a file can be loaded with the same versions only.

    Args:
        model: A built `keras.Model`. If it has no mask, the file holds all values that cannot be
            drawn from a seed.
        path: Path of the file, for example `"digits.freeze"`.
        base: A model, or the path of a `.keras` or `.freeze` file, that the receiver has. Values
            equal to those of the base are left out, whatever trained the model; others are stored
            as differences where these are smaller. `load` and `apply_delta` need the base.
            Defaults to `None`.
        values: The dtype in which values of float32 parameters are stored: `"float32"` (exact),
            or rounded to `"float16"` or `"bfloat16"`; or a `keras_freeze.storage.Grid`, to which
            the trained values of all floating-point parameters are rounded, or
            `keras_freeze.storage.Bits`, a size that chooses it. Values that `quantize` or training
            has put on a grid stay exact. Defaults to `"float32"`.
        include_optimizer: Whether to save the state of the optimizer, so that training continues
            from the file as from the model. Without it, the optimizer of the loaded model starts
            with its initial state. Defaults to `False`.
        include_frozen: Whether to store frozen weights that come neither from a base nor from a
            portable seed. Biases and normalization parameters are always stored. Defaults to
            `False`.
        include_compile: Whether to save optimizer, loss and metrics that the model is compiled
            with. Without them the file is some hundred bytes smaller, and `load` returns a model
            that is not compiled but has its mask. Defaults to `True`.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If frozen weights come neither from a known seed nor from a base; the message
            names the variables and says what to do. Also if the model is not built, contains
            lambda functions or layers that store files, or has values that are too large for
            float16.

    Example:

    ```python
    keras_freeze.save(model, "digits.freeze")
    model = keras_freeze.load("digits.freeze")
    ```
    """
    _check_arguments(model, path, base, values)
    flags = {
        "include_optimizer": include_optimizer,
        "include_frozen": include_frozen,
        "include_compile": include_compile,
    }
    _check_flags(flags)
    base_model = None if base is None else open_base(base)
    base_variables = None if base_model is None else variables_of(base_model)
    header, variables = described(model, base_variables, values, include_frozen, include_optimizer)
    if not include_compile:
        header = dataclasses.replace(header, model={**header.model, COMPILED: None})
    if include_optimizer:
        header = dataclasses.replace(header, optimizer=_optimizer_state(model))
    optimizer_values = [] if header.optimizer is None else optimizer_variables(model)
    check_loads_again(model, header, include_optimizer)
    warn_if_not_portable(variables)
    if base_model is not None:
        header = _beside_base(header, base_model)
    write_model(path, header, variables, [bits_of(v) for v in optimizer_values])
    for saved in variables:  # FreezeNet-WD: the model gets the frozen weights of the file
        if saved.is_settled:
            set_bits(saved.variable, saved.bits, dtype_of(saved.variable))


def _beside_base(header: Header, base: keras.Model) -> Header:
    """Return the header without the architecture if that is the base's."""
    if header.vocabularies:  # which the layers of another base may not have
        return header
    try:
        check_variables(header, variables_of(base))
        return dataclasses.replace(header, model=shared_with_base(header.model, config_of(base)))
    except ValueError:  # a file cannot hold the base, or it has other variables
        return header


def described(
    model: keras.Model,
    base_variables: Sequence[Any] | None,
    values: str | Grid | Bits,
    include_frozen: bool = False,
    include_starts: bool = False,
) -> tuple[Header, list[SavedVariable]]:
    """Return the header of a file of a model without its optimizer's state, and its variables.

    `base_variables` are those of the base, or None; `include_starts` says whether weights that are
    trained whole have their source, too; the other arguments and errors are as in `save`.
    """
    config = config_of(model)
    state, mask = state_of(model), get_mask(model)
    stored_dtype = values if isinstance(values, str) else "float32"
    variables, settings = sourced_variables(
        model, state, mask, base_variables, stored_dtype, include_frozen
    )
    find_rankings(variables, settings, base_variables)
    set_grids(model, variables, base_variables)
    if isinstance(values, (Grid, Bits)):
        round_to_grid(model, variables, base_variables, values)
    if not include_frozen:
        check_explained(variables)
    if include_starts:
        find_starts_of_whole(variables, state, base_variables, initializers_of(model))
    set_changes(variables, base_variables)
    header = Header(
        versions=versions(),
        generator=initializers.GENERATOR,
        model=config,
        records=tuple(saved.record() for saved in variables),
        settings=settings,
        num_rescued=0 if mask is None else mask.num_rescued,
        decay_scale=None if state.decay_scale is None else float(state.decay_scale),
        base=None if base_variables is None else fingerprint(base_variables),
        optimizer=None,
        vocabularies=vocabularies_of(model, all_of_them=base_variables is not None),
    )
    return header, variables


def write_model(
    path: str | os.PathLike[str],
    header: Header,
    variables: Sequence[SavedVariable],
    optimizer_values: Sequence[np.ndarray] = (),
) -> None:
    """Write the file that a header and the variables it was made of describe.

    `optimizer_values` are those of the optimizer's variables, as bit patterns.
    """
    sections = encode(variables, optimizer_values)
    write_container(path, header.to_json(), *sections, header.version)


def encode(
    variables: Sequence[SavedVariable], optimizer_values: Sequence[np.ndarray] = ()
) -> tuple[bytes, bytes, bytes]:
    """Return the sections of a file that follow its header."""
    masks = [saved.coded_mask for saved in variables if saved.entry is not None]
    masks += [v.changed.reshape(v.shape) for v in variables if v.changed is not None]
    values = [*(saved.stored() for saved in variables), *optimizer_values]
    return encode_masks(masks), *encode_values(values)


def sourced_variables(
    model: keras.Model,
    state: State,
    mask: FreezeMask | None,
    base: Sequence[Any] | None,
    stored_dtype: str = "float32",
    portable_only: bool = False,
) -> tuple[list[SavedVariable], tuple[Settings, ...]]:
    """Return a model's variables with their sources, and the settings that decided its masks.

    Args:
        model: The model.
        state, mask: What `state_of` and `get_mask` return for it.
        base: The variables of the base, or None.
        stored_dtype: The dtype in which values of float32 parameters are stored.
        portable_only: As of `find_sources`.
    """
    entries = {} if mask is None else {id(v): mask.find(v) for v in model.variables}
    settings, numbers = _settings_of(model)
    variables = saved_variables(model, entries, numbers, stored_dtype)
    set_starts(variables, state)
    find_sources(variables, state.decay_scale, base, initializers_of(model), portable_only)
    return variables, settings


def state_of(model: keras.Model) -> State:
    """Return the state of a model's FreezeOptimizer, with the decay factor of its variables."""
    optimizer = ModelOptimizers(model).single
    state = State(None, compact=False) if optimizer is None else optimizer.state
    if state.decay_scale is None:
        scale = frozen_variables.decay_scale_of(variables_of(model))
        state = dataclasses.replace(state, decay_scale=scale)
    return state


def _settings_of(model: keras.Model) -> tuple[tuple[Settings, ...], dict[int, int]]:
    """Return all settings that decided masks of variables, and their indices by variable id."""
    settings = {
        id(v): decision.settings
        for v in variables_of(model)
        for decision in frozen_variables.decisions_about([v])
        if decision.settings is not None
    }
    distinct = list(dict.fromkeys(settings.values()))
    return tuple(distinct), {key: distinct.index(one) for key, one in settings.items()}


def _check_allowed(config: Any) -> None:
    """Refuse what `load` would refuse, before anything is written."""
    try:
        check_configuration(config)
    except FreezeFileError as error:
        raise ValueError(f"A `.freeze` file of this model could not be loaded. {error}") from error


def check_loads_again(model: keras.Model, header: Header, include_optimizer: bool = False) -> None:
    """Build the model from its configuration, to write no file that cannot be loaded.

    Raises:
        ValueError: If `load` would refuse the file.
    """
    _check_allowed(header.model)
    random_state = random.getstate()  # Keras draws default seeds from it
    try:
        # Perhaps no other process saves: the model is not distributed over them.
        announced = only_announced([(r.shape, r.dtype) for r in header.records])
        with announced, backend.outside_strategy():
            built = build_model(header.model, compile=True)
            set_vocabularies(built, header.vocabularies)
        check_variables(header, variables_of(built))
        set_trainable(built, [record.trainable for record in header.records])
    except FreezeFileError as error:
        raise ValueError(
            "A `.freeze` file of this model could not be loaded: Keras cannot build the same model "
            "from its configuration. Usual reasons are classes and functions that are not "
            "registered (`keras.saving.register_keras_serializable`), layers that two submodels "
            "share, LoRA in a layer that does not record it, and a change of `trainable` or a "
            f"`quantize` since `freeze`. {error}"
        ) from error
    finally:
        random.setstate(random_state)
    optimizers = ModelOptimizers(model)
    has_optimizer = bool(optimizers.outer or optimizers.all)
    if include_optimizer and has_optimizer and ModelOptimizers(built).outer is None:
        raise ValueError(
            "Argument `include_optimizer` must be False for this model: it overrides `compile`, "
            "which `load` cannot call, so that the loaded model would have no optimizer. Override "
            "`get_compile_config` and `compile_from_config` too, or leave the state out: the file "
            f"holds the mask in any case. Received: model={model!r}"
        )


def _optimizer_state(model: keras.Model) -> OptimizerState | None:
    state = state_of(model)
    slots = [Slot(path_of(v), tuple(v.shape), dtype_of(v)) for v in optimizer_variables(model)]
    return OptimizerState(state.compact, state.by_first_batch, tuple(slots)) if slots else None


def _check_flags(flags: Mapping[str, Any]) -> None:
    for name, value in flags.items():
        check_bool(name, value)
    if flags["include_optimizer"] and not flags["include_compile"]:
        raise ValueError(
            "Argument `include_compile` must be True where the state of the optimizer is saved. "
            "Received: include_optimizer=True, include_compile=False"
        )


def _check_arguments(model: Any, path: Any, base: Any, values: Any) -> None:
    check_built(model, "model")
    check_path(path)
    check_replaceable(path)
    if isinstance(base, (str, os.PathLike)) and is_same_file(base, path):
        raise ValueError(
            "Argument `path` must not be the file of the base, which is needed to load the new "
            f"file. Received: path={os.fspath(path)!r}, base={os.fspath(base)!r}"
        )
    is_grid = isinstance(values, (Grid, Bits))
    if not is_grid and (not isinstance(values, str) or values not in STORED_DTYPES):
        accepted = f"one of {', '.join(map(repr, STORED_DTYPES))}, or a `keras_freeze.storage.Grid`"
        raise value_error("values", values, f"{accepted} or `keras_freeze.storage.Bits`")
