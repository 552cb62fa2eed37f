"""Compact gradients on JAX: `value_and_grad`, function transforms, and what XLA makes of a step."""

import functools
import re

import keras
import numpy as np
import pytest
from helpers import same_bits, sgd, values_of
from keras import layers as kl
from restricted import (
    assert_trained_alike,
    built,
    every_layer,
    freeze_optimizer,
    frozen,
    normal,
    points,
    random_mask,
    restricted_layers,
    small_mlp,
    spy_on_blocks,
    trained_weights,
)

import keras_freeze as kf

pytestmark = pytest.mark.skipif(keras.backend.backend() != "jax", reason="compact gradients of JAX")
jax = pytest.importorskip("jax")


@pytest.fixture(autouse=True)
def restricted_products(monkeypatch):
    """The blocks of which a gradient was computed, or traced, in a test."""
    return spy_on_blocks(monkeypatch)


def state_of(model, optimizer):
    groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    return tuple([v.value for v in group] for group in groups)


def loss_of(model):
    def compute(trainable, others, x, y):
        outputs, others = model.stateless_call(trainable, others, x, training=True)
        return keras.ops.mean(keras.ops.square(outputs - y)), others

    return compute


def trained_by(differentiate, make_model=small_mlp):
    """The weights after some steps of a custom loop, the model, and its weights before."""
    keras.utils.set_random_seed(0)
    model, optimizer = make_model(), freeze_optimizer()
    with every_layer():
        kf.freeze(model, mask=random_mask(), optimizer=optimizer, loss="mse")
    start = values_of(model.trainable_variables)
    gradients_of = differentiate(loss_of(model), optimizer)

    @jax.jit
    def step(state, x, y):
        trainable, others, variables = state
        (_, others), gradients = gradients_of(trainable, others, x, y)
        trainable, variables = optimizer.stateless_apply(variables, gradients, trainable)
        return trainable, others, variables

    state = state_of(model, optimizer)
    x, y = points()
    for i in range(0, len(x), 12):
        state = step(state, x[i : i + 12], y[i : i + 12])
    for variable, value in zip(model.trainable_variables, state[0], strict=True):
        variable.assign(value)
    return values_of(model.trainable_variables), model, start


def ordinary(function, optimizer):
    return jax.value_and_grad(function, has_aux=True)


def compact(function, optimizer):
    return kf.value_and_grad(function, optimizer, has_aux=True)


def test_a_custom_loop_trains_as_with_ordinary_gradients(restricted_products):
    expected, _, _ = trained_by(ordinary)
    assert not restricted_products
    found, model, start = trained_by(compact)
    assert len({id(block) for block in restricted_products}) == 2
    assert_trained_alike(model, start, found, expected)


class Transformed(keras.Model):
    """Uses its layers inside functions that JAX transforms."""

    def __init__(self):
        super().__init__()
        self.first, self.second = kl.Dense(6, activation="tanh"), kl.Dense(3)

    def call(self, x, training=None):
        x = jax.checkpoint(lambda x: self.first(x))(x)
        repeat = lambda carry, _: (carry + self.first(x), None)  # noqa: E731
        x, _ = jax.lax.scan(repeat, x, None, length=2)
        return jax.vmap(lambda row: self.second(row[None])[0])(jax.jit(lambda x: 2.0 * x)(x))


def test_layers_inside_transformed_functions_train_alike():
    def make():
        return built(Transformed(), 1, 6)

    expected, _, _ = trained_by(ordinary, make)
    found, model, start = trained_by(compact, make)
    assert_trained_alike(model, start, found, expected)


def test_a_gradient_of_a_gradient_has_all_its_parts():
    """The penalty is differentiated through the layers' own gradient of their inputs."""

    def with_penalty(function):
        def compute(trainable, others, x, y):
            loss, rest = function(trainable, others, x, y)
            slope = jax.grad(lambda x: function(trainable, others, x, y)[0])(x)
            return loss + 30.0 * keras.ops.sum(keras.ops.square(slope)), rest

        return compute

    expected, _, _ = trained_by(lambda f, optimizer: ordinary(with_penalty(f), optimizer))
    found, model, start = trained_by(lambda f, optimizer: compact(with_penalty(f), optimizer))
    assert_trained_alike(model, start, found, expected)


def test_gradients_are_trees_of_arrays():
    model, optimizer = small_mlp(), freeze_optimizer()
    with every_layer():
        kf.freeze(model, mask=random_mask(), optimizer=optimizer, loss="mse")
    x, y = points()
    trainable, others, _ = state_of(model, optimizer)
    _, gradients = compact(loss_of(model), optimizer)(trainable, others, x, y)
    _, expected = ordinary(loss_of(model), optimizer)(trainable, others, x, y)
    mask, variables = optimizer.mask, model.trainable_variables
    doubled = jax.tree.map(lambda g: 2.0 * g, gradients)
    for variable, gradient, whole in zip(variables, doubled, expected, strict=True):
        if variable.name != "kernel":
            np.testing.assert_allclose(gradient, 2.0 * whole, rtol=1e-5)
            continue
        assert not np.asarray(gradient.kernel).any()
        entries = 2.0 * np.asarray(whole)[mask[variable]]
        np.testing.assert_allclose(gradient.vector, entries, rtol=1e-5, atol=1e-7)


def test_other_optimizers_are_refused():
    with pytest.raises(TypeError, match="`optimizer` must be a FreezeOptimizer"):
        kf.value_and_grad(lambda x: x, sgd())


def test_train_steps_are_those_of_keras_without_restriction():
    model = frozen(small_mlp())
    assert "train_step" in vars(model)
    kf.restore_gradients(model)
    assert "train_step" not in vars(model)
    assert "compute_loss_and_updates" not in vars(model)


def test_a_train_step_that_someone_wrapped_around_a_restricted_one_stays():
    model = frozen(small_mlp())

    @functools.wraps(model.train_step)
    def train_step(*args, restricted=model.train_step):
        return restricted(*args)

    vars(model)["train_step"] = train_step
    kf.restore_gradients(model)
    assert vars(model)["train_step"] is train_step
    trained_weights(model, points())


class OwnStep(keras.Sequential):
    def train_step(self, state, data):
        self.steps = getattr(self, "steps", 0) + 1
        return super().train_step(state, data)


def test_a_train_step_of_the_users_own_is_left_alone():
    model = frozen(OwnStep([keras.Input((6,)), kl.Dense(3)]))
    assert restricted_layers(model)
    start = values_of(model.trainable_variables)
    trained_weights(model, points())
    assert model.steps
    mask = kf.get_mask(model)[model.layers[0].kernel]
    found = values_of(model.trainable_variables)
    assert same_bits(found[0][~mask], start[0][~mask])
    assert (found[0] != start[0])[mask].all()


@pytest.mark.cases(None, jax=1)
@pytest.mark.parametrize("trained", ["several", "one"])
def test_xla_neither_copies_a_kernel_nor_computes_its_whole_gradient(trained):
    """Of a kernel's shape there are its reads, and the entries that are set, in place."""
    size = 600  # large enough for the order of reads and writes to be settled

    def mask(variable):
        rng, chosen = np.random.default_rng(0), np.zeros(variable.shape, bool)
        chosen.flat[rng.choice(chosen.size, 50 if trained == "several" else 1)] = True
        return chosen

    hidden = [kl.Dense(size, "relu"), kl.Dense(size, "relu")]
    model = frozen(keras.Sequential([keras.Input((size,)), *hidden, kl.Dense(3)]), mask=mask)
    x, y = normal(8, size), normal(8, 3)
    model.train_on_batch(x, y)
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = tuple([v.value for v in group] for group in groups)
    step = jax.jit(lambda state, data: model.train_step(state, data), donate_argnums=0)
    text = step.lower(state, (x, y, None)).compile().as_text()
    kernel = re.compile(rf"= f32\[(?:{size},{size}|{size * size})\]\S* ([\w-]+)\(")
    found = {match[1] for match in kernel.finditer(text)}
    assert "parameter" in found
    assert not found & {"copy", "dot", "dynamic-update-slice"}
