"""`freeze(..., drawn=True)`: a mask from rates and a seed, which a file holds instead of it."""

import keras
import numpy as np
import pytest
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    blobs,
    compiled,
    dense_model,
    fit,
    same_bits,
    sgd,
    value_of,
    values_of,
)

import keras_freeze as kf

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)


def wide_model(units=60):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(units, activation="relu", name="first"),
            keras.layers.Reshape((units, 1)),
            keras.layers.Conv1D(8, 3, name="second"),
            keras.layers.Flatten(),
            keras.layers.Dense(3, name="head"),
        ]
    )
    kf.reinitialize(model, seed=3)
    return model


def frozen(rate=0.9, drawn=True, **arguments):
    model = compiled(wide_model(), kf.FreezeOptimizer(sgd(), rate, **arguments))
    kf.freeze(model, *blobs(), drawn=drawn)
    return model


def counts(model):
    return [int(entry.trained.sum()) for entry in kf.get_mask(model).entries]


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("criterion", ["snip", "grasp", "magnitude", "random"])
def test_each_weight_trains_as_many_entries_as_without(criterion):
    drawn, chosen = (frozen(criterion=criterion, drawn=is_drawn) for is_drawn in (True, False))
    assert counts(drawn) == counts(chosen)
    assert kf.get_mask(drawn).num_rescued == kf.get_mask(chosen).num_rescued
    assert kf.get_mask(drawn) != kf.get_mask(chosen)


@pytest.mark.cases(None, tensorflow=0)
def test_frozen_weights_keep_their_bits_and_the_others_are_trained():
    model = frozen()
    before, mask = values_of(model.trainable_variables), kf.get_mask(model)
    fit(model, *blobs(), epochs=2, batch_size=8)
    assert_frozen_bits_kept(model.trainable_variables, mask, before)
    assert_trained_moved(model.trainable_variables, mask, before)
    assert kf.get_mask(model) == mask


@pytest.mark.same_on_all
def test_the_mask_follows_from_the_seed():
    first, again, other = (frozen(seed=seed) for seed in (0, 0, 1))
    assert kf.get_mask(first) == kf.get_mask(again)
    assert kf.get_mask(first) != kf.get_mask(other)
    assert counts(first) == counts(other)


@pytest.mark.same_on_all
def test_a_file_holds_rates_instead_of_the_mask(tmp_path):
    sizes = []
    for drawn in (True, False):
        model = frozen(drawn=drawn)
        fit(model, *blobs(), batch_size=8)
        kf.save(model, tmp_path / "model.freeze", include_optimizer=True)
        inspected = kf.storage.inspect(tmp_path / "model.freeze")
        sizes.append(inspected.num_bytes["mask"])
        assert inspected.freeze_rate == kf.report(model).freeze_rate
        loaded = kf.load(tmp_path / "model.freeze")
        assert kf.get_mask(loaded) == kf.get_mask(model)
        assert kf.FreezeMask.load(tmp_path / "model.freeze") == kf.get_mask(model)
        for one in (model, loaded):
            fit(one, *blobs(), batch_size=8)
        for a, b in zip(model.variables, loaded.variables, strict=True):
            assert same_bits(value_of(a), value_of(b)), a.path
        kf.save(loaded, tmp_path / "again.freeze")
        assert kf.storage.inspect(tmp_path / "again.freeze").num_bytes["mask"] == sizes[-1]
    assert sizes[0] < sizes[1]


@pytest.mark.same_on_all
def test_a_quantized_model_with_a_drawn_mask_is_saved_without_loss(tmp_path):
    model = frozen()
    fit(model, *blobs(), batch_size=8)
    kf.quantize(model, *blobs(), tolerance=0.05)
    kf.save(model, tmp_path / "model.freeze")
    loaded = kf.load(tmp_path / "model.freeze")
    for a, b in zip(model.variables, loaded.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


@pytest.mark.same_on_all
def test_a_mask_that_is_chosen_later_is_saved_as_it_is(tmp_path):
    model = frozen()
    kf.freeze(model, *blobs(), overwrite=True)
    chosen = kf.get_mask(model)
    assert chosen == kf.get_mask(frozen(drawn=False))
    kf.save(model, tmp_path / "model.freeze")
    assert kf.get_mask(kf.load(tmp_path / "model.freeze")) == chosen


@pytest.mark.same_on_all
def test_a_delta_may_have_a_drawn_mask(tmp_path):
    base, model = dense_model(), dense_model()
    compiled(model)
    kf.freeze(model, *blobs(), drawn=True)
    fit(model, *blobs(), batch_size=8)
    kf.save(model, tmp_path / "delta", base=base)
    kf.apply_delta(base, tmp_path / "delta")
    for a, b in zip(model.variables, base.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("rate", [0.0, 0.9999, 1.0])
def test_extreme_rates_are_drawn_as_well(rate, tmp_path):
    model = frozen(rate)
    assert counts(model) == counts(frozen(rate, drawn=False))
    kf.save(model, tmp_path / "model.freeze")
    mask = kf.get_mask(kf.load(tmp_path / "model.freeze"))
    assert mask == kf.get_mask(model)


@pytest.mark.same_on_all
@pytest.mark.parametrize("value", [1, "yes", None, np.True_])
def test_drawn_is_a_boolean(value):
    with pytest.raises(TypeError, match="Argument `drawn` must be"):
        kf.freeze(compiled(dense_model()), *blobs(), drawn=value)


@pytest.mark.same_on_all
def test_a_mask_that_is_given_is_not_drawn():
    with pytest.raises(ValueError, match="`drawn` and `mask` exclude each other"):
        kf.freeze(compiled(dense_model()), mask=lambda variable: None, drawn=True)
