"""What tests of restricted weight gradients share: models in which every layer is restricted."""

import contextlib
import functools

import keras
import numpy as np
import pytest
from helpers import blobs, is_weight, same_bits, sgd, values_of
from hypothesis import Phase, settings
from hypothesis import strategies as st
from keras import layers as kl

import keras_freeze as kf
from keras_freeze.restricted import block, layers
from keras_freeze.restricted.layers import is_restricted

WAYS = [(True, True), (True, False), (False, True), (False, False)]


TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "mixed_float16": 4e-3, "mixed_bfloat16": 3e-2}


MASKS = {
    "none": lambda size, rng: np.zeros(size, bool),
    "one": lambda size, rng: np.arange(size) == rng.integers(size),
    "all but one": lambda size, rng: np.arange(size) != rng.integers(size),
    "few": lambda size, rng: rng.random(size) < 0.1,
    "half": lambda size, rng: rng.random(size) < 0.5,
}


@contextlib.contextmanager
def every_layer(way=(True, True)):
    """In this scope every layer that can be restricted is, in this way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "cheapest_block", lambda *arguments: way)
        yield


def random_mask(kind="half", seed=0):
    """A mask of every variable that `freeze` asks about."""
    rng = np.random.default_rng(seed)
    return lambda v: MASKS[kind](int(np.prod(v.shape)), rng).reshape(v.shape)


def freeze_optimizer(inner=None, **arguments):
    return kf.FreezeOptimizer(sgd(momentum=0.9) if inner is None else inner, 0.5, **arguments)


def frozen(model, optimizer=None, mask=None, way=(True, True), loss="mse", **arguments):
    """The model, compiled and frozen, with every layer restricted that can be."""
    model.compile(freeze_optimizer() if optimizer is None else optimizer, loss, **arguments)
    with every_layer(way):
        kf.freeze(model, mask=random_mask() if mask is None else mask)
    return model


def restricted_layers(model):
    return [layer for layer in model._flatten_layers() if is_restricted(layer)]


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def one_layer(layer, input_shape, dtype="float32"):
    dtype = "float64" if dtype == "float64" else "float32"
    return keras.Sequential([keras.Input(input_shape, dtype=dtype), layer])


def small_mlp(dtype=None, **arguments):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6,)),
            kl.Dense(8, activation="tanh", dtype=dtype, **arguments),
            kl.Dense(3, dtype=dtype),
        ]
    )


def small_convnet():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            kl.Conv2D(4, 3, activation="tanh"),
            kl.Conv2D(3, 2, strides=2),
            kl.Flatten(),
            kl.Dense(3),
        ]
    )


class Nested(keras.Model):
    """A model that calls one layer, or what it is given, in a way of the test's own."""

    def __init__(self, call, **layers):
        super().__init__()
        self._call = call
        for name, layer in layers.items():
            setattr(self, name, layer)

    def call(self, x, training=None):
        return self._call(self, x)


def built(model, *shape):
    model(normal(*shape))
    return model


def trained_weights(model, data, batch_size=12, epochs=2):
    model.fit(*data, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return values_of(model.trainable_variables)


def assert_trained_alike(model, start, found, expected, tolerance=1e-5, may_stay=False):
    """As without restriction within rounding; frozen weights as at the start, bit for bit."""
    mask = kf.get_mask(model)
    for variable, before, one, other in zip(
        model.trainable_variables, start, found, expected, strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
        if is_weight(variable):
            assert same_bits(one[~mask[variable]], before[~mask[variable]])
    assert may_stay or any((one != before).any() for one, before in zip(found, start, strict=True))


def train_both(make_model, data, tolerance=1e-5, optimizer=None, prepare=None, **arguments):
    """Trains a frozen model with and without restricted gradients, which must be the same.

    Returns the restricted model.
    """
    models, starts, values = [], [], []
    for restore in (False, True):
        keras.utils.set_random_seed(0)
        model = frozen(make_model(), None if optimizer is None else optimizer(), **arguments)
        if restore:
            kf.restore_gradients(model)
        if prepare is not None:
            prepare(model)
        starts.append(values_of(model.trainable_variables))
        values.append(trained_weights(model, data))
        models.append(model)
    assert_trained_alike(models[0], starts[0], *values, tolerance)
    return models[0]


def points():
    x, _ = blobs()
    return x, normal(len(x), 3, seed=1)


def images():
    return normal(24, 6, 6, 2), normal(24, 3, seed=1)


def spy_on_blocks(monkeypatch):
    """A list that gets the blocks of which a gradient is computed, or traced."""
    blocks, gradient = [], block.Block.gradient

    def spy(block, *args):
        blocks.append(block)
        return gradient(block, *args)

    monkeypatch.setattr(block.Block, "gradient", spy)
    return blocks


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = kl.Dense(8, activation="tanh"), kl.Dense(3)

    def call(self, x):
        return self.second(self.first(x))


class SubclassedWithTraining(Subclassed):
    def call(self, x, training=None):
        return self.second(self.first(x))


def corner_mask(v, last):
    flat = np.zeros(int(np.prod(v.shape)), bool)
    flat[-4:] = last
    flat[:4] |= not last
    return flat.reshape(v.shape)


def spread_mask(v):
    """As many entries as the corner mask has, in more rows and columns."""
    flat = np.zeros(int(np.prod(v.shape)), bool)
    flat[:: flat.size // 4 - 1][:4] = True
    flat[np.flatnonzero(~flat)[: 4 - flat.sum()]] = True
    return flat.reshape(v.shape)


PRODUCTS = [
    ("ab,bc->ac", (4,), (5,)),
    ("abc,cd->abd", (2, 4), (2, 5)),
    ("abc,dc->abd", (2, 4), (2, 5)),
    ("abc,dbc->ad", (2, 4), (5,)),
    ("abc,cbd->ad", (2, 4), (5,)),
    ("abcd,cde->abe", (2, 3, 4), (2, 5)),
    ("abc,cde->abde", (2, 4), (2, 3, 5)),
    ("abc,dce->abed", (2, 4), (2, 5, 3)),
    ("...x,xy->...y", (2, 3, 4), (5,)),
    ("bc...,cd->bd...", (4, 2, 3), (5, 2, 3)),
]


CONVOLUTIONS = {1: kl.Conv1D, 2: kl.Conv2D, 3: kl.Conv3D}
DEPTHWISE = {
    1: [kl.DepthwiseConv1D, kl.SeparableConv1D],
    2: [kl.DepthwiseConv2D, kl.SeparableConv2D],
}


@st.composite
def convolutions(draw):
    """As `dense_layers`."""
    rank = draw(st.integers(1, 3))
    sizes = st.integers(1, 3)
    arguments = {
        "filters": draw(st.integers(1, 4)),
        "kernel_size": tuple(draw(sizes) for _ in range(rank)),
        "padding": draw(st.sampled_from(["valid", "same", "causal"][: 3 if rank == 1 else 2])),
        "use_bias": draw(st.booleans()),
        "activation": draw(st.sampled_from([None, "tanh"])),
    }
    # TensorFlow takes one of them at a time, and no dilation in three dimensions on a CPU.
    if draw(st.booleans()) or rank == 3:
        arguments["strides"] = (draw(sizes),) * rank
    else:
        arguments["dilation_rate"] = draw(sizes)
    shape = tuple(draw(st.integers(7, 9 if rank < 3 else 7)) for _ in range(rank))
    return _case(draw, CONVOLUTIONS[rank], arguments, (*shape, draw(st.integers(1, 4))))


@st.composite
def depthwise_convolutions(draw):
    """As `dense_layers`, of layers that have a kernel for each input channel."""
    rank = draw(st.integers(1, 2))
    sizes = st.integers(1, 3)
    arguments = {
        "kernel_size": tuple(draw(sizes) for _ in range(rank)),
        "depth_multiplier": draw(st.integers(1, 3)),
        "padding": draw(st.sampled_from(["valid", "same"])),
        "data_format": draw(st.sampled_from(["channels_last", "channels_first"])),
        "use_bias": draw(st.booleans()),
        "activation": draw(st.sampled_from([None, "tanh"])),
        draw(st.sampled_from(["strides", "dilation_rate"])): draw(sizes),
    }
    layer_class = draw(st.sampled_from(DEPTHWISE[rank]))
    if layer_class in (kl.SeparableConv1D, kl.SeparableConv2D):
        arguments["filters"] = draw(st.integers(1, 4))
    shape = [draw(st.integers(7, 9)) for _ in range(rank)]
    axis = 0 if arguments["data_format"] == "channels_first" else rank
    shape.insert(axis, draw(st.integers(1, 4)))
    return _case(draw, layer_class, arguments, tuple(shape))


def _case(draw, layer_class, arguments, input_shape):
    dtype = draw(st.sampled_from(list(TOLERANCES)))
    return functools.partial(layer_class, **arguments, dtype=dtype), input_shape, dtype


@st.composite
def dense_layers(draw):
    """A function that makes a layer, an input shape that fits it, and the layer's dtype."""
    arguments = {
        "units": draw(st.integers(1, 6)),
        "use_bias": draw(st.booleans()),
        "activation": draw(st.sampled_from([None, "relu", "gelu"])),
    }
    spread = draw(st.sampled_from([(), (3,), (2, 3)]))
    return _case(draw, kl.Dense, arguments, (*spread, draw(st.integers(1, 6))))


@st.composite
def einsum_dense_layers(draw):
    """As `dense_layers`."""
    equation, input_shape, output_shape = draw(st.sampled_from(PRODUCTS))
    with_bias = draw(st.booleans()) and "d" in equation.split("->")[1]
    arguments = {
        "equation": equation,
        "output_shape": output_shape,
        "bias_axes": "d" if with_bias else None,
        "activation": draw(st.sampled_from([None, "tanh"])),
    }
    return _case(draw, kl.EinsumDense, arguments, input_shape)


# How a layer is restricted.
restrictions = {
    "seed": st.integers(0, 1000),
    "kind": st.sampled_from(list(MASKS)),
    "way": st.sampled_from(WAYS),
}

# Shrinking a failure would train for minutes.
few_examples = settings(
    max_examples=25 if keras.backend.backend() == "torch" else 4,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
