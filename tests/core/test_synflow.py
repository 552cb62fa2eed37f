"""SynFlow: what it scores, and which networks, inputs and losses it takes."""

import itertools

import keras
import numpy as np
import pytest
from helpers import compiled, crossentropy, same_bits, sgd, values_of
from iterative_cases import (
    equal,
    kernels_of,
    normalized_model,
    relu_model,
    scores_of,
    synflow_by_hand,
)
from keras import layers

import keras_freeze as kf
from keras_freeze.criteria import SynFlow

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)


# What SynFlow scores


def test_score_of_two_layers_is_that_by_hand():
    model = relu_model("synflow", biases=True)
    values = values_of(model.trainable_variables)
    gradients = synflow_by_hand(values)
    for found, kernel, gradient in zip(scores_of(model), values[::2], gradients, strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, np.abs(kernel) * gradient, rtol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
def test_what_flows_into_a_unit_flows_out_of_it(activation):
    """The conservation law, for networks without biases: of layers, and of hidden units."""
    keras.utils.set_random_seed(0)
    body = [layers.Dense(n, activation, use_bias=False) for n in (7, 9, 5)]
    model = keras.Sequential([keras.Input((4,)), *body, layers.Dense(3, use_bias=False)])
    found = [score.astype("float64") for score in scores_of(model)]
    outputs = np.ones(4)
    for kernel in values_of(model.weights):
        outputs = outputs @ np.abs(kernel.astype("float64"))
    assert np.allclose([score.sum() for score in found], outputs.sum(), rtol=1e-6)
    for before, after in itertools.pairwise(found):
        np.testing.assert_allclose(before.sum(0), after.sum(1), rtol=1e-6)


@pytest.mark.same_on_all
def test_channels_of_convolutions_conserve_it_too():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(5, 3, use_bias=False, activation="relu"),
            layers.AveragePooling2D(2),
            layers.Conv2D(4, 3, use_bias=False, activation="relu"),
            layers.Flatten(),
            layers.Dense(3, use_bias=False),
        ]
    )
    found = [score.astype("float64") for score in scores_of(model)]
    np.testing.assert_allclose(found[0].sum((0, 1, 2)), found[1].sum((0, 1, 3)), rtol=1e-6)
    assert np.allclose([score.sum() for score in found], found[0].sum(), rtol=1e-6)


def deep(depth, width=256, dtype=None, biases=False):
    keras.utils.set_random_seed(0)
    arguments = {"use_bias": biases, "kernel_initializer": "he_normal", "dtype": dtype}
    body = [layers.Dense(width, "relu", **arguments) for _ in range(depth)]
    model = keras.Sequential([keras.Input((8,)), *body, layers.Dense(3, **arguments)])
    optimizer = kf.FreezeOptimizer(sgd(), 0.99, criterion=SynFlow(3), frozen_weights="zero")
    return compiled(model, optimizer)


@pytest.mark.same_on_all
def test_forty_layers_do_not_overflow():
    model = deep(40)
    flow = np.ones((1, 8))
    for kernel in values_of(model.weights):
        flow = flow @ np.abs(kernel.astype("float64"))
    assert flow.sum() > np.finfo(np.float32).max
    sums = [score.astype("float64").sum() for score in scores_of(model)]
    # R, divided by a power of two.
    expected = flow.sum() / 2.0 ** np.frexp(flow.sum())[1]
    assert np.allclose(sums, expected, rtol=1e-6)
    mask = kf.freeze(model)
    assert mask.num_trained == mask.num_weights // 100
    assert mask.num_rescued == 0


@pytest.mark.same_on_all
def test_small_flow_does_not_underflow():
    model = deep(20, width=8)
    for kernel in model.weights:
        kernel.assign(kernel * 2.0**-20)
    sums = [score.astype("float64").sum() for score in scores_of(model)]
    assert np.allclose(sums, sums[0], rtol=1e-6)
    assert 0.5 <= sums[0] <= 1.0


@pytest.mark.same_on_all
def test_flow_beyond_double_precision_is_an_error():
    model = deep(20, width=8)
    for kernel in model.weights:
        kernel.assign(kernel * 2.0**60)
    before = values_of(model.variables)
    with pytest.raises(ValueError, match=r"synflow.*inf.*double precision"):
        kf.freeze(model)
    assert all(map(same_bits, values_of(model.variables), before))
    assert kf.get_mask(model) is None


def test_layer_that_casts_by_itself_is_an_error_where_it_overflows():
    model = deep(40)
    cast = layers.Lambda(lambda x: keras.ops.cast(x, "float32"))
    model = compiled(keras.Sequential([model, cast]), model.optimizer)
    with pytest.raises(ValueError, match=r"precision of a layer"):
        scores_of(model)


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("dtype", ["mixed_float16", "float64"])
def test_other_dtypes_of_layers_have_the_same_scores(dtype):
    found, expected = scores_of(deep(3, dtype=dtype)), scores_of(deep(3))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == np.float32
        if dtype == "mixed_float16":
            np.testing.assert_allclose(one, other, rtol=1e-6)
        assert np.isclose(one.sum(), found[0].sum(), rtol=1e-5)


@pytest.mark.same_on_all
def test_statistics_count_with_their_absolute_values_in_inference_mode():
    model = normalized_model()
    first, bias, gamma, beta, mean, variance, second, _ = [
        np.abs(v.astype("float64")) for v in values_of(model.weights)
    ]
    factor = gamma / np.sqrt(variance + model.layers[1].epsilon)
    hidden = (first.sum(0) + bias - mean) * factor + beta
    expected = [first * factor * second.sum(1), second * hidden[:, None]]
    for found, one in zip(scores_of(model), expected, strict=True):
        np.testing.assert_allclose(found, np.abs(one), rtol=1e-5)


# What it needs


def test_data_tell_shapes_that_a_model_does_not():
    inputs = keras.Input((None, None, 2))
    hidden = layers.Conv2D(4, 3, use_bias=False, activation="relu")(inputs)
    model = keras.Model(inputs, layers.Dense(3)(layers.GlobalMaxPooling2D()(hidden)))
    with pytest.raises(ValueError, match=r"any size.*\(None, None, 2\)"):
        scores_of(model)
    images = np.random.default_rng(0).integers(0, 255, (2, 5, 5, 2)).astype("uint8")
    found = scores_of(model, images)
    assert all(score.any() for score in found)
    assert equal(found, scores_of(model, np.ones((1, 5, 5, 2))))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = layers.Dense(4, use_bias=False), layers.Dense(2, use_bias=False)

    def call(self, inputs):
        return {"sum": self.second(self.first(inputs["a"] + inputs["b"])), "count": inputs["a"]}


@pytest.mark.same_on_all
def test_structures_of_a_model_that_is_not_a_graph():
    model, x = Subclassed(), {name: np.zeros((5, 3), "float32") for name in "ab"}
    model(x)
    first, second = [np.abs(k) for k in values_of(model.weights)]
    found = scores_of(model, x)
    np.testing.assert_allclose(found[0], 2 * first * second.sum(1), rtol=1e-6)
    np.testing.assert_allclose(found[1], 2 * second * first.sum(0)[:, None], rtol=1e-6)
    with pytest.raises(ValueError, match=r"synflow.*pass one batch as `x`"):
        scores_of(model)


@pytest.mark.cases(None, jax=0)
def test_several_inputs_are_ones_each():
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2,), name="b")}
    dense = [layers.Dense(4, use_bias=False)(one) for one in inputs.values()]
    model = keras.Model(inputs, [layers.Add()(dense), dense[1]])
    first, second = [np.abs(k) for k in values_of(model.weights)]
    found = scores_of(model)
    np.testing.assert_allclose(found[0], first, rtol=1e-6)
    np.testing.assert_allclose(found[1], 2 * second, rtol=1e-6)


@pytest.mark.same_on_all
@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_token_ids_are_refused(dtype):
    body = [layers.Embedding(5, 4), layers.GlobalAveragePooling1D(), layers.Dense(2)]
    model = keras.Sequential([keras.Input((3,), dtype=dtype), *body])
    with pytest.raises(ValueError, match=r"synflow.*token ids"):
        scores_of(model)
    model = keras.Sequential(body)
    x = np.ones((2, 3), "int32")
    model(x)


@pytest.mark.same_on_all
def test_integers_for_a_model_without_declared_inputs_are_refused():
    class Ids(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.dense = layers.Embedding(5, 4), layers.Dense(2)

        def call(self, ids):
            return self.dense(self.embedding(ids))

    model = Ids()
    with pytest.raises(ValueError, match=r"synflow.*token ids.*int32"):
        scores_of(model, np.ones((2, 3), "int32"))


def ending_in(end, loss="mse"):
    """`relu_model` with something at its end that makes probabilities of its logits."""
    logits = relu_model("synflow", biases=True)
    activation = {"Dense": "softmax", "sigmoid": "sigmoid", "log": "log_softmax"}.get(end)
    if activation:
        logits.get_layer("head").activation = keras.activations.get(activation)
    ends = {
        "Activation": [layers.Activation("softmax")],
        "Softmax": [layers.Softmax()],
        "model": [keras.Sequential([keras.Input((3,)), layers.Softmax()])],
    }
    model = keras.Sequential([keras.Input((6,)), *logits.layers, *ends.get(end, [])])
    compiled(model, logits.optimizer, loss=loss)
    return model


ENDS = ["Dense", "sigmoid", "log", "Activation", "Softmax", "model"]


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("end", ENDS)
def test_logits_flow_where_the_last_layer_makes_probabilities_of_them(end):
    model = ending_in(end)
    before = values_of(model.trainable_variables)
    x = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
    outputs = keras.ops.convert_to_numpy(model(x))
    gradients = synflow_by_hand(before)
    for found, kernel, gradient in zip(scores_of(model), before[::2], gradients, strict=True):
        np.testing.assert_allclose(found, np.abs(kernel) * gradient, rtol=1e-6)
    # The model computes probabilities as ever, and neither its loss nor its end matters.
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model(x)), outputs)
    expected = kf.freeze(relu_model("synflow", biases=True))
    assert kf.freeze(model) == expected
    assert kf.freeze(ending_in(end, loss="categorical_crossentropy")) == expected


def test_several_outputs_may_be_probabilities_and_not():
    plain = relu_model("synflow", biases=True)
    inputs = keras.Input((6,))
    body = plain.get_layer("body")(inputs)
    logits = plain.get_layer("head")(body)
    value = layers.Dense(2, name="value")(body)
    expected = scores_of(keras.Model(inputs, [logits, value]))
    found = scores_of(keras.Model(inputs, [layers.Softmax()(logits), value]))
    assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.same_on_all
def test_probabilities_that_are_made_in_another_way_are_refused():
    class Probabilities(layers.Layer):
        def call(self, inputs):
            return keras.ops.softmax(inputs)

    plain = relu_model("synflow", biases=True)
    model = keras.Sequential([keras.Input((6,)), *plain.layers, Probabilities()])
    message = r"synflow.*does not depend on its weights.*from_logits=True.*Received: a model"
    for loss in ("mse", crossentropy()):
        with pytest.raises(ValueError, match=message):
            kf.freeze(compiled(model, relu_model("synflow").optimizer, loss=loss))
    compiled(model, relu_model("synflow").optimizer, loss="sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match=r"synflow.*sums the outputs.*from_logits=True"):
        kf.freeze(model)


@pytest.mark.same_on_all
def test_weights_that_are_all_zero_have_no_flow():
    model = relu_model("synflow", biases=True)
    for kernel in kernels_of(model):
        kernel.assign(np.zeros(kernel.shape))
    with pytest.warns(UserWarning, match="All scores are zero"):
        kf.freeze(model)


@pytest.mark.same_on_all
def test_no_loss_is_needed():
    model = relu_model("synflow")
    expected = kf.freeze(model)
    model = relu_model("snip")
    loop = kf.FreezeOptimizer(sgd(), 0.9, criterion="synflow", frozen_weights="zero")
    model = keras.Sequential([keras.Input((6,)), *model.layers])
    assert kf.freeze(model, optimizer=loop) == expected


@pytest.mark.same_on_all
def test_own_train_step_is_not_run():
    class Own(keras.Sequential):
        def train_step(self, *args):
            raise AssertionError

    expected = kf.freeze(relu_model("synflow"))
    plain = relu_model("synflow")
    model = compiled(Own([keras.Input((6,)), *plain.layers]), plain.optimizer)
    assert kf.freeze(model) == expected
