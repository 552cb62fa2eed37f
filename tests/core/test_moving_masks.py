"""Callbacks that change the mask while `fit` trains, with every kind of update and treatment."""

import keras
import numpy as np
import pytest
from axes import OPTIMIZERS
from delta_cases import assert_same_weights
from helpers import (
    compiled,
    crossentropy,
    dense_model,
    same_bits,
    sgd,
    two_dense_layers,
    value_of,
    values_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from moving_mask_cases import SCHEDULES, Watch, X, Y, gradual, rigl, train
from own_steps import OwnStep

import keras_freeze as kf
from keras_freeze.callbacks import GradualFreezing, RegrowTrained
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.optimizer.dense_update import DenseUpdate

BACKEND = keras.backend.backend()
COMPACT = ("sgd", "momentum", "adam", "amsgrad", "adagrad", "rmsprop", "schedule_free")
DENSE = ("averaging", "muon", "lamb")

few = pytest.mark.cases(4, tensorflow=1, jax=1)
pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)


@few
@pytest.mark.parametrize("is_frozen_before", [True, False])
@pytest.mark.parametrize("frozen_weights", ["keep", "zero"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("inner", [*COMPACT, *DENSE])
def test_what_is_outside_the_mask_has_its_frozen_value(
    inner, schedule, frozen_weights, is_frozen_before
):
    rate, make = SCHEDULES[schedule]
    optimizer = kf.FreezeOptimizer(OPTIMIZERS[inner](), 0.7, frozen_weights=frozen_weights)
    model = compiled(dense_model(), optimizer)
    watch = Watch(model)
    if is_frozen_before:
        kf.freeze(model, X[:8], Y[:8], freeze_rate=rate)
    train(model, make(), watch)
    assert watch.num_changes >= 3
    if schedule.startswith("gradual"):
        assert watch.counts[-1] == 7 + watch.masks[-1].num_rescued  # floor(0.1 * 72)
        assert watch.masks[-1].num_rescued <= 1
        assert sorted(watch.counts, reverse=True) == watch.counts
    else:
        assert set(watch.counts) == {21}  # floor(0.3 * 72)
    assert isinstance(optimizer.update, CompactUpdate if inner in COMPACT else DenseUpdate)


@settings(max_examples={"torch": 25, "tensorflow": 3, "jax": 3}[BACKEND])
@given(
    fraction=st.floats(0.05, 1.0),
    frequency=st.integers(1, 5),
    begin=st.integers(0, 4),
    length=st.none() | st.integers(0, 9),
    rate=st.sampled_from([0.0, 0.3, 0.8, 0.97, 1.0]),
    inner=st.sampled_from(["adam", "momentum", "muon"]),
    frozen_weights=st.sampled_from(["keep", "zero"]),
    num_gradual=st.integers(0, 7),
)
def test_random_schedules_one_after_the_other_keep_frozen_values(
    fraction, frequency, begin, length, rate, inner, frozen_weights, num_gradual
):
    optimizer = kf.FreezeOptimizer(OPTIMIZERS[inner](), rate, frozen_weights=frozen_weights)
    model = compiled(two_dense_layers(), optimizer)
    watch = Watch(model)
    end = None if length is None else begin + length
    kf.freeze(model, X[:8], Y[:8])
    train(
        model, RegrowTrained(fraction, frequency, "random", begin=begin, end=end), watch, epochs=1
    )
    assert len(set(watch.counts)) == 1
    mask = kf.get_mask(model)
    more = GradualFreezing(mask.freeze_rate, 1.0, 6, 6 + num_gradual, frequency)
    train(model, more, watch, epochs=2)
    assert watch.counts[-1] == 0


# By hand: one linear layer with the mean squared error.


class ByHand:
    """Adam and RigL in float64, entry by entry."""

    def __init__(self, start, mask):
        self.start, self.mask = start.astype("float64"), mask.copy()
        self.weights = self.start.copy()
        self.first, self.second = np.zeros_like(self.start), np.zeros_like(self.start)
        self.count = 0

    def gradient(self, x, y):
        error = x @ self.weights - y
        return 2 * x.T @ error / error.size

    def step(self, x, y, rate=0.01):
        gradient = self.gradient(x, y)
        self.count += 1
        for i in np.ndindex(self.mask.shape):
            if not self.mask[i]:
                continue
            self.first[i] += 0.1 * (gradient[i] - self.first[i])
            self.second[i] += 0.001 * (gradient[i] ** 2 - self.second[i])
            first = self.first[i] / (1 - 0.9**self.count)
            second = self.second[i] / (1 - 0.999**self.count)
            self.weights[i] -= rate * first / (np.sqrt(second) + 1e-7)

    def move(self, x, y, fraction):
        gradient = np.abs(self.gradient(x, y))
        moved = np.abs(self.weights - self.start)
        inside = sorted(zip(*np.nonzero(self.mask), strict=True), key=lambda i: moved[i])
        leaving = inside[: int(fraction * len(inside))]
        for i in leaving:
            self.mask[i] = False
        outside = sorted(zip(*np.nonzero(~self.mask), strict=True), key=lambda i: -gradient[i])
        joining = outside[: len(leaving)]
        for i in set(leaving) - set(joining):
            self.weights[i] = self.start[i]
            self.first[i] = self.second[i] = 0.0
        for i in joining:
            self.mask[i] = True


@pytest.mark.cases(1)
@pytest.mark.parametrize("is_averaging", [False, True], ids=["compact", "dense"])
def test_adam_and_rigl_are_what_they_are_by_hand(is_averaging):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(8, 6)).astype("float32")
    y = rng.normal(size=(8, 5)).astype("float32")
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, use_bias=False, name="linear")]
    )
    inner = keras.optimizers.Adam(0.01, use_ema=is_averaging)
    model.compile(kf.FreezeOptimizer(inner, 0.6), "mse")
    kf.freeze(model, x, y)
    (kernel,) = model.trainable_variables
    hand = ByHand(value_of(kernel), kf.get_mask(model)["linear/kernel"])
    regrow = RegrowTrained(0.5, 2, "gradient", x=x, y=y)
    watch = Watch(model)
    model.fit(x, y, batch_size=8, epochs=11, verbose=0, callbacks=[regrow, watch])
    for step in range(1, 12):
        hand.step(x.astype("float64"), y)
        if step % 2 == 0:
            hand.move(x.astype("float64"), y, 0.5)
        assert np.array_equal(watch.masks[step - 1]["linear/kernel"], hand.mask), step
    if not is_averaging:  # else `fit` puts averages into the variables in the end
        np.testing.assert_allclose(value_of(kernel), hand.weights, rtol=0, atol=2e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("inner", ["momentum", "muon"])
@pytest.mark.cases(1)
def test_what_is_trained_on_a_grid_stays_on_it(schedule, inner, tmp_path):
    rate, make = SCHEDULES[schedule]
    model = two_dense_layers()
    kf.reinitialize(model, seed=1)
    model = compiled(model, kf.FreezeOptimizer(OPTIMIZERS[inner](), 0.7, grid=0.0625))
    kf.freeze(model, X[:8], Y[:8], freeze_rate=rate)
    watch = Watch(model)
    train(model, make(), watch)
    for variable in model.trainable_variables:
        steps = (value_of(variable) - watch.starts[variable.path]).astype("float64") / 0.0625
        assert np.abs(steps - np.rint(steps)).max() < 1e-4
    kf.save(model, tmp_path / "model.freeze")
    assert_same_weights(kf.load(tmp_path / "model.freeze"), model)


def test_the_gradients_of_a_model_with_its_own_train_step_choose():
    class Model(OwnStep):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(3, name="head")

        def call(self, x):
            return self.layer(x)

        def loss_of(self, data):
            x, y = data
            return crossentropy()(y, self.layer(x)) * 1.5

    model = Model()
    model.build((None, 6))
    model.compile(kf.FreezeOptimizer(sgd(), 0.5))
    kf.freeze(model, X[:8], Y[:8])
    watch = Watch(model)
    train(model, rigl(), watch)
    assert watch.num_changes >= 3


@pytest.mark.cases(None, jax=0)
def test_restricted_gradients_follow_the_mask():
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(OPTIMIZERS["momentum"](), 0.7))
    other = compiled(two_dense_layers(), kf.FreezeOptimizer(OPTIMIZERS["momentum"](), 0.7))
    for one in (model, other):
        kf.freeze(one, X[:8], Y[:8])
    kf.restore_gradients(other)
    train(model, rigl())
    train(other, rigl())
    assert kf.get_mask(model) == kf.get_mask(other)
    for one, expected in zip(values_of(model.variables), values_of(other.variables), strict=True):
        np.testing.assert_allclose(one, expected, rtol=0, atol=1e-5)


@pytest.mark.same_on_all
def test_the_loss_scale_of_mixed_precision_makes_no_difference():
    optimizer = kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7)
    model = dense_model(dtype="mixed_float16")
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer), crossentropy())
    kf.freeze(model, X[:8], Y[:8])
    starts = values_of(model.trainable_variables)
    first = kf.get_mask(model)
    train(model, rigl())
    mask = kf.get_mask(model)
    assert mask != first
    for variable, start in zip(model.trainable_variables, starts, strict=True):
        entry = mask.find(variable)
        if entry is not None:
            assert same_bits(value_of(variable)[~entry.trained], start[~entry.trained])


@pytest.mark.cases(None, tensorflow=0)
@pytest.mark.skipif(BACKEND == "torch", reason="Keras on PyTorch executes one step at a time")
def test_steps_that_are_executed_together_change_the_mask_together():
    model = two_dense_layers()
    optimizer = kf.FreezeOptimizer(sgd(), 0.7)
    model.compile(optimizer, crossentropy(), steps_per_execution=4)
    kf.freeze(model, X[:8], Y[:8])
    watch = Watch(model)
    train(model, RegrowTrained(0.4, 3, "random"), watch)
    assert watch.num_changes >= 2


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("schedule", ["rigl", "set", "gradual"])
def test_a_training_that_diverges_ends_as_without_the_callback(schedule):
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(float("inf")), 0.5))
    kf.freeze(model, X[:8], Y[:8], freeze_rate=SCHEDULES[schedule][0] and 0.5)
    train(model, SCHEDULES[schedule][1]())
    assert not all(np.isfinite(value).all() for value in values_of(model.variables))


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("schedule", ["gradual", "rigl"])
def test_one_fit_is_as_good_as_several(schedule):
    def trained(*numbers):
        model = compiled(two_dense_layers(), kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7))
        rate = 0.0 if schedule == "gradual" else 0.9
        kf.freeze(model, X[:8], Y[:8], freeze_rate=rate)
        done = 0
        for number in numbers:
            done += number
            callback = gradual(0.0, 0.97, 1, 15) if schedule == "gradual" else rigl()
            train(model, callback, epochs=done, initial_epoch=done - number)
        return model

    whole, parts = trained(4), trained(1, 1, 1, 1)
    assert kf.get_mask(whole) == kf.get_mask(parts)
    assert kf.get_mask(whole).num_rescued == kf.get_mask(parts).num_rescued
    assert_same_weights(parts, whole)


@pytest.mark.same_on_all
def test_a_callback_whose_fit_has_failed_serves_another_model():
    callback = RegrowTrained(0.5, 2, "random")
    broken = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.7))
    with pytest.raises(Exception, match=r"\w"):
        broken.fit(X, Y[:, None].repeat(7, 1), callbacks=[callback], verbose=0)
    model = compiled(dense_model(), kf.FreezeOptimizer(sgd(), 0.7))
    watch = Watch(model)
    train(model, callback, watch)
    assert watch.num_changes
