"""Training steps with two optimizers, as of a GAN: a mask for each, or one told to both."""

import keras
import numpy as np
import pytest
from helpers import assert_frozen_bits_kept, assert_trained_moved, blobs, is_weight, sgd, values_of
from keras import ops
from own_step_cases import assert_mask_by_hand, assert_same_values, dense, every_value, freezing
from own_steps import gradients_by_hand, make_step, step_of

import keras_freeze as kf
from keras_freeze.masks.drawn import draw_of

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=0)


class Adversarial(keras.Model):
    """WGAN-like: two optimizers, and several steps of the critic for one of the generator."""

    n_critic = 2

    def __init__(self, d_optimizer, g_optimizer):
        super().__init__()
        self.generator = dense(8, 6, inputs=2, name="generator")
        self.critic = dense(10, 1, name="critic")
        self.noise = [np.full((48, 2), 0.1 * i, "float32") for i in range(self.n_critic + 1)]
        self.counter = 0
        super().compile(run_eagerly=True)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def critic_loss(self, x, i):
        return ops.mean(self.critic(self.generator(self.noise[i]))) - ops.mean(self.critic(x))

    def generator_loss(self):
        return -ops.mean(self.critic(self.generator(self.noise[-1])))

    def run(self, data):
        x = data[0] if isinstance(data, (tuple, list)) else data
        for i in range(self.n_critic):
            step_of(
                self.d_optimizer,
                lambda i=i: self.critic_loss(x, i),
                self.critic.trainable_variables,
            )
        step_of(self.g_optimizer, self.generator_loss, self.generator.trainable_variables)
        self.counter += 1

    train_step = make_step(run)


def gan(d_optimizer=None, g_optimizer=None):
    keras.utils.set_random_seed(0)
    return Adversarial(d_optimizer or freezing(), g_optimizer or freezing())


@pytest.mark.same_on_all
def test_two_optimizers_get_a_mask_each():
    model = gan(g_optimizer=kf.FreezeOptimizer(sgd(), 0.5))
    x, _ = blobs()
    before = every_value(model)
    kf.freeze(model, x)
    assert_same_values(every_value(model), before)
    assert model.counter == 0
    critic, generator = model.critic.trainable_variables, model.generator.trainable_variables
    by_hand = gradients_by_hand(lambda: model.critic_loss(x, 0) + model.critic_loss(x, 1), critic)
    assert_mask_by_hand(model.d_optimizer.mask, critic, by_hand)
    by_hand = gradients_by_hand(model.generator_loss, generator)
    assert_mask_by_hand(model.g_optimizer.mask, generator, by_hand, rate=0.5)


@pytest.mark.same_on_all
def test_the_masks_of_two_optimizers_are_drawn():
    x, _ = blobs()
    counts = []
    for drawn in (False, True):
        model = gan()
        kf.freeze(model, x, drawn=drawn)
        masks = [model.d_optimizer.mask, model.g_optimizer.mask]
        counts.append([[int(e.trained.sum()) for e in mask.entries] for mask in masks])
    assert counts[0] == counts[1]
    drawn = [draw_of(v) for v in model.trainable_variables if is_weight(v)]
    entries = [entry for mask in masks[::-1] for entry in mask.entries]  # the generator comes first
    for draw, entry in zip(drawn, entries, strict=True):
        assert np.array_equal(draw.mask(entry.trained.shape), entry.trained)


@pytest.mark.same_on_all
def test_both_networks_of_a_gan_keep_what_is_frozen():
    model = gan()
    x, _ = blobs()
    kf.freeze(model, x)
    networks = [
        (model.critic.trainable_variables, model.d_optimizer.mask),
        (model.generator.trainable_variables, model.g_optimizer.mask),
    ]
    before = [values_of(variables) for variables, _ in networks]
    for _ in range(3):
        model.run(ops.convert_to_tensor(x))
    for (variables, mask), old in zip(networks, before, strict=True):
        assert_frozen_bits_kept(variables, mask, old)
        assert_trained_moved(variables, mask, old)


def build_optimizers(model):
    model.d_optimizer.build(model.critic.trainable_variables)
    model.g_optimizer.build(model.generator.trainable_variables)


@pytest.mark.same_on_all
def test_one_mask_for_two_optimizers_is_told_to_both():
    model = gan()
    build_optimizers(model)
    mask = kf.freeze(model, mask=lambda v: np.arange(v.shape[0] * v.shape[1]).reshape(v.shape) < 5)
    assert kf.get_mask(model) == mask
    variables = model.trainable_variables
    before = values_of(variables)
    model.run(ops.convert_to_tensor(blobs()[0]))
    assert_frozen_bits_kept(variables, mask, before)
    assert_trained_moved(variables, mask, before)


def test_a_mask_of_weights_that_another_optimizer_trains_is_an_error():
    model = gan(g_optimizer=keras.optimizers.SGD(0.1))
    build_optimizers(model)
    frozen = {
        v.path: np.zeros(v.shape, bool)
        for v in model.trainable_variables
        if is_weight(v)  # of both networks
    }
    with pytest.raises(ValueError, match=r"freezes.*generator.*no FreezeOptimizer"):
        kf.freeze(model, mask=frozen)
    assert kf.get_mask(model) is None
    of_critic = {path: array for path, array in frozen.items() if path.startswith("critic")}
    kf.freeze(model, mask=of_critic)
    assert model.d_optimizer.mask.num_trained == 0


@pytest.mark.parametrize("excluding", ["d_optimizer", "g_optimizer"])
def test_a_mask_that_one_of_two_optimizers_refuses_changes_neither(excluding):
    network = {"d_optimizer": "critic", "g_optimizer": "generator"}[excluding]
    model = gan(**{excluding: freezing(exclude=[network])})
    build_optimizers(model)
    with pytest.raises(ValueError, match="`exclude` says"):
        kf.freeze(model, mask=lambda v: np.zeros(v.shape, bool))
    assert model.d_optimizer.mask is None
    assert model.g_optimizer.mask is None


@pytest.mark.same_on_all
def test_a_plain_optimizer_beside_is_put_back_to_what_it_was():
    plain = keras.optimizers.Adam(0.1)
    model = gan(g_optimizer=plain)
    x, _ = blobs()
    generator = values_of(model.generator.trainable_variables)
    kf.freeze(model, x)
    assert_same_values(values_of(model.generator.trainable_variables), generator)
    assert not plain.built
    assert int(plain.iterations) == 0
    assert len(plain.variables) == 2
    model.run(ops.convert_to_tensor(x))
    assert plain.built
    assert int(plain.iterations) == 1
    state = values_of(plain.variables)
    kf.freeze(model, x, overwrite=True)
    assert_same_values(values_of(plain.variables), state)


@pytest.mark.same_on_all
def test_an_error_in_the_step_leaves_everything_as_it_was():
    plain = keras.optimizers.Adam(0.1)
    model = gan(d_optimizer=plain)
    x, _ = blobs()

    class BrokenError(Exception):
        pass

    def generator_loss():
        raise BrokenError

    own = model.generator_loss
    model.generator_loss = generator_loss
    before = every_value(model)
    with pytest.raises(BrokenError):
        kf.freeze(model, x)
    assert_same_values(every_value(model), before)
    assert not plain.built
    assert not model.g_optimizer.built
    assert model.g_optimizer.mask is None
    model.generator_loss = own
    kf.freeze(model, x)
    assert model.g_optimizer.mask is not None


def test_a_step_that_hands_nothing_to_a_freeze_optimizer_is_an_error():
    model = gan()
    model.run = None
    type_of_step = make_step(lambda self, data: None)
    model.train_step = type_of_step.__get__(model)
    with pytest.raises(ValueError, match="passed no gradient to a FreezeOptimizer"):
        kf.freeze(model, blobs()[0])


def test_a_model_without_freeze_optimizer_is_an_error():
    model = gan(keras.optimizers.SGD(), keras.optimizers.SGD())
    with pytest.raises(ValueError, match="has no FreezeOptimizer"):
        kf.freeze(model, blobs()[0])
