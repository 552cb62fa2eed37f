"""Restricted weight gradients against the ordinary ones of the same layers, and NumPy by hand.

Which layers are restricted is a matter of measured costs; here they all are, in a given way.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import is_weight, same_bits, sgd, value_of
from hypothesis import Phase, given, settings
from keras import layers as kl
from restricted import (
    CONVOLUTIONS,
    TOLERANCES,
    WAYS,
    Nested,
    convolutions,
    dense_layers,
    einsum_dense_layers,
    freeze_optimizer,
    frozen,
    normal,
    one_layer,
    random_mask,
    restricted_layers,
    restrictions,
    small_mlp,
)
from tape_gradients import differentiate, numpy_of

import keras_freeze as kf

pytestmark = [pytest.mark.cases(1), pytest.mark.slow]

# Shrinking a failure would train for minutes.
few_examples = settings(max_examples=25, derandomize=True, phases=[Phase.explicit, Phase.generate])


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


def check_layer(make_layer, input_shape, dtype, seed, kind, way, traced=False):
    keras.utils.set_random_seed(seed)
    layer = make_layer()
    model = frozen(one_layer(layer, input_shape, dtype), mask=random_mask(kind, seed), way=way)
    all_trained = kf.get_mask(model)[layer.kernel].all()
    assert restricted_layers(model) == ([] if all_trained else [layer])
    x = normal(2, *input_shape, seed=seed, dtype="float64" if dtype == "float64" else "float32")
    assert_gradients_are_the_ordinary_ones(
        model, x, TOLERANCES[dtype], traced, compact=not all_trained
    )


@few_examples
@given(case=dense_layers(), **restrictions)
def test_dense_gradient(case, **restriction):
    check_layer(*case, **restriction)


@few_examples
@given(case=einsum_dense_layers(), **restrictions)
def test_einsum_dense_gradient(case, **restriction):
    check_layer(*case, **restriction)


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


@few_examples
@given(case=convolutions(), **restrictions)
def test_convolution_gradient(case, **restriction):
    check_layer(*case, **restriction)


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
    layer = functools.partial(
        CONVOLUTIONS[rank], 4, 2, data_format="channels_first", activation="tanh"
    )
    check_layer(layer, (3, *[5] * rank), "float32", 0, "few", way)


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
    check_layer(layer, input_shape, "float32", 0, kind, way, traced=True)


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
