"""Load a network from a `.freeze` file."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_freeze import initializers
from keras_freeze._utils.text import printable, printable_cause
from keras_freeze.initializers.of_layers import initializer_of, initializers_of, is_portable
from keras_freeze.masks import frozen_variables
from keras_freeze.masks.frozen_variables import VariableMask, constant_mask
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.model_state import freeze_optimizer_of, optimizer_of
from keras_freeze.optimizer.checkpoint import State
from keras_freeze.optimizer.freeze_optimizer import FreezeOptimizer
from keras_freeze.parameters import path_of, same_path
from keras_freeze.restricted.restriction import restrict_gradients
from keras_freeze.starts import CONSTANT, INITIALIZER, SEED, Source, Start
from keras_freeze.storage.allowed import check_initializer
from keras_freeze._utils.bits import as_bits, checksum, from_bits, numpy_dtype
from keras_freeze.storage.budget import check_max_bytes, default_max_bytes
from keras_freeze.storage.coding.values import decode_values
from keras_freeze.storage.container import Container, is_container, read_container
from keras_freeze.storage.creation import only_announced
from keras_freeze.storage.errors import FreezeFileError, naming, refusing
from keras_freeze._utils.bits import WIDTHS
from keras_freeze.storage.header import Header, Record
from keras_freeze.storage.keras_model import (
    are_integers,
    build_model,
    dtype_of,
    fingerprint,
    finish_loading,
    is_random_state,
    optimizer_variables,
    set_bits,
    variables_of,
    versions,
)
from keras_freeze.storage.masks import decode_entries
from keras_freeze.storage.origin import regenerate, scaled
from keras_freeze.storage.vocabularies import set_vocabularies


def load(
    path: str | os.PathLike[str],
    *,
    base: keras.Model | str | os.PathLike[str] | None = None,
    compile: bool = True,
    custom_objects: Mapping[str, Any] | None = None,
    max_bytes: int | None = None,
) -> keras.Model:
    """Loads a network that `save` wrote, the same bit for bit.

    The model is built from its configuration, its frozen weights come from the seed, or whatever
    the file names, and every variable is compared with its checksum.

    Args:
        path: the file.
        base: for a file that was saved with one: the same base, a model or the path of a `.keras`
            or `.freeze` file.
        compile: whether the model is compiled as it was. Its FreezeOptimizer then has the mask, and
            fresh moments or, if the file holds them, those of the model that was saved.
        custom_objects: classes and functions of your own by the names that the file has for them,
            if they are not registered.
        max_bytes: what the variables may take that the file announces, and what Keras may create
            for it; None for a quarter of the memory that is free.

    Returns:
        The model.

    Raises:
        OSError: if the file cannot be read.
        FreezeFileError: if it is damaged in any way, of another version, or belongs to another
            base or to none; if the model cannot be built, because it uses classes that are not
            registered, say; if it names what no such file may (docs/security.md), or takes too much
            memory; or if this machine or its versions of Keras and TensorFlow draw other numbers
            from the seed of a Keras initializer. A ValueError.

    Example:

    ```python
    model = keras_freeze.load("digits.freeze")
    ```
    """
    if not isinstance(compile, bool):
        raise TypeError(f"Argument `compile` must be True or False. Received: compile={compile!r}")
    _check_custom_objects(custom_objects)
    check_max_bytes(max_bytes)
    with naming(path):
        container = read_container(path)
        header = Header.from_json(container.header, max_bytes)
        base_variables = _checked_base(header, base, custom_objects, max_bytes)
        limit = default_max_bytes() if max_bytes is None else max_bytes
        with refusing(), only_announced([(r.shape, r.dtype) for r in header.records], limit):
            return _load(header, container, base_variables, compile, custom_objects)


def _load(
    header: Header,
    container: Container,
    base: Sequence[Any] | None,
    compile: bool,
    custom_objects: Mapping[str, Any] | None,
) -> keras.Model:
    for record in header.records:
        if record.source is not None and record.source.kind == INITIALIZER:
            check_initializer(record.source.config)
    model = build_model(header.model, compile, custom_objects)
    set_vocabularies(model, header.vocabularies)
    variables = variables_of(model)
    check_variables(header, variables)
    values = restored(header, container, base)
    for record, variable, bits in zip(header.records, variables, values.bits, strict=True):
        set_bits(variable, bits, record.dtype)
    finish_loading(model)
    _keep_initializers(model, variables, header.records)
    _restore_optimizer(model, header, values)
    return model


def _check_custom_objects(custom_objects: Any) -> None:
    if custom_objects is not None and not isinstance(custom_objects, Mapping):
        raise TypeError(
            "Argument `custom_objects` must be a mapping from names to classes and functions, or "
            f"None. Received: custom_objects={custom_objects!r}"
        )


def open_base(
    base: keras.Model | str | os.PathLike[str],
    custom_objects: Mapping[str, Any] | None = None,
    max_bytes: int | None = None,
) -> keras.Model:
    """The model that is meant by a `base`; the other arguments are those of `load`."""
    if isinstance(base, keras.Model):
        if not base.built:
            raise ValueError("Argument `base` is not built: call it on a batch of data first.")
        return base
    if not isinstance(base, (str, os.PathLike)):
        raise TypeError(
            "Argument `base` must be a keras.Model, or the path of a `.keras` or `.freeze` file. "
            f"Received: base={base!r} of type {type(base).__name__}"
        )
    if not os.path.isfile(base):
        raise FileNotFoundError(f"Argument `base` names no file. Received: base={base!r}")
    if is_container(base):
        return load(base, compile=False, custom_objects=custom_objects, max_bytes=max_bytes)
    try:
        return keras.models.load_model(base, custom_objects=custom_objects, compile=False)
    except ValueError as error:
        raise ValueError(
            "Argument `base` must be a keras.Model, or the path of a `.keras` or `.freeze` file. "
            f"Received: base={base!r}. Keras says: {printable(str(error), 500)}"
        ) from printable_cause(error)


@dataclass(frozen=True)
class Values:
    """What a file says about the variables of a model.

    Attributes:
        bits: the values of each, as bit patterns.
        mask: the freezing mask; None if there is none.
        starts: what variables of the mask were drawn from, by their positions in it.
        optimizer: the values of each variable of the optimizer, as bit patterns, which are read
            when they are asked for.
    """

    bits: list[np.ndarray]
    mask: FreezeMask | None
    starts: dict[int, Start]
    optimizer: Iterator[np.ndarray]


def restored(header: Header, container: Container, base: Sequence[Any] | None) -> Values:
    """All values of a file, those that are not in it from their sources, and checked.

    Raises:
        FreezeFileError: if something does not fit.
    """
    mask = mask_of(header, container)
    trained = {} if mask is None else {e.position: e.trained.reshape(-1) for e in mask.entries}
    masks = [None if r.entry is None else trained[r.entry.position] for r in header.records]
    stored, optimizer = _stored_values(header, container, masks)
    sources = [(r.source, r.shape, r.dtype) for r in header.records if r.source is not None]
    if any(source.kind == SEED for source, _, _ in sources):
        _check_generator(header)
    sourced = iter(regenerate(sources, base))
    values: list[np.ndarray] = []
    starts: dict[int, Start] = {}
    for record, chosen, bits in zip(header.records, masks, stored, strict=True):
        if record.source is not None:
            rest = next(sourced)
            if record.entry is not None and record.source.kind in (SEED, INITIALIZER):
                starts[record.entry.position] = _start(header, record.source, rest)
            if chosen is not None:
                if header.decay_scale is not None and record.source.kind != CONSTANT:
                    rest = scaled(rest, record.dtype, header.decay_scale)
                rest[chosen] = bits
            bits = rest
        if checksum(bits) != record.checksum:
            raise _mismatch(header, record)
        values.append(bits)
    return Values(values, mask, starts, optimizer)


def _start(header: Header, source: Source, bits: np.ndarray) -> Start:
    drawn_with = "" if is_portable(source) else _versions_in_words(header.versions)
    return Start(source, checksum(bits), drawn_with)


def _versions_in_words(found: Mapping[str, str]) -> str:
    """As `present_versions` says it, of the machine that wrote a file."""
    backends = [f"{name} {found[name]}" for name in found if name not in ("keras", "keras_freeze")]
    return f"Keras {found.get('keras')} on {', '.join(backends)}"


def check_variables(header: Header, variables: Sequence[Any]) -> None:
    """Compares a model's variables with those that a file describes.

    Raises:
        FreezeFileError: if they are not the same.
    """
    if len(variables) != len(header.records):
        raise FreezeFileError(
            f"The file describes {len(header.records)} variables, and the model has "
            f"{len(variables)}: {', '.join(path_of(v) for v in variables[:12])}, ..."
        )
    for record, variable in zip(header.records, variables, strict=True):
        is_same = (tuple(variable.shape), dtype_of(variable)) == (record.shape, record.dtype)
        if is_random_state(variable):
            is_same = tuple(variable.shape) == record.shape and are_integers(
                dtype_of(variable), record.dtype
            )
        if not is_same or not same_path(path_of(variable), record.path):
            raise FreezeFileError(
                f"The file describes {record.path!r} of shape {record.shape} and "
                f"{record.dtype}, where the model has {path_of(variable)!r} of shape "
                f"{tuple(variable.shape)} and {dtype_of(variable)}."
            )


def mask_of(header: Header, container: Container) -> FreezeMask | None:
    """The freezing mask of a file; None if it has none."""
    entries = [MaskEntry(*entry) for entry in decode_entries(header, container)]
    return FreezeMask(entries, num_rescued=header.num_rescued) if entries else None


def _stored_values(
    header: Header, container: Container, masks: Sequence[np.ndarray | None]
) -> tuple[list[np.ndarray], Iterator[np.ndarray]]:
    """The values in the file, of the model's variables and of the optimizer's."""
    kinds = [
        (r.num_stored(0 if m is None else int(np.count_nonzero(m))), WIDTHS[r.stored_dtype])
        for r, m in zip(header.records, masks, strict=True)
    ]
    slots = () if header.optimizer is None else header.optimizer.slots
    kinds += [(slot.size, WIDTHS[slot.dtype]) for slot in slots]
    decoded = decode_values(container.exponents, container.mantissas, kinds)
    stored = []
    for record in header.records:
        bits = next(decoded)
        if record.stored_dtype != record.dtype:
            rounded = from_bits(bits, record.stored_dtype)
            bits = as_bits(rounded.astype(numpy_dtype(record.dtype)), record.dtype)
        stored.append(bits)
    return stored, decoded


def _checked_base(
    header: Header, base: Any, custom_objects: Mapping[str, Any] | None, max_bytes: int | None
) -> list[Any] | None:
    if header.base is None:
        if base is not None:
            raise FreezeFileError(f"It was saved without a base. Received: base={base!r}")
        return None
    if base is None:
        raise FreezeFileError(
            "It was saved on a base, the model with the fingerprint "
            f"{header.base[:16]}...: pass it, or the path of its file, as `base`."
        )
    variables = variables_of(open_base(base, custom_objects, max_bytes))
    check_fingerprint(header, variables)
    return variables


def check_fingerprint(header: Header, variables: Sequence[Any]) -> None:
    """Compares the variables of a base with the fingerprint in a file.

    Raises:
        FreezeFileError: if the file was saved on another base.
    """
    found = fingerprint(variables)
    if found != header.base:
        raise FreezeFileError(
            "It was saved on another base, with the fingerprint "
            f"{(header.base or '')[:16]}... Received: a base with {found[:16]}..."
        )


def _check_generator(header: Header) -> None:
    if header.generator != initializers.GENERATOR:
        raise FreezeFileError(
            f"Its seeds belong to the generator {header.generator!r:.100}, "
            f"and this keras_freeze has {initializers.GENERATOR!r}."
        )


def _mismatch(header: Header, record: Record) -> FreezeFileError:
    what = f"The values of {record.path!r} do not match their checksum."
    if record.source is not None and record.source.kind == INITIALIZER:
        there = ", ".join(f"{name} {version}" for name, version in header.versions.items())
        here = ", ".join(f"{name} {version}" for name, version in versions().items())
        what += (
            " Its frozen weights were drawn by an initializer of Keras, whose numbers may change "
            f"between versions and machines. It was saved with {there}; this is {here}. Seeds of "
            "keras_freeze.reinitialize are portable, as is a file with include_frozen=True."
        )
    return FreezeFileError(what)


def _keep_initializers(
    model: keras.Model, variables: Sequence[Any], records: Sequence[Record]
) -> None:
    """Tells layers where their weights came from, so that the model can be saved again."""
    found = initializers_of(model)
    for variable, record in zip(variables, records, strict=True):
        source = record.source
        if source is not None and source.kind in (SEED, INITIALIZER) and id(variable) in found:
            layer, attribute = found[id(variable)]
            setattr(layer, attribute, initializer_of(source))


def _restore_optimizer(model: keras.Model, header: Header, values: Values) -> None:
    _register_mask(model, header, values)
    optimizer, freeze_optimizer = optimizer_of(model), freeze_optimizer_of(model)
    state = header.optimizer
    if optimizer is None or (values.mask is None and state is None):
        check_rest(values)
        return
    if freeze_optimizer is not None:
        freeze_optimizer.restore(_state(header, values, freeze_optimizer))
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    if freeze_optimizer is not None:
        restrict_gradients(model)
    if state is None:
        check_rest(values)
        return
    variables = optimizer_variables(model)
    if len(variables) != len(state.slots) or not all(
        tuple(variable.shape) == slot.shape
        and (dtype_of(variable) == slot.dtype or are_integers(dtype_of(variable), slot.dtype))
        for variable, slot in zip(variables, state.slots, strict=False)
    ):
        raise FreezeFileError("It holds the state of another optimizer than the one it describes.")
    for variable, slot, bits in zip(variables, state.slots, values.optimizer, strict=True):
        set_bits(variable, bits, slot.dtype)


def _register_mask(model: keras.Model, header: Header, values: Values) -> None:
    """Says of the variables what is frozen: any FreezeOptimizer to come takes it over."""
    if values.mask is None:
        return
    scale = header.decay_scale
    decay_scale = None if scale is None else keras.Variable(scale, dtype="float32", trainable=False)
    masks = {entry.position: constant_mask(entry.trained) for entry in values.mask.entries}
    found = [(v, r.entry) for v, r in zip(variables_of(model), header.records, strict=True)]
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


def check_rest(values: Values) -> None:
    """Reads the optimizer's values without keeping them, so that the file is checked to its end.

    Raises:
        FreezeFileError: if they cannot be read, or something follows them.
    """
    for _ in values.optimizer:
        pass


def _state(header: Header, values: Values, optimizer: FreezeOptimizer) -> State:
    mask = values.mask
    compact, found = mask is not None and optimizer.suits_compact(mask), False
    if header.optimizer is not None:
        compact, found = header.optimizer.compact, header.optimizer.found
    return State(mask, compact, header.decay_scale, found, values.starts)
