"""FreezeNet on LeNet-300-100 against manual backpropagation in NumPy (the paper's equation 2)."""

import keras
import numpy as np
import pytest
from oracle import DenseByHand, SGDByHand

import keras_freeze as kf

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)

BATCH, LEARNING_RATE, MOMENTUM, L2 = 60, 0.1, 0.9, 5e-4
KERNELS = (0, 2, 4)  # among the trainable variables


def make_data(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(3 * BATCH, 28, 28, 1)).astype("float32")
    x[:, :4] = 0.0  # dead pixels, as in the borders of MNIST: their weights score exactly zero
    return x, rng.integers(0, 10, 3 * BATCH)


def make_model(**arguments):
    model = kf.models.lenet_300_100(seed=3)
    sgd = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
    model.compile(
        optimizer=kf.FreezeOptimizer(sgd, l2=L2, **arguments),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def numbers(model):
    return [v.numpy() for v in model.trainable_variables]


@pytest.mark.cases(None, jax=0)
def test_saliency_equals_manual_backpropagation():
    model = make_model()
    x, y = make_data()
    network = DenseByHand(numbers(model))
    gradients = network.gradients(x[:BATCH], y[:BATCH])
    scores = kf.compute_saliency(model, x[:BATCH], y[:BATCH])
    assert list(scores) == [v.path for v in model.trainable_variables if v.name == "kernel"]
    for score, layer in zip(scores.values(), KERNELS, strict=True):
        expected = np.abs(gradients[layer] * network.values[layer])
        np.testing.assert_allclose(score, expected, rtol=2e-4, atol=1e-9)


def test_manual_backpropagation_equals_central_differences():
    x, y = make_data()
    network = DenseByHand(numbers(make_model()))
    gradients = network.gradients(x, y)
    rng = np.random.default_rng(1)
    for parameter, gradient in zip(network.values, gradients, strict=True):
        for _ in range(5):
            index = tuple(rng.integers(0, n) for n in parameter.shape)
            start, losses = parameter[index], []
            for step in (1e-5, -1e-5):
                parameter[index] = start + step
                losses.append(network.loss(x, y))
            parameter[index] = start
            assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(gradient[index], abs=1e-8)


@pytest.mark.cases(1)
@pytest.mark.parametrize("freeze_rate", [0.9, 0.99, 0.995])
@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_three_steps_equal_manual_training(freeze_rate, way):
    model = make_model(freeze_rate=freeze_rate)
    x, y = make_data()
    start = numbers(model)
    network = DenseByHand(start, LEARNING_RATE, MOMENTUM, L2)

    assert network.freeze(x[:BATCH], y[:BATCH], freeze_rate) > 1e-6, "the data have a near-tie"

    if way == "freeze":
        kf.freeze(model, x[:BATCH], y[:BATCH])
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)

    for step in range(3):
        rows = slice(step * BATCH, (step + 1) * BATCH)
        network.step(x[rows], y[rows])

    mask = kf.get_mask(model)
    assert mask.num_trained == round((1 - freeze_rate) * 266_200)
    for i, variable in enumerate(model.trainable_variables):
        np.testing.assert_allclose(variable.numpy(), network.values[i], rtol=1e-4, atol=2e-6)
        if i in KERNELS:
            trained = network.masks[i]
            np.testing.assert_array_equal(mask[variable], trained)
            bits, bits_at_start = variable.numpy().view("uint32"), start[i].view("uint32")
            assert (bits[~trained] == bits_at_start[~trained]).all()
            assert (bits[trained] != bits_at_start[trained]).any()


@pytest.mark.cases(1, jax=0)
@pytest.mark.parametrize("way", ["freeze", "first batch"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_decayed_frozen_weights_follow_their_recurrence(way, nesterov):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([20, 40], [0.1, 0.05, 0.01])
    model = kf.models.lenet_300_100(seed=3)
    sgd = keras.optimizers.SGD(schedule, momentum=0.9, nesterov=nesterov)
    model.compile(
        optimizer=kf.FreezeOptimizer(sgd, 0.9, frozen_weights="decay", l2=0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    x, y = make_data()
    start = numbers(model)
    if way == "freeze":
        kf.freeze(model, x[:BATCH], y[:BATCH])
    model.fit(x, y, batch_size=BATCH, epochs=20, shuffle=False, verbose=0)

    mask = kf.get_mask(model)
    for variable, weights in zip(model.trainable_variables, start, strict=True):
        if variable.name != "kernel":
            continue
        w, recurrence = weights.astype("float64"), SGDByHand(0.9, nesterov)
        for step in range(60):
            rate = 0.1 if step <= 20 else 0.05 if step <= 40 else 0.01
            w = w + recurrence.change(0.05 * w, rate)
        frozen = ~mask[variable]
        assert 0.0 < abs(w[frozen]).max() < 0.5 * abs(weights[frozen]).max()
        np.testing.assert_allclose(variable.numpy()[frozen], w[frozen], rtol=1e-4)


@pytest.mark.parametrize(
    ("freeze_rate", "distribution"), [(0.9, "global"), (0.9, {"fc2": 1.0}), (1.0, "global")]
)
@pytest.mark.cases(1, tensorflow=0)
def test_steps_with_decay_use_the_weights_before_they_shrink(freeze_rate, distribution):
    l2 = 0.5  # so that it shows which weights a gradient is of
    model = kf.models.lenet_300_100(seed=3)
    model.compile(
        optimizer=kf.FreezeOptimizer(
            keras.optimizers.SGD(LEARNING_RATE),
            freeze_rate,
            frozen_weights="decay",
            l2=l2,
            distribution=distribution,
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    x, y = make_data()
    kf.freeze(model, x[:BATCH], y[:BATCH])
    mask = kf.get_mask(model)
    network = DenseByHand(numbers(model))
    for step in range(9):
        rows = slice(step % 3 * BATCH, (step % 3 + 1) * BATCH)
        model.fit(x[rows], y[rows], batch_size=BATCH, verbose=0)
        for i, gradient in enumerate(network.gradients(x[rows], y[rows])):
            if i in KERNELS:
                gradient = np.where(mask[model.trainable_variables[i]], gradient, 0.0)
            change = -LEARNING_RATE * (gradient + l2 * network.values[i])
            network.values[i] = network.values[i] + change
        for i, value in enumerate(numbers(model)):
            np.testing.assert_allclose(value, network.values[i], rtol=1e-4, atol=2e-6)


@pytest.mark.same_on_all
def test_snip_trains_the_network_of_the_kept_weights():
    model = make_model(freeze_rate=0.9, frozen_weights="zero")
    x, y = make_data()
    kf.freeze(model, x[:BATCH], y[:BATCH])
    mask = kf.get_mask(model)
    network = DenseByHand(numbers(model), LEARNING_RATE, MOMENTUM, L2)
    for i in KERNELS:
        network.masks[i] = mask[model.trainable_variables[i]]
        assert (network.values[i][~network.masks[i]] == 0.0).all()
    model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, shuffle=False, verbose=0)
    network.step(x[:BATCH], y[:BATCH])
    for i, variable in enumerate(model.trainable_variables):
        np.testing.assert_allclose(variable.numpy(), network.values[i], rtol=1e-4, atol=2e-6)
        if i in KERNELS:
            assert (variable.numpy()[~network.masks[i]] == 0.0).all()
