"""Write the preset dictionaries for the compression of headers of `.freeze` files.

    python tools/make_header_dictionary.py 1 keras_freeze/storage/header_dictionary.txt
    python tools/make_header_dictionary.py 2 keras_freeze/storage/header_dictionary_2.txt

Configurations of Keras models resemble each other. A preset dictionary lets deflate refer to
frequent text: that of version 1 of the format is about the most used layers, optimizers and losses,
the most common last; that of version 2 ends with whole headers of the two LeNets, and begins with
as much of the first one as deflate can refer to. They are parts of the format: files cannot be read
without exactly these texts, so they must not be written again once a version is released. The
script documents where the texts came from.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers

import keras_freeze as kf
from keras_freeze._utils.files import replacing
from keras_freeze.initializers.generator import GENERATOR
from keras_freeze.storage.container import DICTIONARIES, read_container

_LONGEST = 2**15 - 262  # the largest distance that deflate refers to


def main() -> None:
    text = {"1": _version_1, "2": _version_2}[sys.argv[1]]()
    with replacing(sys.argv[2]) as path:
        path.write_text(text)


def _version_1() -> str:
    texts = [_text(_described(model)) for model in (_rare(), _sequence(), _image())]
    texts.append(
        _text({"generator": GENERATOR, "variables": _records(), "num_rescued": 1})
        + _text({"decay_scale": 0.99, "base": "", "optimizer": {"compact": True, "variables": []}})
    )
    texts.append(_text({"versions": {"keras_freeze": "0.1.0", "keras": "3.15.1"}, "tensorflow": 2}))
    return "\n".join(texts)


def _version_2() -> str:
    lenets = (kf.models.lenet_300_100(seed=0), kf.models.lenet_5_caffe(seed=0))
    headers = [_header(model) for model in lenets]
    return (DICTIONARIES[1].decode() + "\n".join(headers))[-_LONGEST:]


def _header(model: keras.Model) -> str:
    """Return the header of a file of a model, without the numbers that each file has of its own."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    _compiled(model, keras.optimizers.SGD(0.1, momentum=0.9), loss)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 28, 28, 1)).astype("float32"), np.arange(8)
    kf.freeze(model, x, y, drawn=True)
    model.fit(x, y, verbose=0)
    kf.quantize(model, step=0.01)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.freeze"
        kf.save(model, file)
        text = _text(read_container(file).header)
    return re.sub(r'"(crc32|grid)":[^,}]+', r'"\1":0', text)


def _text(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _described(model: keras.Model) -> object:
    return keras.saving.serialize_keras_object(model)


def _records() -> list[object]:
    source = ["seed", "kaiming_uniform", 0, 0]
    kernel = {"path": "conv/kernel", "shape": [3, 3, 64, 64], "source": source, "mask": [0, 1]}
    others = [
        {"path": "bn/moving_variance", "shape": [64], "trainable": False, "crc32": 0},
        {"path": "bn/moving_mean", "shape": [64], "trainable": False, "crc32": 0},
        {"path": "bn/beta", "shape": [64], "crc32": 0},
        {"path": "bn/gamma", "shape": [64], "crc32": 0},
        {"path": "seed_generator_state", "dtype": "uint32", "source": ["constant", 0]},
        {"path": "sequential/dense/kernel", "source": ["base", 0], "stored_dtype": "float16"},
        {"path": "fc/bias", "shape": [500], "crc32": 0},
    ]
    seeded = {"path": "fc1/kernel", "shape": [500, 10], "source": ["seed", "xavier_normal", 0, 1]}
    return [kernel, *others, {**seeded, "mask": [2, 1], "crc32": 0}]


def _compiled(model: keras.Model, optimizer: object, loss: object) -> keras.Model:
    model.compile(
        optimizer=kf.FreezeOptimizer(optimizer, freeze_rate=0.99, l2=5e-4),
        loss=loss,
        metrics=["accuracy"],
    )
    return model


def _rare() -> keras.Model:
    image = keras.Input((32, 32, 3), name="input_layer")
    x = layers.Rescaling(1 / 255)(image)
    x = layers.RandomFlip("horizontal")(x)
    x = layers.SeparableConv2D(16, 3, padding="same")(x)
    x = layers.DepthwiseConv2D(3, padding="same")(x)
    x = layers.Conv2DTranspose(8, 3, strides=2, padding="same")(x)
    x = layers.UpSampling2D()(x)
    x = layers.Concatenate()([x, x])
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Reshape((4, 4))(x)
    x = layers.Bidirectional(layers.GRU(8))(x)
    model = keras.Model(
        image, layers.Dense(1, "sigmoid", kernel_regularizer="l2")(x), name="functional"
    )
    return _compiled(model, keras.optimizers.RMSprop(1e-3), keras.losses.BinaryCrossentropy())


def _sequence() -> keras.Model:
    tokens = keras.Input((32,), dtype="int32", name="tokens")
    x = layers.Embedding(1000, 32, name="embedding")(tokens)
    x = layers.LSTM(32, return_sequences=True, name="lstm")(x)
    attended = layers.MultiHeadAttention(2, 16, name="multi_head_attention")(x, x)
    x = layers.LayerNormalization(epsilon=1e-6)(layers.Add()([x, attended]))
    x = layers.GlobalAveragePooling1D()(x)
    x = layers.Dropout(0.1)(x)
    model = keras.Model(tokens, layers.Dense(2, activation="softmax")(x), name="model")
    return _compiled(
        model,
        keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(1e-3, 1000)),
        keras.losses.CategoricalCrossentropy(),
    )


def _image() -> keras.Model:
    image = keras.Input((28, 28, 1), name="image")
    x = layers.ZeroPadding2D(1)(image)
    x = layers.Conv2D(
        64, 3, use_bias=False, kernel_initializer=kf.initializers.KaimingUniform(), name="conv1"
    )(x)
    x = layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name="conv1_bn")(x)
    x = layers.ReLU(name="conv1_relu")(x)
    x = layers.Conv2D(64, 3, padding="same", name="conv2")(x)
    x = layers.MaxPooling2D(2, name="pool1")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(128, name="dense")(x)
    x = layers.Activation("relu")(x)
    fully = kf.initializers.XavierNormal(0, 1)
    x = layers.Dense(300, activation="relu", kernel_initializer=fully, name="fc1")(x)
    x = layers.Dense(10, kernel_initializer=kf.initializers.XavierNormal(0, 2), name="fc2")(x)
    model = keras.Model(image, x, name="lenet")
    return _compiled(
        model,
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


if __name__ == "__main__":
    main()
