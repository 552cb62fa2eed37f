"""Restricted weight gradients against the ordinary ones of the same layers, and NumPy by hand.

Which layers are restricted is a matter of measured costs; here they all are, in a given way.
"""

import functools

import keras
import numpy as np
import pytest
import restricted_networks
import tensorflow as tf
from helpers import (
    gradients_by_autodiff,
    is_weight,
    same_bits,
    sgd,
    training_step,
    value_of,
    values_of,
)
from hypothesis import Phase, given, settings
from keras import layers as kl
from restricted import (
    CONVOLUTIONS,
    TOLERANCES,
    WAYS,
    Nested,
    SubclassedWithTraining,
    assert_trained_alike,
    built,
    convolutions,
    corner_mask,
    dense_layers,
    einsum_dense_layers,
    every_layer,
    freeze_optimizer,
    frozen,
    images,
    normal,
    one_layer,
    points,
    random_mask,
    restricted_layers,
    restrictions,
    small_convnet,
    small_mlp,
    spread_mask,
    spy_on_blocks,
    train_both,
    trained_weights,
)
from restricted_networks import InCondition, functional
from tensorflow.python.saved_model import loader_impl

import keras_freeze as kf
from keras_freeze import backend
from keras_freeze.optimizer import compact_update

pytestmark = [pytest.mark.cases(1), pytest.mark.slow]

# Shrinking a failure would train for minutes.
few_examples = settings(max_examples=25, derandomize=True, phases=[Phase.explicit, Phase.generate])


@pytest.fixture(autouse=True)
def restricted_products(monkeypatch):
    """The blocks of which a gradient was computed, or traced, in a test."""
    return spy_on_blocks(monkeypatch)


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


# Training


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


NETWORKS = {
    **restricted_networks.NETWORKS,
    "in a function": (functional(lambda x: kl.Dense(3)(InFunction()(x))), 1),
    "in a function in a loop": (functional(lambda x: kl.Dense(3)(FunctionInLoop()(x))), 1),
}


@pytest.mark.parametrize("network", ["in a function", "in a function in a loop"])
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


def test_another_mask_after_xla_compiled_the_step():
    model = frozen(small_mlp(), mask=functools.partial(corner_mask, last=False), jit_compile=True)
    trained_weights(model, points())
    model.optimizer.restore(frozen(small_mlp(), mask=spread_mask).optimizer.state)
    start = values_of(model.trainable_variables)
    found = trained_weights(model, points())
    for variable, before, after in zip(model.trainable_variables, start, found, strict=True):
        if is_weight(variable):
            assert np.array_equal(before != after, kf.get_mask(model)[variable])


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


# Plain layers


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


# The rule
