"""The gradient flow: by hand in NumPy, where it vanishes, and that watching it changes nothing."""

import csv
import math
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    blobs,
    compiled,
    crossentropy,
    dense_model,
    fit,
    gradients_by_autodiff,
    is_weight,
    same_bits,
    sgd,
    two_dense_layers,
    value_of,
    values_of,
)
from keras import layers

import keras_freeze as kf
from keras_freeze.callbacks.gradient_flow_history import GradientFlowHistory
from keras_freeze.gradients.flow import gradient_flow

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)
traced_only = pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="PyTorch traces nothing"
)


def plain_model(seed=0):
    """tanh(x W1 + b1) W2 + b2: small enough for backpropagation by hand."""
    return two_dense_layers(seed)


def restless_model(seed=0):
    """A model of which every pass in training mode changes statistics and random states."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", name="body"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5, name="dropout"),
            layers.Dense(3, name="head"),
        ]
    )


def everything(model):
    """Every number that the model, its optimizer and the sources of randomness hold."""
    generator = keras.src.random.seed_generator.global_seed_generator()
    variables = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    numbers = [value_of(v).tobytes() for v in [*variables, generator.state]]
    return numbers, random.getstate(), np.random.get_state()[1].tobytes()


def gradients_by_hand(model, x, y):
    """W1, b1, W2, b2: float64 gradients of the mean crossentropy."""
    w1, b1, w2, b2 = (value.astype("float64") for value in values_of(model.trainable_variables))
    h = np.tanh(x @ w1 + b1)
    exponentials = np.exp(h @ w2 + b2)
    delta = exponentials / exponentials.sum(1, keepdims=True) - np.eye(3)[y]
    delta /= len(x)
    delta_h = delta @ w2.T * (1 - h**2)
    return [x.T @ delta_h, delta_h.sum(0), h.T @ delta, delta.sum(0)]


def trained_parts(model, gradients):
    """The gradients of trained weights and of all biases in one vector."""
    mask = kf.get_mask(model)
    return np.concatenate(
        [
            g[mask[v]] if is_weight(v) else g.ravel()
            for g, v in zip(gradients, model.trainable_variables, strict=True)
        ]
    )


# The number itself


def test_flow_is_the_mean_magnitude_over_trained_weights_and_biases():
    x, y = blobs()
    model = compiled(plain_model())
    kf.freeze(model, x, y)
    trained = trained_parts(model, gradients_by_hand(model, x, y))
    assert trained.size == 18 + 11  # a quarter of 72 weights, and the biases
    assert np.isclose(gradient_flow(model, x, y), np.abs(trained).sum() / 29, rtol=1e-5)


def test_gradients_are_averaged_by_batch_size_before_the_norm():
    x, y = blobs(50)
    model = compiled(plain_model())
    kf.freeze(model, x, y)
    expected = np.abs(trained_parts(model, gradients_by_hand(model, x, y))).mean()
    for batch_size in (50, 16):
        assert np.isclose(gradient_flow(model, x, y, batch_size=batch_size), expected, rtol=1e-5)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    assert np.isclose(gradient_flow(model, dataset), expected, rtol=1e-5)


def test_norms_are_averaged_by_batch_size_after_the_norm():
    x, y = blobs(40)
    model = compiled(plain_model())
    kf.freeze(model, x, y)
    by_batch = [
        np.abs(trained_parts(model, gradients_by_hand(model, x[rows], y[rows]))).mean()
        for rows in (slice(0, 32), slice(32, 40))
    ]
    mean = (32 * by_batch[0] + 8 * by_batch[1]) / 40
    variance = (32 * (by_batch[0] - mean) ** 2 + 8 * (by_batch[1] - mean) ** 2) / 40
    assert np.isclose(gradient_flow(model, x, y, reduce="norms"), mean, rtol=1e-5)
    flow = GradientFlowHistory(x, y)  # batches of 32 by default
    fit(model, x, y, epochs=1, callbacks=[flow])
    assert np.isclose(flow.history["gradient_flow"][0], mean, rtol=1e-5)
    assert np.isclose(flow.history["gradient_flow_deviation"][0], variance**0.5, rtol=1e-4)


def test_without_a_mask_or_at_rate_0_it_is_the_dense_flow():
    x, y = blobs()
    expected = np.mean(
        np.abs(np.concatenate([g.ravel() for g in gradients_by_hand(plain_model(), x, y)]))
    )
    flows = []
    for optimizer in (sgd(), kf.FreezeOptimizer(sgd(), 0.0), kf.FreezeOptimizer(sgd(), 0.75)):
        flows.append(gradient_flow(compiled(plain_model(), optimizer), x, y))  # not frozen yet
    frozen_at_0 = compiled(plain_model(), kf.FreezeOptimizer(sgd(), 0.0))
    kf.freeze(frozen_at_0, x, y)
    flows.append(gradient_flow(frozen_at_0, x, y))
    assert np.isclose(flows[0], expected, rtol=1e-5)
    assert len(set(flows)) == 1


def test_compact_and_full_shape_optimizers_give_the_same_number():
    x, y = blobs()
    flows = []
    for use_ema in (False, True):
        model = compiled(dense_model(), kf.FreezeOptimizer(sgd(use_ema=use_ema), 0.75))
        kf.freeze(model, x, y)
        flows.append(gradient_flow(model, x, y))
    assert flows[0] == flows[1]


def test_biases_frozen_by_a_mask_of_ones_own_do_not_count():
    x, y = blobs()
    model = compiled(plain_model())
    nothing = {
        "body/kernel": np.zeros((6, 8), bool),
        "body/bias": np.zeros(8, bool),
        "head/kernel": np.zeros((8, 3), bool),
    }
    kf.freeze(model, mask=nothing)
    head_bias = gradients_by_hand(model, x, y)[3]
    assert np.isclose(gradient_flow(model, x, y), np.abs(head_bias).mean(), rtol=1e-5)


def test_sample_weights_count_as_in_fit():
    x, y = blobs()
    model = compiled(plain_model(), sgd())
    weight = np.where(np.arange(48) < 24, 2.0, 0.0)
    assert np.isclose(
        gradient_flow(model, x, y, sample_weight=weight),
        gradient_flow(model, x[:24], y[:24]),  # twice as much on half of the samples
        rtol=1e-5,
    )


# Where it vanishes


def cut_model(frozen_weights, use_bias):
    """Four layers, one weight of each trained: two through units 0, then two through units 1."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            *[layers.Dense(6, use_bias=use_bias, name=f"fc{n}") for n in (1, 2, 3)],
            layers.Dense(3, use_bias=use_bias, name="fc4"),
        ]
    )
    compiled(model, kf.FreezeOptimizer(sgd(), 0.9, frozen_weights=frozen_weights))
    trained = {}
    for number, unit in ((1, 0), (2, 0), (3, 1), (4, 1)):
        array = np.zeros(model.get_layer(f"fc{number}").kernel.shape, bool)
        array[unit, unit] = True
        trained[f"fc{number}/kernel"] = array
    kf.freeze(model, mask=trained)
    return model


def test_flow_of_a_cut_pruned_network_is_0_and_of_the_frozen_one_is_not():
    x, y = blobs()
    assert gradient_flow(cut_model("zero", use_bias=False), x, y) == 0.0
    assert gradient_flow(cut_model("keep", use_bias=False), x, y) > 0.0


def test_only_biases_behind_the_cut_of_a_pruned_network_have_a_gradient():
    x, y = blobs()
    y = np.where(np.arange(48) < 30, 0, y)
    model = cut_model("zero", use_bias=True)
    to_logits = 1 / 3 - np.eye(3)[y].mean(0)  # all logits are 0
    to_fc3 = to_logits[1] * value_of(model.get_layer("fc4").kernel)[1, 1]
    to_fc2 = to_fc3 * value_of(model.get_layer("fc3").kernel)[1, 1]
    norm = np.abs(to_logits).sum() + abs(to_fc3) + abs(to_fc2)
    num_parameters = 4 + 3 * 6 + 3
    assert np.isclose(gradient_flow(model, x, y), norm / num_parameters, rtol=1e-5)


# Nothing changes


def test_model_is_left_as_it_was():
    x, y = blobs()
    model = compiled(restless_model(), metrics=["accuracy"])
    kf.freeze(model, x, y)
    fit(model, x, y)
    before = everything(model)
    for reduce in ("gradients", "norms"):
        gradient_flow(model, x, y, reduce=reduce)
    assert everything(model) == before


def test_model_is_left_as_it_was_after_an_error():
    x, y = blobs()
    model = compiled(restless_model())
    kf.freeze(model, x, y)
    before = everything(model)
    bad = x.copy()
    bad[40] = np.nan
    with pytest.raises(ValueError, match="not finite for batch 1") as caught:
        gradient_flow(model, bad, y)
    assert everything(model) == before, caught
    if keras.backend.backend() == "jax":
        return  # where Keras gives labels that do not exist a loss of 0
    with pytest.raises(ValueError, match=r"batch 1.*labels"):
        gradient_flow(model, x, np.where(np.arange(48) == 40, 9, y))
    assert everything(model) == before


@pytest.mark.cases(1)
def test_batch_normalization_uses_the_statistics_of_the_batch():
    x, y = blobs()
    model = compiled(dense_model(), sgd())
    fit(model, x, y)
    gradients = gradients_by_autodiff(model, x, y)
    expected = np.abs(np.concatenate([g.ravel() for g in gradients])).mean()
    assert np.isclose(gradient_flow(model, x, y, batch_size=48), expected, rtol=1e-5)


def watched_and_unwatched(train):
    """The model and History of two trainings that differ in the callback alone."""
    results = []
    x, y = blobs()
    for callbacks in ([], [GradientFlowHistory(x, y, batch_size=20)]):
        optimizer = kf.FreezeOptimizer(keras.optimizers.Adam(0.01), 0.75)
        model = compiled(restless_model(), optimizer, metrics=["accuracy"])
        kf.freeze(model, x, y)
        results.append((model, train(model, callbacks).history, callbacks))
    return results


def assert_same_training(results):
    (model, history, _), (watched, watched_history, (flow,)) = results
    for first, second in zip(
        [*model.variables, *model.optimizer.variables],
        [*watched.variables, *watched.optimizer.variables],
        strict=True,
    ):
        assert same_bits(value_of(first), value_of(second))
    assert {name: watched_history[name] for name in history} == history
    assert len(flow.history["gradient_flow"]) == len(history["loss"]) + 1
    assert min(flow.history["gradient_flow"]) > 0.0


@pytest.mark.cases(1)
def test_training_is_the_same_with_and_without_the_callback():
    x, y = blobs()

    def train(model, callbacks):
        steps = 1 if keras.backend.backend() == "torch" else 3  # Keras has no more on PyTorch
        model.compile(model.optimizer, crossentropy(), steps_per_execution=steps)
        return fit(
            model,
            x,
            y,
            epochs=3,
            batch_size=8,
            shuffle=True,
            validation_data=(x, y),
            callbacks=callbacks,
        )

    assert_same_training(watched_and_unwatched(train))


def test_shuffled_dataset_keeps_its_order_beside_a_dataset_of_the_callbacks_own():
    x, y = blobs()

    def shuffled():
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(48, seed=1).batch(8)

    def train(model, callbacks):
        callbacks = [GradientFlowHistory(shuffled(), steps=2)] if callbacks else []
        result = fit(model, shuffled(), epochs=3, callbacks=callbacks)
        seen.extend(callbacks)
        return result

    seen = []
    (model, history, _), (watched, watched_history, _) = watched_and_unwatched(train)
    assert_same_training([(model, history, []), (watched, watched_history, seen)])


# The callback


def test_logs_reach_history_and_csv_logger(tmp_path):
    x, y = blobs()
    model = compiled(dense_model())
    kf.freeze(model, x, y)
    flow = GradientFlowHistory(x, y)
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    history = fit(model, x, y, epochs=2, callbacks=[flow, logger]).history
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    for name in ("gradient_flow", "gradient_flow_deviation"):
        assert history[name] == flow.history[name][1:]
        assert [float(row[name]) for row in rows] == history[name]
    assert flow.history["epoch"] == [0, 1, 2]


def test_history_starts_anew_with_each_fit_and_counts_epochs_from_the_initial_one():
    x, y = blobs()
    model = compiled(dense_model())
    kf.freeze(model, x, y)
    flow = GradientFlowHistory(x, y, batch_size=48)
    fit(model, x, y, epochs=2, callbacks=[flow])
    last = flow.history["gradient_flow"][-1]
    fit(model, x, y, epochs=4, initial_epoch=2, callbacks=[flow])
    assert flow.history["epoch"] == [2, 3, 4]
    assert flow.history["gradient_flow"][0] == last
    assert flow.history["gradient_flow_deviation"] == [0.0, 0.0, 0.0]  # one batch


@pytest.mark.cases(1)
def test_mask_found_in_the_first_batch_counts_from_then_on():
    x, y = blobs()
    model = compiled(plain_model())
    dense = gradient_flow(model, x, y, reduce="norms")
    flow = GradientFlowHistory(x, y)
    fit(model, x, y, callbacks=[flow])
    trained = [
        trained_parts(model, gradients_by_hand(model, x[rows], y[rows]))
        for rows in (slice(0, 32), slice(32, 48))
    ]
    expected = (32 * np.abs(trained[0]).mean() + 16 * np.abs(trained[1]).mean()) / 48
    assert np.isclose(flow.history["gradient_flow"][0], dense, rtol=1e-6)
    assert np.isclose(flow.history["gradient_flow"][1], expected, rtol=1e-5)


@pytest.mark.cases(1, tensorflow=1, jax=1)
@traced_only
def test_model_is_traced_once_for_all_epochs():
    x, y = blobs()
    calls = []

    class Counting(layers.Layer):
        def call(self, inputs):
            calls.append(None)
            return inputs

    model = compiled(keras.Sequential([keras.Input((6,)), Counting(), layers.Dense(3)]))
    kf.freeze(model, x, y)
    counts = []
    fit(model, x, y)  # traces for itself
    for epochs in (1, 3):
        calls.clear()
        fit(model, x, y, epochs=epochs, callbacks=[GradientFlowHistory(x, y, batch_size=20)])
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_training_that_diverges_is_recorded_as_nan_and_goes_on():
    x, y = blobs()
    model = compiled(plain_model(), sgd(1e39))
    flow = GradientFlowHistory(x, y)
    fit(model, x, y, epochs=3, callbacks=[flow])
    assert math.isfinite(flow.history["gradient_flow"][0])
    assert math.isnan(flow.history["gradient_flow"][-1])
    assert math.isnan(flow.history["gradient_flow_deviation"][-1])


def test_callback_refuses_what_can_be_read_only_once():
    x, y = blobs()
    with pytest.raises(TypeError, match="again and again"):
        GradientFlowHistory(iter([(x, y)]))


# Models and precisions


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_gives_the_unscaled_flow(dtype):
    x, y = blobs()
    expected = gradient_flow(compiled(dense_model(), sgd()), x, y)
    model = compiled(dense_model(dtype=dtype), sgd(), auto_scale_loss=True)
    is_scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert is_scaled == (dtype == "mixed_float16")
    assert np.isclose(gradient_flow(model, x, y), expected, rtol=0.05)


def test_loss_scale_that_is_too_large_for_float16_is_halved():
    x, y = blobs()
    scaled = keras.optimizers.LossScaleOptimizer(
        kf.FreezeOptimizer(sgd(), 0.75), initial_scale=2.0**30
    )
    model = compiled(dense_model(dtype="mixed_float16"), scaled)
    kf.freeze(model, x, y)
    unscaled = compiled(
        dense_model(dtype="mixed_float16"), kf.FreezeOptimizer(sgd(), 0.75), auto_scale_loss=False
    )
    kf.freeze(unscaled, mask=kf.get_mask(model))
    assert np.isclose(gradient_flow(model, x, y), gradient_flow(unscaled, x, y), rtol=0.02)
    assert float(scaled.scale_loss(1.0)) == 2.0**30


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.body = layers.Dense(8, activation="tanh")
        self.head = layers.Dense(3)

    def call(self, inputs):
        return self.head(self.body(inputs))


def subclassed_like(model, x):
    copy = Subclassed()
    copy(x)
    copy.set_weights(model.get_weights())
    return copy


def test_subclassed_models_built_or_not_and_eager_ones():
    x, y = blobs()
    expected = gradient_flow(compiled(plain_model(), sgd()), x, y)
    for run_eagerly in (False, True):
        model = compiled(subclassed_like(plain_model(), x), sgd(), run_eagerly=run_eagerly)
        assert np.isclose(gradient_flow(model, x, y), expected, rtol=1e-6)
    unbuilt = compiled(Subclassed(), sgd())
    flow = gradient_flow(unbuilt, x, y)
    assert flow == gradient_flow(unbuilt, x, y) > 0.0


def test_several_inputs_and_outputs():
    x, y = blobs()
    inputs = {"a": keras.Input((6,), name="a"), "b": keras.Input((6,), name="b")}
    shared = layers.Dense(3, name="shared")
    model = keras.Model(inputs, {"p": shared(inputs["a"]), "q": shared(inputs["b"])})
    compiled(model, sgd(), loss={"p": crossentropy(), "q": crossentropy()})
    single = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    single.set_weights(model.get_weights())
    twice = 2 * gradient_flow(compiled(single, sgd()), x, y)
    assert np.isclose(gradient_flow(model, {"a": x, "b": x}, {"p": y, "q": y}), twice, rtol=1e-5)


def test_py_dataset_and_generator_give_what_arrays_give():
    x, y = blobs()

    class Pieces(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            rows = slice(16 * index, 16 * (index + 1))
            return x[rows], y[rows]

    model = compiled(plain_model(), sgd())
    pieces = Pieces()
    for steps in (None, 2):
        expected = gradient_flow(model, x, y, batch_size=16, steps=steps)
        assert gradient_flow(model, pieces, steps=steps) == expected
        assert gradient_flow(model, (pieces[i] for i in range(3)), steps=steps) == expected


def test_model_that_is_not_compiled_takes_a_loss():
    x, y = blobs()
    expected = gradient_flow(compiled(plain_model(), sgd()), x, y)
    assert gradient_flow(plain_model(), x, y, loss=crossentropy()) == expected


# Bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": np.zeros((0, 6), "float32"), "y": np.zeros(0, int)}, ValueError, "length"),
        (
            {"x": tf.data.Dataset.from_tensor_slices(blobs()).batch(8).take(0), "y": None},
            ValueError,
            "at least one batch",
        ),
        (
            {"x": tf.data.Dataset.from_tensor_slices(blobs()).batch(8).repeat(), "y": None},
            ValueError,
            "endless",
        ),
        ({"x": tf.data.Dataset.from_tensor_slices(blobs()).batch(8)}, ValueError, "y must be None"),
        ({"steps": 3}, ValueError, "steps=3.*2 batches"),
        ({"steps": 0}, ValueError, "steps=0"),
        ({"batch_size": 1.5}, TypeError, "batch_size=1.5"),
        ({"reduce": "sum"}, ValueError, "reduce='sum'"),
        ({"y": None}, ValueError, "y=None"),
        ({"x": None}, TypeError, "x=None"),
        ({"model": "model"}, TypeError, "model='model'"),
        ({"model": plain_model()}, ValueError, "not compiled"),
    ],
)
def test_bad_input_is_refused(arguments, error, message):
    x, y = blobs()
    arguments = {"model": compiled(plain_model(), sgd()), "x": x, "y": y, **arguments}
    with pytest.raises(error, match=message):
        gradient_flow(**arguments)


def test_model_in_which_nothing_is_trained_is_refused():
    x, y = blobs()
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3, use_bias=False)])
    compiled(model)
    kf.freeze(model, mask={"kernel": np.zeros((6, 3), bool)})
    with pytest.raises(ValueError, match="Nothing"):
        gradient_flow(model, x, y)


@pytest.mark.cases(1, tensorflow=1)
def test_a_model_that_fit_does_not_compile_is_not_compiled():
    def network(*lookup):
        return compiled(
            keras.Sequential(
                [
                    keras.Input((2,), dtype="int64"),
                    *lookup,
                    layers.Embedding(4, 3),
                    layers.Flatten(),
                    layers.Dense(3),
                ]
            )
        )

    numbers = np.array([[3, 5], [7, 9], [5, 5], [7, 3]] * 3)
    indices = np.array([[1, 2], [3, 0], [2, 2], [3, 1]] * 3)
    y = np.arange(12) % 3
    looked_up = network(layers.IntegerLookup(vocabulary=[3, 5, 7]))  # not by JAX's compiler
    given = network()
    given.set_weights(looked_up.get_weights())
    for model, x in ((looked_up, numbers), (given, indices)):
        kf.freeze(model, x, y)
    assert np.isclose(gradient_flow(looked_up, numbers, y), gradient_flow(given, indices, y))
