"""Models that are changed, copied, pickled, cloned or loaded after they were frozen."""

import copy
import pickle

import axes
import keras
import numpy as np
import pytest
from frozen_models import check_training, fit, freezing, frozen_model, model_and_data
from helpers import assert_frozen_bits_kept, crossentropy, same_bits, value_of, values_of
from keras import layers as kl

import keras_freeze as kf

pytestmark = pytest.mark.cases(2, tensorflow=1, jax=0)

each_way = pytest.mark.parametrize("way", axes.WAYS)


# Changing the model


@pytest.mark.same_on_all
def test_loaded_weights_are_where_the_next_step_starts():
    model, x, y = frozen_model(inner=keras.optimizers.Adam(0.001))
    fit(model, x, y)
    mask = kf.get_mask(model)
    weights = [np.full_like(w, 0.25) for w in model.get_weights()]
    for change in (model.set_weights, lambda w: model.layers[0].set_weights(w[:2])):
        change(weights)
        loaded = values_of(model.trainable_variables)
        fit(model, x, y)
        assert_frozen_bits_kept(model.trainable_variables, mask, loaded)
        moved = value_of(model.trainable_variables[0])[mask[model.trainable_variables[0]]]
        assert (np.abs(moved - 0.25) < 0.02).all()


@pytest.mark.same_on_all
def test_compiling_anew_keeps_the_mask_whether_it_is_handed_on_or_not():
    model, x, y = frozen_model()
    mask = kf.get_mask(model)
    model.compile(freezing(), crossentropy())
    assert kf.get_mask(model) == mask
    kf.freeze(model, mask=mask)
    before = values_of(model.trainable_variables)
    fit(model, x, y)
    assert check_training(model, before) == mask


def outcome_with_two_models(optimizer):
    for number in range(2):
        model, x, y = model_and_data()
        model.compile(optimizer, crossentropy())
        try:
            fit(model, x, y)
        except Exception as error:
            return number, type(error)
    return None


@pytest.mark.same_on_all
def test_an_optimizer_of_another_model_is_refused_where_keras_refuses_it():
    plain = outcome_with_two_models(keras.optimizers.SGD(0.05, momentum=0.9))
    assert outcome_with_two_models(freezing()) == plain
    assert (plain is None) == (axes.BACKEND == "jax")


@pytest.mark.same_on_all
def test_layers_made_untrainable_keep_all_their_weights():
    model, x, y = frozen_model("first_batch")
    fit(model, x, y)
    model.layers[0].trainable = False
    model.compile(freezing(), crossentropy())
    before = values_of(model.layers[0].weights)
    fit(model, x, y)
    for old, new in zip(before, values_of(model.layers[0].weights), strict=True):
        assert same_bits(old, new)
    assert kf.get_mask(model).num_weights == model.get_layer("head").kernel.shape[0] * 3


# Copies and files


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.cases(1, tensorflow=0)
@each_way
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
def test_copies_train_alike_and_apart(duplicate, way):
    model, x, y = frozen_model(way)
    fit(model, x, y)
    other = duplicate(model)
    before = values_of(model.variables)
    fit(other, x, y)
    for old, new in zip(before, values_of(model.variables), strict=True):
        assert same_bits(old, new)
    fit(model, x, y)
    assert kf.get_mask(other) == kf.get_mask(model)
    for ours, theirs in zip(values_of(other.variables), values_of(model.variables), strict=True):
        assert same_bits(ours, theirs)


def test_a_cloned_model_has_an_optimizer_without_a_mask_that_will_not_train():
    model, x, y = frozen_model()
    clone = keras.models.clone_model(model)
    clone.compile_from_config(model.get_compile_config())
    clone.optimizer.build(clone.trainable_variables)
    with pytest.raises(ValueError, match="says how many weights are trained but not which"):
        clone.optimizer.apply([keras.ops.ones(v.shape) for v in clone.trainable_variables])
    kf.freeze(clone, mask=kf.get_mask(model))
    before = values_of(clone.trainable_variables)
    fit(clone, x, y)
    check_training(clone, before)


@pytest.mark.cases(1, jax=1)
@each_way
def test_saved_and_loaded_models_train_on_identically(way, tmp_path):
    model, x, y = frozen_model(way)
    fit(model, x, y)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert kf.get_mask(loaded) == kf.get_mask(model)
    for one in (model, loaded):
        fit(one, x, y)
    for ours, theirs in zip(values_of(loaded.variables), values_of(model.variables), strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.cases(2, tensorflow=2, jax=1)
def test_a_freeze_file_brings_weights_and_mask_back(tmp_path):
    model, x, y = model_and_data()
    kf.reinitialize(model, seed=5)
    model.compile(freezing(), crossentropy())
    kf.freeze(model, x, y)
    fit(model, x, y)
    kf.save(model, tmp_path / "model.freeze")
    loaded = kf.load(tmp_path / "model.freeze")
    assert kf.get_mask(loaded) == kf.get_mask(model)
    for ours, theirs in zip(values_of(loaded.variables), values_of(model.variables), strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.cases(1)
@each_way
@pytest.mark.parametrize("make", [freezing, keras.optimizers.SGD], ids=["freezing", "plain"])
def test_models_from_legacy_h5_files_train_with_no_optimizer(make, way, tmp_path):
    model, x, y = model_and_data()
    model.compile(make(), crossentropy())
    if way == "freeze" and make is freezing:
        kf.freeze(model, x, y)
    fit(model, x, y)
    model.save(tmp_path / "model.h5")
    assert keras.models.load_model(tmp_path / "model.h5", compile=False).built
    loaded = keras.models.load_model(tmp_path / "model.h5")
    with pytest.raises((KeyError, ValueError), match=r"Unknown variable|corresponding 1:1"):
        fit(loaded, x, y)


def test_a_step_that_was_compiled_for_an_earlier_mask_moves_nothing_that_is_frozen():
    if axes.BACKEND != "jax":
        pytest.skip("the functions of the other backends have tests of their own, or none to keep")
    import jax

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), kl.Dense(4, use_bias=False, name="a")])
    model.add(kl.Dense(4, use_bias=False, name="b"))
    optimizer = freezing(inner=keras.optimizers.SGD(0.1))
    chosen = np.arange(16).reshape(4, 4) < 5
    variables = model.trainable_variables
    step = jax.jit(
        lambda state, gradients, values: optimizer.stateless_apply(state, gradients, values)
    )
    for name in ("a", "b"):  # as many entries of another kernel: every shape is the same
        mask = {f"{name}/kernel": chosen}
        kf.freeze(model, mask=mask, overwrite=True, loss="mse", optimizer=optimizer)
        before = values_of(variables)
        values, _ = step(
            [v.value for v in optimizer.variables],
            [keras.ops.ones(v.shape) for v in variables],
            [v.value for v in variables],
        )
        position = "ab".index(name)
        moved = np.asarray(values[position]) != before[position]
        assert np.array_equal(moved, chosen)


def test_an_optimizers_weights_can_be_set_after_its_mask_was_replaced():
    model, x, y = frozen_model()
    optimizer = model.optimizer
    kept = values_of(optimizer.variables)
    kf.freeze(model, mask=kf.get_mask(model), overwrite=True)
    fit(model, x, y)
    optimizer.set_weights(kept)
    for old, variable in zip(kept, optimizer.variables, strict=True):
        if old.size:
            assert same_bits(old, value_of(variable))


@pytest.mark.same_on_all
def test_weights_of_a_frozen_model_load_into_one_with_a_bare_optimizer(tmp_path):
    model, x, y = frozen_model()
    fit(model, x, y)
    model.save_weights(tmp_path / "frozen.weights.h5")
    plain, _, _ = model_and_data()
    plain.compile(keras.optimizers.Adam(0.01), crossentropy())
    plain.load_weights(tmp_path / "frozen.weights.h5")
    for ours, theirs in zip(values_of(plain.weights), values_of(model.weights), strict=True):
        assert same_bits(ours, theirs)
    fit(plain, x, y)
