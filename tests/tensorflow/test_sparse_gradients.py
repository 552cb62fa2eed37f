"""Restricted weight gradients against the ordinary ones of the same layers, and NumPy by hand.

Which layers are restricted is a matter of measured costs; here they all are, in a given way.
"""

import contextlib
import copy
import functools
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    blobs,
    crossentropy,
    gradients_by_autodiff,
    is_weight,
    same_bits,
    sgd,
    training_step,
    value_of,
    values_of,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from keras import layers as kl
from tensorflow.python.saved_model import loader_impl

import keras_freeze as kf
from keras_freeze import backend
from keras_freeze.optimizer import compact_update
from keras_freeze.optimizer.strategy import COORDINATE_WISE
from keras_freeze.restricted import block
from keras_freeze.restricted import layers as sparse_gradients
from keras_freeze.restricted.cost_model import cheapest_block
from keras_freeze.restricted.layers import is_restricted

pytestmark = [pytest.mark.cases(1), pytest.mark.slow]

WAYS = [(True, True), (True, False), (False, True), (False, False)]
TOLERANCES = {"float32": 1e-5, "float64": 1e-12, "mixed_float16": 4e-3, "mixed_bfloat16": 3e-2}
MASKS = {
    "none": lambda size, rng: np.zeros(size, bool),
    "one": lambda size, rng: np.arange(size) == rng.integers(size),
    "all but one": lambda size, rng: np.arange(size) != rng.integers(size),
    "few": lambda size, rng: rng.random(size) < 0.1,
    "half": lambda size, rng: rng.random(size) < 0.5,
}
# Shrinking a failure would train for minutes.
few_examples = settings(max_examples=25, derandomize=True, phases=[Phase.explicit, Phase.generate])


@pytest.fixture(autouse=True)
def restricted_products(monkeypatch):
    """The blocks of which a gradient was computed, or traced, in a test."""
    blocks, gradient = [], block.Block.gradient

    def spy(block, *args):
        blocks.append(block)
        return gradient(block, *args)

    monkeypatch.setattr(block.Block, "gradient", spy)
    return blocks


@contextlib.contextmanager
def every_layer(way=(True, True)):
    """In this scope every layer that can be restricted is, in this way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_gradients, "cheapest_block", lambda matrices, places: way)
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


def numpy_of(tensor):
    return None if tensor is None else value_of(tf.convert_to_tensor(tensor))


def differentiate(model, x, traced=False, training=True):
    """Outputs, and gradients of their product with fixed numbers: of variables, then of inputs."""
    upstream = normal(*model(x).shape, seed=9, dtype="float64")
    found = {}

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = model(x, training=training)
            loss = tf.reduce_sum(tf.cast(outputs, "float64") * upstream)
        sources = [*(v.value for v in model.trainable_variables), x]
        gradients = tape.gradient(loss, sources)
        found["compact"] = [isinstance(g, backend.CompactGradient) for g in gradients]
        return outputs, [None if g is None else tf.convert_to_tensor(g) for g in gradients]

    outputs, gradients = (tf.function(run) if traced else run)(tf.constant(x))
    return numpy_of(outputs), [numpy_of(g) for g in gradients], found["compact"]


def assert_gradients_are_the_ordinary_ones(model, x, tolerance=1e-5, traced=False, compact=True):
    """Within rounding at trained entries, bit for bit in all else; then the model is restored."""
    mask = kf.get_mask(model)
    outputs, gradients, are_compact = differentiate(model, x, traced)
    assert any(are_compact) == compact
    kf.restore_gradients(model)
    expected_outputs, expected, still_compact = differentiate(model, x, traced)
    assert not any(still_compact)
    assert same_bits(outputs, expected_outputs)
    variables = [*model.trainable_variables, None]
    for variable, found, ordinary in zip(variables, gradients, expected, strict=True):
        if variable is None or not is_weight(variable):
            assert same_bits(found, ordinary)
            continue
        assert found.dtype == ordinary.dtype
        assert found.shape == ordinary.shape
        trained = mask[variable]
        scale = max(1.0, np.abs(ordinary).max(initial=0.0))
        error = np.abs(found.astype("float64") - ordinary)[trained]
        assert error.max(initial=0.0) <= tolerance * scale


def check_layer(layer, input_shape, seed, kind, way, dtype, traced=False):
    keras.utils.set_random_seed(seed)
    model = frozen(one_layer(layer, input_shape, dtype), mask=random_mask(kind, seed), way=way)
    all_trained = kf.get_mask(model)[layer.kernel].all()
    assert restricted_layers(model) == ([] if all_trained else [layer])
    x = normal(2, *input_shape, seed=seed, dtype="float64" if dtype == "float64" else "float32")
    assert_gradients_are_the_ordinary_ones(
        model, x, TOLERANCES[dtype], traced, compact=not all_trained
    )


common = {
    "seed": st.integers(0, 1000),
    "kind": st.sampled_from(list(MASKS)),
    "way": st.sampled_from(WAYS),
    "dtype": st.sampled_from(list(TOLERANCES)),
}


@few_examples
@given(
    spread=st.sampled_from([(), (3,), (2, 3)]),
    features=st.integers(1, 6),
    units=st.integers(1, 6),
    use_bias=st.booleans(),
    activation=st.sampled_from([None, "relu", "gelu"]),
    **common,
)
def test_dense_gradient(spread, features, units, use_bias, activation, dtype, **rest):
    layer = kl.Dense(units, activation=activation, use_bias=use_bias, dtype=dtype)
    check_layer(layer, (*spread, features), dtype=dtype, **rest)


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


@few_examples
@given(
    case=st.sampled_from(PRODUCTS),
    with_bias=st.booleans(),
    activation=st.sampled_from([None, "tanh"]),
    **common,
)
def test_einsum_dense_gradient(case, with_bias, activation, dtype, **rest):
    equation, input_shape, output_shape = case
    bias_axes = "d" if with_bias and "d" in equation.split("->")[1] else None
    layer = kl.EinsumDense(
        equation, output_shape, bias_axes=bias_axes, activation=activation, dtype=dtype
    )
    check_layer(layer, input_shape, dtype=dtype, **rest)


@pytest.mark.parametrize(
    ("equation", "input_shape", "output_shape"),
    [
        ("abc,bcd->abd", (2, 4), (2, 5)),
        ("abc,cd->ad", (2, 4), (5,)),
        ("abcd,de->acbe", (2, 3, 4), (3, 2, 5)),  # but for the order of the results
    ],
)
def test_einsum_dense_that_is_no_matrix_product_is_left_alone(equation, input_shape, output_shape):
    model = frozen(one_layer(kl.EinsumDense(equation, output_shape), input_shape))
    assert not restricted_layers(model)
    assert not any(differentiate(model, normal(2, *input_shape))[2])


CONVOLUTIONS = {1: kl.Conv1D, 2: kl.Conv2D, 3: kl.Conv3D}


@st.composite
def convolutions(draw):
    """A convolution's arguments, its rank and an input shape that it fits."""
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
    return rank, arguments, (*shape, draw(st.integers(1, 4)))


@few_examples
@given(case=convolutions(), **common)
def test_convolution_gradient(case, dtype, **rest):
    rank, arguments, input_shape = case
    check_layer(CONVOLUTIONS[rank](**arguments, dtype=dtype), input_shape, dtype=dtype, **rest)


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("rank", CONVOLUTIONS)
def test_channels_first(rank, way):
    trial = CONVOLUTIONS[rank](1, 1, data_format="channels_first")
    try:
        with tf.GradientTape() as tape:
            output = trial(tf.zeros((1, 1, *[2] * rank)))
        tape.gradient(output, trial.kernel)
    except (tf.errors.UnimplementedError, tf.errors.InvalidArgumentError):
        pytest.skip("TensorFlow has no convolution with channels first for this processor")
    layer = CONVOLUTIONS[rank](4, 2, data_format="channels_first", activation="tanh")
    check_layer(layer, (3, *[5] * rank), 0, "few", way, "float32")


@pytest.mark.parametrize("kind", ["none", "few"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("layer", "input_shape"),
    [
        (lambda: kl.Dense(4, activation="tanh"), (3, 5)),
        (lambda: kl.Conv1D(4, 3, padding="causal"), (6, 5)),
        (lambda: kl.Conv2D(4, 3, strides=2, padding="same"), (5, 6, 3)),
        (lambda: kl.Conv1D(4, 4, dilation_rate=2, padding="same"), (7, 5)),
        (lambda: kl.Conv2D(4, (2, 3), dilation_rate=(3, 2), padding="same"), (5, 6, 3)),
    ],
    ids=["Dense", "Conv1D", "Conv2D", "dilated Conv1D", "dilated Conv2D"],
)
def test_gradient_in_a_graph(layer, input_shape, way, kind):
    check_layer(layer(), input_shape, 0, kind, way, "float32", traced=True)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_whole_row_or_column_is_trained(way, axis):
    def row(v):
        chosen = np.arange(v.shape[axis]) == 1
        return np.array(np.broadcast_to(chosen[:, None] if axis == 0 else chosen, v.shape))

    model = frozen(one_layer(kl.Dense(5), (4,)), mask=row, way=way)
    assert kf.get_mask(model).num_trained == (5, 4)[axis]
    assert_gradients_are_the_ordinary_ones(model, normal(3, 4))


def test_grouped_convolution_is_left_alone():
    model = frozen(one_layer(kl.Conv2D(4, 3, groups=2), (6, 6, 4)))
    assert not restricted_layers(model)


def test_dense_gradient_by_hand():
    model = frozen(one_layer(kl.Dense(5), (4,)), mask=random_mask("few", 3))
    x, upstream = normal(7, 4), normal(7, 5, seed=9)
    (kernel, bias, inputs) = differentiate(model, x)[1]
    trained = kf.get_mask(model)[model.layers[0].kernel]
    assert trained.any()
    np.testing.assert_allclose(kernel, np.where(trained, x.T @ upstream, 0.0), rtol=1e-5)
    np.testing.assert_allclose(bias, upstream.sum(0), rtol=1e-5)
    weights = value_of(model.layers[0].kernel)
    np.testing.assert_allclose(inputs, upstream @ weights.T, rtol=1e-4, atol=1e-5)


def test_convolution_gradient_by_hand():
    model = frozen(one_layer(kl.Conv2D(2, (2, 3)), (4, 5, 3)), mask=random_mask("half"))
    x, upstream = normal(2, 4, 5, 3), normal(2, 3, 3, 2, seed=9)
    expected = np.zeros((2, 3, 3, 2))
    for i in range(2):
        for j in range(3):
            patch = x[:, i : i + 3, j : j + 3]
            expected[i, j] = np.einsum("bhwc,bhwf->cf", patch, upstream)
    trained = kf.get_mask(model)[model.layers[0].kernel]
    kernel = differentiate(model, x)[1][0]
    np.testing.assert_allclose(kernel, np.where(trained, expected, 0.0), rtol=1e-4, atol=1e-5)


# Training


def trained_weights(model, data, batch_size=12, epochs=2):
    model.fit(*data, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0)
    return values_of(model.trainable_variables)


def assert_trained_alike(model, start, found, expected, tolerance=1e-5):
    """As without restriction within rounding; frozen weights as at the start, bit for bit."""
    mask = kf.get_mask(model)
    for variable, before, one, other in zip(
        model.trainable_variables, start, found, expected, strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
        if is_weight(variable):
            assert same_bits(one[~mask[variable]], before[~mask[variable]])
    assert any((one != before).any() for one, before in zip(found, start, strict=True))


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


@functools.cache
def trained_without_restriction():
    model = frozen(small_mlp())
    kf.restore_gradients(model)
    return trained_weights(model, points())


LOOPS = {
    "default": {},
    "jit": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "steps_per_execution": {"steps_per_execution": 3},
}


@pytest.mark.parametrize("loop", LOOPS)
def test_fit(loop, restricted_products):
    model = frozen(small_mlp(), **LOOPS[loop])
    start = values_of(model.trainable_variables)
    found = trained_weights(model, points())
    assert_trained_alike(model, start, found, trained_without_restriction())
    assert len({id(block) for block in restricted_products}) == 2


def test_train_on_batch(restricted_products):
    model = frozen(small_mlp())
    start = values_of(model.trainable_variables)
    x, y = points()
    for _ in range(2):
        for i in range(0, len(x), 12):
            model.train_on_batch(x[i : i + 12], y[i : i + 12])
    found = values_of(model.trainable_variables)
    assert_trained_alike(model, start, found, trained_without_restriction())
    assert restricted_products


@pytest.mark.parametrize("jit_compile", [False, True])
def test_loop_of_ones_own(jit_compile, restricted_products):
    model, optimizer, loss = small_mlp(), freeze_optimizer(), keras.losses.MeanSquaredError()
    with every_layer():
        kf.freeze(model, mask=random_mask(), optimizer=optimizer, loss=loss)
    start = values_of(model.trainable_variables)

    step = training_step(model, optimizer, loss, jit_compile)
    x, y = points()
    for _ in range(2):
        for i in range(0, len(x), 12):
            step(tf.constant(x[i : i + 12]), tf.constant(y[i : i + 12]))
    found = values_of(model.trainable_variables)
    assert_trained_alike(model, start, found, trained_without_restriction())
    assert restricted_products


@pytest.mark.parametrize("inner", COORDINATE_WISE, ids=lambda inner: inner.__name__)
def test_every_coordinate_wise_optimizer(inner, restricted_products):
    train_both(
        small_mlp,
        points(),
        optimizer=lambda: freeze_optimizer(inner(0.01)),
        run_eagerly=True,
    )
    assert restricted_products


OPTIMIZERS = {
    "clipnorm": ({"clipnorm": 0.1}, {}),
    "global_clipnorm": ({"global_clipnorm": 0.1}, {}),
    "accumulation": ({"gradient_accumulation_steps": 2}, {}),
    "weight_decay": ({"weight_decay": 0.1}, {}),
    "l2": ({}, {"l2": 0.1}),
    "zero": ({}, {"frozen_weights": "zero"}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_of_the_optimizer(name, restricted_products):
    inner, outer = OPTIMIZERS[name]
    train_both(
        small_mlp,
        points(),
        optimizer=lambda: freeze_optimizer(sgd(momentum=0.9, **inner), **outer),
        run_eagerly=name != "accumulation",
    )
    assert restricted_products


def test_frozen_weights_decay(restricted_products):
    values = []
    for restore in (False, True):
        model = frozen(small_mlp(), freeze_optimizer(l2=0.1, frozen_weights="decay"))
        if restore:
            kf.restore_gradients(model)
        values.append(trained_weights(model, points()))
    for one, other in zip(*values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert restricted_products


@pytest.mark.parametrize(
    ("dtype", "l2", "scaled"),
    [
        ("mixed_float16", 0.0, False),
        ("mixed_float16", 0.1, False),
        ("mixed_float16", 0.1, True),
        ("mixed_bfloat16", 0.1, False),
        ("float64", 0.1, True),
    ],
)
def test_precision_and_loss_scale(dtype, l2, scaled, restricted_products):
    def optimizer():
        inner = freeze_optimizer(keras.optimizers.Adam(0.01), l2=l2)
        return keras.optimizers.LossScaleOptimizer(inner) if scaled else inner

    make_model = functools.partial(small_mlp, dtype)
    tolerance = {"float64": 1e-10}.get(dtype, 1e-3)
    train_both(
        make_model, points(), tolerance, optimizer, run_eagerly=not scaled, auto_scale_loss=False
    )
    assert restricted_products


def test_default_loss_scale_of_mixed_float16(restricted_products):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = train_both(small_convnet, images(), 1e-3)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert restricted_products


def images():
    return normal(24, 6, 6, 2), normal(24, 3, seed=1)


@pytest.mark.parametrize("kind", ["none", "one", "few"])
@pytest.mark.parametrize("eager", [False, True])
def test_convolutional_network(kind, eager, restricted_products):
    mask = {}  # the same for both models

    def same_mask(v):
        return mask.setdefault(tuple(v.shape), random_mask(kind)(v))

    train_both(small_convnet, images(), mask=same_mask, run_eagerly=eager)
    assert restricted_products


def functional(connect, shape=(6,)):
    def make():
        keras.utils.set_random_seed(0)
        inputs = keras.Input(shape)
        return keras.Model(inputs, connect(inputs))

    return make


def shared(uses):
    def connect(x):
        layer = kl.Dense(6, activation="tanh")
        for _ in range(uses):
            x = layer(x)
        return kl.Dense(3)(x)

    return functional(connect)


def nested(x):
    inner = keras.Sequential([keras.Input((6,)), kl.Dense(5, activation="tanh")])
    return kl.Dense(3)(inner(x))


def attention(x):
    x = kl.Reshape((2, 3))(x)
    return kl.MultiHeadAttention(2, 3)(x, x)[:, 0]


class Cell(keras.Layer):
    """A recurrent cell of two Dense layers."""

    def __init__(self, units, **arguments):
        super().__init__(**arguments)
        self.state_size = units
        self.from_inputs, self.from_state = kl.Dense(units), kl.Dense(units)

    def build(self, shape):
        self.from_inputs.build(shape)
        self.from_state.build((None, self.state_size))
        self.built = True

    def call(self, x, states):
        h = keras.ops.tanh(self.from_inputs(x) + self.from_state(states[0]))
        return h, [h]


class ReadTwice(keras.Layer):
    """Uses a Dense layer `uses` times and reads its kernel besides."""

    def __init__(self, uses, as_loss):
        super().__init__()
        self.dense, self.uses, self.as_loss = kl.Dense(6, activation="tanh"), uses, as_loss

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        for _ in range(self.uses):
            x = self.dense(x)
        if self.as_loss:
            self.add_loss(0.1 * keras.ops.sum(keras.ops.square(self.dense.kernel)))
            return x
        return keras.ops.matmul(x, keras.ops.transpose(self.dense.kernel))


class InCondition(keras.Layer):
    """Uses a Dense layer in a branch and outside of it."""

    def __init__(self):
        super().__init__()
        self.dense = kl.Dense(6, activation="tanh")

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        y = keras.ops.cond(keras.ops.sum(x) < 1e9, lambda: self.dense(x), lambda: x)
        return self.dense(y)


class FunctionInLoop(InCondition):
    """Uses a Dense layer in a function of a loop."""

    def call(self, x):
        function = tf.function(self.dense)
        body = lambda i, x: (i + 1, function(x))  # noqa: E731
        _, x = tf.while_loop(lambda i, _: i < 3, body, (tf.constant(0), x), maximum_iterations=3)
        return x


class InFunction(InCondition):
    """Uses a Dense layer in a function, several times."""

    @tf.function
    def call(self, x):
        return self.dense(self.dense(x))


def rnn(x, unroll):
    return kl.RNN(Cell(3), unroll=unroll)(kl.Reshape((3, 2))(x))


# With the number of layers whose gradient is restricted.
NETWORKS = {
    "used twice": (shared(2), 2),
    "used three times": (shared(3), 2),
    "nested": (functional(nested), 2),
    "attention": (functional(attention), 4),
    "cell in a loop": (functional(lambda x: rnn(x, False)), 0),
    "cell unrolled": (functional(lambda x: rnn(x, True)), 2),
    "kernel read": (functional(lambda x: kl.Dense(3)(ReadTwice(1, False)(x))), 2),
    "used twice and read": (functional(lambda x: kl.Dense(3)(ReadTwice(2, False)(x))), 2),
    "kernel in a loss": (functional(lambda x: kl.Dense(3)(ReadTwice(1, True)(x))), 2),
    "used twice and in a loss": (functional(lambda x: kl.Dense(3)(ReadTwice(2, True)(x))), 2),
    "in a branch": (functional(lambda x: kl.Dense(3)(InCondition()(x))), 2),
    "in a function": (functional(lambda x: kl.Dense(3)(InFunction()(x))), 1),
    "in a function in a loop": (functional(lambda x: kl.Dense(3)(FunctionInLoop()(x))), 1),
    "constraint": (functools.partial(small_mlp, kernel_constraint="non_neg"), 2),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_network(network, restricted_products):
    make_model, number = NETWORKS[network]
    train_both(make_model, points())
    assert len({id(block) for block in restricted_products}) == number


@pytest.mark.parametrize(
    "network", ["used three times", "cell in a loop", "used twice and read", "in a function"]
)
def test_network_run_eagerly(network):
    train_both(NETWORKS[network][0], points(), run_eagerly=True)


@pytest.mark.parametrize("network", ["used three times", "cell in a loop"])
def test_network_that_xla_compiles(network):
    train_both(NETWORKS[network][0], points(), jit_compile=True)


@pytest.mark.parametrize("steps", [3, None])
def test_time_distributed(steps, restricted_products):
    network = functional(lambda x: kl.TimeDistributed(kl.Dense(3))(x), (steps, 2))
    train_both(network, (normal(12, 3, 2), normal(12, 3, 3, seed=1)))
    assert restricted_products


def test_regularized_kernel_is_left_alone():
    model = frozen(small_mlp(kernel_regularizer="l2"))
    assert restricted_layers(model) == [model.layers[1]]
    train_both(functools.partial(small_mlp, kernel_regularizer="l2"), points(), run_eagerly=True)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = kl.Dense(8, activation="tanh"), kl.Dense(3)

    def call(self, x):
        return self.second(self.first(x))


class SubclassedWithTraining(Subclassed):
    def call(self, x, training=None):
        return self.second(self.first(x))


@pytest.mark.parametrize("kind", [Subclassed, SubclassedWithTraining])
def test_subclassed_model_is_restricted_if_it_is_told_that_it_trains(kind, restricted_products):
    train_both(lambda: built(kind(), 1, 6), points())
    assert bool(restricted_products) == (kind is SubclassedWithTraining)


@pytest.mark.parametrize("eager", [False, True])
def test_rematerialized_layers(eager, restricted_products):
    # Of Dense layers in a graph, Keras can only rematerialize the activations.
    def make():
        with keras.RematScope("full" if eager else "activations"):
            return small_mlp()

    train_both(make, points(), run_eagerly=eager)
    assert bool(restricted_products) == (not eager)


class GradientPenalty(keras.Sequential):
    """Adds to the loss the squared gradient for the inputs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            penalty = tf.reduce_sum(tf.square(inner.gradient(loss, x)))
            total = loss + 30.0 * penalty
        gradients = outer.gradient(total, [v.value for v in self.trainable_variables])
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": total}


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", ["dense", "convolution"])
def test_gradient_penalty(kind, eager, restricted_products):
    def make():
        if kind == "dense":
            return GradientPenalty([keras.Input((6,)), kl.Dense(8, activation="tanh"), kl.Dense(3)])
        convolutions = [kl.Conv1D(4, 3, activation="tanh"), kl.Conv1D(3, 4)]
        return GradientPenalty([keras.Input((6,)), kl.Reshape((6, 1)), *convolutions, kl.Flatten()])

    train_both(make, points(), run_eagerly=eager)
    assert restricted_products


def test_layer_that_is_not_trainable():
    def make():
        model = small_mlp()
        model.layers[0].trainable = False
        return model

    model = train_both(make, points())
    assert restricted_layers(model) == [model.layers[1]]


def test_layer_that_is_made_untrainable_later():
    def prepare(model):
        model.layers[0].trainable = False

    train_both(small_mlp, points(), prepare=prepare)


def test_lora_enabled_after_freeze():
    model = frozen(small_mlp())
    model.layers[0].enable_lora(2)
    outputs, gradients, compact = differentiate(model, normal(4, 6))
    kf.restore_gradients(model)
    expected_outputs, expected, _ = differentiate(model, normal(4, 6))
    assert same_bits(outputs, expected_outputs)
    assert sum(compact) == 1  # the other layer's
    variables = model.trainable_variables
    of_lora = [i for i, variable in enumerate(variables) if "lora" in variable.path]
    assert len(of_lora) == 2
    assert all(same_bits(gradients[i], expected[i]) for i in of_lora)


def test_quantization_after_freeze():
    model = frozen(small_mlp())
    model.quantize("int8")
    outputs, _, compact = differentiate(model, normal(4, 6))
    assert not any(compact)
    kf.restore_gradients(model)
    assert same_bits(outputs, differentiate(model, normal(4, 6))[0])


def test_sparse_inputs():
    model = frozen(
        keras.Sequential([keras.Input((6,), sparse=True), kl.Dense(5), kl.Dense(3)]),
    )
    x = tf.sparse.from_dense(np.where(normal(4, 6) > 0, 1.0, 0.0).astype("float32"))
    values = []
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
        values.append([numpy_of(g) for g in gradients])
        kf.restore_gradients(model)
    trained = [kf.get_mask(model)[layer.kernel] for layer in model.layers]
    assert same_bits(values[0][0], values[1][0])
    np.testing.assert_allclose(values[0][2][trained[1]], values[1][2][trained[1]], rtol=1e-5)


def test_inputs_whose_last_dimension_is_not_known_in_the_graph():
    x, y = points()
    data = tf.data.Dataset.from_generator(
        lambda: iter([(x, y)]),
        output_signature=(tf.TensorSpec([None, None]), tf.TensorSpec([None, None])),
    )
    values = []
    for restore in (False, True):
        model = frozen(small_mlp())
        if restore:
            kf.restore_gradients(model)
        model.fit(data, steps_per_epoch=1, verbose=0)
        values.append(values_of(model.trainable_variables))
    for one, other in zip(*values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


class TiedAutoencoder(keras.Model):
    """Its decoder multiplies by the transposed kernel of its encoder."""

    def __init__(self, decoder):
        super().__init__()
        self.encoder, self.decoder = kl.Dense(4, use_bias=False), decoder

    def build(self, shape):
        self.encoder.build(shape)
        self.decoder.build(shape)
        self.decoder._tracker.unlock()
        self.decoder._trainable_variables.clear()
        self.decoder._kernel = self.encoder._kernel
        self.decoder._tracker.lock()
        self.built = True

    def call(self, x, training=None):
        return self.decoder(self.encoder(x))


@pytest.mark.parametrize(
    "decoder",
    [lambda: kl.EinsumDense("ab,cb->ac", 4), lambda: kl.Dense(4)],
    ids=["transposed", "the same"],
)
def test_layers_that_share_a_kernel(decoder):
    """The forward pass, too, must be each layer's own."""
    model = TiedAutoencoder(decoder())
    model.build((None, 4))
    frozen(model)
    assert len(model.trainable_variables) <= 2
    x = normal(3, 4)
    outputs, gradients, _ = differentiate(model, x)
    kf.restore_gradients(model)
    expected_outputs, expected, _ = differentiate(model, x)
    assert same_bits(outputs, expected_outputs)
    kernel = model.encoder.kernel
    trained = kf.get_mask(model)[kernel]
    (place,) = [i for i, v in enumerate(model.trainable_variables) if v is kernel]
    found, ordinary = gradients[place], expected[place]
    np.testing.assert_allclose(found[trained], ordinary[trained], rtol=1e-5, atol=1e-6)
    assert same_bits(gradients[-1], expected[-1])


def test_layer_that_was_given_its_kernel_instead_of_being_built():
    model = Nested(
        lambda model, x: model.second(model.first(x)),
        first=kl.Dense(4, use_bias=False),
        second=kl.Dense(4),
    )
    model.first.build((None, 4))
    model.second._kernel, model.second.bias, model.second.built = model.first._kernel, None, True
    model.built = True
    frozen(model)
    x = normal(3, 4)
    found = differentiate(model, x)[1]
    kf.restore_gradients(model)
    expected = differentiate(model, x)[1]
    trained = kf.get_mask(model)[model.first.kernel]
    np.testing.assert_allclose(found[0][trained], expected[0][trained], rtol=1e-5, atol=1e-6)


def test_sparse_gradient_of_a_vector_is_not_taken_for_a_compact_one():
    class LookUp(keras.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(6,), name="kernel", initializer="ones")

        def call(self, x):
            return tf.gather(self.kernel.value, tf.cast(x, "int32"))

    model = keras.Sequential([keras.Input((3,)), LookUp()])
    trained = np.array([True, True, False, True, False, False])
    frozen(model, freeze_optimizer(sgd(1.0)), mask=lambda v: trained)
    model.fit(np.array([[5, 4, 3]]), np.zeros((1, 3)), verbose=0)
    # The loss is the mean of three squares; only entry 3 was looked up and is trained.
    np.testing.assert_allclose(value_of(model.weights[0]), [1, 1, 1, 1 / 3, 1, 1], rtol=1e-6)


def test_stateless_scope_gives_the_values_of_the_scope():
    model = frozen(one_layer(kl.Dense(5), (4,)))
    mapping = [(v, tf.ones(v.shape)) for v in model.trainable_variables]
    x = normal(3, 4)
    with keras.StatelessScope(state_mapping=mapping):
        outputs = value_of(model(x, training=True))
    np.testing.assert_allclose(outputs, np.repeat(x.sum(1, keepdims=True), 5, 1) + 1, rtol=1e-4)


# Which optimizer


def all_dense(model, x):
    return not any(differentiate(model, x)[2])


def moved(before, after):
    return [(one != other).mean() for one, other in zip(before, after, strict=True)]


class FunctionModel(SubclassedWithTraining):
    """Its `call` is traced once, whoever trains it."""

    call = tf.function(SubclassedWithTraining.call)


@pytest.mark.parametrize("kind", [SubclassedWithTraining, FunctionModel])
def test_another_optimizer_trains_everything(kind):
    model = frozen(built(kind(), 1, 6))
    x, y = points()
    model.fit(x, y, verbose=0)
    model.compile(sgd(0.1), "mse")
    start = values_of(model.trainable_variables)
    model.fit(x, y, verbose=0)
    assert min(moved(start, values_of(model.trainable_variables))) > 0.9
    assert all_dense(model, x)


def test_second_model_that_shares_the_layers_gets_ordinary_gradients():
    model = frozen(small_mlp())
    other = keras.Model(model.inputs, kl.Dense(2)(model.outputs[0]))
    other.compile(sgd(0.1), "mse")
    x, _ = points()
    assert all_dense(other, x)
    start = values_of(model.trainable_variables)
    other.fit(x, normal(len(x), 2), verbose=0)
    assert min(moved(start, values_of(model.trainable_variables))) > 0.9
    assert any(differentiate(model, x)[2])


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


@pytest.mark.parametrize(
    ("by", "way"),
    [*(("state", way) for way in WAYS), ("checkpoint", (True, True)), ("weights", (True, True))],
)
def test_another_mask_reaches_a_train_function_that_is_traced(way, by, tmp_path):
    data = points()
    model = frozen(small_mlp(), mask=functools.partial(corner_mask, last=False), way=way)
    other = frozen(small_mlp(), mask=spread_mask, way=way)
    trained_weights(model, data)
    function = model.train_function
    if by == "state":
        model.set_weights(other.get_weights())
        model.optimizer.restore(other.optimizer.state)
    elif by == "weights":
        model.optimizer.set_weights([value_of(v) for v in other.optimizer.variables])
    else:
        other.save_weights(tmp_path / "w.weights.h5")
        model.load_weights(tmp_path / "w.weights.h5")
    assert kf.get_mask(model) == kf.get_mask(other)
    assert model.train_function is function
    start = values_of(model.trainable_variables)
    found = trained_weights(model, data)
    for variable, before, after in zip(model.trainable_variables, start, found, strict=True):
        if is_weight(variable):
            assert np.array_equal(before != after, kf.get_mask(model)[variable])


def test_another_mask_after_xla_compiled_the_step():
    model = frozen(small_mlp(), mask=functools.partial(corner_mask, last=False), jit_compile=True)
    trained_weights(model, points())
    model.optimizer.restore(frozen(small_mlp(), mask=spread_mask).optimizer.state)
    start = values_of(model.trainable_variables)
    found = trained_weights(model, points())
    for variable, before, after in zip(model.trainable_variables, start, found, strict=True):
        if is_weight(variable):
            assert np.array_equal(before != after, kf.get_mask(model)[variable])


def test_overwrite_restricts_to_the_new_mask(restricted_products):
    def prepare(model):
        restore = not restricted_layers(model)
        trained_weights(model, points(), epochs=1)
        with every_layer():
            kf.freeze(model, mask=random_mask("few", 5), overwrite=True)
        restricted_products.clear()
        if restore:
            kf.restore_gradients(model)
            assert not restricted_layers(model)

    train_both(small_mlp, points(), prepare=prepare)


def test_reinitialize_keeps_the_restriction(restricted_products):
    model = frozen(small_mlp())
    trained_weights(model, points(), epochs=1)
    with every_layer():
        kf.reinitialize(model)
    assert len(restricted_layers(model)) == 2
    restricted_products.clear()
    trained_weights(model, points(), epochs=1)
    assert restricted_products


@pytest.mark.parametrize("inner", [keras.optimizers.Adafactor, keras.optimizers.Lamb])
def test_optimizer_of_whole_variables_restricts_nothing(inner):
    model = frozen(small_mlp(), freeze_optimizer(inner(0.01)))
    assert not restricted_layers(model)
    with every_layer():
        kf.restrict_gradients(model)
    assert not restricted_layers(model)


def test_mask_of_the_first_batch_restricts_nothing():
    model = small_mlp()
    model.compile(freeze_optimizer(), "mse")
    with every_layer():
        trained_weights(model, points())
        kf.restrict_gradients(model)
    assert kf.get_mask(model) is not None
    assert not restricted_layers(model)


def test_optimizer_of_ones_own_beside_a_compiled_one_restricts_nothing():
    model = small_mlp()
    model.compile(sgd(), "mse")
    with every_layer():
        kf.freeze(model, mask=random_mask(), optimizer=freeze_optimizer(), loss="mse")
    x, y = points()
    assert all_dense(model, x)
    start = values_of(model.trainable_variables)
    model.fit(x, y, verbose=0)  # with SGD, which trains everything
    assert min(moved(start, values_of(model.trainable_variables))) > 0.9


def test_inference_and_other_models_use_the_ordinary_call(restricted_products):
    model = frozen(small_mlp())
    outer = keras.Sequential([keras.Input((6,)), model])
    x, y = points()
    assert not any(differentiate(model, x, training=False)[2])
    assert not any(differentiate(outer, x)[2])
    model.predict(x, verbose=0)
    model.evaluate(x, y, verbose=0)
    assert not restricted_products


def gradients_of_mse(model, x, y):
    """In training mode, as they come from the tape."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    return tape.gradient(loss, [v.value for v in model.trainable_variables])


def test_gradient_of_another_mask_is_refused():
    model = frozen(small_mlp(), mask=functools.partial(corner_mask, last=False))
    x, y = points()

    @tf.function
    def gradients():
        return gradients_of_mse(model, x, y)

    model.optimizer.apply(gradients(), model.trainable_variables)
    with every_layer():
        kf.freeze(model, mask=functools.partial(corner_mask, last=True), overwrite=True)
    start = values_of(model.trainable_variables)
    with pytest.raises(ValueError, match="another freezing mask"):
        model.optimizer.apply(gradients(), model.trainable_variables)
    for variable, before in zip(model.trainable_variables, start, strict=True):
        if is_weight(variable):
            assert same_bits(value_of(variable), before)


def test_function_with_a_block_that_was_dropped_is_refused_for_another_mask():
    model = frozen(small_mlp(), mask=functools.partial(corner_mask, last=False))
    other = frozen(small_mlp(), mask=functools.partial(corner_mask, last=True))
    x, y = points()

    @tf.function
    def step():
        model.optimizer.apply(gradients_of_mse(model, x, y), model.trainable_variables)

    step()
    kf.restore_gradients(model)
    step()
    model.optimizer.restore(other.optimizer.state)
    with pytest.raises(tf.errors.InvalidArgumentError, match="traced before"):
        step()


@pytest.mark.parametrize("traced", [False, True])
def test_gradients_can_be_added_and_scaled_by_hand(traced):
    models = [frozen(small_mlp()), frozen(small_mlp())]
    kf.restore_gradients(models[1])
    x, y = points()

    def steps(model):
        variables = model.trainable_variables
        halves = (slice(0, 24), slice(24, 48))
        gradients = [gradients_of_mse(model, x[half], y[half]) for half in halves]
        mean = [(0.5 * one + other / 2.0) * 2.0 for one, other in zip(*gradients, strict=True)]
        model.optimizer.apply(
            [sum([g, tf.zeros_like(v)]) for g, v in zip(mean, variables, strict=True)]
        )

    for model in models:
        (tf.function(steps) if traced else steps)(model)
    for one, other in zip(*(values_of(m.trainable_variables) for m in models), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


MASK = np.random.default_rng(5).random((6, 8)) < 0.5
ARITHMETIC = {
    "array * g": (lambda g: MASK.astype("float32") * g, lambda g: MASK * g),
    "g * array": (lambda g: g * MASK.astype("float32"), lambda g: MASK * g),
    "g * row": (lambda g: g * MASK[0].astype("float32"), lambda g: MASK[0] * g),
    "g * tensor": (lambda g: g * tf.cast(MASK, "float32"), lambda g: MASK * g),
    "tensor * g": (lambda g: tf.cast(MASK, "float32") * g, lambda g: MASK * g),
    "number * g": (lambda g: np.float32(3.0) * g * 2, lambda g: 6.0 * g),
    "scalar / g": (lambda g: g / tf.constant(4.0), lambda g: g / 4.0),
    "g / array": (lambda g: g / np.full((6, 8), 4.0, "float32"), lambda g: g / 4.0),
    "g + array": (lambda g: g + MASK.astype("float32"), lambda g: g + MASK),
    "array - g": (lambda g: MASK.astype("float32") - g, lambda g: MASK - g),
    "g - g": (lambda g: g - g / 2.0, lambda g: g / 2.0),
    "g * g": (lambda g: g * g, np.square),
    "g ** 2": (lambda g: g**2, np.square),
    "g ** 0": (lambda g: g**0, np.ones_like),
    "2 ** g": (lambda g: 2.0**g, np.exp2),
    "-g": (lambda g: -g, np.negative),
    "abs(g)": (abs, np.abs),
    "g > 0": (lambda g: tf.cast(g > 0.0, "float32"), lambda g: g > 0),
    "g @ tensor": (lambda g: g @ tf.ones((8, 2)), lambda g: g @ np.ones((8, 2))),
    "g[0]": (lambda g: g[0], lambda g: g[0]),
    "shape": (lambda g: tf.zeros(g.shape), np.zeros_like),
    "tf.norm": (tf.norm, np.linalg.norm),
    "tf.clip_by_norm": (lambda g: tf.clip_by_norm(g, 1e-3), lambda g: g / np.linalg.norm(g) * 1e-3),
    "tf.clip_by_value": (
        lambda g: tf.clip_by_value(g, -1e-3, 1e-3),
        lambda g: np.clip(g, -1e-3, 1e-3),
    ),
    "tf.reduce_mean": (lambda g: g - tf.reduce_mean(g, 0), lambda g: g - g.mean(0)),
    "keras.ops.sum": (lambda g: keras.ops.sum(g, axis=1), lambda g: g.sum(1)),
    "keras.ops.norm": (keras.ops.norm, np.linalg.norm),
    "keras.ops.add": (lambda g: keras.ops.add(g, 1.0), lambda g: g + 1.0),
    "keras.ops.where": (
        lambda g: keras.ops.where(MASK, g, tf.zeros_like(g)),
        lambda g: np.where(MASK, g, 0.0),
    ),
    "sum of three": (lambda g: sum([g, g, g]), lambda g: 3.0 * g),
}


@pytest.fixture(scope="module")
def kernel_gradients():
    """The restricted gradient of a kernel as a function, and in full shape with zeros."""
    model = frozen(small_mlp())
    kf.restore_gradients(model)
    x, y = points()
    whole = [
        value_of(g) for g in gradients_by_autodiff(model, x, y, keras.losses.MeanSquaredError())
    ]
    expected = whole[0] * kf.get_mask(model)[model.trainable_variables[0]]
    with every_layer():
        kf.restrict_gradients(model)
    return lambda: gradients_of_mse(model, x, y)[0], expected


@pytest.mark.parametrize("where", ["eager", "graph", "outside its function"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_is_that_of_the_gradient_in_full_shape(name, where, kernel_gradients):
    gradient, expected = kernel_gradients
    ours, by_hand = ARITHMETIC[name]
    if where == "eager":
        found = ours(gradient())
    elif where == "graph":
        found = tf.function(lambda: tf.convert_to_tensor(ours(gradient())))()
    else:
        found = ours(tf.function(gradient)())
    np.testing.assert_allclose(np.array(found), by_hand(expected), rtol=1e-4, atol=1e-7)


def test_arithmetic_with_an_array_is_not_done_entry_by_entry(kernel_gradients, monkeypatch):
    calls = []
    times = backend.CompactGradient.__rmul__
    monkeypatch.setattr(
        backend.CompactGradient, "__rmul__", lambda *both: calls.append(both) or times(*both)
    )
    assert isinstance(MASK.astype("float32") * kernel_gradients[0](), tf.Tensor)
    assert len(calls) == 1
    with pytest.raises(TypeError, match="ufunc"):
        np.exp(kernel_gradients[0]())


def test_gradients_that_stay_compact(kernel_gradients):
    gradient = kernel_gradients[0]()
    for result in (gradient * 2.0, 2.0 * gradient, gradient / 2.0, -gradient, gradient - gradient):
        assert isinstance(result, backend.CompactGradient)
    assert isinstance(gradient + gradient, backend.CompactGradient)


def test_optimizers_that_train_different_layers_in_turn(restricted_products):
    """Each knows the kernels by other positions."""
    model = small_mlp()
    all_layers, last_layer = freeze_optimizer(), freeze_optimizer()
    data = points()
    frozen(model, all_layers)
    model.layers[0].trainable = False
    model.compile(last_layer, "mse")
    last_layer.build(model.trainable_variables)  # takes over its part of the mask
    kf.restrict_gradients(model)
    trained_weights(model, data, epochs=1)
    model.layers[0].trainable = True
    model.compile(all_layers, "mse")
    start = values_of(model.trainable_variables)
    restricted_products.clear()
    values = []
    for restore in (False, True):
        for variable, value in zip(model.trainable_variables, start, strict=True):
            variable.assign(value)
        with every_layer():
            kf.restore_gradients(model) if restore else kf.restrict_gradients(model)
        all_layers.reset()
        values.append(trained_weights(model, data, epochs=1))
    for one, other in zip(*values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", None])
def test_reinitialize_of_a_model_that_is_no_longer_frozen(optimizer):
    model = frozen(small_mlp())
    other = keras.Model(model.inputs, model.outputs)
    if optimizer is not None:
        other.compile(optimizer, "mse")
    start = values_of(model.trainable_variables)
    kf.reinitialize(other, seed=3)
    assert min(moved(start[::2], values_of(model.trainable_variables)[::2])) == 1.0


def test_call_that_someone_wrapped_around_a_restricted_one_stays():
    model = frozen(small_mlp())
    layer = model.layers[0]

    @functools.wraps(layer.call)
    def call(*args, restricted=layer.call, **kwargs):
        return 2.0 * restricted(*args, **kwargs)

    vars(layer)["call"] = call
    kf.restore_gradients(model)
    assert vars(layer)["call"] is call
    assert all_dense(model, points()[0])


@pytest.mark.parametrize("loop", ["default", "jit"])
@pytest.mark.parametrize("bias", [0.0, np.nan])
def test_order_of_writing_changes_no_bit(loop, bias, monkeypatch):
    """Of large kernels; here of all."""
    values = []
    for large in (compact_update._LARGE, 0):
        monkeypatch.setattr(compact_update, "_LARGE", large)
        model = frozen(small_mlp(), **LOOPS[loop])
        model.layers[0].bias.assign(tf.fill((8,), bias))
        values.append(trained_weights(model, points()))
    assert all(same_bits(one, other) for one, other in zip(*values, strict=True))
    assert bool(np.isnan(values[0][0]).any()) == np.isnan(bias)


def test_restrict_gradients_names_the_layers():
    model = frozen(small_mlp())
    with every_layer():
        assert kf.restrict_gradients(model) == [layer.name for layer in model.layers]
    with every_layer(None):
        assert kf.restrict_gradients(model) == []


def test_users_own_call_is_left_alone():
    model = small_mlp()
    layer = model.layers[0]
    call = layer.call
    layer.call = lambda inputs: 2.0 * call(inputs)
    own = vars(layer)["call"]
    frozen(model)
    assert restricted_layers(model) == [model.layers[1]]
    kf.restore_gradients(model)
    assert vars(layer)["call"] is own


def test_subclass_of_a_known_layer_is_left_alone():
    class MyDense(kl.Dense):
        pass

    assert not restricted_layers(frozen(one_layer(MyDense(3), (4,))))


def test_restrict_gradients_needs_a_freeze_optimizer():
    model = small_mlp()
    with pytest.raises(ValueError, match="not compiled"):
        kf.restrict_gradients(model)
    model.compile(sgd(), "mse")
    with pytest.raises(ValueError, match="FreezeOptimizer"):
        kf.restrict_gradients(model)


def test_restore_gradients_of_something_else_is_a_type_error():
    with pytest.raises(TypeError, match="model"):
        kf.restore_gradients(kl.Dense(3))


def test_restore_gradients_takes_everything_away():
    model = frozen(small_mlp())
    kf.restore_gradients(model)
    kf.restore_gradients(model)
    assert not any("call" in vars(layer) for layer in model._flatten_layers())
    assert all_dense(model, points()[0])


# Passes that need every score


def function_model():
    return built(FunctionModel(), 1, 6)


@pytest.mark.parametrize("make_model", [small_mlp, function_model])
@pytest.mark.parametrize("trained_before", [False, True])
def test_saliency_and_gradient_flow_are_those_of_all_weights(make_model, trained_before):
    keras.utils.set_random_seed(0)
    model = frozen(make_model(), run_eagerly=False)
    x, y = points()
    if trained_before:
        model.fit(x, y, verbose=0)
    found = [
        list(kf.compute_saliency(model, x, y, criterion).values())
        for criterion in ("snip", "grasp")
    ]
    flow = kf.gradient_flow(model, x, y)
    expected = reference(model)
    for scores, others in zip(found, expected[:2], strict=True):
        for one, other in zip(scores, others, strict=True):
            assert (one != 0).mean() > 0.9
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(flow, expected[2], rtol=1e-5)


def reference(model):
    """Scores and gradient flow of an unrestricted copy."""
    x, y = points()
    copied = small_mlp()
    for variable, other in zip(copied.trainable_variables, model.trainable_variables, strict=True):
        variable.assign(other)
    frozen(copied, mask={v.path: kf.get_mask(model)[o] for v, o in kernels(copied, model)})
    kf.restore_gradients(copied)
    scores = [
        list(kf.compute_saliency(copied, x, y, criterion).values())
        for criterion in ("snip", "grasp")
    ]
    return [*scores, kf.gradient_flow(copied, x, y)]


def kernels(first, second):
    pairs = zip(first.trainable_variables, second.trainable_variables, strict=True)
    return [pair for pair in pairs if is_weight(pair[0])]


@pytest.mark.parametrize("criterion", ["snip", "grasp"])
def test_freezing_again_chooses_from_all_weights(criterion):
    x, y = points()
    masks = []
    for restore in (False, True):
        model = frozen(small_mlp(), freeze_optimizer(criterion=criterion), mask=random_mask("few"))
        if restore:
            kf.restore_gradients(model)
        masks.append(kf.freeze(model, x, y, overwrite=True))
    assert masks[0] == masks[1]


def test_pruning_check_is_the_same():
    x, y = blobs()
    checks = []
    for restore in (False, True):
        model = frozen(small_mlp(), loss=crossentropy(), metrics=["accuracy"])
        if restore:
            kf.restore_gradients(model)
        checks.append(kf.check_pruning(model, x, y))
    assert str(checks[0]) == str(checks[1])


# Plain layers


def test_restricted_layers_are_plain_layers(tmp_path):
    model = small_convnet()
    configs = [layer.get_config() for layer in model.layers]
    summaries = [[], []]
    model.summary(print_fn=summaries[0].append)
    calls = [type(layer).call for layer in model.layers]
    frozen(model)
    assert len(restricted_layers(model)) == 3
    x, y = images()
    trained_weights(model, (x, y), epochs=1)
    assert [layer.get_config() for layer in model.layers] == configs
    assert [type(layer).call for layer in model.layers] == calls
    model.summary(print_fn=summaries[1].append)
    assert len({summary[0].split("Total params")[0] for summary in summaries}) == 1
    outputs = value_of(model(x))
    model.save(tmp_path / "model.keras")
    copies = [
        keras.models.load_model(tmp_path / "model.keras"),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    for copied in copies:
        assert not any("call" in vars(layer) for layer in copied.layers)
        assert same_bits(value_of(copied(x)), outputs)
    cloned = keras.models.clone_model(model)
    assert not any("call" in vars(layer) for layer in cloned.layers)
    assert not any("call" in vars(copy.deepcopy(layer)) for layer in model.layers)


@pytest.mark.parametrize("way", ["export", "saved_model"])
def test_exported_graph_has_no_custom_gradient(way, tmp_path):
    model = frozen(small_convnet())
    x, _ = images()
    outputs = value_of(model(x))
    path = str(tmp_path / "exported")
    if way == "export":
        model.export(path, verbose=False)
        loaded = tf.saved_model.load(path)
        np.testing.assert_allclose(numpy_of(loaded.serve(x)), outputs, rtol=1e-5, atol=1e-6)
    else:
        tf.saved_model.save(model, path)
    graph = loader_impl.parse_saved_model(path).meta_graphs[0].graph_def
    nodes = [node for function in graph.library.function for node in function.node_def]
    assert nodes
    kinds = [n.attr["_gradient_op_type"].s for n in nodes if "_gradient_op_type" in n.attr]
    assert not [kind for kind in kinds if kind.startswith(b"CustomGradient")]


def test_loaded_model_can_be_restricted(tmp_path, restricted_products):
    model = frozen(small_mlp())
    trained_weights(model, points(), epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    with every_layer():
        kf.restrict_gradients(loaded)
    assert len(restricted_layers(loaded)) == 2
    restricted_products.clear()
    found = trained_weights(loaded, points(), epochs=1)
    assert restricted_products
    for one, other in zip(found, trained_weights(model, points(), epochs=1), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# The rule


def mask_with(rows, columns, active_rows, active_columns):
    mask = np.zeros((1, rows, columns), bool)
    mask[:, :active_rows, :active_columns] = True
    return mask


sizes = st.integers(1, 300)


@few_examples
@given(rows=sizes, columns=sizes, places=st.tuples(sizes, sizes))
def test_layer_whose_channels_are_all_active_is_left_alone(rows, columns, places):
    diagonal = np.zeros((1, rows, columns), bool)
    larger = np.arange(max(rows, columns))
    diagonal[0, larger % rows, larger % columns] = True
    assert cheapest_block(diagonal, places) is None


@few_examples
@given(rows=sizes, columns=sizes, places=st.tuples(sizes, sizes))
def test_layer_without_trained_weights_is_restricted(rows, columns, places):
    assert cheapest_block(mask_with(rows, columns, 0, 0), places) is not None


@few_examples
@given(
    rows=st.integers(1, 4000),
    columns=st.integers(1, 1000),
    share=st.floats(0.0, 1.0),
    other_share=st.floats(0.0, 1.0),
    column_share=st.floats(0.0, 1.0),
    places=st.integers(1, 400),
)
def test_fewer_active_rows_never_make_restriction_dearer(
    rows, columns, share, other_share, column_share, places
):
    few, many = sorted(int(np.ceil(s * rows)) for s in (share, other_share))
    active_columns = int(np.ceil(column_share * columns))
    ways = [
        cheapest_block(mask_with(rows, columns, active, active_columns), (places, places))
        for active in (few, many)
    ]
    assert ways[1] is None or ways[0] is not None


def test_only_channels_that_can_be_left_out_are_taken():
    way = cheapest_block(mask_with(4096, 4096, 40, 4096), (1, 1))
    assert way == (True, False)
    assert cheapest_block(mask_with(4096, 4096, 4096, 40), (1, 1)) == (False, True)
