"""Models with a training step of their own: what it hands to the optimizer decides the mask."""

import random

import keras
import numpy as np
import pytest
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    blobs,
    crossentropy,
    is_weight,
    same_bits,
    sgd,
    value_of,
    values_of,
)
from keras import ops
from own_step_cases import (
    CASES,
    RATE,
    Flow,
    assert_mask_by_hand,
    assert_same_values,
    compiled,
    dense,
    every_value,
    freezing,
    made,
    tensors,
)
from own_steps import BACKEND, OwnStep, gradients_by_hand

import keras_freeze as kf

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=0)


def expected_mask_holds(model, mask, data, rate=RATE):
    seeds = [(v, value_of(v)) for v in model.non_trainable_variables]
    variables = model.trained_variables()
    gradients = gradients_by_hand(lambda: model.loss_of(data), variables)
    for variable, value in seeds:
        variable.assign(value)
    assert_mask_by_hand(mask, variables, gradients, rate)


@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize("case", CASES)
def test_the_mask_is_of_the_gradients_that_the_step_hands_to_the_optimizer(case):
    model, data, arguments = made(case)
    before = every_value(model)
    mask = kf.freeze(model, *arguments)
    assert_same_values(every_value(model), before)
    expected_mask_holds(model, mask, tensors(data))
    assert kf.get_mask(model) == mask


@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize("case", CASES)
def test_training_on_keeps_what_is_frozen(case):
    model, _, arguments = made(case)
    mask = kf.freeze(model, *arguments)
    variables = model.trained_variables()
    before = values_of(variables)
    fit_arguments = {"epochs": 2, "shuffle": False, "verbose": 0, "batch_size": 16}
    model.fit(*arguments, **fit_arguments)
    assert_frozen_bits_kept(variables, mask, before)
    assert_trained_moved(variables, mask, before)
    assert kf.get_mask(model) == mask


def test_all_state_is_put_back_bit_for_bit():
    model, _, (data,) = made("dict")
    model.rng = np.random.default_rng(5)
    own_loss = model.loss_of
    tracker = keras.metrics.Mean()

    def loss_of(data):  # that draws from everything
        model.rng.normal(), random.random(), np.random.random()
        noise = keras.random.normal((6,))
        model.count = getattr(model, "count", 0) + 1
        return own_loss({**data, "image": data["image"] + 0.01 * noise})

    model.loss_of = loss_of
    model.tracker = tracker
    model.count = 7
    tracker.update_state(3.0)
    keras.random.normal((1,))  # so that Keras's generator exists
    states = model.rng.bit_generator.state, random.getstate(), np.random.get_state()[1].tobytes()
    before = [*every_value(model), *values_of(tracker.variables)]
    next_of_keras = peek(lambda: keras.random.normal((3,)))
    kf.freeze(model, data)
    after = model.rng.bit_generator.state, random.getstate(), np.random.get_state()[1].tobytes()
    assert after == states
    assert model.count == 7
    assert_same_values([*every_value(model), *values_of(tracker.variables)], before)
    assert same_bits(value_of(keras.random.normal((3,))), next_of_keras)


def peek(draw):
    """What is drawn next from Keras's own generator, which is put back."""
    from keras.src.backend.common.global_state import get_global_attribute

    state = get_global_attribute("global_seed_generator").state
    before = value_of(state)
    drawn = value_of(draw())
    state.assign(before)
    return drawn


@pytest.mark.same_on_all
def test_batches_of_a_dataset_are_summed():
    model, _, _ = made("flow")
    x, y = blobs()
    batches = [(x[:16], y[:16]), (x[16:32], y[16:32]), (x[32:], y[32:])]
    mask = kf.freeze(model, iter(batches), steps=2)

    def loss():
        return sum(model.loss_of(tensors(batch)) for batch in batches[:2])

    variables = model.trainable_variables
    assert_mask_by_hand(mask, variables, gradients_by_hand(loss, variables))


@pytest.mark.same_on_all
def test_batches_of_more_parts_than_keras_knows_go_to_the_step_as_they_are():
    class FourParts(Flow):
        def loss_of(self, data):
            x, _, z, weight = data
            return super().loss_of(x) + weight[0] * ops.mean(ops.square(self.scale(z))) * 5.0

    keras.utils.set_random_seed(0)
    model = compiled(FourParts)
    x, y = blobs()
    model(x)
    batch = (x, y, x[::-1].copy(), np.ones((48,), "float32"))
    mask = kf.freeze(model, iter([batch]))
    expected_mask_holds(model, mask, tensors(batch))


def test_a_model_of_built_layers_is_built_for_a_step_that_needs_its_state():
    """Of a siamese network: only JAX's `stateless_call` asks whether the outer model is built."""

    class Tower(OwnStep):
        def __init__(self):
            super().__init__()
            self.tower = dense(8, 4)

        def call(self, pair):
            return self.tower(pair[0]) - self.tower(pair[1])

        def loss_of(self, data):
            if BACKEND == "jax":
                self.stateless_call(self.trainable_variables, self.non_trainable_variables, data[0])
            return ops.mean(ops.square(self(data[0])))

    model = compiled(Tower)
    x, _ = blobs()
    assert not model.built
    assert kf.freeze(model, (x, x[::-1].copy())).num_weights == 6 * 8 + 8 * 4


def test_a_scale_that_is_too_large_is_halved_as_in_training():
    plain, _, arguments = made("flow")
    expected = kf.freeze(plain, *arguments)
    outer = keras.optimizers.LossScaleOptimizer(freezing(), initial_scale=2.0**127)
    model, _, arguments = made("flow", outer)
    assert kf.freeze(model, *arguments) == expected
    assert float(outer.dynamic_scale) == outer.initial_scale == 2.0**127


def test_gradients_that_are_not_finite_are_an_error():
    model, _, (x, y) = made("flow")
    x[0, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        kf.freeze(model, x, y)
    assert kf.get_mask(model) is None
    outer = keras.optimizers.LossScaleOptimizer(freezing(), initial_scale=4.0)
    model, _, _ = made("flow", outer)
    with pytest.raises(ValueError, match="not finite"):
        kf.freeze(model, x, y)
    assert not outer.built


@pytest.mark.cases(1)
@pytest.mark.parametrize("criterion", ["magnitude", "random", lambda w, g: ops.square(g)])
def test_other_criteria_decide_by_what_the_step_trains(criterion):
    model, _, arguments = made("distiller", freezing(criterion=criterion))
    mask = kf.freeze(model, *arguments)
    trained = model.student.trainable_variables
    assert mask.num_weights == sum(v.shape[0] * v.shape[1] for v in trained if is_weight(v))
    assert mask.num_trained == mask.num_weights // 4


@pytest.mark.same_on_all
def test_freezing_twice_needs_overwrite():
    model, _, arguments = made("flow")
    mask = kf.freeze(model, *arguments)
    with pytest.raises(ValueError, match="frozen already"):
        kf.freeze(model, *arguments)
    assert kf.freeze(model, *arguments, overwrite=True) == mask


@pytest.mark.same_on_all
@pytest.mark.parametrize("criterion", ["snip", "random"])
def test_a_first_batch_with_nothing_to_freeze_is_an_error(criterion):
    keras.utils.set_random_seed(0)
    model = dense(8, 3)
    names = [layer.name for layer in model.layers]
    model.compile(freezing(criterion=criterion, exclude=names), "mse")
    before = every_value(model)
    x = blobs()[0]
    with pytest.raises(ValueError, match="no weights that could be frozen"):
        model.fit(x, x[:, :3], verbose=0)
    if BACKEND == "jax":  # where Keras has taken the values out of the model when a step fails
        return
    assert_same_values(every_value(model), before)
    with pytest.raises(ValueError, match="no weights that could be frozen"):
        kf.freeze(model, x, x[:, :3])


@pytest.mark.same_on_all
def test_rate_zero_with_nothing_to_freeze_trains_everything():
    model = dense(8, 3)
    names = [layer.name for layer in model.layers]
    model.compile(kf.FreezeOptimizer(sgd(), 0.0, exclude=names), "mse")
    before = every_value(model)
    x = blobs()[0]
    model.fit(x, x[:, :3], verbose=0)
    assert not same_bits(every_value(model)[0], before[0])


@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_a_first_batch_whose_scores_are_zero_warns(run_eagerly):
    keras.utils.set_random_seed(0)
    model = dense(8, 3)
    model.compile(freezing(), "mse", run_eagerly=run_eagerly, jit_compile=None)
    x = blobs()[0]
    with pytest.warns(UserWarning, match="All scores are zero"):
        model.fit(x, x[:, :3], sample_weight=np.zeros(len(x)), verbose=0)
    assert 18 <= kf.get_mask(model).num_trained <= 20  # with one in a layer left empty


class Remembers(keras.Model):
    """A model that keeps numbers of its own in arrays, which its step changes in place."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.dense.build((None, 6))
        self.counts = np.zeros(3)
        self.nested = {"seen": [np.zeros(2)]}
        if keras.backend.backend() == "torch":
            import torch

            self.register_buffer("total", torch.zeros(2))

    def call(self, x):
        return self.dense(x)

    def train_step(self, *args):
        self.counts += 1
        self.nested["seen"][0][:] = 7
        if keras.backend.backend() == "torch":
            self.total += 1
        return super().train_step(*args)


def test_arrays_that_a_step_changes_in_place_are_put_back():
    model = Remembers()
    model.compile(kf.FreezeOptimizer("sgd", 0.75), crossentropy())
    x, y = blobs()
    kf.freeze(model, x, y)
    assert not model.counts.any()
    assert not model.nested["seen"][0].any()
    if keras.backend.backend() == "torch":
        assert not model.total.any()
