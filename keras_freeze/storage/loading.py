"""Load a model from a `.freeze` file."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_freeze._utils.text import printable, printable_cause
from keras_freeze._utils.validation import check_bool, check_int, type_error
from keras_freeze.initializers.of_layers import initializer_of, initializers_of
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.drawn import remember_draw
from keras_freeze.masks.frozen_variables import VariableMask, constant_mask
from keras_freeze.model_state import ModelOptimizers
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.optimizer.state import State
from keras_freeze.optimizer.trained_starts import TrainedStarts
from keras_freeze.placements import remember_grids
from keras_freeze.restricted.layers import restrict_gradients
from keras_freeze.starts import INITIALIZER, SEED
from keras_freeze.storage.checks.configuration import check_initializer
from keras_freeze.storage.checks.creation import only_announced
from keras_freeze.storage.checks.memory import limit_of
from keras_freeze.storage.container import Container, is_container, read_container
from keras_freeze.storage.errors import FreezeFileError, naming, refusing
from keras_freeze.storage.header import Header
from keras_freeze.storage.keras_model import (
    are_integers,
    build_model,
    check_built,
    dtype_of,
    finish_loading,
    of_base,
    optimizer_variables,
    set_bits,
    set_trainable,
    variables_of,
)
from keras_freeze.storage.records import VariableRecord
from keras_freeze.storage.restoring import (
    Values,
    check_fingerprint,
    check_rest,
    check_variables,
    restored,
)
from keras_freeze.storage.vocabularies import set_vocabularies

_BASE = "a keras.Model, or the path of a `.keras` or `.freeze` file"


def load(
    path: str | os.PathLike[str],
    *,
    base: keras.Model | str | os.PathLike[str] | None = None,
    compile: bool = True,
    custom_objects: Mapping[str, Any] | None = None,
    max_bytes: int | None = None,
) -> keras.Model:
    """Load a model that `save` wrote, the same bit for bit.

    The model is built from its configuration, the frozen weights are drawn from the seed or come
    from the source that the file names, and every variable is compared with its checksum. It is
    safe to load files from strangers, within the limits that docs/security.md describes.

    Args:
        path: Path of the file.
        base: The base, for a file that was saved with one: a `keras.Model`, or the path of a
            `.keras` or `.freeze` file. Defaults to `None`.
        compile: Whether to compile the model as it was. Its FreezeOptimizer then has the mask, and
            the saved state if the file holds it, else its initial state. Defaults to `True`.
        custom_objects: A mapping from names to custom classes and functions that are not
            registered. Defaults to `None`.
        max_bytes: The largest size in bytes of the variables that the file describes, and of what
            Keras creates for it. Defaults to `None`, which is a quarter of the free memory.

    Returns:
        A `keras.Model`.

    Raises:
        OSError: If the file cannot be read.
        FreezeFileError: If the file is damaged, of another version, or belongs to another base; if
            Keras cannot build the model, for example because classes are not registered; if the
            file names what it may not name (docs/security.md), or takes too much memory; or if this
            machine or its versions of Keras and the backend draw other numbers from the seed of a
            Keras initializer. A subclass of `ValueError`.
        TypeError: If an argument has a wrong type.

    Example:

    ```python
    model = keras_freeze.load("digits.freeze")
    ```
    """
    check_bool("compile", compile)
    if custom_objects is not None and not isinstance(custom_objects, Mapping):
        accepted = "None or a mapping from names to classes and functions"
        raise type_error("custom_objects", custom_objects, accepted)
    if max_bytes is not None:
        max_bytes = check_int("max_bytes", max_bytes, minimum=1)
    with naming(path):
        container = read_container(path)
        header = Header.from_json(container.header, max_bytes)
        base_model = _checked_base(header, base, custom_objects, max_bytes)
        shaped = [(record.shape, record.dtype) for record in header.records]
        with refusing(), only_announced(shaped, limit_of(max_bytes)):
            return _load(header, container, base_model, compile, custom_objects)


def _load(
    header: Header,
    container: Container,
    base: keras.Model | None,
    compile: bool,
    custom_objects: Mapping[str, Any] | None,
) -> keras.Model:
    for record in header.records:
        if record.source is not None and record.source.kind == INITIALIZER:
            check_initializer(record.source.config)
    model = build_model(of_base(header.model, base), compile, custom_objects)
    set_vocabularies(model, header.vocabularies)
    variables = variables_of(model)
    check_variables(header, variables)
    set_trainable(model, [record.trainable for record in header.records])
    values = restored(header, container, None if base is None else variables_of(base))
    for record, variable, bits in zip(header.records, variables, values.bits, strict=True):
        set_bits(variable, bits, record.dtype)
    remember_grids(variables, values.placements)
    finish_loading(model, variables)
    _keep_initializers(model, variables, header.records)
    _restore_optimizer(model, header, values)
    return model


def open_base(
    base: keras.Model | str | os.PathLike[str],
    custom_objects: Mapping[str, Any] | None = None,
    max_bytes: int | None = None,
) -> keras.Model:
    """Return the model of an argument `base`; the other arguments are those of `load`."""
    if isinstance(base, keras.Model):
        check_built(base, "base")
        return base
    if not isinstance(base, (str, os.PathLike)):
        raise type_error("base", base, _BASE)
    if not os.path.isfile(base):
        raise FileNotFoundError(
            f"Argument `base` must be the path of an existing file. Received: base={base!r}"
        )
    if is_container(base):
        return load(base, compile=False, custom_objects=custom_objects, max_bytes=max_bytes)
    try:
        return keras.models.load_model(base, custom_objects=custom_objects, compile=False)
    except ValueError as error:
        raise ValueError(
            f"Argument `base` must be {_BASE}. Received: base={base!r}. "
            f"Keras says: {printable(str(error), 500)}"
        ) from printable_cause(error)


def _checked_base(
    header: Header, base: Any, custom_objects: Mapping[str, Any] | None, max_bytes: int | None
) -> keras.Model | None:
    if header.base is None:
        if base is not None:
            raise FreezeFileError(
                f"The file was saved without a base: leave `base` out. Received: base={base!r:.200}"
            )
        return None
    if base is None:
        raise FreezeFileError(
            f"The file was saved on a base, the model with the fingerprint {header.base[:16]}...: "
            "pass this model, or the path of its file, as `base`."
        )
    model = open_base(base, custom_objects, max_bytes)
    check_fingerprint(header, variables_of(model))
    return model


def _keep_initializers(
    model: keras.Model, variables: Sequence[Any], records: Sequence[VariableRecord]
) -> None:
    """Set the initializers of layers to what drew their weights, for a later `save`."""
    found = initializers_of(model)
    for variable, record in zip(variables, records, strict=True):
        source = record.source
        if source is not None and source.kind in (SEED, INITIALIZER) and id(variable) in found:
            layer, attribute = found[id(variable)]
            setattr(layer, attribute, initializer_of(source))


def _restore_optimizer(model: keras.Model, header: Header, values: Values) -> None:
    _register_mask(model, header, values)
    optimizers = ModelOptimizers(model)
    optimizer, freeze_optimizer = optimizers.outer, optimizers.single
    state = header.optimizer
    if optimizer is not None and (values.mask is not None or state is not None):
        if freeze_optimizer is not None:
            freeze_optimizer.restore(_state(header, values, freeze_optimizer))
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        if freeze_optimizer is not None:
            restrict_gradients(model)
    if optimizer is None or state is None:
        check_rest(values)
        return
    variables = optimizer_variables(model)
    if len(variables) != len(state.slots) or not all(
        tuple(variable.shape) == slot.shape
        and (dtype_of(variable) == slot.dtype or are_integers(dtype_of(variable), slot.dtype))
        for variable, slot in zip(variables, state.slots, strict=False)
    ):
        raise FreezeFileError(
            "The state of the optimizer in the file does not belong to the optimizer that the file "
            "describes. Use `load(path, compile=False)` to load the model without it."
        )
    for variable, slot, bits in zip(variables, state.slots, values.optimizer, strict=True):
        set_bits(variable, bits, slot.dtype)


def _register_mask(model: keras.Model, header: Header, values: Values) -> None:
    """Register which entries are frozen, for any later FreezeOptimizer on these variables."""
    if values.mask is None:
        return
    scale = header.decay_scale
    decay_scale = None if scale is None else keras.Variable(scale, dtype="float32", trainable=False)
    masks = {entry.position: constant_mask(entry.trained) for entry in values.mask.entries}
    found = [(v, r.entry) for v, r in zip(variables_of(model), header.records, strict=True)]
    for variable, entry in found:
        if entry is not None and entry.position in values.draws:
            remember_draw(variable, values.draws[entry.position])
    for number in range(max(1, len(header.settings))):
        registered = [
            VariableMask(
                v, e.position, e.is_weight, masks[e.position], values.starts.get(e.position)
            )
            for v, e in found
            if e is not None and e.settings == number
        ]
        settings = header.settings[number] if header.settings else None
        frozen_variables.register(None, registered, settings, decay_scale)


def _state(header: Header, values: Values, optimizer: FreezeOptimizer) -> State:
    mask = values.mask
    compact, found = mask is not None and optimizer.suits_compact(mask), False
    if header.optimizer is not None:
        compact, found = header.optimizer.compact, header.optimizer.found
    known = TrainedStarts(values=values.trained_starts)
    if mask is None or header.decay_scale is not None or not known.fit(mask):
        known = TrainedStarts()
    return State(mask, compact, header.decay_scale, found, values.starts, trained_starts=known)
