"""Headers and files made by hand, and what Keras looks up of them."""

import copy
import functools
import zlib

import keras
import numpy as np
from helpers import blobs, compiled
from keras import layers, ops
from keras.src.saving import serialization_lib

import keras_freeze as kf
from keras_freeze.storage.container import read_container, write_container


def network():
    """Layers, operations and objects of each kind that a configuration has a place for."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,), name="inputs")
    x = layers.Dense(
        8,
        activation="tanh",
        kernel_initializer=keras.initializers.GlorotUniform(seed=1),
        bias_initializer=keras.initializers.Constant(0.5),
        kernel_regularizer=keras.regularizers.L2(0.1),
        kernel_constraint=keras.constraints.MaxNorm(),
        name="body",
    )(inputs)
    x = layers.Dropout(0.1, name="dropout")(ops.add(x, 1.0))
    return keras.Model(inputs, layers.Dense(3, name="head")(x))


def trained(model):
    optimizer = kf.FreezeOptimizer(
        keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10), momentum=0.9), 0.75
    )
    compiled(model, optimizer, metrics=[keras.metrics.SparseCategoricalAccuracy()])
    kf.freeze(model, *blobs())
    model.fit(*blobs(), verbose=0)
    return model


def content_of(path):
    """What is in a file of that network, which is written there."""
    kf.save(trained(network()), path, include_optimizer=True)
    return read_container(path)


def write(path, content, header):
    write_container(path, header, content.mask, content.exponents, content.mantissas)


def changed(header, place, value):
    """A copy of a header with a value at a place."""
    header = copy.deepcopy(header)
    target = functools.reduce(lambda inner, key: inner[key], place[:-1], header)
    target[place[-1]] = value
    return header


def layer_named(header, name):
    listed = header["model"]["config"]["layers"]
    (index,) = (i for i, layer in enumerate(listed) if layer["config"].get("name") == name)
    return ("model", "config", "layers", index)


def spy_on_lookups(monkeypatch):
    """A list that gets what Keras looks up for a configuration."""
    found = []
    retrieve = serialization_lib._retrieve_class_or_fn

    def spy(*arguments, **keywords):
        found.append(retrieve(*arguments, **keywords))
        return found[-1]

    monkeypatch.setattr(serialization_lib, "_retrieve_class_or_fn", spy)
    return found


def node_of(header, name):
    return functools.reduce(lambda inner, key: inner[key], layer_named(header, name), header)[
        "inbound_nodes"
    ]


def described(kind, /, **config):
    """A layer of Keras as a configuration has it."""
    module = "keras" if kind == "Sequential" else "keras.layers"
    return {"module": module, "class_name": kind, "config": config, "registered_name": None}


def sequential(*listed, shape=(4,), dtype="float32"):
    first = described("InputLayer", batch_shape=[None, *shape], dtype=dtype, name="input")
    return described("Sequential", name="model", layers=[first, *listed])


def write_small(path, model, variables=()):
    """A file of a few hundred bytes that announces variables of zeros."""
    records = []
    for name, shape in variables:
        record = {"path": name, "shape": list(shape), "source": ["constant", 0]}
        records.append({**record, "crc32": zlib.crc32(bytes(4 * int(np.prod(shape))))})
    write_container(path, {"versions": {}, "model": model, "variables": records}, b"", b"", b"")
