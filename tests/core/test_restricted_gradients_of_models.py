"""Models with restricted weight gradients: other masks, optimizers, calls, copies and files.

Which layers are restricted is a matter of measured costs; here they all are, in a given way.
"""

import copy
import functools
import pickle

import keras
import numpy as np
import pytest
from helpers import blobs, crossentropy, is_weight, same_bits, sgd, value_of, values_of
from keras import layers as kl
from restricted import (
    WAYS,
    corner_mask,
    every_layer,
    freeze_optimizer,
    frozen,
    images,
    one_layer,
    points,
    random_mask,
    restricted_layers,
    small_convnet,
    small_mlp,
    spread_mask,
    spy_on_blocks,
    train_both,
    trained_weights,
)

import keras_freeze as kf

BACKEND = keras.backend.backend()
pytestmark = [pytest.mark.cases(1, jax=0), pytest.mark.slow_on("tensorflow")]
on_every_backend = pytest.mark.cases(1, jax=1)


@pytest.fixture(autouse=True)
def restricted_products(monkeypatch):
    """The blocks of which a gradient was computed, or traced, in a test."""
    return spy_on_blocks(monkeypatch)


def test_layer_that_is_not_trainable():
    def make():
        model = small_mlp()
        model.layers[0].trainable = False
        return model

    model = train_both(make, points())
    assert restricted_layers(model) == [model.layers[1]]


@pytest.mark.skipif(BACKEND == "jax", reason="Keras refuses it there without another compile")
def test_layer_that_is_made_untrainable_later():
    def prepare(model):
        model.layers[0].trainable = False

    train_both(small_mlp, points(), prepare=prepare)


@on_every_backend
@pytest.mark.parametrize(
    ("by", "way"),
    [*(("state", way) for way in WAYS), ("checkpoint", (True, True)), ("weights", (True, True))],
)
def test_another_mask_reaches_a_train_function_that_is_traced(way, by, tmp_path):
    data = points()
    model = frozen(small_mlp(), mask=functools.partial(corner_mask, last=False), way=way)
    other = frozen(small_mlp(), mask=spread_mask, way=way)
    trained_weights(model, data)
    function = model.train_function
    if by == "state":
        model.set_weights(other.get_weights())
        model.optimizer.restore(other.optimizer.state)
    elif by == "weights":
        model.optimizer.set_weights([value_of(v) for v in other.optimizer.variables])
    else:
        other.save_weights(tmp_path / "w.weights.h5")
        model.load_weights(tmp_path / "w.weights.h5")
    assert kf.get_mask(model) == kf.get_mask(other)
    assert model.train_function is function
    start = values_of(model.trainable_variables)
    found = trained_weights(model, data)
    for variable, before, after in zip(model.trainable_variables, start, found, strict=True):
        if is_weight(variable):
            assert np.array_equal(before != after, kf.get_mask(model)[variable])


def test_overwrite_restricts_to_the_new_mask(restricted_products):
    def prepare(model):
        restore = not restricted_layers(model)
        trained_weights(model, points(), epochs=1)
        with every_layer():
            kf.freeze(model, mask=random_mask("few", 5), overwrite=True)
        restricted_products.clear()
        if restore:
            kf.restore_gradients(model)
            assert not restricted_layers(model)

    train_both(small_mlp, points(), prepare=prepare)


def test_reinitialize_keeps_the_restriction(restricted_products):
    model = frozen(small_mlp())
    trained_weights(model, points(), epochs=1)
    with every_layer():
        kf.reinitialize(model)
    assert len(restricted_layers(model)) == 2
    restricted_products.clear()
    trained_weights(model, points(), epochs=1)
    assert restricted_products


@pytest.mark.parametrize("inner", [keras.optimizers.Adafactor, keras.optimizers.Lamb])
def test_optimizer_of_whole_variables_restricts_nothing(inner):
    model = frozen(small_mlp(), freeze_optimizer(inner(0.01)))
    assert not restricted_layers(model)
    with every_layer():
        kf.restrict_gradients(model)
    assert not restricted_layers(model)


def test_optimizers_that_train_different_layers_in_turn(restricted_products):
    """Each knows the kernels by other positions."""
    model = small_mlp()
    all_layers, last_layer = freeze_optimizer(), freeze_optimizer()
    data = points()
    frozen(model, all_layers)
    model.layers[0].trainable = False
    model.compile(last_layer, "mse")
    last_layer.build(model.trainable_variables)  # takes over its part of the mask
    kf.restrict_gradients(model)
    trained_weights(model, data, epochs=1)
    model.layers[0].trainable = True
    model.compile(all_layers, "mse")
    start = values_of(model.trainable_variables)
    restricted_products.clear()
    values = []
    for restore in (False, True):
        for variable, value in zip(model.trainable_variables, start, strict=True):
            variable.assign(value)
        with every_layer():
            kf.restore_gradients(model) if restore else kf.restrict_gradients(model)
        all_layers.reset()
        values.append(trained_weights(model, data, epochs=1))
    for one, other in zip(*values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_restrict_gradients_names_the_layers():
    model = frozen(small_mlp())
    with every_layer():
        assert kf.restrict_gradients(model) == [layer.name for layer in model.layers]
    with every_layer(None):
        assert kf.restrict_gradients(model) == []


def test_users_own_call_is_left_alone():
    model = small_mlp()
    layer = model.layers[0]
    call = layer.call
    layer.call = lambda inputs: 2.0 * call(inputs)
    own = vars(layer)["call"]
    frozen(model)
    assert restricted_layers(model) == [model.layers[1]]
    kf.restore_gradients(model)
    assert vars(layer)["call"] is own


def test_subclass_of_a_known_layer_is_left_alone():
    class MyDense(kl.Dense):
        pass

    assert not restricted_layers(frozen(one_layer(MyDense(3), (4,))))


def test_restrict_gradients_needs_a_freeze_optimizer():
    model = small_mlp()
    with pytest.raises(ValueError, match="not compiled"):
        kf.restrict_gradients(model)
    model.compile(sgd(), "mse")
    with pytest.raises(ValueError, match="FreezeOptimizer"):
        kf.restrict_gradients(model)


def test_restore_gradients_of_something_else_is_a_type_error():
    with pytest.raises(TypeError, match="model"):
        kf.restore_gradients(kl.Dense(3))


@on_every_backend
@pytest.mark.parametrize("criterion", ["snip", "grasp"])
def test_freezing_again_chooses_from_all_weights(criterion):
    x, y = points()
    masks = []
    for restore in (False, True):
        model = frozen(small_mlp(), freeze_optimizer(criterion=criterion), mask=random_mask("few"))
        if restore:
            kf.restore_gradients(model)
        masks.append(kf.freeze(model, x, y, overwrite=True))
    assert masks[0] == masks[1]


def test_pruning_check_is_the_same():
    x, y = blobs()
    checks = []
    for restore in (False, True):
        model = frozen(small_mlp(), loss=crossentropy(), metrics=["accuracy"])
        if restore:
            kf.restore_gradients(model)
        checks.append(kf.check_pruning(model, x, y))
    assert str(checks[0]) == str(checks[1])


@on_every_backend
def test_restricted_layers_are_plain_layers(tmp_path):
    model = small_convnet()
    configs = [layer.get_config() for layer in model.layers]
    summaries = [[], []]
    model.summary(print_fn=summaries[0].append)
    calls = [type(layer).call for layer in model.layers]
    frozen(model)
    assert len(restricted_layers(model)) == 3
    x, y = images()
    trained_weights(model, (x, y), epochs=1)
    assert [layer.get_config() for layer in model.layers] == configs
    assert [type(layer).call for layer in model.layers] == calls
    model.summary(print_fn=summaries[1].append)
    assert len({summary[0].split("Total params")[0] for summary in summaries}) == 1
    outputs = value_of(model(x))
    model.save(tmp_path / "model.keras")
    copies = [
        keras.models.load_model(tmp_path / "model.keras"),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ]
    for copied in copies:
        assert not any("call" in vars(layer) for layer in copied.layers)
        assert same_bits(value_of(copied(x)), outputs)
    cloned = keras.models.clone_model(model)
    assert not any("call" in vars(layer) for layer in cloned.layers)
    assert not any("call" in vars(copy.deepcopy(layer)) for layer in model.layers)


def test_loaded_model_can_be_restricted(tmp_path, restricted_products):
    model = frozen(small_mlp())
    trained_weights(model, points(), epochs=1)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    with every_layer():
        kf.restrict_gradients(loaded)
    assert len(restricted_layers(loaded)) == 2
    restricted_products.clear()
    found = trained_weights(loaded, points(), epochs=1)
    assert restricted_products
    for one, other in zip(found, trained_weights(model, points(), epochs=1), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
