"""prune and reinitialize: what becomes of weights, masks and optimizers."""

import keras
import numpy as np
import pytest
from freezing_cases import build_model, compile_model, make_data, make_model, masks_of
from keras import layers

import keras_freeze as kf

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)


def test_model_of_a_custom_loop_can_be_asked_pruned_and_reinitialized():
    model = build_model()
    optimizer = kf.FreezeOptimizer(keras.optimizers.Adam(0.01), 0.75, frozen_weights="zero")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    mask = kf.freeze(model, *make_data(), loss=loss, optimizer=optimizer)
    assert kf.get_mask(model) == mask
    assert kf.report(model).num_trained_weights == 42
    kf.reinitialize(model, seed=2)
    kernel = model.get_layer("fc1").kernel
    assert (kernel.numpy()[~mask[kernel]] == 0.0).all()
    assert (kernel.numpy()[mask[kernel]] != 0.0).all()
    kf.prune(model)
    compile_model(model)  # from now on the compiled optimizer is the one that counts
    assert kf.get_mask(model) == mask


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_pruned_weights_are_zero_and_stay_zero(way):
    model = make_model(l2=1e-3)
    with pytest.raises(ValueError, match="frozen"):
        kf.prune(model)
    if way == "freeze":
        kf.freeze(model, *make_data())
    model.fit(*make_data(), verbose=0)
    before = model.get_layer("fc1").kernel.numpy()
    kf.prune(model)
    trained = masks_of(model)[0]
    assert (model.get_layer("fc1").kernel.numpy() == np.where(trained, before, 0.0)).all()
    model.fit(*make_data(), verbose=0)
    assert (model.get_layer("fc1").kernel.numpy()[~trained] == 0.0).all()
    assert (model.get_layer("fc2").kernel.numpy()[~masks_of(model)[1]] == 0.0).all()


@pytest.mark.cases(1)
@pytest.mark.parametrize("frozen_weights", ["keep", "zero", "decay"])
def test_reinitialized_network_keeps_its_mask_and_starts_afresh(frozen_weights):
    model = make_model(frozen_weights=frozen_weights, l2=1e-3)
    mask = kf.freeze(model, *make_data())
    model.fit(*make_data(), verbose=0, epochs=2)
    kf.reinitialize(model, "kaiming_uniform", seed=5)
    assert kf.get_mask(model) == mask
    assert int(model.optimizer.iterations) == 0
    assert all((m.numpy() == 0).all() for m in model.optimizer.inner_optimizer.momentums)
    for stream, (name, trained) in enumerate(zip(("fc1", "fc2"), masks_of(model), strict=True)):
        kernel = model.get_layer(name).kernel
        drawn = kf.initializers.KaimingUniform(seed=5, stream=stream)(kernel.shape)
        keep = trained if frozen_weights == "zero" else True
        np.testing.assert_array_equal(kernel.numpy(), np.where(keep, drawn, 0.0))
        assert (model.get_layer(name).bias.numpy() == 0.0).all()
    norm = model.get_layer("norm")
    assert [float(w.numpy().mean()) for w in norm.weights] == [1.0, 0.0, 0.0, 1.0]
    before = model.get_layer("fc1").kernel.numpy()
    model.fit(*make_data(), verbose=0)
    moved = model.get_layer("fc1").kernel.numpy() != before
    assert moved.any()
    if frozen_weights != "decay":
        assert not (moved & ~masks_of(model)[0]).any()


def test_reinitialize_resets_the_forget_bias_and_needs_no_mask():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((5, 3)), layers.LSTM(4), layers.Dense(2)])
    fresh = [v.numpy() for v in model.trainable_variables if v.name == "bias"]
    for variable in model.trainable_variables:
        variable.assign(np.full(variable.shape, 9.0))
    kf.reinitialize(model, seed=1)
    again = [v.numpy() for v in model.trainable_variables if v.name == "bias"]
    assert all((a == b).all() for a, b in zip(fresh, again, strict=True))
    kernels = [v.numpy() for v in model.trainable_variables if v.name != "bias"]
    assert all((k != 9.0).all() for k in kernels)
    kf.reinitialize(model, seed=1)
    kernels_again = [v.numpy() for v in model.trainable_variables if v.name != "bias"]
    assert all((a == b).all() for a, b in zip(kernels, kernels_again, strict=True))
    with pytest.raises(ValueError, match="seed"):
        kf.reinitialize(model, seed=-1)
    with pytest.raises(ValueError, match="xavier"):
        kf.reinitialize(model, "xavier")
