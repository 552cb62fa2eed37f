"""The criteria "smallest_magnitude" and "fisher", by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import blobs, compiled, is_weight, sgd, values_of
from keras import layers
from oracle import DenseByHand, brute_force_mask

import keras_freeze as kf

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)


def relu_model(criterion, **arguments):
    keras.utils.set_random_seed(1)
    body = layers.Dense(16, "relu", bias_initializer="normal", name="body")
    model = keras.Sequential([keras.Input((6,)), body, layers.Dense(3, name="head")])
    optimizer = kf.FreezeOptimizer(sgd(), 0.75, criterion=criterion, **arguments)
    return compiled(model, optimizer)


def masks_of(model):
    mask = kf.get_mask(model)
    return [mask[v] for v in model.trainable_variables if is_weight(v)]


def equal(found, expected):
    return all(np.array_equal(f, e) for f, e in zip(found, expected, strict=True))


def squares_by_hand(model, batches):
    """The squared gradient of each batch, summed."""
    network = DenseByHand(values_of(model.trainable_variables))
    squares = [[g**2 for g in network.gradients(x, y)[::2]] for x, y in batches]
    return [sum(of_kernel) for of_kernel in zip(*squares, strict=True)]


@pytest.mark.cases(None, tensorflow=0)
@pytest.mark.parametrize("way", ["freeze", "first batch"])
@pytest.mark.parametrize("frozen_weights", ["keep", "zero"])
def test_smallest_weights_are_trained(way, frozen_weights):
    model = relu_model("smallest_magnitude", frozen_weights=frozen_weights)
    kernels = values_of(model.trainable_variables)[::2]
    if way == "freeze":
        kf.freeze(model, *blobs())
    else:
        model.train_on_batch(*blobs())
    assert equal(masks_of(model), brute_force_mask([-np.abs(k) for k in kernels], 36))
    found = kf.compute_saliency(relu_model("snip"), *blobs(), "smallest_magnitude")
    assert equal(found.values(), [-np.abs(k) for k in kernels])


@pytest.mark.cases(None, tensorflow=0)
def test_smallest_weights_survive_files(tmp_path):
    model = relu_model("smallest_magnitude")
    mask = kf.freeze(model, *blobs())
    kf.save(model, tmp_path / "model.freeze", include_optimizer=True)
    loaded = kf.load(tmp_path / "model.freeze")
    assert kf.get_mask(loaded) == mask
    assert loaded.optimizer.criterion == "smallest_magnitude"


@pytest.mark.same_on_all
def test_fisher_of_one_batch_is_the_squared_gradient():
    model, (x, y) = relu_model("fisher"), blobs()
    expected = squares_by_hand(model, [(x, y)])
    found = kf.compute_saliency(model, x, y, "fisher")
    for score, one in zip(found.values(), expected, strict=True):
        assert score.dtype == np.float32
        np.testing.assert_allclose(score, one, rtol=1e-3, atol=1e-9)
    masks = []
    for batch_size in (None, 20):
        model = relu_model("fisher")
        kf.freeze(model, x, y, batch_size=batch_size)
        masks.append(masks_of(model))
    model = relu_model("fisher")
    model.train_on_batch(x, y)
    masks.append(masks_of(model))
    assert all(equal(mask, brute_force_mask(expected, 36)) for mask in masks)


def test_fisher_sums_the_squares_of_the_batches_of_a_dataset():
    (x, y), model = blobs(), relu_model("fisher")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 32, 8)]
    expected = brute_force_mask(squares_by_hand(model, batches), 36)
    kf.freeze(model, dataset, steps=4)
    assert equal(masks_of(model), expected)
    for other in ([(x[:32], y[:32])], batches[:1]):
        assert not equal(expected, brute_force_mask(squares_by_hand(model, other), 36))


@pytest.mark.cases(None, tensorflow=0)
def test_fisher_of_several_batches_needs_a_loss_beside_an_own_train_step():
    class Own(keras.Sequential):
        def train_step(self, *args):
            return super().train_step(*args)

    plain = relu_model("fisher")
    (x, y), model = blobs(), Own([keras.Input((6,)), *plain.layers])
    compiled(model, plain.optimizer)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    with pytest.raises(ValueError, match=r"fisher.*give `freeze` a `loss`.*2 batches"):
        kf.freeze(model, dataset, steps=2)
    kf.freeze(model, x, y, batch_size=20)
    expected = relu_model("fisher")
    kf.freeze(expected, x, y)
    assert equal(masks_of(model), masks_of(expected))
