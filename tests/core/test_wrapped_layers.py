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


@keras.saving.register_keras_serializable("test_wrapped_layers")
class Block(keras.layers.Layer):
    """Its layer gets another number each time that it is made."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.inner = layers.Dense(6)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, inputs):
        return self.inner(inputs)


def beside_automatic_names():
    return [Block(), *bidirectional()]


WRAPPED = [
    bidirectional,
    two_of_equal_names,
    sequential,
    time_distributed,
    beside_automatic_names,
]
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


@pytest.mark.cases(1, tensorflow=0, jax=0)
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


@pytest.mark.cases(1, tensorflow=0, jax=0)
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


def with_attention(names=("first", "second")):
    """Two layers of equal parts, and one more."""
    inputs = keras.Input((5, 6))
    inner = layers.GRU(4, return_sequences=True, name="gru")
    outputs = layers.Bidirectional(inner, name="outer")(inputs)
    outputs = layers.Dense(4, name="middle")(outputs)
    for name in names:
        outputs = layers.MultiHeadAttention(2, 4, name=name)(outputs, outputs)
    return keras.Model(inputs, layers.Dense(3, name="head")(layers.Flatten()(outputs)))


def change_trainable(model):
    model.get_layer("middle").trainable = False


CHANGES = {
    "trainable": change_trainable,
    "lora": lambda model: model.get_layer("middle").enable_lora(2),
    "quantize": lambda model: model.get_layer("middle").quantize("int8"),
}


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore:The model's trainable variables")
@pytest.mark.parametrize("change", CHANGES)
def test_masks_of_layers_stay_when_another_one_is_changed(change, tmp_path):
    model = with_attention()
    kf.reinitialize(model, seed=0)
    compiled(model, kf.FreezeOptimizer("adam", 0.9, exclude="outer"))
    kf.freeze(model, *data())
    before = {e.path: e.trained for e in kf.get_mask(model).entries}
    CHANGES[change](model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    after = {e.path: e.trained for e in kf.get_mask(loaded).entries}
    assert len(after) >= len(before) - 1 >= 9
    for path in after:
        np.testing.assert_array_equal(after[path], before[path])


@pytest.mark.cases(None, tensorflow=0)
def test_attention_layers_in_another_order_are_noticed(tmp_path):
    model = with_attention()
    compiled(model, kf.FreezeOptimizer("adam", 0.9))
    kf.freeze(model, *data())
    model.save_weights(tmp_path / "model.weights.h5")
    other = compiled(with_attention(("second", "first")), kf.FreezeOptimizer("adam", 0.9))
    other.optimizer.build(other.trainable_variables)
    with pytest.raises(ValueError, match="come in another order"):
        other.load_weights(tmp_path / "model.weights.h5")


@pytest.mark.cases(1)
@pytest.mark.parametrize("names", NAMES[:2], ids=str)
def test_a_model_that_was_not_trained_yet_is_loaded_with_its_names(names, tmp_path):
    network = [keras.Input((5, 6)), *bidirectional(), layers.Dense(3, name="head")]
    model = compiled(keras.Sequential(network), kf.FreezeOptimizer("adam", 0.9, **names))
    for _ in range(2):
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
    mask = kf.freeze(model, *data())
    rates = {round(1 - entry.trained.mean(), 1) for entry in mask.entries}
    assert rates == ({0.9} if "exclude" in names else {0.3, 0.9})


def test_weights_that_wait_for_an_optimizer_keep_its_names(tmp_path):
    model = frozen(bidirectional, NAMES[0])
    model.save_weights(tmp_path / "model.weights.h5")
    layers_of_other = [keras.Input((5, 6)), *bidirectional(), layers.Dense(3, name="head")]
    other = keras.Sequential(layers_of_other, name="net")
    compiled(other, kf.FreezeOptimizer("adam", 0.9, **NAMES[0]))
    other.load_weights(tmp_path / "model.weights.h5")
    other.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_equal(masks(loaded), masks(model))


def test_paths_of_other_variables_are_not_taken():
    layer = layers.Dense(3, name="fc")
    layer.build((None, 2))
    for others in (["a/head/kernel", "a/head/bias"], ["a/head/kernel"], ["fc/bias", "fc/kernel"]):
        found = classify(layer.trainable_variables, "fc", others)
        assert [p.first_path for p in found] == [p.path for p in found] == ["fc/kernel", "fc/bias"]
        assert all(p.excluded for p in found)
