"""Restricted weight gradients against the ordinary ones of the same layers, on every backend.

Which layers are restricted is a matter of measured costs; here they all are, in a given way.
"""

import functools

import keras
import numpy as np
import pytest
from helpers import is_weight, sgd, values_of
from hypothesis import given
from keras import layers as kl
from restricted import (
    TOLERANCES,
    Subclassed,
    SubclassedWithTraining,
    assert_trained_alike,
    built,
    convolutions,
    dense_layers,
    depthwise_convolutions,
    einsum_dense_layers,
    few_examples,
    freeze_optimizer,
    frozen,
    images,
    normal,
    one_layer,
    points,
    random_mask,
    restricted_layers,
    restrictions,
    small_convnet,
    small_mlp,
    spy_on_blocks,
    train_both,
    trained_weights,
)
from restricted_networks import NETWORKS, functional

import keras_freeze as kf
from keras_freeze.optimizer.strategy import COORDINATE_WISE
from keras_freeze.restricted.layers import _operations_of

BACKEND = keras.backend.backend()
pytestmark = [pytest.mark.cases(1, jax=0), pytest.mark.slow_on("tensorflow")]
on_every_backend = pytest.mark.cases(1, jax=1)

OPTIMIZERS = {
    "clipnorm": ({"clipnorm": 0.1}, {}),
    "global_clipnorm": ({"global_clipnorm": 0.1}, {}),
    "accumulation": ({"gradient_accumulation_steps": 2}, {}),
    "weight_decay": ({"weight_decay": 0.1}, {}),
    "l2": ({}, {"l2": 0.1}),
    "zero": ({}, {"frozen_weights": "zero"}),
}


@pytest.fixture(autouse=True)
def restricted_products(monkeypatch):
    """The blocks of which a gradient was computed, or traced, in a test."""
    return spy_on_blocks(monkeypatch)


# Layers


def check_layer(make_layer, input_shape, dtype, seed, kind, way):
    """One step of SGD with and without restricted gradients, from the same weights."""
    keras.utils.set_random_seed(seed)
    layer = make_layer()
    model = frozen(
        one_layer(layer, input_shape, dtype),
        freeze_optimizer(sgd(0.5)),
        mask=random_mask(kind, seed),
        way=way,
    )
    mask = kf.get_mask(model)
    all_trained = all(mask[v].all() for v in layer.trainable_variables if is_weight(v))
    assert restricted_layers(model) == ([] if all_trained else [layer])
    start = values_of(model.trainable_variables)
    x = normal(3, *input_shape, seed=seed, dtype="float64" if dtype == "float64" else "float32")
    y = normal(*model(x).shape, seed=seed + 1)
    values = []
    for _ in range(2):
        for variable, value in zip(model.trainable_variables, start, strict=True):
            variable.assign(value)
        model.train_on_batch(x, y)
        values.append(values_of(model.trainable_variables))
        kf.restore_gradients(model)
    tolerance = max(TOLERANCES[dtype], 1e-6)  # Keras computes losses in float32
    assert_trained_alike(model, start, *values, tolerance, may_stay=True)


@on_every_backend
@few_examples
@given(case=dense_layers(), **restrictions)
def test_dense_layer(case, **restriction):
    check_layer(*case, **restriction)


@few_examples
@given(case=einsum_dense_layers(), **restrictions)
def test_einsum_dense_layer(case, **restriction):
    check_layer(*case, **restriction)


@few_examples
@given(case=convolutions(), **restrictions)
def test_convolution_layer(case, **restriction):
    check_layer(*case, **restriction)


@on_every_backend
@few_examples
@given(case=depthwise_convolutions(), **restrictions)
def test_depthwise_and_separable_convolution_layer(case, **restriction):
    check_layer(*case, **restriction)


# Training


@functools.cache
def trained_without_restriction():
    model = frozen(small_mlp())
    kf.restore_gradients(model)
    return trained_weights(model, points())


@on_every_backend
def test_train_on_batch(restricted_products):
    model = frozen(small_mlp())
    start = values_of(model.trainable_variables)
    x, y = points()
    for _ in range(2):
        for i in range(0, len(x), 12):
            model.train_on_batch(x[i : i + 12], y[i : i + 12])
    found = values_of(model.trainable_variables)
    assert_trained_alike(model, start, found, trained_without_restriction())
    assert restricted_products


@pytest.mark.parametrize("inner", COORDINATE_WISE, ids=lambda inner: inner.__name__)
def test_every_coordinate_wise_optimizer(inner, restricted_products):
    train_both(
        small_mlp,
        points(),
        optimizer=lambda: freeze_optimizer(inner(0.01)),
        run_eagerly=True,
    )
    assert restricted_products


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_of_the_optimizer(name, restricted_products):
    inner, outer = OPTIMIZERS[name]
    train_both(
        small_mlp,
        points(),
        optimizer=lambda: freeze_optimizer(sgd(momentum=0.9, **inner), **outer),
        run_eagerly=name != "accumulation",
    )
    assert restricted_products


def test_frozen_weights_decay(restricted_products):
    values = []
    for restore in (False, True):
        model = frozen(small_mlp(), freeze_optimizer(l2=0.1, frozen_weights="decay"))
        if restore:
            kf.restore_gradients(model)
        values.append(trained_weights(model, points()))
    for one, other in zip(*values, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert restricted_products


@pytest.mark.parametrize(
    ("dtype", "l2", "scaled"),
    [
        ("mixed_float16", 0.0, False),
        ("mixed_float16", 0.1, False),
        ("mixed_float16", 0.1, True),
        ("mixed_bfloat16", 0.1, False),
        ("float64", 0.1, True),
    ],
)
def test_precision_and_loss_scale(dtype, l2, scaled, restricted_products):
    def optimizer():
        inner = freeze_optimizer(keras.optimizers.Adam(0.01), l2=l2)
        return keras.optimizers.LossScaleOptimizer(inner) if scaled else inner

    make_model = functools.partial(small_mlp, dtype)
    tolerance = {"float64": 1e-6}.get(dtype, 1e-3)
    train_both(
        make_model, points(), tolerance, optimizer, run_eagerly=not scaled, auto_scale_loss=False
    )
    # Elsewhere a LossScaleOptimizer computes with whole gradients alone.
    assert bool(restricted_products) == (not scaled or BACKEND == "tensorflow")


def test_default_loss_scale_of_mixed_float16(restricted_products):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = train_both(small_convnet, images(), 1e-3)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert bool(restricted_products) == (BACKEND == "tensorflow")


@pytest.mark.parametrize("kind", ["none", "one", "few"])
@pytest.mark.parametrize("eager", [False, True])
def test_convolutional_network(kind, eager, restricted_products):
    mask = {}  # the same for both models

    def same_mask(v):
        return mask.setdefault(tuple(v.shape), random_mask(kind)(v))

    train_both(small_convnet, images(), mask=same_mask, run_eagerly=eager)
    assert restricted_products


@on_every_backend
@pytest.mark.parametrize("network", NETWORKS)
def test_network(network, restricted_products):
    make_model, number = NETWORKS[network]
    if network == "cell in a loop" and BACKEND != "tensorflow":
        number = 2  # TensorFlow alone derives the gradient of a loop by itself
    train_both(make_model, points())
    assert len({id(block) for block in restricted_products}) == number


@pytest.mark.parametrize("steps", [3, None])
def test_time_distributed(steps, restricted_products):
    network = functional(lambda x: kl.TimeDistributed(kl.Dense(3))(x), (steps, 2))
    train_both(network, (normal(12, 3, 2), normal(12, 3, 3, seed=1)))
    assert restricted_products


def test_regularized_kernel_is_left_alone():
    model = frozen(small_mlp(kernel_regularizer="l2"))
    assert restricted_layers(model) == [model.layers[1]]
    train_both(functools.partial(small_mlp, kernel_regularizer="l2"), points(), run_eagerly=True)


@pytest.mark.parametrize("kind", [Subclassed, SubclassedWithTraining])
def test_subclassed_model_is_restricted_if_it_is_told_that_it_trains(kind, restricted_products):
    train_both(lambda: built(kind(), 1, 6), points())
    # JAX differentiates functions, which are told by what they are given.
    assert bool(restricted_products) == (kind is SubclassedWithTraining or BACKEND == "jax")


@pytest.mark.parametrize("eager", [False, True])
def test_rematerialized_layers(eager, restricted_products):
    # Of Dense layers in a graph, Keras can only rematerialize the activations.
    def make():
        with keras.RematScope("full" if eager else "activations"):
            return small_mlp()

    train_both(make, points(), run_eagerly=eager)
    assert bool(restricted_products) == (not eager)


@pytest.mark.parametrize("name", ["depthwise", "pointwise"])
def test_separable_convolution_with_a_regularized_kernel_is_left_alone(name):
    layer = kl.SeparableConv1D(3, 2, **{f"{name}_regularizer": "l2"})
    assert not restricted_layers(frozen(one_layer(layer, (4, 2))))


@on_every_backend
@pytest.mark.parametrize("kernel", ["depthwise_kernel", "pointwise_kernel"])
def test_one_kernel_of_a_separable_convolution(kernel, restricted_products):
    """The other one is trained in all its entries."""

    def make():
        keras.utils.set_random_seed(0)
        layer = kl.SeparableConv2D(3, 3)
        return keras.Sequential([keras.Input((6, 6, 2)), layer, kl.GlobalAveragePooling2D()])

    def mask(v):
        return random_mask("few")(v) if v.name == kernel else np.ones(v.shape, bool)

    model = train_both(make, images(), mask=mask)
    assert len({id(block) for block in restricted_products}) == 1
    assert (
        restricted_products[0].num_trained == kf.get_mask(model)[kernel_path(model, kernel)].sum()
    )


def kernel_path(model, name):
    return next(v.path for v in model.trainable_variables if v.name == name)


def test_dilated_depthwise_convolution_with_strides_is_left_alone():
    layer = kl.DepthwiseConv1D(2, strides=2, dilation_rate=2)
    layer.build((None, 8, 2))
    assert not _operations_of(layer)
