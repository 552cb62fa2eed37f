"""Layers that learn from data what they look up, in the tests' process and in a fresh one.

    python tests/vocabulary_cases.py FOLDER

loads every case of the folder and writes beside it what its layer makes of the case's data.
"""

import sys
from pathlib import Path

import keras
import numpy as np
from keras import layers

import keras_freeze as kf

TEXTS = np.array(["The cat sat, ü!", "a dog ran", "the dog and the übercat", "nothing known"])
WORDS = np.array([["cat"], ["dog"], ["wolf"], ["über"], ["cow"]])
NUMBERS = np.array([[12], [7], [99], [7], [-5]])
VALUES = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")


def adapted(layer, data):
    layer.adapt(data)
    return layer


def reset():
    layer = layers.StringLookup(vocabulary=["a", "b"])
    layer.set_vocabulary(["wolf", "cow"])
    return layer


def tf_idf_from_a_list(**arguments):
    layer = layers.StringLookup(output_mode="tf_idf", **arguments)
    layer.set_vocabulary(["cat", "dog", "wolf"], idf_weights=[0.1, 0.7, 1.3])
    return layer


# How a layer is made, and what it is tried on.
LAYERS = {
    "text": (lambda: adapted(layers.TextVectorization(output_sequence_length=5), TEXTS), TEXTS),
    "text_multi_hot": (
        lambda: adapted(layers.TextVectorization(max_tokens=6, output_mode="multi_hot"), TEXTS),
        TEXTS,
    ),
    "text_tf_idf": (
        lambda: adapted(layers.TextVectorization(output_mode="tf_idf"), TEXTS),
        TEXTS,
    ),
    "text_tf_idf_padded": (
        lambda: adapted(
            layers.TextVectorization(30, output_mode="tf_idf", pad_to_max_tokens=True), TEXTS
        ),
        TEXTS,
    ),
    "text_ngrams": (
        lambda: adapted(
            layers.TextVectorization(standardize="lower", split="character", ngrams=2), TEXTS
        ),
        TEXTS,
    ),
    "text_given": (lambda: layers.TextVectorization(vocabulary=["the", "dog", "ü"]), TEXTS),
    "text_odd": (
        lambda: adapted(
            layers.TextVectorization(standardize=None, split=None),
            np.array(["line\nfeed", "zero\0", " ", "\x1b[2J", "\u2028"]),
        ),
        np.array([" ", "line\nfeed", "zero\0", "zero", "\u2028"]),
    ),
    "text_unset": (lambda: layers.TextVectorization(), None),
    "strings": (lambda: adapted(layers.StringLookup(), WORDS[:3]), WORDS),
    "strings_given": (lambda: layers.StringLookup(vocabulary=["cat", "wolf"]), WORDS),
    "strings_mask": (
        lambda: layers.StringLookup(vocabulary=["cat"], mask_token="dog", num_oov_indices=3),
        WORDS,
    ),
    "strings_no_oov": (lambda: adapted(layers.StringLookup(num_oov_indices=0), WORDS), WORDS),
    "strings_one_hot": (
        lambda: adapted(layers.StringLookup(output_mode="one_hot"), WORDS[:3]),
        WORDS,
    ),
    "strings_inverted": (
        lambda: layers.StringLookup(vocabulary=["cat", "wolf"], invert=True),
        np.array([[1], [2], [0]]),
    ),
    "strings_reset": (reset, WORDS),
    "strings_tf_idf": (tf_idf_from_a_list, WORDS),
    "strings_tf_idf_padded": (
        lambda: tf_idf_from_a_list(max_tokens=9, pad_to_max_tokens=True),
        WORDS,
    ),
    "strings_tf_idf_given": (
        lambda: layers.StringLookup(
            vocabulary=["cat", "dog"], idf_weights=[0.3, 0.4], output_mode="tf_idf"
        ),
        WORDS,
    ),
    "integers": (lambda: adapted(layers.IntegerLookup(), NUMBERS[:3]), NUMBERS),
    "integers_given": (lambda: layers.IntegerLookup(vocabulary=[7, -5]), NUMBERS),
    "integers_count": (
        lambda: adapted(layers.IntegerLookup(num_oov_indices=2, output_mode="count"), NUMBERS[:3]),
        NUMBERS,
    ),
    "discretization": (lambda: adapted(layers.Discretization(num_bins=5), VALUES), VALUES),
    "discretization_given": (lambda: layers.Discretization([-0.5, 0.1, 0.7]), VALUES),
    "normalization": (lambda: adapted(layers.Normalization(), VALUES), VALUES),
    "normalization_given": (
        lambda: layers.Normalization(mean=[1.0, 2.0, 3.0], variance=[0.1, 0.2, 0.3]),
        VALUES,
    ),
    "normalization_inverted": (
        lambda: adapted(layers.Normalization(axis=None, invert=True), VALUES),
        VALUES,
    ),
    "hashing": (lambda: layers.Hashing(5, salt=[1, 2]), WORDS),
    "category_encoding": (lambda: layers.CategoryEncoding(100), np.abs(NUMBERS)),
}


def model_of(layer, data):
    """A model with a weight besides the layer, which is in a model in the model."""
    data = TEXTS if data is None else data
    kind = {"U": "string", "i": "int64", "f": "float32"}[data.dtype.kind]
    inputs = keras.Input(data.shape[1:], dtype=kind, name="looked_up")
    inner = keras.Model(inputs, layer(inputs), name="inner")
    other = keras.Input((4,))
    outputs = [inner(inputs), layers.Dense(3)(other)]
    return keras.Model([inputs, other], outputs)


def layer_in(model):
    return model.get_layer("inner").layers[-1]


def outputs_of(model, data):
    """What the layer makes of data; its vocabulary where data are None."""
    layer = layer_in(model)
    if data is None:
        return np.array(layer.get_vocabulary())
    if getattr(layer, "invert", False) and data.dtype.kind == "i":
        # Only tf.data takes the texts of it on every backend.
        import tensorflow as tf

        return next(tf.data.Dataset.from_tensors(data).map(layer).as_numpy_iterator())
    found = layer(data)
    if hasattr(found, "to_tensor"):
        found = found.to_tensor()
    return np.array(found.numpy() if hasattr(found, "numpy") else found)


def main(folder):
    for path in sorted(Path(folder).glob("*.freeze")):
        found = outputs_of(kf.load(path), LAYERS[path.stem][1])
        np.save(path.with_suffix(".npy"), found, allow_pickle=True)


if __name__ == "__main__":
    main(sys.argv[1])
