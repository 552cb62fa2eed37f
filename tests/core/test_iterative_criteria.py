"""Criteria in steps: SynFlow, SNIP in steps, FORCE; their networks and steps in NumPy."""

import itertools
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import blobs, compiled, crossentropy, is_weight, same_bits, sgd, value_of, values_of
from keras import layers
from oracle import DenseByHand, brute_force_mask

import keras_freeze as kf
from keras_freeze.criteria import FORCE, IterativeCriterion, IterativeSNIP, SynFlow

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)


CRITERIA = [IterativeSNIP(5), FORCE(5), SynFlow(7)]


def relu_model(criterion, frozen_weights="zero", rate=0.9, biases=False, **arguments):
    """A network of 6 * 16 + 16 * 3 weights."""
    keras.utils.set_random_seed(1)
    start = "normal" if biases else "zeros"
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, "relu", bias_initializer=start, name="body"),
            layers.Dense(3, bias_initializer=start, name="head"),
        ]
    )
    optimizer = kf.FreezeOptimizer(
        sgd(), rate, criterion=criterion, frozen_weights=frozen_weights, **arguments
    )
    return compiled(model, optimizer)


def kernels_of(model):
    return [v for v in model.trainable_variables if is_weight(v)]


def masks_of(model):
    mask = kf.get_mask(model)
    return [mask[kernel] for kernel in kernels_of(model)]


def equal(found, expected):
    return all(np.array_equal(f, e) for f, e in zip(found, expected, strict=True))


def scores_of(model, *data, criterion="synflow"):
    return list(kf.compute_saliency(model, *data, criterion=criterion).values())


# The steps by hand


def count_by_hand(rate, step, steps, total):
    """How many of all weights are left after a step; 1e-9 for the rounding of a power."""
    return int((1.0 - rate) ** (step / steps) * total + 1e-9)


def steps_by_hand(values, gradients_of, score, rate, steps):
    """The masks of kernels after all steps, and how far apart the threshold's scores are."""
    kernels = [value.astype("float64") for value in values[::2]]
    masks, margin = [np.ones(k.shape, bool) for k in kernels], np.inf
    for step in range(1, steps + 1):
        pruned = list(values)
        pruned[::2] = [np.where(m, k, 0.0) for k, m in zip(kernels, masks, strict=True)]
        gradients = gradients_of(pruned)
        scores = [score(k, g, m) for k, g, m in zip(kernels, gradients, masks, strict=True)]
        count = count_by_hand(rate, step, steps, sum(k.size for k in kernels))
        flat = np.sort(np.concatenate([s.ravel() for s in scores]))[::-1]
        margin = min(margin, (flat[count - 1] - flat[count]) / flat[count - 1])
        masks = brute_force_mask(scores, count)
        assert all(mask.any() for mask in masks)  # no layer needs the weight of its own
    return masks, margin


def synflow_by_hand(values):
    """The gradients of R over two kernels, with biases."""
    first, bias, second, _ = [np.abs(v.astype("float64")) for v in values]
    hidden = first.sum(0) + bias
    signs = np.where(np.signbit(values[0]), 1.0, 1.0), np.ones(second.shape)
    return [signs[0] * second.sum(1), signs[1] * hidden[:, None]]


def left(kernel, gradient, mask):
    return np.where(mask, np.abs(kernel * gradient), -1.0)


def whole(kernel, gradient, mask):
    return np.abs(kernel * gradient)


def loss_by_hand(batches):
    def gradients(values):
        parts = [DenseByHand(values).gradients(x, y)[::2] for x, y in batches]
        return [sum(of_kernel) for of_kernel in zip(*parts, strict=True)]

    return gradients


BY_HAND = {
    "synflow in 1": (SynFlow(1), left),
    "synflow in 100": ("synflow", left),
    "snip in 1": (IterativeSNIP(1), left),
    "snip in 10": (IterativeSNIP(), left),
    "force in 1": (FORCE(1), whole),
    "force in 10": (FORCE(), whole),
    "force in 4": (FORCE(4), whole),
}


@pytest.mark.parametrize("rate", [0.5, 0.9])
@pytest.mark.parametrize("name", BY_HAND)
def test_masks_of_all_steps_are_those_by_hand(name, rate):
    criterion, score = BY_HAND[name]
    model, (x, y) = relu_model(criterion, rate=rate, biases=True), blobs()
    steps = 100 if criterion == "synflow" else criterion.steps
    values = values_of(model.trainable_variables)
    gradients = synflow_by_hand if "synflow" in name else loss_by_hand([(x, y)])
    expected, margin = steps_by_hand(values, gradients, score, rate, steps)
    assert margin > 1e-5  # float32 cannot tell less apart
    mask = kf.freeze(model, x, y)
    assert equal(masks_of(model), expected)
    assert mask.num_trained == round((1 - rate) * 144 - 0.4)
    found = values_of(kernels_of(model))
    assert equal(found, [np.where(m, v, 0) for m, v in zip(expected, values[::2], strict=True)])


@pytest.mark.same_on_all
def test_steps_change_the_mask_and_force_brings_weights_back():
    """The tests by hand tell the criteria apart."""
    found = {}
    for name, (criterion, _) in BY_HAND.items():
        model = relu_model(criterion, biases=True)
        kf.freeze(model, *blobs())
        found[name] = np.concatenate([m.ravel() for m in masks_of(model)]).tobytes()
    assert found["snip in 1"] == found["force in 1"]
    assert len(set(found.values())) == len(BY_HAND) - 1


@pytest.mark.same_on_all
def test_batches_of_a_dataset_are_summed_in_each_step():
    (x, y), criterion = blobs(), FORCE(3)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    model = relu_model(criterion, biases=True)
    values = values_of(model.trainable_variables)
    batches = [(x[:16], y[:16]), (x[16:32], y[16:32])]
    kf.freeze(model, dataset, steps=2)
    expected, margin = steps_by_hand(values, loss_by_hand(batches), whole, 0.9, 3)
    assert margin > 1e-5
    assert equal(masks_of(model), expected)


@pytest.mark.parametrize("criterion", CRITERIA, ids=repr)
@pytest.mark.parametrize("frozen_weights", ["keep", "decay"])
def test_where_frozen_weights_stay_in_the_network_one_step_is_all(criterion, frozen_weights):
    """Bit for bit the mask of one score of the whole network."""
    once = type(criterion)(1)
    arguments = {"l2": 0.1} if frozen_weights == "decay" else {}
    masks, scores = [], []
    for one in (criterion, once):
        model = relu_model(one, frozen_weights, **arguments)
        before = values_of(model.variables)
        masks.append(kf.freeze(model, *blobs()))
        assert all(map(same_bits, values_of(model.variables), before))
        scores.append(scores_of(relu_model(one), *blobs(), criterion=one))
    assert masks[0] == masks[1]
    assert all(map(same_bits, *scores))
    pruned = kf.freeze(relu_model(criterion), *blobs())
    assert pruned != masks[0]


@pytest.mark.same_on_all
@pytest.mark.parametrize("criterion", [IterativeSNIP(1), FORCE(9)], ids=repr)
def test_score_of_the_whole_network_is_that_of_snip(criterion):
    found = scores_of(relu_model("snip"), *blobs(), criterion=criterion)
    expected = scores_of(relu_model("snip"), *blobs(), criterion="snip")
    assert all(map(same_bits, found, expected))


@pytest.mark.same_on_all
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("criterion", CRITERIA, ids=repr)
def test_counts_are_exact(criterion, rate):
    model = relu_model(criterion, rate=rate)
    with warnings.catch_warnings():
        if rate != 0.99:  # of which two weights are left at last, on different paths
            warnings.simplefilter("error")
        mask = kf.freeze(model, *blobs())
    assert mask.num_trained - mask.num_rescued == {0.0: 144, 0.5: 72, 0.99: 1, 1.0: 0}[rate]


@pytest.mark.same_on_all
@pytest.mark.parametrize("distribution", ["uniform", {"body": 0.5}, {"body": 0.0}, {"head": 1.0}])
def test_distribution_holds_in_each_step(distribution):
    """Each rate of a mapping is approached at its own pace; 0 and 1 are there at once."""
    given, seen = [], []

    class Spy(FORCE):
        def rate(self, freeze_rate, step):
            given.append(freeze_rate)
            return super().rate(freeze_rate, step)

        def score(self, weights, gradients, mask):
            seen.append(int(keras.ops.sum(mask)))
            return super().score(weights, gradients, mask)

    model = relu_model(Spy(2), rate=0.75, distribution=distribution)
    (x, y), values = blobs(), values_of(model.trainable_variables)
    kf.freeze(model, x, y)
    rates = {"body": 0.75, "head": 0.75, **(distribution if distribution != "uniform" else {})}
    counts = [
        [
            int((1 - rate) ** part * size + 1e-9)
            for rate, size in zip(rates.values(), (96, 48), strict=True)
        ]
        for part in (0.5, 1.0)
    ]
    assert seen == [96, 48, *counts[0]]
    assert [mask.sum() for mask in masks_of(model)] == counts[1]
    assert set(given) == {0.75, *rates.values()}
    kernels = values[::2]
    gradients_of, masks = loss_by_hand([(x, y)]), None
    for step in counts:
        gradients = gradients_of(values)
        scores = [
            whole(k.astype("float64"), g, None) for k, g in zip(kernels, gradients, strict=True)
        ]
        masks = [brute_force_mask([s], k)[0] for s, k in zip(scores, step, strict=True)]
        values[::2] = [np.where(m, k, 0.0) for m, k in zip(masks, kernels, strict=True)]
    assert equal(masks_of(model), masks)


@pytest.mark.same_on_all
def test_rate_of_a_step_is_a_decimal_number():
    assert [FORCE(2).rate(0.99, 1), SynFlow(4).rate(0.9999, 2)] == [0.9, 0.99]


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


@pytest.mark.parametrize("dtype", ["mixed_float16", "float64"])
def test_other_dtypes_of_layers_have_the_same_scores(dtype):
    found, expected = scores_of(deep(3, dtype=dtype)), scores_of(deep(3))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == np.float32
        if dtype == "mixed_float16":
            np.testing.assert_allclose(one, other, rtol=1e-6)
        assert np.isclose(one.sum(), found[0].sum(), rtol=1e-5)


def normalized_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu", bias_initializer="normal"),
            layers.BatchNormalization(gamma_initializer="normal", beta_initializer="normal"),
            layers.Dropout(0.5),
            layers.Dense(3),
        ]
    )
    norm = model.layers[1]
    norm.moving_mean.assign(np.linspace(-0.1, 0.1, 8))
    norm.moving_variance.assign(np.linspace(0.5, 2.0, 8))
    optimizer = kf.FreezeOptimizer(sgd(), 0.5, criterion=SynFlow(4), frozen_weights="zero")
    return compiled(model, optimizer)


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


FINGERPRINTS = {
    "IterativeSNIP(steps=5)": "b70f5b197b6ea3ad",
    "FORCE(steps=5)": "8fd9b10c90e176ff",
    "SynFlow(steps=7)": "7afb43885e230291",
}


@pytest.mark.parametrize("criterion", CRITERIA, ids=repr)
def test_three_backends_agree(criterion):
    """From weights that are the same bits everywhere."""
    model = relu_model(criterion)
    kf.reinitialize(model, seed=3)
    mask = kf.freeze(model, *blobs())
    assert mask.fingerprint[:16] == FINGERPRINTS[repr(criterion)]


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


@pytest.mark.cases(2)
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


@pytest.mark.same_on_all
def test_own_train_step_needs_a_loss_for_the_others():
    class Own(keras.Sequential):
        def train_step(self, *args):
            return super().train_step(*args)

    plain = relu_model(FORCE(2))
    model = compiled(Own([keras.Input((6,)), *plain.layers]), plain.optimizer)
    with pytest.raises(ValueError, match="give `freeze` a `loss`"):
        kf.freeze(model, *blobs())


@pytest.mark.parametrize("criterion", ["synflow", *CRITERIA], ids=repr)
def test_first_step_without_freeze_is_an_error(criterion):
    model = relu_model(criterion)
    with pytest.raises(ValueError, match=r"in steps.*keras_freeze\.freeze"):
        model.fit(*blobs(), verbose=0)


# The model is left as it was


class Interrupted(IterativeSNIP):
    """Fails in its second step, as if somebody had pressed Ctrl-C."""

    def __init__(self, error):
        super().__init__(4)
        self.error = error

    def score(self, weights, gradients, mask):
        if not keras.ops.all(mask):
            raise self.error
        return super().score(weights, gradients, mask)


def state_of(model):
    holders = [model, *model.layers]
    values = values_of([*model.variables, *model.metrics_variables])
    return values, [holder.dtype_policy for holder in holders]


@pytest.mark.same_on_all
@pytest.mark.parametrize("criterion", CRITERIA, ids=repr)
def test_model_is_left_as_it_was(criterion):
    plain = normalized_model()
    optimizer = kf.FreezeOptimizer(sgd(), 0.5, criterion=criterion)
    model = compiled(plain, optimizer, metrics=["accuracy"])
    model.evaluate(*blobs(), verbose=0)
    before, policies = state_of(model)
    random = np.random.get_state()[1].copy()
    kf.freeze(model, *blobs())
    after, policies_after = state_of(model)
    assert all(map(same_bits, after, before))
    assert all(a is b for a, b in zip(policies_after, policies, strict=True))
    assert np.array_equal(np.random.get_state()[1], random)
    model.fit(*blobs(), verbose=0)


@pytest.mark.same_on_all
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("no")], ids=["stop", "error"])
def test_model_is_left_as_it_was_by_a_pass_that_fails(error, monkeypatch):
    model = normalized_model()
    before, policies = state_of(model)
    layer = model.layers[-1]

    def fail(inputs, training):
        assert not same_bits(value_of(layer.kernel), before[-2])  # signs are gone
        raise error

    monkeypatch.setattr(layer, "call", fail)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else Exception):
        kf.freeze(model)
    after, policies_after = state_of(model)
    assert all(map(same_bits, after, before))
    assert all(a is b for a, b in zip(policies_after, policies, strict=True))
    assert kf.get_mask(model) is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("no")], ids=["stop", "error"])
def test_weights_come_back_where_a_step_fails(error):
    model = relu_model(Interrupted(error))
    before = values_of(model.variables)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else RuntimeError):
        kf.freeze(model, *blobs())
    assert all(map(same_bits, values_of(model.variables), before))
    assert kf.get_mask(model) is None


# Criteria of the user, configurations and files


@keras.saving.register_keras_serializable("test_iterative_criteria")
class Weighted(IterativeCriterion):
    """The power of the weights in the score decides, at rates of a straight line."""

    def __init__(self, steps, power=2.0):
        super().__init__(steps)
        self.power = power

    def score(self, weights, gradients, mask):
        return keras.ops.abs(gradients) * keras.ops.abs(weights) ** self.power

    def rate(self, freeze_rate, step):
        return freeze_rate * step / self.steps

    def get_config(self):
        return {**super().get_config(), "power": self.power}


@pytest.mark.same_on_all
def test_criterion_of_the_user_has_its_score_and_rates():
    model, (x, y) = relu_model(Weighted(3), rate=0.75, biases=True), blobs()
    kernels = values_of(model.trainable_variables)
    gradients_of, seen = loss_by_hand([(x, y)]), []
    values = list(kernels)
    for rate in (0.25, 0.5, 0.75):
        scores = [
            np.abs(g) * np.abs(k.astype("float64")) ** 2
            for g, k in zip(gradients_of(values), kernels[::2], strict=True)
        ]
        masks = brute_force_mask(scores, int((1 - rate) * 144))
        values[::2] = [np.where(m, k, 0.0) for m, k in zip(masks, kernels[::2], strict=True)]
        seen.append(masks)
    kf.freeze(model, x, y)
    assert equal(masks_of(model), seen[-1])


@pytest.mark.same_on_all
def test_criterion_without_a_score_says_so():
    with pytest.raises(NotImplementedError, match="IterativeCriterion must define `score`"):
        kf.freeze(relu_model(IterativeCriterion(2)), *blobs())


@pytest.mark.same_on_all
@pytest.mark.parametrize(
    "criterion", ["synflow", SynFlow(3), FORCE(3), IterativeSNIP(2), Weighted(2, 0.5)], ids=repr
)
def test_criterion_survives_configuration_and_files(tmp_path, criterion):
    model = relu_model(criterion)
    optimizer = kf.FreezeOptimizer.from_config(model.optimizer.get_config())
    assert optimizer.criterion == criterion
    kf.freeze(model, *blobs())
    model.save(tmp_path / "model.keras")
    kf.save(model, tmp_path / "model.freeze", include_optimizer=True)
    custom = {"test_iterative_criteria>Weighted": Weighted}
    for loaded in (
        keras.saving.load_model(tmp_path / "model.keras"),
        kf.load(tmp_path / "model.freeze", custom_objects=custom),
    ):
        assert loaded.optimizer.criterion == criterion
        assert kf.get_mask(loaded) == kf.get_mask(model)
        assert all(map(same_bits, values_of(loaded.variables), values_of(model.variables)))


@pytest.mark.same_on_all
def test_descriptions_tell_settings():
    assert kf.criteria.in_words("synflow") == kf.criteria.in_words(SynFlow())
    assert kf.criteria.in_words(SynFlow()) == "SynFlow(steps=100)"
    assert kf.criteria.in_words(FORCE()) == "FORCE(steps=10)"
    assert kf.criteria.in_words(Weighted(2)) == f"{__name__}.Weighted(steps=2, power=2.0)"


@pytest.mark.same_on_all
def test_criteria_are_equal_when_their_settings_are():
    assert FORCE(np.int64(3)) == FORCE(3)
    assert hash(FORCE(3)) == hash(FORCE(3))
    assert FORCE(3) != FORCE(4)
    assert FORCE(3) != IterativeSNIP(3)
    assert Weighted.from_config(Weighted(2, 3.0).get_config()) == Weighted(2, 3.0)


@pytest.mark.same_on_all
def test_class_in_place_of_a_criterion_is_refused():
    with pytest.raises(TypeError, match="criterion"):
        kf.FreezeOptimizer(sgd(), criterion=FORCE)
