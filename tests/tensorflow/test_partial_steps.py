"""Steps and losses that reach some of the variables: the others stay, and counts are right."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_frozen_bits_kept,
    blobs,
    compiled,
    crossentropy,
    dense_model,
    fit,
    is_weight,
    same_bits,
    sgd,
    value_of,
    values_of,
)
from keras import layers as kl
from keras import optimizers as ko
from numeric_cases import quarter, step_of

import keras_freeze as kf

pytestmark = pytest.mark.cases(1)

each_way = pytest.mark.parametrize("way", ["freeze", "first_batch"])


def test_gradients_without_variables_reach_the_weights():
    """keras#21706."""
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75)
    optimizer.build(variables)
    before = values_of(variables)
    optimizer.apply([tf.ones(v.shape) for v in variables])
    assert_frozen_bits_kept(variables, optimizer.mask, before)
    for v, old in zip(variables, before, strict=True):
        trained = optimizer.mask[v] if is_weight(v) else np.ones(v.shape, bool)
        np.testing.assert_allclose(value_of(v)[trained], old[trained] - 0.1, rtol=1e-5, atol=1e-7)


def test_gradients_without_variables_need_an_optimizer_that_is_built():
    with pytest.raises(ValueError, match="build"):
        kf.FreezeOptimizer(sgd()).apply([tf.ones((2, 2))])


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("decided", ["by_freeze", "by_the_first_batch"])
def test_a_step_may_update_some_of_the_variables(decided, mode):
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(sgd(momentum=0.9), freeze_rate=0.75)
    if decided == "by_freeze":
        kf.freeze(model, mask=quarter(variables), optimizer=optimizer)
    else:
        optimizer.apply([tf.ones(v.shape) for v in variables], variables)
    before = values_of(variables)
    step_of(optimizer, variables[:2], mode)([tf.ones(v.shape) for v in variables[:2]])
    assert_frozen_bits_kept(variables, optimizer.mask, before)
    moved = [(value_of(v) != old).any() for v, old in zip(variables, before, strict=True)]
    assert moved == [True, True, False, False, False, False]


def test_the_first_batch_must_bring_all_weights():
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75)
    optimizer.build(variables)
    with pytest.raises(ValueError, match="head/kernel"):
        optimizer.apply([tf.ones(v.shape) for v in variables[:2]], variables[:2])
    assert optimizer.mask is None


@pytest.mark.parametrize("frequency", [None, 1, 2])
def test_averages_stay_exact_when_a_step_updates_some_of_the_variables(frequency):
    """Keras averages, and overwrites, all variables whatever the step was given."""
    model = dense_model()
    variables = model.trainable_variables
    inner = sgd(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=frequency)
    optimizer = kf.FreezeOptimizer(inner, freeze_rate=0.75)
    kf.freeze(model, mask=quarter(variables), optimizer=optimizer)
    before = values_of(variables)
    for _ in range(5):
        optimizer.apply([tf.ones(v.shape) for v in variables[:2]], variables[:2])
        assert_frozen_bits_kept(variables, optimizer.mask, before)
    optimizer.finalize_variable_values(variables)
    assert_frozen_bits_kept(variables, optimizer.mask, before)


def test_decay_of_a_step_on_some_of_the_variables_keeps_one_factor_for_all():
    """save relies on w = a * w_0 with one a: such a step is refused, or reaches every weight."""
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75, l2=0.5, frozen_weights="decay")
    kf.freeze(model, mask=quarter(variables), optimizer=optimizer)
    before = values_of(variables)
    try:
        optimizer.apply([tf.ones(v.shape) for v in variables[:2]], variables[:2])
        factor = 1 - 0.1 * 0.5
    except ValueError:
        factor = 1.0
    for v, old in zip(variables, before, strict=True):
        if is_weight(v):
            frozen = ~optimizer.mask[v]
            np.testing.assert_allclose(value_of(v)[frozen], factor * old[frozen], rtol=1e-6)


@each_way
def test_a_layer_that_the_loss_does_not_reach_scores_zero_and_stays(way):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    reached = kl.Dense(3, name="reached")(kl.Dense(5, activation="tanh", name="first")(inputs))
    apart = kl.Dense(2, name="apart")(inputs)
    model = keras.Model(inputs, [reached, apart])
    x, y = blobs()
    compiled(
        model,
        kf.FreezeOptimizer(sgd(momentum=0.9), freeze_rate=0.5, l2=0.1),
        loss=[crossentropy(), None],
        run_eagerly=True,
    )
    start = values_of(model.trainable_variables)
    if way == "freeze":
        kf.freeze(model, x, y)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        model.fit(x, y, batch_size=16, verbose=0)
    mask = kf.get_mask(model)
    assert mask["apart/kernel"].sum() == mask.num_rescued == 1
    for v, old in zip(model.trainable_variables, start, strict=True):
        assert same_bits(value_of(v), old) == ("apart" in v.path)
    assert_frozen_bits_kept(model.trainable_variables, mask, start)


@each_way
def test_excluded_variables_train_whole_and_leave_the_others_their_share(way):
    x, y = blobs()
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75, exclude="head")
    model = compiled(dense_model(), optimizer, run_eagerly=True)
    start = values_of(model.trainable_variables)
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y)
    mask = kf.get_mask(model)
    assert (mask.num_weights, mask.num_trained) == (48, 12)
    assert (value_of(model.layers[-1].kernel) != start[4]).all()


@each_way
@pytest.mark.parametrize("by", ["var_list", "var_names"])
def test_what_is_excluded_from_weight_decay_is_not_decayed(by, way):
    """With zero gradients the decay is all that moves trained entries."""
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(
        ko.AdamW(0.1, weight_decay=0.5), freeze_rate=0.75, criterion="magnitude"
    )
    body, head = variables[0], variables[4]
    if by == "var_list":
        optimizer.exclude_from_weight_decay(var_list=[body])
    else:
        optimizer.exclude_from_weight_decay(var_names=["bias|gamma"])
    if way == "freeze":
        kf.freeze(model, *blobs(), loss=crossentropy(), optimizer=optimizer)
    before = values_of(variables)
    optimizer.apply([tf.zeros(v.shape) for v in variables], variables)
    for v, old in zip(variables, before, strict=True):
        excluded = v is body if by == "var_list" else v.name in ("bias", "gamma")
        trained = optimizer.mask[v] if is_weight(v) else np.ones(v.shape, bool)
        expected = old if excluded else np.where(trained, old * (1 - 0.05), old)
        np.testing.assert_allclose(value_of(v), expected, rtol=1e-6)
    assert head.name == "kernel"
    assert_frozen_bits_kept(variables, optimizer.mask, before)


@each_way
@pytest.mark.parametrize("use_bias", [False, True])
def test_steps_are_counted_even_where_nothing_is_trained(way, use_bias):
    """Schedules and callbacks go by the count."""
    model = keras.Sequential([keras.Input((6,)), kl.Dense(3, use_bias=use_bias)])
    compiled(model, kf.FreezeOptimizer(sgd(), freeze_rate=1.0), run_eagerly=True)
    x, y = blobs()
    before = value_of(model.trainable_variables[0])
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y, batch_size=16)
    assert same_bits(value_of(model.trainable_variables[0]), before)
    assert int(model.optimizer.iterations) == 3
