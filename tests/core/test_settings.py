"""Settings of a FreezeOptimizer that are changed, rates given to `freeze`, and unfreezing."""

import copy
import functools

import keras
import numpy as np
import pytest
from helpers import blobs, compiled, fit, same_bits, two_dense_layers, values_of

import keras_freeze as kf
from keras_freeze import criteria

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=0)

X, Y = blobs()

CHANGES = {
    "freeze_rate": 0.5,
    "criterion": "magnitude",
    "frozen_weights": "zero",
    "l2": 0.1,
    "exclude": "head",
    "seed": 3,
    "distribution": {"head": 0.25},
    "structure": "column",
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_can_be_changed_before_the_optimizer_is_built(name):
    model = compiled(two_dense_layers())
    setattr(model.optimizer, name, CHANGES[name])
    other = compiled(
        two_dense_layers(), kf.FreezeOptimizer("sgd", **{"freeze_rate": 0.75, name: CHANGES[name]})
    )
    assert kf.freeze(model, X, Y) == kf.freeze(other, X, Y)
    assert getattr(model.optimizer, name) == getattr(other.optimizer, name)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_cannot_be_changed_once_it_has_decided(name):
    model = compiled(two_dense_layers())
    mask, before = kf.freeze(model, X, Y), getattr(model.optimizer, name)
    with pytest.raises(ValueError, match=f"`{name}` .*overwrite=True.*{name}="):
        setattr(model.optimizer, name, CHANGES[name])
    assert getattr(model.optimizer, name) == before
    fit(model, X, Y)
    assert kf.get_mask(model) == mask


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("freeze_rate", 1.5, ValueError),
        ("freeze_rate", "0.5", TypeError),
        ("criterion", "largest", ValueError),
        ("frozen_weights", "melt", ValueError),
        ("l2", -1, ValueError),
        ("exclude", 3, TypeError),
        ("seed", -1, ValueError),
        ("distribution", "even", ValueError),
        ("structure", "4:2", ValueError),
    ],
)
def test_a_wrong_setting_is_refused_when_it_is_set(name, value, error):
    optimizer = kf.FreezeOptimizer("sgd")
    with pytest.raises(error, match=name):
        setattr(optimizer, name, value)


def scaled(weights, gradients, factor):
    return factor * keras.ops.abs(weights)


def test_criteria_with_other_arguments_are_others():
    def frozen(**arguments):
        criterion = functools.partial(scaled, **arguments)
        return compiled(model, kf.FreezeOptimizer("sgd", 0.75, criterion=criterion))

    model = two_dense_layers()
    mask = kf.freeze(frozen(factor=1.0), X, Y)
    fit(frozen(factor=1.0), X, Y)
    assert kf.get_mask(model) == mask
    with pytest.raises(ValueError, match=r"already frozen with .*factor=1\.0"):
        fit(frozen(factor=-1.0), X, Y)


class Own:
    def __call__(self, weights, gradients, factor):
        return scaled(weights, gradients, factor)


@pytest.mark.parametrize("function", [scaled, Own()])
@pytest.mark.parametrize(
    "factor",
    [np.float32(0.5), np.arange(3000.0), keras.ops.abs, functools.partial(scaled, factor=2), Own()],
    ids=lambda factor: type(factor).__name__,
)
def test_names_of_criteria_are_the_same_in_each_process(function, factor):
    name = criteria.in_words(functools.partial(function, factor=factor))
    assert name.startswith(f"{__name__}.{'scaled' if function is scaled else 'Own'}(factor=")
    assert " at 0x" not in name
    assert len(name) < 200
    assert name == criteria.in_words(functools.partial(function, factor=copy.deepcopy(factor)))
    assert name != criteria.in_words(functools.partial(function, factor=np.arange(3000.0) ** 2))


def test_freeze_takes_another_rate():
    model = compiled(two_dense_layers())
    assert kf.freeze(model, X, Y, freeze_rate=0.5).freeze_rate == 0.5
    assert model.optimizer.freeze_rate == 0.5
    with pytest.raises(ValueError, match="frozen already"):
        kf.freeze(model, X, Y, freeze_rate=0.25)
    assert model.optimizer.freeze_rate == 0.5
    assert kf.freeze(model, X, Y, freeze_rate=0.25, overwrite=True).freeze_rate == 0.25
    with pytest.raises(ValueError, match="exclude each other"):
        kf.freeze(model, mask=lambda v: None, freeze_rate=0.5, overwrite=True)
    with pytest.raises(ValueError, match="freeze_rate=2"):
        kf.freeze(model, X, Y, freeze_rate=2, overwrite=True)


@pytest.mark.same_on_all
def test_unfrozen_weights_keep_their_values_and_are_all_trained():
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(keras.optimizers.Adam(0.1), 0.75))
    with pytest.raises(ValueError, match="not frozen"):
        kf.unfreeze(model)
    kf.freeze(model, X, Y)
    fit(model, X, Y)
    before = values_of(model.trainable_variables)
    kf.unfreeze(model)
    assert all(map(same_bits, values_of(model.trainable_variables), before))
    assert kf.report(model).freeze_rate == 0.0
    fit(model, X, Y)
    now = values_of(model.trainable_variables)
    assert all((new != old).mean() > 0.9 for new, old in zip(now, before, strict=True))
    assert kf.freeze(model, X, Y, overwrite=True).freeze_rate == 0.75


def test_masks_take_the_name_of_a_layer_with_one_weight():
    model = compiled(two_dense_layers())
    body = np.arange(48).reshape(6, 8) % 2 == 0
    mask = kf.freeze(model, mask={"body": body})
    assert np.array_equal(mask["body"], body)
    assert mask["head"].all()
    with pytest.raises(KeyError, match="bod"):
        mask["bod"]
    with pytest.raises(ValueError, match="names no trainable variable"):
        kf.freeze(model, mask={"bod": body}, overwrite=True)


def test_the_name_of_a_layer_with_several_weights_is_ambiguous():
    model = keras.Sequential([keras.Input((4, 3)), keras.layers.LSTM(2, name="lstm")])
    compiled(model, loss="mse")
    with pytest.raises(ValueError, match="names several variables"):
        kf.freeze(model, mask={"lstm": np.ones((3, 8), bool)})
    mask = kf.freeze(model, mask=lambda variable: None)
    with pytest.raises(ValueError, match="ambiguous"):
        mask["lstm"]


@pytest.mark.parametrize("overwrite", ["no", 1, None])
def test_overwrite_must_be_true_or_false(overwrite):
    model = compiled(two_dense_layers())
    mask = kf.freeze(model, X, Y)
    with pytest.raises(TypeError, match="overwrite="):
        kf.freeze(model, X[:5], Y[:5], overwrite=overwrite)
    assert kf.get_mask(model) == mask
