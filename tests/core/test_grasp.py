"""The criterion "grasp": w * (H g) against finite differences and a Hessian by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    blobs,
    compiled,
    dense_model,
    gradients_by_autodiff,
    is_weight,
    sgd,
    values_of,
)
from keras import layers
from oracle import brute_force_mask

import keras_freeze as kf
from keras_freeze import criteria
from keras_freeze.criteria.grasp_criterion import GraSP

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)
tensorflow_only = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="the name of an operation of TensorFlow"
)

# Keras reduces a loss to float32 on PyTorch, whose rounding a small step would magnify.
STEP, TOLERANCE = (1e-3, 2e-3) if keras.backend.backend() == "torch" else (1e-5, 1e-5)

# A network of two kernels and biases in NumPy, whose gradient also takes complex weights.


def tanh_model(seed=0, **arguments):
    """A network of 6 * 8 + 8 * 3 weights, with biases that are not zero."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", bias_initializer="normal", name="body"),
            layers.Dense(3, bias_initializer="normal", name="head"),
        ]
    )
    arguments = {"freeze_rate": 0.75, "criterion": "grasp", **arguments}
    return compiled(model, kf.FreezeOptimizer(sgd(), **arguments))


def gradient_by_hand(kernels, biases, x, y, temperature, sample_weight=1.0):
    hidden = np.tanh(x @ kernels[0] + biases[0])
    logits = (hidden @ kernels[1] + biases[1]) / temperature
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    error = (probabilities - np.eye(3)[y]) / temperature / len(x)
    error = error * np.broadcast_to(sample_weight, len(x))[:, None]
    return [x.T @ ((error @ kernels[1].T) * (1 - hidden**2)), hidden.T @ error]


def split(flat):
    return [flat[:48].reshape(6, 8), flat[48:].reshape(8, 3)]


def joined(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])


def score_by_hand(model, x, y, temperature=200.0, sample_weight=1.0):
    """w * (H g) with every column of the Hessian from the gradient at a complex point."""
    kernels = [k.astype("float64") for k in values_of(w for w in model.weights if is_weight(w))]
    biases = values_of(model.get_layer(name).bias for name in ("body", "head"))

    def gradient(flat):
        return joined(
            gradient_by_hand(split(flat), biases, x.astype(float), y, temperature, sample_weight)
        )

    w = joined(kernels)
    columns = [gradient(w + 1e-30j * unit).imag / 1e-30 for unit in np.eye(w.size)]
    return split(w * (np.stack(columns, 1) @ gradient(w)))


def scores_of(model, x, y, criterion="grasp", **arguments):
    return list(kf.compute_saliency(model, x, y, criterion, **arguments).values())


def close(found, expected, tolerance=1e-4):
    """Whether scores agree up to a share of the largest one of each layer."""
    return all(
        np.abs(f - e).max() <= tolerance * np.abs(e).max()
        for f, e in zip(found, expected, strict=True)
    )


# The score


@pytest.mark.parametrize("temperature", [1.0, 7.0, 200.0])
def test_score_is_that_of_a_full_hessian_by_hand(temperature):
    model, (x, y) = tanh_model(), blobs()
    found = scores_of(model, x, y, GraSP(temperature))
    assert found[0].dtype == np.float32
    assert close(found, score_by_hand(model, x, y, temperature))


def test_grasp_by_name_has_the_published_temperature():
    model, (x, y) = tanh_model(), blobs()
    assert close(scores_of(model, x, y), score_by_hand(model, x, y, 200.0))


NETWORKS = {
    "dense": ((6,), [layers.Dense(5, activation="gelu")]),
    "convolution": (
        (6, 6, 2),
        [layers.Conv2D(3, 3, activation="tanh"), layers.MaxPooling2D(), layers.Flatten()],
    ),
    "depthwise": (
        (6, 6, 2),
        [
            layers.DepthwiseConv2D(3, activation="tanh"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
        ],
    ),
    "batch normalization": ((6,), [layers.Dense(5), layers.BatchNormalization()]),
    "layer normalization": ((6,), [layers.Dense(5, "tanh"), layers.LayerNormalization()]),
    "group normalization": ((6,), [layers.Dense(6, "tanh"), layers.GroupNormalization(2)]),
    "dropout": ((6,), [layers.Dense(9, activation="tanh"), layers.Dropout(0.4)]),
    "embedding": ((4,), [layers.Embedding(3, 5), layers.Flatten()]),
    "lstm": ((4, 3), [layers.LSTM(4)]),
    "gru": ((4, 3), [layers.GRU(4)]),
}


def float64_network(name):
    shape, body = NETWORKS[name]
    keras.utils.set_random_seed(0)
    inner = [type(layer).from_config({**layer.get_config(), "dtype": "float64"}) for layer in body]
    return keras.Sequential([keras.Input(shape), *inner, layers.Dense(3, dtype="float64")])


def attention_network():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4, 3))
    outputs = layers.MultiHeadAttention(2, 3, dropout=0.3, dtype="float64")(inputs, inputs)
    outputs = layers.Dense(3, dtype="float64")(layers.Flatten(dtype="float64")(outputs))
    return keras.Model(inputs, outputs)


def score_by_differences(model, x, y, loss):
    """w * (H g), H g being the change of the gradient along itself."""
    variables = [v for v in model.trainable_variables if is_weight(v)]
    weights = values_of(variables)

    def gradient():
        keras.utils.set_random_seed(0)  # the same Dropout every time, on PyTorch too
        gradients = gradients_by_autodiff(model, x, y, loss)
        pairs = zip(model.trainable_variables, gradients, strict=True)
        return [g for v, g in pairs if is_weight(v)]

    def gradient_at(step):
        for variable, w, g in zip(variables, weights, along, strict=True):
            variable.assign(w + step * g)
        return gradient()

    along = gradient()
    step = STEP / np.linalg.norm(joined(along))
    pairs = zip(weights, gradient_at(step), gradient_at(-step), strict=True)
    scores = [w * (ahead - behind) / (2 * step) for w, ahead, behind in pairs]
    gradient_at(0.0)
    return scores


@pytest.mark.cases(1, tensorflow=1, jax=1)
@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX computes in float32 here")
@pytest.mark.parametrize("name", [*NETWORKS, "attention"])
def test_score_is_that_of_finite_differences(name):
    model = attention_network() if name == "attention" else float64_network(name)
    x = np.random.default_rng(0).normal(size=(12, *model.input_shape[1:])).astype("float32")
    if name == "embedding":
        x = np.random.default_rng(0).integers(0, 3, (12, 4))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
    expected = score_by_differences(model, x, np.arange(12) % 3, loss)
    keras.utils.set_random_seed(0)
    found = scores_of(model, x, np.arange(12) % 3, GraSP(1.0), loss=loss)
    assert all(np.abs(e).max() > 1e-9 for e in expected)
    assert close(found, expected, TOLERANCE)


def test_pieces_of_a_batch_give_the_score_of_the_batch():
    x, y = blobs(50)
    sample_weight = np.linspace(0.5, 2.0, 50).astype("float32")
    masks = []
    for batch_size in (None, 16):
        model = tanh_model()
        masks.append(kf.freeze(model, x, y, sample_weight=sample_weight, batch_size=batch_size))
    assert masks[0] == masks[1]
    expected = score_by_hand(tanh_model(), x, y, sample_weight=sample_weight)
    assert np.array_equal(trained(model), largest(expected, 18))


def test_of_several_batches_the_gradient_comes_first():
    """H g of the sum, which is not the sum of each batch's own H g."""
    x, y = blobs()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    model = tanh_model()
    kf.freeze(model, dataset, steps=6)
    whole = score_by_hand(tanh_model(), x, y)
    parts = [score_by_hand(tanh_model(), x[i : i + 8], y[i : i + 8]) for i in range(0, 48, 8)]
    summed = [sum(p[layer] for p in parts) for layer in (0, 1)]
    assert np.array_equal(trained(model), largest(whole, 18))
    assert not np.array_equal(trained(model), largest(summed, 18))


# The mask


def trained(model):
    mask = kf.get_mask(model)
    return joined([mask[model.get_layer(name).kernel] for name in ("body", "head")])


def largest(scores, k):
    return joined(brute_force_mask(scores, k))


def test_mask_is_the_global_top_of_the_signed_score():
    model, (x, y) = tanh_model(), blobs()
    expected = score_by_hand(model, x, y)
    kf.freeze(model, x, y)
    assert np.array_equal(trained(model), largest(expected, 18))
    assert not np.array_equal(trained(model), largest([np.abs(s) for s in expected], 18))
    per_layer = joined([largest([s], s.size // 4) for s in expected])
    assert not np.array_equal(trained(model), per_layer)


def test_hessian_is_over_the_weights_that_may_be_frozen():
    model, (x, y) = tanh_model(exclude=["head"]), blobs()
    kernels = [k.astype("float64") for k in values_of(w for w in model.weights if is_weight(w))]
    biases = values_of(model.get_layer(name).bias for name in ("body", "head"))

    def gradient(flat):
        return gradient_by_hand([flat.reshape(6, 8), kernels[1]], biases, x, y, 200.0)[0].ravel()

    w = kernels[0].ravel()
    columns = [gradient(w + 1e-30j * unit).imag / 1e-30 for unit in np.eye(48)]
    expected = largest([w * (np.stack(columns, 1) @ gradient(w))], 12)
    mask = kf.freeze(model, x, y)
    assert np.array_equal(mask["body/kernel"].ravel(), expected)
    assert not np.array_equal(expected, largest([score_by_hand(model, x, y)[0]], 12))


def test_model_is_left_as_it_was_and_trains_on():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(3),
        ]
    )
    compiled(model, kf.FreezeOptimizer(sgd(), criterion="grasp", frozen_weights="keep"))
    model.evaluate(*blobs(), verbose=0)  # metrics away from their start
    before = values_of([*model.variables, *model.metrics_variables])
    mask = kf.freeze(model, *blobs())
    after = values_of([*model.variables, *model.metrics_variables])
    assert all(np.array_equal(a, b) for a, b in zip(after, before, strict=True))
    model.fit(*blobs(), verbose=0)
    assert kf.get_mask(model) == mask


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("scale", "temperature"), [(2.0**10, 200.0), (2.0**60, 200.0), (2.0**40, 1e7)]
)
def test_mixed_precision_keeps_the_score(scale, temperature):
    """Also where the loss scale is too large for float16, or the gradient too small."""
    (x, y), criterion = blobs(), GraSP(temperature)
    expected = scores_of(compiled(dense_model()), x, y, criterion)
    optimizer = keras.optimizers.LossScaleOptimizer(kf.FreezeOptimizer(sgd()), initial_scale=scale)
    model = compiled(dense_model(dtype="mixed_float16"), optimizer)
    found = scores_of(model, x, y, criterion)
    assert found[0].dtype == np.float32
    assert close(found, expected, 0.02)


# What is refused


@pytest.mark.cases(1)
@pytest.mark.parametrize("criterion", ["grasp", GraSP(temperature=1.0)])
def test_first_step_without_freeze_is_an_error(criterion):
    model = tanh_model(criterion=criterion)
    with pytest.raises(ValueError, match=r"grasp.*keras_freeze\.freeze"):
        model.fit(*blobs(), verbose=0)
    model = tanh_model(criterion=criterion)
    with pytest.raises(ValueError, match=r"grasp.*keras_freeze\.freeze"):
        model.optimizer.apply(
            [tf.ones_like(v) for v in model.trainable_variables], model.trainable_variables
        )


PROBABILITY_LOSSES = [
    "sparse_categorical_crossentropy",
    "crossentropy",
    keras.losses.SparseCategoricalCrossentropy(),
    keras.losses.sparse_categorical_crossentropy,
    [keras.losses.SparseCategoricalCrossentropy()],
]


@pytest.mark.parametrize("loss", PROBABILITY_LOSSES)
def test_temperature_is_refused_for_losses_of_probabilities(loss):
    model = tanh_model()
    model.get_layer("head").activation = keras.activations.softmax
    compiled(model, loss=loss)
    with pytest.raises(ValueError, match="from_logits=True"):
        scores_of(model, *blobs())
    expected = score_by_hand(model, *blobs(), temperature=1.0)
    assert close(scores_of(model, *blobs(), GraSP(1.0)), expected, 1e-3)


@pytest.mark.cases(1, tensorflow=1, jax=1)
@tensorflow_only
def test_operation_without_second_derivative_is_named():
    model = keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            layers.Conv2D(2, 1),
            layers.UpSampling2D(interpolation="bicubic"),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    x = np.random.default_rng(0).normal(size=(6, 4, 4, 1))
    with pytest.raises(ValueError, match=r"grasp.*ResizeBicubicGrad"):
        kf.freeze(
            compiled(model, kf.FreezeOptimizer(sgd(), criterion="grasp")), x, np.arange(6) % 3
        )


def test_score_that_is_not_finite_names_the_layer():
    model, (x, y) = tanh_model(criterion=GraSP(1.0)), blobs()
    model.get_layer("head").bias.assign([0.0, 0.0, 0.0])
    model.get_layer("body").bias.assign(np.zeros(8))
    x[0] = 0.0  # an output of exactly zero, where the second derivative of |p|^1.5 is infinite
    model.compile(model.optimizer, lambda y, p: keras.ops.sum(keras.ops.abs(p) ** 1.5, -1))
    with pytest.raises(ValueError, match="kernel' are not finite"):
        kf.freeze(model, x, y)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"temperature": 0.0}, ValueError),
        ({"temperature": float("nan")}, ValueError),
        ({"temperature": "hot"}, TypeError),
        ({"samples_per_class": 0}, ValueError),
        ({"samples_per_class": 2.5}, TypeError),
        ({"samples_per_class": True}, TypeError),
    ],
)
def test_arguments_out_of_range_are_named(arguments, error):
    ((name, value),) = arguments.items()
    with pytest.raises(error, match=f"`{name}`.*{name}={value!r}"):
        GraSP(**arguments)


def test_class_in_place_of_a_criterion_is_refused():
    with pytest.raises(TypeError, match="criterion"):
        kf.FreezeOptimizer(sgd(), criterion=GraSP)


# Examples of each class


def rows_by_hand(y, samples_per_class):
    """The rows that hold the first examples of each class."""
    return np.sort(
        np.concatenate([np.flatnonzero(y == c)[:samples_per_class] for c in np.unique(y)])
    )


@pytest.mark.parametrize("batch_size", [20, 48])
def test_first_examples_of_each_class_are_collected(batch_size):
    rng = np.random.default_rng(0)
    y = rng.permutation(np.repeat([0, 1, 2], [30, 10, 8]))
    x, w = rng.normal(size=(48, 2)), rng.normal(size=48)
    cuts = [slice(i, i + batch_size) for i in range(0, 48, batch_size)]
    given = [(x[c], y[c], w[c], 1.0) for c in cuts]
    batches = criteria.first_of_each_class(given, 7, 3)
    rows = rows_by_hand(y, 7)
    for place, expected in enumerate((x, y, w)):
        found = np.concatenate([b[place] for b in batches])
        assert np.array_equal(found, keras.ops.convert_to_numpy(expected[rows]).astype(found.dtype))
    assert np.array_equal(np.bincount(np.concatenate([b[1] for b in batches])), [7, 7, 7])
    sizes = [len(b[1]) for b in batches]
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1
    assert np.allclose([b[3] for b in batches], np.array(sizes) / 21)


@pytest.mark.cases(1)
@pytest.mark.parametrize("labels", ["sparse", "column", "one-hot"])
def test_score_of_examples_of_each_class_is_that_of_the_same_rows(labels):
    x, y = blobs(60, seed=1)
    y = np.where(np.arange(60) < 20, 0, y)  # the first classes are not balanced
    rows = rows_by_hand(y, 4)
    given = {"sparse": y, "column": y[:, None], "one-hot": np.eye(3)[y]}[labels]
    dataset = tf.data.Dataset.from_tensor_slices((x, given)).batch(12)
    model = tanh_model(criterion=GraSP(samples_per_class=4))
    if labels == "one-hot":
        loss = keras.losses.CategoricalCrossentropy(from_logits=True)
        model.compile(model.optimizer, loss)
    kf.freeze(model, dataset, steps=5)
    expected = score_by_hand(tanh_model(), x[rows], y[rows])
    assert np.array_equal(trained(model), largest(expected, 18))
    found = scores_of(model, x, given, GraSP(samples_per_class=4))
    assert close(found, expected, 1e-3)


def test_binary_labels_are_two_classes():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    x, y = blobs(classes=2)
    y = y.astype("float32")
    rows = rows_by_hand(y, 3)
    found = scores_of(model, x, y, GraSP(samples_per_class=3), loss=loss)
    assert close(found, scores_of(model, x[rows], y[rows], loss=loss))
    with pytest.raises(ValueError, match="0 examples of class 1 of 2"):
        scores_of(model, x, 0 * y, GraSP(samples_per_class=3), loss=loss)


def test_class_with_too_few_examples_is_an_error():
    x, y = blobs(12)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
    model = tanh_model(criterion=GraSP(samples_per_class=3))
    with pytest.raises(
        ValueError, match=r"samples_per_class=3.*`steps`.*2 examples of class 0 of 3"
    ):
        kf.freeze(model, dataset)
    assert kf.freeze(model, dataset, steps=2).num_trained == 18


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (np.linspace(0.0, 1.0, 12), "labels from 0.0 to 1.0 of dtype float32"),
        (np.arange(12), "labels from 0 to 11 .* 3 classes"),
        (np.full((12, 3), 0.5), "not one-hot"),
        (np.zeros((12, 3, 3)), "shape"),
        ({"head": np.zeros(12)}, "one array"),
    ],
)
def test_targets_that_are_no_classes_are_refused(y, message):
    with pytest.raises(ValueError, match=message):
        scores_of(tanh_model(), blobs(12)[0], y, GraSP(samples_per_class=2))


def test_number_of_classes_must_be_known():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, [layers.Dense(3)(inputs), layers.Dense(3)(inputs)])
    loss = lambda y, p: keras.ops.mean(p[0] ** 2 + p[1] ** 2)  # noqa: E731
    with pytest.raises(ValueError, match="number of classes"):
        scores_of(model, *blobs(), GraSP(samples_per_class=2), loss=loss)


# Configuration


@pytest.mark.cases(1)
@pytest.mark.parametrize("criterion", ["grasp", GraSP(3.0, samples_per_class=4)])
def test_criterion_survives_configuration_and_files(tmp_path, criterion):
    model = tanh_model(criterion=criterion)
    optimizer = kf.FreezeOptimizer.from_config(model.optimizer.get_config())
    assert optimizer.criterion == criterion
    kf.freeze(model, *blobs())
    model.save(tmp_path / "model.keras")
    kf.save(model, tmp_path / "model.freeze", include_optimizer=True)
    for loaded in (
        keras.saving.load_model(tmp_path / "model.keras"),
        kf.load(tmp_path / "model.freeze"),
    ):
        assert loaded.optimizer.criterion == criterion
        assert kf.get_mask(loaded) == kf.get_mask(model)


def test_criteria_are_equal_when_their_settings_are():
    assert GraSP(np.float32(2.0), np.int64(3)) == GraSP(2.0, 3)
    assert GraSP(2.0) != GraSP(3.0)
    assert GraSP.from_config(GraSP(2.0, 3).get_config()) == GraSP(2.0, 3)
