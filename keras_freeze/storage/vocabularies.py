"""The vocabularies of a model's lookup layers, which Keras stores in files next to the variables.

A vocabulary that was passed to a layer as a list is in the layer's configuration. One that comes
from `adapt`, a file or `set_vocabulary` is stored in the header.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_freeze import _keras_private
from keras_freeze.storage.checks.configuration import dictionaries_in
from keras_freeze.storage.errors import FreezeFileError
from keras_freeze.storage.header import Vocabulary

_LOOKUPS = (keras.layers.StringLookup, keras.layers.IntegerLookup)
# TextVectorization has a StringLookup inside, which is a layer of the model too.
_KNOWN_ASSETS = (
    keras.layers.StringLookup.save_assets,
    keras.layers.TextVectorization.save_assets,
)
_WITH_VOCABULARY = {"StringLookup", "IntegerLookup", "TextVectorization"}
# Keras creates arrays in which every token takes as much memory as the longest one.
_LARGEST_ARRAY = 1 << 26  # elements


def check_assets(model: keras.Model) -> None:
    """Raise ValueError if a model has layers that store files other than vocabularies."""
    for layer in _keras_private.all_layers(model):
        if hasattr(layer, "save_assets") and type(layer).save_assets not in _KNOWN_ASSETS:
            raise ValueError(
                f"The layer {layer.name!r} ({type(layer).__name__}) stores files in addition to "
                "its variables. A `.freeze` file can hold the vocabularies of Keras's layers only: "
                "save the model without this layer, and apply the layer to the data beforehand."
            )


def vocabularies_of(model: keras.Model, all_of_them: bool) -> tuple[Vocabulary | None, ...]:
    """Return the vocabularies of a model's lookup layers, as `Header` has them.

    Args:
        model: The model.
        all_of_them: Whether to include those that follow from the configuration.

    Raises:
        ValueError: If a vocabulary cannot be read.
    """
    found = [
        None if _is_configured(layer) and not all_of_them else _vocabulary_of(layer)
        for layer in _lookups_in(model)
    ]
    return tuple(found) if any(found) else ()


def set_vocabularies(model: keras.Model, vocabularies: Sequence[Vocabulary | None]) -> None:
    """Set the vocabularies of a model's lookup layers; raise FreezeFileError if they do not fit."""
    if not vocabularies:
        return
    layers = list(_lookups_in(model))
    if len(layers) != len(vocabularies):
        raise FreezeFileError(
            f"The file has {len(vocabularies)} vocabularies, but the model has {len(layers)} "
            "lookup layers."
        )
    for layer, vocabulary in zip(layers, vocabularies, strict=True):
        if vocabulary is not None:
            _set_vocabulary(layer, vocabulary)


def check_same_vocabularies(model: keras.Model, vocabularies: Sequence[Vocabulary | None]) -> None:
    """Raise FreezeFileError if a model has other vocabularies than a file."""
    found = vocabularies_of(model, all_of_them=True)
    if found != tuple(vocabularies):
        raise FreezeFileError("The vocabularies of the model differ from those of the file.")


def check_configured(config: Any) -> None:
    """Raise FreezeFileError for lookup layers that would read a file, or create huge arrays."""
    for described in dictionaries_in(config):
        inner = described.get("config")
        if described.get("class_name") in _WITH_VOCABULARY and isinstance(inner, Mapping):
            _check_lookup(inner)


def _check_lookup(config: Mapping[str, Any]) -> None:
    vocabulary = config.get("vocabulary")
    if vocabulary is not None and not isinstance(vocabulary, list):
        raise FreezeFileError(
            f"A lookup layer has the vocabulary {vocabulary!r:.100}, which is not a list."
        )
    tokens = vocabulary or []
    lengths = [
        max((len(str(token)) for token in tokens), default=0) * len(tokens),
        config.get("num_oov_indices"),
        config.get("ngrams"),
        config.get("max_tokens") if config.get("pad_to_max_tokens") else 0,
    ]
    if any(isinstance(length, int) and length > _LARGEST_ARRAY for length in lengths):
        raise FreezeFileError(
            f"A lookup layer of {len(tokens):,} tokens would create an array of more than "
            f"{_LARGEST_ARRAY:,} elements."
        )


def _lookups_in(model: keras.Model) -> Iterator[Any]:
    return (layer for layer in _keras_private.all_layers(model) if isinstance(layer, _LOOKUPS))


def _is_configured(layer: Any) -> bool:
    """Return whether a layer's configuration contains its vocabulary, and it has no weights."""
    given = layer.get_config()["vocabulary"]
    return (
        given is not None
        and layer.output_mode != "tf_idf"
        and any(list(given) == list(layer.get_vocabulary(special)) for special in (True, False))
    )


def _vocabulary_of(layer: Any) -> Vocabulary | None:
    """Return a layer's vocabulary including special tokens; None if it is not set."""
    if not int(layer.lookup_table.size()):
        return None
    try:
        tokens = layer.get_vocabulary()
    except Exception as error:  # e.g. bytes that are not text in the layer's encoding
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
            f"The vocabulary of {layer.name!r} has tokens that are not of type {kind.__name__}."
        )
    try:
        layer.set_vocabulary(
            # Not an array of strings, in which zero bytes at their end would be lost.
            np.array(tokens, object if kind is str else np.int64),
            None if weights is None else np.array(weights[: len(tokens)]),
        )
        found = _vocabulary_of(layer)
    except Exception as error:  # Keras raises errors of many types
        raise FreezeFileError(
            f"Keras does not accept the vocabulary of {layer.name!r}: {error}"
        ) from error
    if found != vocabulary:
        raise FreezeFileError(f"Keras changes the vocabulary of {layer.name!r}.")
