"""Networks with restricted weight gradients, in loops, functions and XLA, train as without.

Which layers are restricted is a matter of measured costs; here they all are, in a given way.
"""

import functools

import keras
import numpy as np
import pytest
import restricted_networks
import tensorflow as tf
from helpers import same_bits, training_step, values_of
from keras import layers as kl
from restricted import (
    assert_trained_alike,
    every_layer,
    freeze_optimizer,
    frozen,
    points,
    random_mask,
    small_mlp,
    spy_on_blocks,
    train_both,
    trained_weights,
)
from restricted_networks import InCondition, functional
from tape_gradients import LOOPS

import keras_freeze as kf
from keras_freeze.optimizer import compact_update

pytestmark = [pytest.mark.cases(1), pytest.mark.slow]


@pytest.fixture(autouse=True)
def restricted_products(monkeypatch):
    """The blocks of which a gradient was computed, or traced, in a test."""
    return spy_on_blocks(monkeypatch)


@functools.cache
def trained_without_restriction():
    model = frozen(small_mlp())
    kf.restore_gradients(model)
    return trained_weights(model, points())


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
