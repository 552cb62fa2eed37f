"""The vocabularies of a model's lookup layers, which Keras keeps in files beside the variables.

A layer that was given its vocabulary as a list has it in its configuration. One that was adapted,
or has it from a file or from `set_vocabulary`, gets it back from the header.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_freeze import _keras_private
from keras_freeze.storage.errors import FreezeFileError
from keras_freeze.storage.header import Vocabulary

_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup)
# TextVectorization has a StringLookup inside, which is a layer of the model too.
_KNOWN_ASSETS = (
    keras.layers.StringLookup.save_assets,
    keras.layers.TextVectorization.save_assets,
)
_WITH_VOCABULARY = {"StringLookup", "IntegerLookup", "TextVectorization"}
# Keras makes arrays in which every token takes as much as the longest.
_LARGEST_ARRAY = 1 << 26  # elements


def check_assets(model: keras.Model) -> None:
    """Refuses layers that keep files which are no vocabularies.

    Raises:
        ValueError: if there is one.
    """
    for layer in _keras_private.all_layers(model):
        if hasattr(layer, "save_assets") and type(layer).save_assets not in _KNOWN_ASSETS:
            raise ValueError(
                f"The layer {layer.name!r} ({type(layer).__name__}) keeps files beside its "
                "variables. A `.freeze` file holds vocabularies of Keras's own layers: save the "
                "model without this layer, and apply it to the data before."
            )


def vocabularies_of(model: keras.Model, all_of_them: bool) -> tuple[Vocabulary | None, ...]:
    """The vocabularies of a model's lookup layers, in the order of its layers.

    Args:
        model: the model.
        all_of_them: whether those that follow from the configuration are given too.

    Returns:
        One for each, None where there is none to store; nothing if all are None.

    Raises:
        ValueError: if one cannot be read.
    """
    found = [
        None if _is_configured(layer) and not all_of_them else _vocabulary_of(layer)
        for layer in _lookups_in(model)
    ]
    return tuple(found) if any(found) else ()


def set_vocabularies(model: keras.Model, vocabularies: Sequence[Vocabulary | None]) -> None:
    """Gives the lookup layers of a model their vocabularies.

    Raises:
        FreezeFileError: if they do not fit.
    """
    if not vocabularies:
        return
    layers = list(_lookups_in(model))
    if len(layers) != len(vocabularies):
        raise FreezeFileError(
            f"The file has {len(vocabularies)} vocabularies, and the model has {len(layers)} "
            "layers for them."
        )
    for layer, vocabulary in zip(layers, vocabularies, strict=True):
        if vocabulary is not None:
            _set_vocabulary(layer, vocabulary)


def check_same_vocabularies(model: keras.Model, vocabularies: Sequence[Vocabulary | None]) -> None:
    """Compares the vocabularies of a model with those of a file.

    Raises:
        FreezeFileError: if they differ.
    """
    found = vocabularies_of(model, all_of_them=True)
    if found != tuple(vocabularies):
        raise FreezeFileError("The vocabularies of the model are not those of the file.")


def check_configured(config: Any) -> None:
    """Refuses vocabularies in a configuration that Keras would read from a file of this machine,
    and settings for which it would make arrays much larger than the configuration.

    Raises:
        FreezeFileError: if there is one.
    """
    for described in _configs_in(config):
        vocabulary = described.get("vocabulary")
        if vocabulary is not None and not isinstance(vocabulary, list):
            raise FreezeFileError(
                f"A layer takes its vocabulary from {vocabulary!r:.100}, which is no list."
            )
        tokens = vocabulary or []
        lengths = [
            max((len(str(token)) for token in tokens), default=0) * len(tokens),
            described.get("num_oov_indices"),
            described.get("ngrams"),
            described.get("max_tokens") if described.get("pad_to_max_tokens") else 0,
        ]
        if any(isinstance(length, int) and length > _LARGEST_ARRAY for length in lengths):
            raise FreezeFileError(
                f"A layer of {len(tokens):,} tokens would take an array of more than "
                f"{_LARGEST_ARRAY:,} elements."
            )


def _configs_in(config: Any) -> Iterator[Mapping[str, Any]]:
    """The configurations of layers with vocabularies."""
    pending = [config]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            inner = value.get("config")
            if value.get("class_name") in _WITH_VOCABULARY and isinstance(inner, Mapping):
                yield inner
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)


def _lookups_in(model: keras.Model) -> Iterator[Any]:
    return (layer for layer in _keras_private.all_layers(model) if isinstance(layer, _LOOKUPS))


def _is_configured(layer: Any) -> bool:
    """Whether a layer's vocabulary, without weights, is the list in its configuration."""
    given = layer.get_config()["vocabulary"]
    return (
        given is not None
        and layer.output_mode != "tf_idf"
        and any(list(given) == list(layer.get_vocabulary(special)) for special in (True, False))
    )


def _vocabulary_of(layer: Any) -> Vocabulary | None:
    """A layer's vocabulary, special tokens and their weights included; None if it is not set."""
    if not int(layer.lookup_table.size()):
        return None
    try:
        tokens = layer.get_vocabulary()
    except Exception as error:  # bytes that are no text in the layer's encoding, say
        raise ValueError(
            f"The vocabulary of the layer {layer.name!r} cannot be read: {error}"
        ) from error
    convert = str if layer.vocabulary_dtype == "string" else int
    return Vocabulary(
        tuple(None if token is None else convert(token) for token in tokens),
        tuple(layer.idf_weights_const.numpy().tolist()) if layer.output_mode == "tf_idf" else None,
    )


def _set_vocabulary(layer: Any, vocabulary: Vocabulary) -> None:
    tokens, weights = vocabulary.tokens, vocabulary.idf_weights
    expected = None
    if layer.output_mode == "tf_idf":
        expected = layer.max_tokens if layer.pad_to_max_tokens else len(tokens)
    if (None if weights is None else len(weights)) != expected:
        raise FreezeFileError(
            f"The vocabulary of {layer.name!r} has {len(weights or ())} weights instead of "
            f"{expected or 0}."
        )
    kind = str if layer.vocabulary_dtype == "string" else int
    if not all(isinstance(token, kind) or token is None for token in tokens):
        raise FreezeFileError(
            f"The vocabulary of {layer.name!r} has tokens that are no {kind.__name__}."
        )
    try:
        layer.set_vocabulary(
            # Not an array of strings: they would lose zero bytes at their end.
            np.array(tokens, object if kind is str else np.int64),
            None if weights is None else np.array(weights[: len(tokens)]),
        )
        found = _vocabulary_of(layer)
    except Exception as error:  # Keras raises anything for one that it does not take
        raise FreezeFileError(
            f"Keras does not take the vocabulary of {layer.name!r}: {error}"
        ) from error
    if found != vocabulary:
        raise FreezeFileError(f"The vocabulary of {layer.name!r} comes out as another one.")
