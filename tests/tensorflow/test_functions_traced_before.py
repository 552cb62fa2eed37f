"""Functions and checkpoints from before the update became compact, with the first batch's mask."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_freeze as kf
from keras_freeze.optimizer.compact_update import CompactUpdate

X = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
Y = X[:, :1]


def make(kind=keras.Sequential):
    keras.utils.set_random_seed(0)
    model = kind([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile(kf.FreezeOptimizer("adam"), "mse")
    return model


def fit(model, x=X, y=Y):
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)


def weights_of(model):
    return [v.numpy() for v in model.trainable_variables]


def assert_trained_alike(model, expected):
    assert model.optimizer.mask == expected.optimizer.mask
    for one, two in zip(weights_of(model), weights_of(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


class DecoratedStep(keras.Sequential):
    @tf.function
    def train_step(self, data):
        return super().train_step(data)


class InnerFunction(keras.Sequential):
    def train_step(self, data):
        return self.inner_step(data)

    @tf.function
    def inner_step(self, data):
        return super().train_step(data)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", [DecoratedStep, InnerFunction])
def test_a_train_step_that_keeps_its_own_trace_trains_on(kind):
    model, plain = make(kind), make()
    fit(model)
    fit(plain)
    assert_trained_alike(model, plain)


@pytest.mark.cases(1)
@pytest.mark.parametrize("first", ["loop", "one step of fit"])
def test_a_custom_loop_goes_on_after_fit(first):
    model, expected = make(), make()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model.compute_loss(y=y, y_pred=model(x, training=True))
        variables = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    if first == "loop":
        step(X[:8], Y[:8])
    else:
        fit(model, X[:8], Y[:8])
        step(X[:8], Y[:8])
    fit(model)
    step(X[:8], Y[:8])
    for _ in range(1 if first == "loop" else 2):
        fit(expected, X[:8], Y[:8])
    fit(expected)
    fit(expected, X[:8], Y[:8])
    assert_trained_alike(model, expected)


@pytest.mark.exhaustive
def test_two_models_with_one_optimizer_are_trained_in_turn():
    model, expected = make(), make()
    other = keras.Model(model.inputs, model.outputs)
    other.compile(model.optimizer, "mse")
    for _ in range(2):
        model.train_on_batch(X[:8], Y[:8])
        other.train_on_batch(X[8:16], Y[8:16])
        expected.train_on_batch(X[:8], Y[:8])
        expected.train_on_batch(X[8:16], Y[8:16])
    assert_trained_alike(model, expected)


def test_a_checkpoint_of_the_first_step_can_be_restored_later(tmp_path):
    model, expected = make(), make()
    fit(model, X[:8], Y[:8])
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "c")
    fit(model)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
    fit(model, X[8:], Y[8:])
    fit(expected)
    assert isinstance(model.optimizer.update, CompactUpdate)
    assert_trained_alike(model, expected)
