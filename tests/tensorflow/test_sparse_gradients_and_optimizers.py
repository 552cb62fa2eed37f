"""Which optimizers, masks and passes over the data get restricted weight gradients.

Which layers are restricted is a matter of measured costs; here they all are, in a given way.
"""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import is_weight, same_bits, sgd, value_of, values_of
from keras import layers as kl
from restricted import (
    SubclassedWithTraining,
    built,
    corner_mask,
    every_layer,
    freeze_optimizer,
    frozen,
    images,
    normal,
    points,
    random_mask,
    small_convnet,
    small_mlp,
    spread_mask,
    spy_on_blocks,
    trained_weights,
)
from tape_gradients import differentiate, gradients_of_mse, numpy_of
from tensorflow.python.saved_model import loader_impl

import keras_freeze as kf

pytestmark = [pytest.mark.cases(1), pytest.mark.slow]


@pytest.fixture(autouse=True)
def restricted_products(monkeypatch):
    """The blocks of which a gradient was computed, or traced, in a test."""
    return spy_on_blocks(monkeypatch)


# Which optimizer


def all_dense(model, x):
    return not any(differentiate(model, x)[2])


def moved(before, after):
    return [(one != other).mean() for one, other in zip(before, after, strict=True)]


class FunctionModel(SubclassedWithTraining):
    """Its `call` is traced once, whoever trains it."""

    call = tf.function(SubclassedWithTraining.call)


@pytest.mark.parametrize("kind", [SubclassedWithTraining, FunctionModel])
def test_another_optimizer_trains_everything(kind):
    model = frozen(built(kind(), 1, 6))
    x, y = points()
    model.fit(x, y, verbose=0)
    model.compile(sgd(0.1), "mse")
    start = values_of(model.trainable_variables)
    model.fit(x, y, verbose=0)
    assert min(moved(start, values_of(model.trainable_variables))) > 0.9
    assert all_dense(model, x)


def test_second_model_that_shares_the_layers_gets_ordinary_gradients():
    model = frozen(small_mlp())
    other = keras.Model(model.inputs, kl.Dense(2)(model.outputs[0]))
    other.compile(sgd(0.1), "mse")
    x, _ = points()
    assert all_dense(other, x)
    start = values_of(model.trainable_variables)
    other.fit(x, normal(len(x), 2), verbose=0)
    assert min(moved(start, values_of(model.trainable_variables))) > 0.9
    assert any(differentiate(model, x)[2])


def test_another_mask_after_xla_compiled_the_step():
    model = frozen(small_mlp(), mask=functools.partial(corner_mask, last=False), jit_compile=True)
    trained_weights(model, points())
    model.optimizer.restore(frozen(small_mlp(), mask=spread_mask).optimizer.state)
    start = values_of(model.trainable_variables)
    found = trained_weights(model, points())
    for variable, before, after in zip(model.trainable_variables, start, found, strict=True):
        if is_weight(variable):
            assert np.array_equal(before != after, kf.get_mask(model)[variable])


def test_optimizer_of_ones_own_beside_a_compiled_one_restricts_nothing():
    model = small_mlp()
    model.compile(sgd(), "mse")
    with every_layer():
        kf.freeze(model, mask=random_mask(), optimizer=freeze_optimizer(), loss="mse")
    x, y = points()
    assert all_dense(model, x)
    start = values_of(model.trainable_variables)
    model.fit(x, y, verbose=0)  # with SGD, which trains everything
    assert min(moved(start, values_of(model.trainable_variables))) > 0.9


def test_inference_and_other_models_use_the_ordinary_call(restricted_products):
    model = frozen(small_mlp())
    outer = keras.Sequential([keras.Input((6,)), model])
    x, y = points()
    assert not any(differentiate(model, x, training=False)[2])
    assert not any(differentiate(outer, x)[2])
    model.predict(x, verbose=0)
    model.evaluate(x, y, verbose=0)
    assert not restricted_products


def test_gradient_of_another_mask_is_refused():
    model = frozen(small_mlp(), mask=functools.partial(corner_mask, last=False))
    x, y = points()

    @tf.function
    def gradients():
        return gradients_of_mse(model, x, y)

    model.optimizer.apply(gradients(), model.trainable_variables)
    with every_layer():
        kf.freeze(model, mask=functools.partial(corner_mask, last=True), overwrite=True)
    start = values_of(model.trainable_variables)
    with pytest.raises(ValueError, match="another freezing mask"):
        model.optimizer.apply(gradients(), model.trainable_variables)
    for variable, before in zip(model.trainable_variables, start, strict=True):
        if is_weight(variable):
            assert same_bits(value_of(variable), before)


def test_function_with_a_block_that_was_dropped_is_refused_for_another_mask():
    model = frozen(small_mlp(), mask=functools.partial(corner_mask, last=False))
    other = frozen(small_mlp(), mask=functools.partial(corner_mask, last=True))
    x, y = points()

    @tf.function
    def step():
        model.optimizer.apply(gradients_of_mse(model, x, y), model.trainable_variables)

    step()
    kf.restore_gradients(model)
    step()
    model.optimizer.restore(other.optimizer.state)
    with pytest.raises(tf.errors.InvalidArgumentError, match="traced before"):
        step()


@pytest.mark.parametrize("optimizer", ["sgd", None])
def test_reinitialize_of_a_model_that_is_no_longer_frozen(optimizer):
    model = frozen(small_mlp())
    other = keras.Model(model.inputs, model.outputs)
    if optimizer is not None:
        other.compile(optimizer, "mse")
    start = values_of(model.trainable_variables)
    kf.reinitialize(other, seed=3)
    assert min(moved(start[::2], values_of(model.trainable_variables)[::2])) == 1.0


def test_call_that_someone_wrapped_around_a_restricted_one_stays():
    model = frozen(small_mlp())
    layer = model.layers[0]

    @functools.wraps(layer.call)
    def call(*args, restricted=layer.call, **kwargs):
        return 2.0 * restricted(*args, **kwargs)

    vars(layer)["call"] = call
    kf.restore_gradients(model)
    assert vars(layer)["call"] is call
    assert all_dense(model, points()[0])


def test_restore_gradients_takes_everything_away():
    model = frozen(small_mlp())
    kf.restore_gradients(model)
    kf.restore_gradients(model)
    assert not any("call" in vars(layer) for layer in model._flatten_layers())
    assert all_dense(model, points()[0])


# Passes that need every score


def function_model():
    return built(FunctionModel(), 1, 6)


@pytest.mark.parametrize("make_model", [small_mlp, function_model])
@pytest.mark.parametrize("trained_before", [False, True])
def test_saliency_and_gradient_flow_are_those_of_all_weights(make_model, trained_before):
    keras.utils.set_random_seed(0)
    model = frozen(make_model(), run_eagerly=False)
    x, y = points()
    if trained_before:
        model.fit(x, y, verbose=0)
    found = [
        list(kf.compute_saliency(model, x, y, criterion).values())
        for criterion in ("snip", "grasp")
    ]
    flow = kf.gradient_flow(model, x, y)
    expected = reference(model)
    for scores, others in zip(found, expected[:2], strict=True):
        for one, other in zip(scores, others, strict=True):
            assert (one != 0).mean() > 0.9
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(flow, expected[2], rtol=1e-5)


def reference(model):
    """Scores and gradient flow of an unrestricted copy."""
    x, y = points()
    copied = small_mlp()
    for variable, other in zip(copied.trainable_variables, model.trainable_variables, strict=True):
        variable.assign(other)
    frozen(copied, mask={v.path: kf.get_mask(model)[o] for v, o in kernels(copied, model)})
    kf.restore_gradients(copied)
    scores = [
        list(kf.compute_saliency(copied, x, y, criterion).values())
        for criterion in ("snip", "grasp")
    ]
    return [*scores, kf.gradient_flow(copied, x, y)]


def kernels(first, second):
    pairs = zip(first.trainable_variables, second.trainable_variables, strict=True)
    return [pair for pair in pairs if is_weight(pair[0])]


# Plain layers


@pytest.mark.parametrize("way", ["export", "saved_model"])
def test_exported_graph_has_no_custom_gradient(way, tmp_path):
    model = frozen(small_convnet())
    x, _ = images()
    outputs = value_of(model(x))
    path = str(tmp_path / "exported")
    if way == "export":
        model.export(path, verbose=False)
        loaded = tf.saved_model.load(path)
        np.testing.assert_allclose(numpy_of(loaded.serve(x)), outputs, rtol=1e-5, atol=1e-6)
    else:
        tf.saved_model.save(model, path)
    graph = loader_impl.parse_saved_model(path).meta_graphs[0].graph_def
    nodes = [node for function in graph.library.function for node in function.node_def]
    assert nodes
    kinds = [n.attr["_gradient_op_type"].s for n in nodes if "_gradient_op_type" in n.attr]
    assert not [kind for kind in kinds if kind.startswith(b"CustomGradient")]
