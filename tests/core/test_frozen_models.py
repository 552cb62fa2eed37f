"""Frozen models with several optimizers or recurrent layers, and what is done to them."""

import axes
import keras
import loops
import numpy as np
import pytest
from frozen_models import check_training, fit, freezing, frozen_model, model_and_data
from helpers import assert_frozen_bits_kept, crossentropy, is_weight, same_bits, value_of, values_of
from keras import layers as kl

import keras_freeze as kf

pytestmark = pytest.mark.cases(2, tensorflow=1, jax=0)

each_way = pytest.mark.parametrize("way", axes.WAYS)


# Several optimizers


def multi(make):
    """One optimizer for each layer, as a function says."""
    optimizers = {name: make() for name in ("body", "head")}
    return keras.optimizers.MultiOptimizer(
        lambda variable: optimizers["head" if "head" in variable.path else "body"]
    )


@pytest.mark.same_on_all
def test_freeze_finds_its_optimizer_where_a_function_chooses():
    model, x, y = model_and_data()
    optimizers = iter([freezing(), keras.optimizers.SGD(0.1)])
    model.compile(multi(lambda: next(optimizers)), crossentropy())
    mask = kf.freeze(model, x, y)
    before = values_of(model.trainable_variables)
    fit(model, x, y)
    kernel = model.trainable_variables[0]
    assert same_bits(before[0][~mask[kernel]], value_of(kernel)[~mask[kernel]])


@pytest.mark.same_on_all
def test_several_freeze_optimizers_decide_in_the_first_batch_but_not_in_freeze():
    model, x, y = model_and_data()
    model.compile(multi(freezing), crossentropy())
    model.optimizer.build(model.trainable_variables)
    for ask in (lambda m: kf.freeze(m, x, y), kf.prune):
        with pytest.raises(ValueError, match="with 2 FreezeOptimizers in it"):
            ask(model)
    assert kf.get_mask(model) is None
    before = values_of(model.trainable_variables)
    fit(model, x, y)
    mask = kf.get_mask(model)
    assert kf.report(model).num_trained_weights == mask.num_trained
    assert_frozen_bits_kept(model.trainable_variables, mask, before)


# What is done to a frozen model


@pytest.mark.cases(None, tensorflow=0)
@pytest.mark.parametrize("look", ["freeze", "flow", "saliency"])
@pytest.mark.skipif(axes.BACKEND == "torch", reason="where Keras cannot train stateful RNNs")
def test_states_of_recurrent_layers_are_left_as_they_were(look):
    keras.utils.set_random_seed(0)
    layer = kl.LSTM(4, stateful=True)
    model = keras.Sequential([keras.Input(batch_shape=(8, 4, 2)), layer, kl.Dense(3)])
    model.compile(freezing(), crossentropy())
    x = np.random.default_rng(0).normal(size=(8, 4, 2)).astype("float32")
    y = np.arange(8) % 3
    before = values_of(layer.states)
    looks = {
        "freeze": kf.freeze,
        "flow": kf.gradient_flow,
        "saliency": kf.compute_saliency,
    }
    looks[look](model, x, y)
    for old, new in zip(before, values_of(layer.states), strict=True):
        assert same_bits(old, new)


@pytest.mark.cases(1, tensorflow=0)
@each_way
def test_prune_reinitialize_report_and_gradient_flow(way):
    model, x, y = frozen_model(way)
    fit(model, x, y)
    mask = kf.get_mask(model)
    flow = kf.gradient_flow(model, x, y, reduce="norms", batch_size=loops.BATCH)
    assert flow == pytest.approx(flow_by_hand(model, x, y, mask), rel=1e-4)
    assert kf.report(model).num_trained_weights == mask.num_trained
    kf.prune(model)
    for variable in model.trainable_variables:
        if is_weight(variable):
            assert not value_of(variable)[~mask[variable]].any()
    fit(model, x, y)
    kf.reinitialize(model, seed=3)
    drawn = values_of(model.trainable_variables)
    assert kf.get_mask(model) == mask
    kf.reinitialize(model, seed=3)
    for old, new in zip(drawn, values_of(model.trainable_variables), strict=True):
        assert same_bits(old, new)
    fit(model, x, y)
    assert check_training(model, drawn) == mask


def flow_by_hand(model, x, y, mask):
    """By how a step of plain SGD moves a copy of the model: w - w_0 = -rate * gradient."""
    flows = []
    for batch in loops.batches(x, y):
        copied = keras.models.clone_model(model)
        copied.set_weights(model.get_weights())
        copied.compile(keras.optimizers.SGD(1.0), crossentropy())
        before = values_of(copied.trainable_variables)
        copied.train_on_batch(*batch)
        gradients = [
            np.abs(old - value_of(variable))[mask[original] if is_weight(original) else ...]
            for old, variable, original in zip(
                before, copied.trainable_variables, model.trainable_variables, strict=True
            )
        ]
        flows.append(sum(g.sum() for g in gradients) / sum(g.size for g in gradients))
    return np.mean(flows)
