"""Where the frozen values of a mask that moves come from: seeds, kept values, or nowhere."""

import dataclasses

import keras
import pytest
from axes import OPTIMIZERS
from helpers import compiled, same_bits, sgd, two_dense_layers, values_of
from moving_mask_cases import Watch, X, Y, rigl, train, with_loaded_weights

import keras_freeze as kf

pytestmark = pytest.mark.same_on_all


def test_starts_that_were_drawn_with_seeds_are_found_again():
    model = two_dense_layers()
    kf.reinitialize(model, seed=1)
    model = compiled(model, kf.FreezeOptimizer(sgd(), 0.7))
    watch = Watch(model)
    kf.freeze(model, X[:8], Y[:8])
    train(model, epochs=1)  # without the callback
    train(model, rigl(), watch)
    assert watch.num_changes >= 3


def test_starts_that_are_lost_are_an_error():
    model = with_loaded_weights()
    kf.freeze(model, X[:8], Y[:8])
    train(model, epochs=1)
    before = values_of(model.variables)
    with pytest.raises(ValueError, match="values before training, and these are not known"):
        train(model, rigl())
    assert all(map(same_bits, values_of(model.variables), before))


def test_a_pruned_network_needs_no_starts():
    model = with_loaded_weights(frozen_weights="zero")
    kf.freeze(model, X[:8], Y[:8])
    train(model, epochs=1)
    watch = Watch(model)
    train(model, rigl(), watch)
    assert watch.num_changes >= 3


def trained_by(first):
    """A model whose starts no seed gives, trained with a callback."""
    model = with_loaded_weights()
    watch = Watch(model)
    kf.freeze(model, X[:8], Y[:8])
    train(model, first, watch, epochs=1)
    return model, watch


def test_starts_come_with_the_weights_when_the_model_is_compiled_again():
    model, watch = trained_by(rigl())
    compiled(model, kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7))
    train(model, rigl(), watch, epochs=1)
    assert watch.num_changes >= 2


def test_starts_are_known_of_a_model_that_was_frozen_and_not_trained(tmp_path):
    model = with_loaded_weights()
    kf.freeze(model, X[:8], Y[:8])
    compiled(model, kf.FreezeOptimizer(sgd(), 0.7))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        watch = Watch(one)
        train(one, rigl(), watch, epochs=1)
        assert watch.num_changes


def test_values_that_are_set_before_training_are_not_the_starts():
    model = two_dense_layers()
    kf.reinitialize(model, seed=1)
    model = compiled(model, kf.FreezeOptimizer(sgd(), 0.7))
    watch = Watch(model)
    kf.freeze(model, X[:8], Y[:8])
    kf.set_trained(model, kf.get_trained(model) + 1)
    train(model, rigl(), watch, epochs=1)
    assert watch.num_changes


def test_weights_and_state_that_are_set_back_have_their_own_starts():
    model = two_dense_layers()
    kf.reinitialize(model, seed=1)
    model = compiled(model, kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7))
    watch = Watch(model)
    kf.freeze(model, X[:8], Y[:8])
    train(model, rigl(), watch, epochs=1)
    kept = values_of(model.optimizer.variables), model.get_weights()
    train(model, rigl(), watch, epochs=1)
    model.optimizer.set_weights(kept[0])
    model.set_weights(kept[1])
    train(model, rigl(), watch, epochs=1)


def test_a_pruned_model_keeps_its_zeros():
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.7))
    kf.freeze(model, X[:8], Y[:8])
    kf.prune(model)
    with pytest.raises(ValueError, match="frozen_weights='zero'"):
        train(model, rigl())


def test_other_numbers_of_starts_than_the_mask_trains_are_refused(tmp_path):
    model, _ = trained_by(rigl())
    state = model.optimizer.state
    wrong = {position: values[1:] for position, values in state.trained_starts.values.items()}
    model.optimizer.set_trained_starts(dataclasses.replace(state.trained_starts, values=wrong))
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="damaged"):
        keras.models.load_model(tmp_path / "model.keras")


def test_a_model_with_a_mask_and_no_optimizer_yet_is_initialized_again():
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.7))
    kf.freeze(model, X[:8], Y[:8])
    loaded = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.7))
    loaded.optimizer.restore(model.optimizer.state)
    assert not loaded.optimizer.built
    kf.reinitialize(loaded, seed=1)
    watch = Watch(loaded)
    train(loaded, rigl(), watch)
    assert watch.num_changes
