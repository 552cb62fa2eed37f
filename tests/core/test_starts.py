"""What frozen weights were drawn from is remembered in every file, on each backend."""

import dataclasses
import warnings

import axes
import keras
import numpy as np
import pytest
from helpers import blobs, compiled, fit, same_bits, sgd, two_dense_layers, values_of

import keras_freeze as kf
from keras_freeze.initializers.of_layers import source_of, starts_of
from keras_freeze.initializers.portable import Orthogonal, RandomUniform, VarianceScaling
from keras_freeze.parameters import WEIGHT, classify

pytestmark = pytest.mark.cases(None, tensorflow=0, jax=0)

X, Y = blobs()


def network(portable=True, **arguments):
    model = two_dense_layers(**arguments)
    if portable:
        kf.reinitialize(model, seed=3)
    return compiled(model)


def trained(way="freeze", portable=True):
    model = network(portable)
    if way == "freeze":
        kf.freeze(model, X, Y)
    fit(model, X, Y)
    return model


def assert_same_weights(first, second):
    pairs = zip(values_of(first.variables), values_of(second.variables), strict=True)
    assert all(same_bits(a, b) for a, b in pairs)


def saved_and_loaded(model, path):
    kf.save(model, path)
    return kf.load(path)


def weights_of(model):
    return [p for p in classify(model.trainable_variables) if p.kind == WEIGHT]


def messages_of(function):
    """The package's warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    of_user = [str(w.message) for w in caught if w.category is UserWarning]
    words = ("replaces all weights", "can be loaded with", "portable version", "keep their values")
    return [message for message in of_user if any(word in message for word in words)]


# Files and checkpoints


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:The file has no values")
@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("way", axes.WAYS)
def test_a_model_from_a_keras_file_can_be_saved_small(way, portable, tmp_path):
    model = trained(way, portable)
    again = model
    for name in ("first.keras", "second.keras"):
        again.save(tmp_path / name)
        again = keras.models.load_model(tmp_path / name)
    from_freeze_file = saved_and_loaded(again, tmp_path / "model.freeze")
    assert_same_weights(model, from_freeze_file)
    from_freeze_file.save(tmp_path / "third.keras")
    third = keras.models.load_model(tmp_path / "third.keras")
    assert_same_weights(model, saved_and_loaded(third, tmp_path / "third.freeze"))


@pytest.mark.filterwarnings("ignore:The file has no values")
def test_a_start_travels_with_weights_alone(tmp_path):
    model = trained(portable=False)
    model.save_weights(tmp_path / "model.weights.h5")
    other = network(portable=False, seed=1)
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same_weights(model, saved_and_loaded(other, tmp_path / "model.freeze"))


@pytest.mark.skipif(axes.BACKEND != "tensorflow", reason="tf.train.Checkpoint is TensorFlow's")
@pytest.mark.filterwarnings("ignore:The file has no values")
def test_a_start_travels_in_a_checkpoint_of_tensorflow(tmp_path):
    import tensorflow as tf

    model = trained(portable=False)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "check")
    other = network(portable=False, seed=1)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    other.optimizer.build(other.trainable_variables)
    assert_same_weights(model, saved_and_loaded(other, tmp_path / "model.freeze"))


def test_a_loop_of_ones_own_remembers_the_start_too(tmp_path):
    model = two_dense_layers()
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75)
    optimizer.build(model.trainable_variables)
    assert len(optimizer.starts) == 2
    model.compile(optimizer, loss="mse")
    assert len(optimizer.state.starts) == 2


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", axes.WAYS)
def test_weights_that_were_set_before_have_no_start(way, tmp_path):
    model = network()
    kernel = model.layers[0].kernel
    kernel.assign(np.full(kernel.shape, 0.5) + np.arange(8) / 100)
    if way == "freeze":
        kf.freeze(model, X, Y)
    fit(model, X, Y)
    assert list(model.optimizer.starts) == [2]
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="body/kernel' come neither from a known seed"):
        kf.save(loaded, tmp_path / "model.freeze")


def test_a_start_that_is_drawn_otherwise_here_is_said(tmp_path):
    model = trained(portable=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    elsewhere = {
        position: dataclasses.replace(
            start,
            source=source_of(network(portable=False, seed=5).layers[0], "kernel_initializer"),
            drawn_with="Keras 4.0 on another 1.0",
        )
        for position, start in loaded.optimizer.starts.items()
    }
    loaded.optimizer.set_starts(elsewhere)
    message = "body/kernel', 'head/kernel' were drawn by initializers of Keras with Keras 4.0 on"
    with pytest.raises(ValueError, match=message):
        kf.save(loaded, tmp_path / "model.freeze")
    kf.save(loaded, tmp_path / "model.freeze", include_frozen=True)
    assert_same_weights(model, kf.load(tmp_path / "model.freeze"))


def test_reinitialize_replaces_what_is_remembered(tmp_path):
    model = network()
    kf.freeze(model, X, Y)
    kf.reinitialize(model, "he_normal", seed=8)
    starts = model.optimizer.starts
    assert [starts[p].source.seed for p in (0, 2)] == [8, 8]
    assert [starts[p].source.parameters["scale"] for p in (0, 2)] == [2.0, 2.0]


@pytest.mark.parametrize("layer", axes.LAYERS)
def test_every_layer_tells_what_its_weights_are_drawn_from(layer):
    """The initializers as they were used: axes, transposed kernels, cells, sublayers."""
    model, x, _ = axes.build(layer, "float32")
    model(x[:2])
    weights = weights_of(model)
    assert weights
    assert len(starts_of(model, weights)) == len(weights)


# What `save` warns of


def test_save_warns_where_a_file_is_bound_to_a_backend(tmp_path):
    model = trained(portable=False)
    expected = f"Keras {keras.__version__} on {keras.backend.backend()}"
    with pytest.warns(UserWarning, match=f"can be loaded with {expected}") as caught:
        kf.save(model, tmp_path / "model.freeze")
    assert any("reinitialize" in str(warning.message) for warning in caught)
    assert not messages_of(lambda: kf.save(model, tmp_path / "a.freeze", include_frozen=True))
    rows = kf.storage.inspect(tmp_path / "a.freeze").rows
    assert not any("Keras's" in row.source for row in rows)
    assert_same_weights(model, kf.load(tmp_path / "a.freeze"))
    assert not messages_of(lambda: kf.save(trained(), tmp_path / "b.freeze"))


# reinitialize


def custom(initializer, keep):
    class Scaled(keras.layers.Layer):
        def build(self, shape):
            own = keras.initializers.get(initializer)
            if keep:
                self.kernel_initializer = own
            self.kernel = self.add_weight(shape=(shape[-1], 4), initializer=own, name="kernel")

        def call(self, x):
            return keras.ops.matmul(x, self.kernel)

    return keras.Sequential([keras.Input((6,)), Scaled(), keras.layers.Dense(3)])


LAYERS = {
    "dense": lambda: keras.layers.Dense(5, kernel_initializer="he_uniform"),
    "zeros": lambda: keras.layers.Dense(5, kernel_initializer="zeros"),
    "constant": lambda: keras.layers.Dense(5, kernel_initializer=keras.initializers.Constant(0.3)),
    "identity": lambda: keras.layers.Dense(6, kernel_initializer="identity"),
    "orthogonal": lambda: keras.layers.Dense(5, kernel_initializer="orthogonal"),
}
SAME = {"zeros": 0.0, "constant": np.float32(0.3)}


@pytest.mark.parametrize("name", LAYERS)
def test_reinitialize_keeps_each_layers_distribution(name):
    model = keras.Sequential([keras.Input((6,)), LAYERS[name]()])
    before = keras.ops.convert_to_numpy(model.layers[0].kernel).copy()
    kf.reinitialize(model, seed=4)
    kernel = keras.ops.convert_to_numpy(model.layers[0].kernel)
    if name in SAME:
        assert (kernel == SAME[name]).all()
    elif name == "identity":
        assert (kernel == np.eye(6)).all()
    else:
        expected = Orthogonal(1.0, seed=4)
        if name == "dense":
            expected = VarianceScaling(2.0, "fan_in", "uniform", seed=4)
        assert same_bits(kernel, expected.values((6, 5)))
        assert not same_bits(kernel, before)
        assert type(model.layers[0].kernel_initializer) is type(expected)


def test_recurrent_kernels_and_embeddings_keep_theirs():
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Embedding(9, 6), keras.layers.LSTM(5)]
    )
    kf.reinitialize(model, seed=2)
    embeddings, kernel, recurrent, bias = map(keras.ops.convert_to_numpy, model.trainable_variables)
    assert same_bits(embeddings, RandomUniform(-0.05, 0.05, seed=2).values((9, 6)))
    glorot = VarianceScaling(1.0, "fan_avg", "uniform", seed=2, stream=1)
    assert same_bits(kernel, glorot.values((6, 20)))
    assert same_bits(recurrent, Orthogonal(seed=2, stream=2).values((5, 20)))
    assert bias.tolist() == [0.0] * 5 + [1.0] * 5 + [0.0] * 10


def test_kernels_of_attention_keep_their_fans():
    model, x, _ = axes.build("attention", "float32")
    model(x[:2])
    expected = {}
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.EinsumDense):
            kernel, outputs = layer.equation.split(",")[1].split("->")
            shape = dict(zip(kernel, layer.kernel.shape, strict=True))
            fan_out = np.prod([n for axis, n in shape.items() if axis in outputs])
            fan_in = np.prod([n for axis, n in shape.items() if axis not in outputs])
            expected[layer.path] = np.sqrt(6.0 / (fan_in + fan_out))
    kf.reinitialize(model, seed=1)
    for layer in model._flatten_layers():
        if layer.path in expected:
            largest = np.abs(keras.ops.convert_to_numpy(layer.kernel)).max()
            assert 0.6 * expected[layer.path] < largest < expected[layer.path]


def test_random_biases_are_drawn_from_the_seed():
    layer = keras.layers.Dense(50, bias_initializer="random_normal")
    model = keras.Sequential([keras.Input((6,)), layer])
    biases = []
    for seed in (1, 2, 1):
        kf.reinitialize(model, seed=seed)
        biases.append(keras.ops.convert_to_numpy(layer.bias).copy())
    assert same_bits(biases[0], biases[2])
    assert not same_bits(biases[0], biases[1])


def test_a_name_of_keras_is_drawn_portably():
    model = network(portable=False)
    kf.reinitialize(model, "lecun_normal", seed=6)
    expected = VarianceScaling(1.0, "fan_in", "truncated_normal", seed=6, stream=1)
    assert same_bits(keras.ops.convert_to_numpy(model.layers[1].kernel), expected.values((8, 3)))


@pytest.mark.parametrize("name", ["glorot_uniform", "orthogonal"])
def test_a_layer_that_forgets_its_initializer_is_an_error(name):
    model = custom(name, keep=False)
    before = values_of(model.variables)
    with pytest.raises(ValueError, match=r"scaled.*/kernel' are drawn from: their layers do not"):
        kf.reinitialize(model, seed=1)
    assert all(map(same_bits, before, values_of(model.variables)))
    assert not messages_of(lambda: kf.reinitialize(model, "he_normal", seed=1))
    assert not messages_of(lambda: kf.reinitialize(custom(name, keep=True), seed=1))


def test_initializers_of_ones_own_get_the_seed_and_a_warning():
    class Doubled(keras.initializers.RandomNormal):
        def __call__(self, shape, dtype=None):
            return 2.0 * super().__call__(shape, dtype)

    model = custom(Doubled(stddev=1.0, seed=3), keep=True)
    kernels = []
    for seed in (1, 2, 1):
        (message,) = messages_of(lambda seed=seed: kf.reinitialize(model, seed=seed))
        assert "kernel' have initializers of which keras_freeze has no portable version" in message
        kernels.append(keras.ops.convert_to_numpy(model.layers[0].kernel).copy())
    assert same_bits(kernels[0], kernels[2])
    assert not same_bits(kernels[0], kernels[1])

    def ones(shape, dtype=None):
        return keras.ops.ones(shape, dtype=dtype)

    assert messages_of(lambda: kf.reinitialize(custom(ones, keep=True), seed=1))


def test_reinitialize_says_what_is_lost(tmp_path):
    fresh = network(portable=False)
    assert not messages_of(lambda: kf.reinitialize(fresh, seed=1))
    assert not messages_of(lambda: kf.reinitialize(fresh, seed=2))
    (message,) = messages_of(lambda: kf.reinitialize(trained(), seed=1))
    assert "has been trained for 1 steps" in message or "has been trained for 2 steps" in message
    loaded = network()
    loaded.layers[0].set_weights([np.ones((6, 8)), np.zeros(8)])
    (message,) = messages_of(lambda: kf.reinitialize(loaded, seed=1))
    assert "body/kernel' do not have the values that their layers' initializers give" in message
    assert "head" not in message


# Optimizers whose variables Keras numbers


class Counting(keras.optimizers.SGD):
    """Has a variable of its own, without a name."""

    def build(self, variables):
        super().build(variables)
        self.calls = keras.Variable(0.0, trainable=False)
        self._track_variable(self.calls)


OPTIMIZERS = {**axes.OPTIMIZERS, "counting": lambda: Counting(0.05)}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_every_optimizer_comes_back_under_other_numbers(name, tmp_path):
    def made():
        return compiled(two_dense_layers(), kf.FreezeOptimizer(OPTIMIZERS[name](), 0.75))

    def step(model):  # without the compilation of `fit`
        variables = model.trainable_variables
        gradients = [keras.ops.ones(v.shape, v.dtype) for v in variables]
        model.optimizer.apply(gradients, variables)

    model, other = made(), made()
    kf.freeze(model, X, Y)
    kf.freeze(other, mask=kf.get_mask(model))
    step(model)
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")  # into an optimizer that is built
    model.save(tmp_path / "model.keras")
    with keras.saving.custom_object_scope({"Counting": Counting}):
        loaded = keras.models.load_model(tmp_path / "model.keras")
    for again in (model, other, loaded):
        step(again)
    for again in (other, loaded):
        assert kf.get_mask(again) == kf.get_mask(model)
        assert_same_weights(model, again)
