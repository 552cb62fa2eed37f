"""Layers around others, whose names Keras leaves out of paths when it loads a model."""

import keras
import numpy as np
import pytest
from helpers import compiled

import keras_freeze as kf
from keras_freeze.parameters import classify

pytestmark = pytest.mark.cases(6, tensorflow=1, jax=1)

layers = keras.layers


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(24, 5, 6)).astype("float32"), np.arange(24) % 3


def bidirectional():
    return [layers.Bidirectional(layers.GRU(4), name="outer")]


def two_of_equal_names():
    """Once loaded, both have the same paths."""
    first = layers.RNN(layers.GRUCell(4, name="cell"), return_sequences=True, name="outer")
    return [first, layers.RNN(layers.GRUCell(4, name="cell"))]


def sequential():
    inner = [layers.Dense(4, name="first"), layers.Dense(4, name="second")]
    return [keras.Sequential(inner, name="outer"), layers.Flatten()]


def time_distributed():
    return [layers.TimeDistributed(layers.Dense(4), name="outer"), layers.Flatten()]


WRAPPED = [bidirectional, two_of_equal_names, sequential, time_distributed]
NAMES = [{"exclude": "outer"}, {"distribution": {"outer": 0.3}}, {"exclude": "net/outer"}]


def frozen(wrapped, names):
    model = keras.Sequential(
        [keras.Input((5, 6)), *wrapped(), layers.Dense(3, name="head")], name="net"
    )
    kf.reinitialize(model, seed=0)
    compiled(model, kf.FreezeOptimizer("adam", 0.9, **names))
    kf.freeze(model, *data())
    return model


def masks(model):
    return [entry.trained for entry in kf.get_mask(model).entries]


def load(model, ending, folder):
    """Save and load a model as a .keras or a .freeze file."""
    path = str(folder / f"model{ending}")
    if ending == ".keras":
        model.save(path)
        return keras.models.load_model(path)
    kf.save(model, path)
    return kf.load(path)


@pytest.mark.parametrize("ending", [".keras", ".freeze"])
@pytest.mark.parametrize("names", NAMES, ids=str)
@pytest.mark.parametrize("wrapped", WRAPPED)
def test_names_of_layers_around_others_mean_the_same_after_loading(
    wrapped, names, ending, tmp_path
):
    model = frozen(wrapped, names)
    before = masks(model)
    for _ in range(2):  # what is loaded is saved and loaded, too
        model = load(model, ending, tmp_path)
        np.testing.assert_equal(masks(model), before)
    kf.freeze(model, *data(), overwrite=True)
    np.testing.assert_equal(masks(model), before)


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_gradual_freezing_goes_on_with_the_rates_of_layers_around_others(wrapped, tmp_path):
    def train(model, epochs):
        x, y = data()
        schedule = kf.callbacks.GradualFreezing(0.1, 0.9, begin=2, end=9, frequency=1)
        model.fit(x, y, batch_size=8, shuffle=False, epochs=epochs, verbose=0, callbacks=[schedule])

    def network():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((5, 6)), *wrapped(), layers.Dense(3, name="head")])
        kf.reinitialize(model, seed=0)
        optimizer = kf.FreezeOptimizer(
            keras.optimizers.Adam(0.01), 0.9, distribution={"outer": 0.3}
        )
        return compiled(model, optimizer)

    whole, resumed = network(), network()
    train(whole, 4)
    train(resumed, 2)
    resumed.save(tmp_path / "half.keras")
    resumed = keras.models.load_model(tmp_path / "half.keras")
    train(resumed, 2)
    np.testing.assert_equal(masks(resumed), masks(whole))


def test_paths_of_other_variables_are_not_taken():
    layer = layers.Dense(3, name="fc")
    layer.build((None, 2))
    for others in (["a/head/kernel", "a/head/bias"], ["a/head/kernel"], ["fc/bias", "fc/kernel"]):
        found = classify(layer.trainable_variables, "fc", others)
        assert [p.first_path for p in found] == [p.path for p in found] == ["fc/kernel", "fc/bias"]
        assert all(p.excluded for p in found)
