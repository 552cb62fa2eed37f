"""Masks that users give to freeze: by path, by function, or of another model."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from freezing_cases import compile_model, make_data, make_model
from keras import layers

import keras_freeze as kf

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)


def own_mask():
    return np.arange(120).reshape(10, 12) % 3 == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["mapping", "function", "FreezeMask", "tensor", "short path"])
def test_mask_of_ones_own_decides(kind):
    model = make_model()
    kernel = model.get_layer("fc1").kernel
    masks = {
        "mapping": {kernel.path: own_mask()},
        "function": lambda v: own_mask() if v is kernel else None,
        "FreezeMask": kf.freeze(make_model(), mask={"fc1/kernel": own_mask()}),
        "tensor": {kernel.path: tf.constant(own_mask())},
        "short path": {"fc1/kernel": own_mask()},
    }
    mask = kf.freeze(model, mask=masks[kind])
    assert mask.num_trained == 40 + 48  # what is missing stays trained
    before = kernel.numpy()
    model.fit(*make_data(), verbose=0, epochs=2)
    moved = kernel.numpy() != before
    assert not (moved & ~own_mask()).any()
    assert moved.any()
    assert kf.get_mask(model) == mask


def test_biases_may_be_frozen_by_name_and_layers_whole():
    model = make_model()
    nothing = np.zeros((12, 4), bool)
    mask = {"fc1/bias": np.arange(12) < 5, "fc2/kernel": nothing}
    mask = kf.freeze(model, mask=mask)
    before = [v.numpy() for v in model.trainable_variables]
    model.fit(*make_data(), verbose=0)
    after = [v.numpy() for v in model.trainable_variables]
    bias = [v.path.endswith("fc1/bias") for v in model.trainable_variables].index(True)
    assert ((after[bias] != before[bias]) == (np.arange(12) < 5)).all()
    assert (model.get_layer("fc2").kernel.numpy() == before[-2]).all()
    # Biases are no weights: they are in no freezing rate.
    assert (mask.num_weights, mask.num_trained) == (168, 120)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"fc9/kernel": np.ones((10, 12), bool)}, "fc9/kernel.*names no trainable variable"),
        ({"fc1/kernel": np.ones((12, 10), bool)}, r"fc1/kernel.*\(10, 12\).*\(12, 10\)"),
        ({"fc1/kernel": np.ones((10, 12))}, "fc1/kernel.*boolean.*float64"),
        ({"kernel": np.ones((10, 12), bool)}, "'kernel' names several"),
        ({3: np.ones((10, 12), bool)}, "3 names no"),
        ({"fc1/kernel": own_mask(), "sequential/fc1/kernel": own_mask()}, "twice|names no"),
        (lambda v: np.ones(3, bool), "shape"),
        (kf.FreezeMask([]), None),
    ],
)
def test_wrong_masks_name_paths_shapes_and_dtypes(mask, message):
    model = make_model()
    if message is None:
        assert kf.freeze(model, mask=mask).freeze_rate == 0.0
        return
    with pytest.raises(ValueError, match=message):
        kf.freeze(model, mask=mask)
    assert kf.get_mask(model) is None


def test_mask_of_another_network_is_refused():
    other = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    mask = kf.freeze(compile_model(other), mask=lambda v: None)
    with pytest.raises(ValueError, match="shape"):
        kf.freeze(make_model(), mask=mask)


def test_mask_against_exclude_is_refused():
    model = make_model(exclude="fc2")
    with pytest.raises(ValueError, match="exclude"):
        kf.freeze(model, mask={"fc2/kernel": np.zeros((12, 4), bool)})
    with pytest.raises(TypeError, match="mask"):
        kf.freeze(model, mask=np.ones((10, 12), bool))


def test_function_as_mask_is_asked_for_weights_only():
    model = make_model()
    asked = []
    mask = kf.freeze(model, mask=lambda v: asked.append(v.path) or abs(v.numpy()) > 0.2)
    assert [path.split("/")[-1] for path in asked] == ["kernel", "kernel"]
    model.fit(*make_data(), verbose=0)
    assert (model.get_layer("fc1").bias.numpy() != 0.0).any()
    assert 0 < mask.num_trained < mask.num_weights
