"""Restricted weight gradients against the ordinary ones of the same layers, on every backend.

Which layers are restricted is a matter of measured costs; here they all are, in a given way.
"""

import copy
import functools
import pickle

import keras
import numpy as np
import pytest
from helpers import blobs, crossentropy, is_weight, same_bits, sgd, value_of, values_of
from hypothesis import given
from hypothesis import strategies as st
from keras import layers as kl
from restricted import (
    TOLERANCES,
    WAYS,
    Subclassed,
    SubclassedWithTraining,
    assert_trained_alike,
    built,
    convolutions,
    corner_mask,
    dense_layers,
    depthwise_convolutions,
    einsum_dense_layers,
    every_layer,
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
    spread_mask,
    spy_on_blocks,
    train_both,
    trained_weights,
)
from restricted_networks import NETWORKS, functional

import keras_freeze as kf
from keras_freeze.optimizer.strategy import COORDINATE_WISE
from keras_freeze.restricted.convolutions import Depthwise
from keras_freeze.restricted.cost_model import cheapest_block
from keras_freeze.restricted.layers import _operations_of

BACKEND = keras.backend.backend()
pytestmark = [pytest.mark.cases(1, jax=0), pytest.mark.slow_on("tensorflow")]
on_every_backend = pytest.mark.cases(1)

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


@on_every_backend
@pytest.mark.parametrize("kind", [kl.MultiHeadAttention, kl.GroupQueryAttention])
@pytest.mark.parametrize("length", [64, None])
def test_projections_of_attention_are_restricted_where_that_pays(kind, length):
    x = keras.Input((length, 256))
    arguments = (8, 32) if kind is kl.MultiHeadAttention else (32, 8, 8)
    model = keras.Model(x, kind(*arguments)(x, x))
    model.compile(freeze_optimizer(), "mse")
    kf.freeze(model, mask=functools.partial(corner_mask, last=False))
    names = {layer.name for layer in restricted_layers(model)}
    assert names == {"query", "key", "value", "attention_output"}


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


def mask_with(rows, columns, active_rows, active_columns):
    mask = np.zeros((1, rows, columns), bool)
    mask[:, :active_rows, :active_columns] = True
    return mask


sizes = st.integers(1, 300)


@few_examples
@given(rows=sizes, columns=sizes, places=st.tuples(sizes, sizes))
def test_layer_whose_channels_are_all_active_is_left_alone(rows, columns, places):
    diagonal = np.zeros((1, rows, columns), bool)
    larger = np.arange(max(rows, columns))
    diagonal[0, larger % rows, larger % columns] = True
    assert cheapest_block(diagonal, places) is None


@few_examples
@given(rows=sizes, columns=sizes, places=st.tuples(sizes, sizes))
def test_layer_without_trained_weights_is_restricted(rows, columns, places):
    assert cheapest_block(mask_with(rows, columns, 0, 0), places) is not None


@few_examples
@given(
    rows=st.integers(1, 4000),
    columns=st.integers(1, 1000),
    share=st.floats(0.0, 1.0),
    other_share=st.floats(0.0, 1.0),
    column_share=st.floats(0.0, 1.0),
    places=st.integers(1, 400),
)
def test_fewer_active_rows_never_make_restriction_dearer(
    rows, columns, share, other_share, column_share, places
):
    few, many = sorted(int(np.ceil(s * rows)) for s in (share, other_share))
    active_columns = int(np.ceil(column_share * columns))
    ways = [
        cheapest_block(mask_with(rows, columns, active, active_columns), (places, places))
        for active in (few, many)
    ]
    assert ways[1] is None or ways[0] is not None


def test_only_channels_that_can_be_left_out_are_taken():
    way = cheapest_block(mask_with(4096, 4096, 40, 4096), (1, 1))
    assert way == (True, False)
    assert cheapest_block(mask_with(4096, 4096, 4096, 40), (1, 1)) == (False, True)


@on_every_backend
@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, True), (0.1, BACKEND == "jax"), (1.0, False)]
)
def test_depthwise_kernel_is_restricted_where_its_gradient_is_dear(share, expected):
    layer = kl.DepthwiseConv2D(3, depth_multiplier=2)
    layer.build((None, 16, 16, 256))
    trained = np.zeros((3, 3, 256, 2), bool)
    trained[:, :, : round(share * 256)] = True
    operation = Depthwise(layer)
    places = operation.places((None, 16, 16, 256))
    way = cheapest_block(operation.matrices(trained), places, operation.ways)
    assert (way is not None) == expected
