"""Data, models and optimizers that freeze refuses, by name and without a change."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from freezing_cases import build_model, compile_model, everything, make_data, make_model
from helpers import same_bits, values_of
from keras import layers

import keras_freeze as kf

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)
tensorflow_only = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="XLA's, tf.distribute's or tf.sparse's"
)


def labels_out_of_range():
    x, y = make_data()
    return {"x": x, "y": y + 4}


def with_nan(array="x"):
    x, y = make_data()
    x[3, 2] = np.nan
    return {"x": x, "y": y}


def wrong_shape():
    x, y = make_data()
    return {"x": x[:, :7], "y": y}


def unequal():
    x, y = make_data()
    return {"x": x, "y": y[:9]}


def empty_dataset():
    return {"x": tf.data.Dataset.from_tensor_slices(make_data()).take(0).batch(8)}


def short_dataset():
    return {"x": tf.data.Dataset.from_tensor_slices(make_data()).batch(32), "steps": 5}


def dataset_and_labels():
    x, y = make_data()
    return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(32), "y": y}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (labels_out_of_range, "labels"),
        (with_nan, "loss of batch 0 is nan"),
        (wrong_shape, "shape"),
        (unequal, "64"),
        (empty_dataset, "0 batches"),
        (short_dataset, "2 batches"),
        (dataset_and_labels, "y must be None"),
        (lambda: {"x": make_data()[0][:0], "y": make_data()[1][:0]}, "length"),
        (dict, "x=None"),
        (lambda: {"x": make_data()[0], "y": make_data()[1], "steps": 2}, "steps"),
        (lambda: {"x": make_data()[0], "y": make_data()[1], "steps": 0}, "steps"),
        (lambda: {"x": make_data()[0], "y": make_data()[1], "batch_size": 0}, "batch_size"),
        (lambda: {"x": make_data()[0]}, "targets"),
        (lambda: {"x": make_data()[0].tolist(), "y": make_data()[1].tolist()}, "np.asarray"),
        (lambda: {"x": np.full((4, 10), "a"), "y": np.zeros(4, int)}, "dtypes|string|of numbers"),
        (lambda: {**dict(zip("xy", make_data(), strict=True)), "loss": ["mse"]}, "one loss"),
    ],
)
def test_bad_data_are_named_and_change_nothing(arguments, message):
    if (arguments, keras.backend.backend()) == (labels_out_of_range, "jax"):
        pytest.skip("Keras gives labels that do not exist a loss of 0 on JAX, in `fit` as well")
    model = make_model(frozen_weights="zero")
    before = everything(model)
    with pytest.raises(ValueError, match=message):
        kf.freeze(model, **arguments())
    assert everything(model) == before
    assert kf.get_mask(model) is None
    kf.freeze(model, *make_data())  # and it can be frozen still


def test_loss_that_is_nan_is_named():
    model = build_model()
    model.compile(kf.FreezeOptimizer("sgd"), lambda y, p: keras.ops.sum(p) * float("nan"))
    with pytest.raises(ValueError, match="nan"):
        kf.freeze(model, *make_data())


@pytest.mark.cases(1, tensorflow=1)
def test_gradient_that_is_not_finite_names_the_layer():
    model = build_model()
    # sqrt has an infinite slope at 0, where the loss itself is finite.
    model.compile(kf.FreezeOptimizer("sgd"), lambda y, p: keras.ops.mean(keras.ops.sqrt(p * 0.0)))
    with pytest.raises(ValueError, match=r"fc./kernel"):
        kf.freeze(model, *make_data())


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_first_batch_with_nan_stops_and_changes_nothing(run_eagerly):
    model = make_model()
    model.run_eagerly = run_eagerly
    before = values_of(model.trainable_variables)
    # On JAX, a step cannot raise.
    raises = pytest.raises(Exception, match=r"fc1/kernel.*not finite")
    warns = pytest.warns(RuntimeWarning, match="No step has decided")
    with warns if keras.backend.backend() == "jax" else raises:
        model.fit(**with_nan(), batch_size=64, verbose=0)
    assert all(map(same_bits, before, values_of(model.trainable_variables)))
    assert kf.get_mask(model) is None


@pytest.mark.cases(1, jax=1)
@tensorflow_only
def test_first_batch_with_nan_decides_nothing_under_xla():
    model = make_model()
    model.jit_compile = True
    before = [v.numpy() for v in model.trainable_variables]
    model.fit(**with_nan(), batch_size=64, verbose=0)
    assert all(
        (a == b.numpy()).all() for a, b in zip(before, model.trainable_variables, strict=True)
    )
    assert kf.get_mask(model) is None


def test_models_that_cannot_be_frozen_say_why():
    model = build_model()
    with pytest.raises(ValueError, match="not compiled"):
        kf.freeze(model, *make_data())
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"FreezeOptimizer.*SGD"):
        kf.freeze(model, *make_data())
    with pytest.raises(ValueError, match="FreezeOptimizer"):
        kf.prune(model)
    assert kf.get_mask(model) is None
    for function in (kf.freeze, kf.compute_saliency):
        with pytest.raises(TypeError, match="model"):
            function("model", *make_data())
    with pytest.raises(TypeError, match="model"):
        kf.reinitialize("model")
    for x in (None, "digits"):
        with pytest.raises(TypeError, match=f"x={x!r}"):
            kf.compute_saliency(model, x)
    with pytest.raises(ValueError, match=r"criterion.*None"):
        kf.compute_saliency(make_model(), *make_data(), criterion=lambda w, g: None)
    without_weights = compile_model(keras.Sequential([keras.Input((10,)), layers.ReLU()]))
    with pytest.raises(ValueError, match="no trainable variables"):
        kf.freeze(without_weights, *make_data())
    without_kernels = compile_model(keras.Sequential([keras.Input((10,)), layers.PReLU()]))
    with pytest.raises(ValueError, match="no weights"):
        kf.freeze(without_kernels, *make_data())
    unbuilt = compile_model(keras.Sequential([layers.Dense(4)]))
    with pytest.raises(ValueError, match="not built"):
        kf.freeze(unbuilt, mask={})


@pytest.mark.parametrize(
    "scores", ["abc", np.ones((4, 3), "complex64"), [[1.0], [2.0, 3.0]]], ids=type
)
def test_scores_that_are_no_real_numbers_are_refused(scores):
    model, (x, y) = make_model(), make_data()
    path = next(iter(kf.compute_saliency(model, x, y)))
    with pytest.raises(TypeError, match=f"`criterion` must return a tensor.*{path}"):
        kf.compute_saliency(model, x, y, criterion=lambda w, g: scores)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"freeze_rate": -0.1}, ValueError, "freeze_rate=-0.1"),
        ({"freeze_rate": 1.5}, ValueError, "freeze_rate=1.5"),
        ({"freeze_rate": float("nan")}, ValueError, "freeze_rate=nan"),
        ({"freeze_rate": "0.9"}, TypeError, "freeze_rate='0.9'"),
        ({"freeze_rate": True}, TypeError, "freeze_rate=True"),
        ({"criterion": "snap"}, ValueError, "'snip'.*criterion='snap'"),
        ({"criterion": 3}, TypeError, "criterion=3"),
        ({"frozen_weights": "melt"}, ValueError, "'keep'.*'melt'"),
        ({"frozen_weights": "decay"}, ValueError, "l2 > 0"),
        ({"l2": -1e-4}, ValueError, "l2=-0.0001"),
        ({"l2": "x"}, TypeError, "l2='x'"),
        ({"l2": float("inf")}, ValueError, "l2=inf"),
        ({"exclude": 3}, TypeError, "exclude=3"),
        ({"exclude": {"fc1": 1}}, TypeError, "exclude={'fc1': 1}"),
        ({"exclude": ("fc1", 3)}, TypeError, r"exclude=\['fc1', 3\]"),
        ({"exclude": [""]}, ValueError, r"exclude=\[''\]"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"seed": 0.5}, TypeError, "seed=0.5"),
        ({"weight_decay": 0.1}, ValueError, "weight_decay.*inner optimizer"),
        ({"clipnorm": 1.0}, ValueError, "clipnorm.*inner optimizer"),
    ],
)
def test_bad_arguments_of_the_optimizer_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        kf.FreezeOptimizer(keras.optimizers.SGD(), **arguments)


@pytest.mark.parametrize(
    ("inner", "error", "message"),
    [
        (lambda: 3, TypeError, "inner_optimizer=3"),
        (lambda: keras.optimizers.LossScaleOptimizer("sgd" and keras.optimizers.SGD()), ValueError,
         "LossScaleOptimizer\\(FreezeOptimizer"),
        (lambda: kf.FreezeOptimizer("sgd"), ValueError, "must not be a FreezeOptimizer"),
    ],
)  # fmt: skip
def test_inner_optimizers_that_cannot_work_are_refused(inner, error, message):
    with pytest.raises(error, match=message):
        kf.FreezeOptimizer(inner())


def test_inner_optimizer_in_use_is_refused():
    sgd = keras.optimizers.SGD()
    sgd.build(build_model().trainable_variables)
    with pytest.raises(ValueError, match="already built"):
        kf.FreezeOptimizer(sgd)


@pytest.mark.parametrize("argument", ["clipnorm", "clipvalue", "global_clipnorm", "weight_decay"])
def test_decay_refuses_what_breaks_its_recurrence(argument):
    with pytest.raises(ValueError, match=argument):
        kf.FreezeOptimizer(keras.optimizers.SGD(**{argument: 0.1}), frozen_weights="decay", l2=0.1)
    with pytest.raises(ValueError, match="Adam"):
        kf.FreezeOptimizer(keras.optimizers.Adam(), frozen_weights="decay", l2=0.1)


def test_exclude_that_names_nothing_is_an_error():
    model = make_model(exclude="fc7")
    with pytest.raises(ValueError, match="fc7"):
        kf.freeze(model, *make_data())
    with pytest.raises(ValueError, match="fc7"):
        model.fit(*make_data(), verbose=0)


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="plain Keras takes it as well")
def test_optimizer_of_one_model_is_refused_by_another():
    model = make_model()
    kf.freeze(model, *make_data())
    other = build_model(seed=1)
    other.compile(model.optimizer, "sparse_categorical_crossentropy")
    with pytest.raises(ValueError, match="Unknown variable"):
        other.fit(*make_data(), verbose=0)


@pytest.mark.cases(1, tensorflow=1, jax=1)
@tensorflow_only
def test_refused_freeze_leaves_an_earlier_mask_and_its_optimizer_alone():
    model = make_model()
    kf.freeze(model, *make_data())
    model.fit(*make_data(), verbose=0)
    mask, before = kf.get_mask(model), [v.numpy() for v in model.optimizer.variables]
    with (
        tf.distribute.OneDeviceStrategy("cpu:0").scope(),
        pytest.raises(ValueError, match=r"tf\.distribute"),
    ):
        kf.freeze(model, *make_data(seed=3), overwrite=True)
    assert kf.get_mask(model) == mask
    after = [v.numpy() for v in model.optimizer.variables]
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
    model.fit(*make_data(), verbose=0)


def test_refused_freeze_leaves_no_mask_behind():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((10,)), layers.Dense(4, dtype="bfloat16")])
    compile_model(model, frozen_weights="decay", l2=0.1)
    for _ in range(2):
        with pytest.raises(ValueError, match="float32"):
            kf.freeze(model, *make_data())
        assert kf.get_mask(model) is None


def test_scores_that_are_all_zero_are_warned_of():
    x, y = make_data()
    with pytest.warns(UserWarning, match="All scores are zero"):
        kf.freeze(make_model(), x, y, sample_weight=np.zeros(64))


@pytest.mark.cases(1, tensorflow=1, jax=1)
@tensorflow_only
@pytest.mark.parametrize("way", ["freeze", "first batch"])
def test_strategies_that_were_not_tested_are_refused(way):
    with tf.distribute.experimental.CentralStorageStrategy().scope():
        model = make_model()
    with pytest.raises(ValueError, match=r"OneDeviceStrategy\. Received: Central"):
        kf.freeze(model, *make_data()) if way == "freeze" else model.fit(*make_data(), verbose=0)
