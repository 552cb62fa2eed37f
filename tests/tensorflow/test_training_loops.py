"""Every way to run training, against training by hand: tape gradients, masks and steps in NumPy."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    blobs,
    compiled,
    crossentropy,
    dense_model,
    fit,
    gradients_by_autodiff,
    is_weight,
    mask_by_hand,
    same_bits,
    sgd,
    training_step,
    value_of,
    values_of,
)
from keras import layers as kl
from oracle import SGDByHand

import keras_freeze as kf

pytestmark = [pytest.mark.cases(1), pytest.mark.slow]

BATCH, EPOCHS = 12, 2
each_way = pytest.mark.parametrize("way", ["freeze", "first_batch"])


def batches(*arrays):
    size = len(arrays[0])
    return [tuple(a[i : i + BATCH] for a in arrays) for i in range(0, size, BATCH)]


def train_by_hand(model, data, loss=None, rates=(0.1, 0.1)):
    """FreezeNet's algorithm 1 at rate 0.75; returns masks by position, first and last values."""
    variables = model.trainable_variables
    weights = [i for i, v in enumerate(variables) if is_weight(v)]
    gradients = gradients_by_autodiff(model, *data[0], loss)
    start = values_of(variables)
    found = mask_by_hand([start[i] for i in weights], [gradients[i] for i in weights], 0.75)
    assert all(m.any() for m in found)
    masks = dict(zip(weights, found, strict=True))
    recurrences = [SGDByHand(momentum=0.9) for _ in start]
    for rate in rates:
        for batch in data:
            gradients = gradients_by_autodiff(model, *batch, loss)
            for i, variable in enumerate(variables):
                change = recurrences[i].change(gradients[i], rate)
                variable.assign(value_of(variable) + np.where(masks.get(i, True), change, 0.0))
    return masks, start, values_of(variables)


@functools.cache
def by_hand():
    return train_by_hand(dense_model(), batches(*blobs()))


def assert_equals_by_hand(model, expected=None, mask=None):
    masks, start, values = expected or by_hand()
    mask = mask or kf.get_mask(model)
    variables = model.trainable_variables
    for i, array in masks.items():
        assert np.array_equal(mask[variables[i]], array)
    assert_frozen_bits_kept(variables, mask, start)
    for v, value in zip(variables, values, strict=True):
        np.testing.assert_allclose(value_of(v), value, rtol=1e-4, atol=1e-5)


LOOPS = {
    "default": {},
    "jit": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "steps_per_execution_3": {"steps_per_execution": 3},
    "steps_per_execution_100": {"steps_per_execution": 100},
}


@each_way
@pytest.mark.parametrize("loop", LOOPS)
def test_fit_equals_training_by_hand(loop, way):
    x, y = blobs()
    model = compiled(dense_model(), **LOOPS[loop])
    if way == "freeze":
        kf.freeze(model, x[:BATCH], y[:BATCH])
    fit(model, x, y, batch_size=BATCH, epochs=EPOCHS)
    assert_equals_by_hand(model)
    assert int(model.optimizer.iterations) == EPOCHS * len(batches(x))


@each_way
def test_train_on_batch_equals_training_by_hand(way):
    model = compiled(dense_model())
    data = batches(*blobs())
    if way == "freeze":
        kf.freeze(model, *data[0])
    for x, y in data * EPOCHS:
        model.train_on_batch(x, y)
    assert_equals_by_hand(model)


@pytest.mark.parametrize("jit_compile", [False, True])
@each_way
def test_loop_of_ones_own_with_an_optimizer_that_is_not_built(way, jit_compile):
    model = dense_model()
    optimizer = kf.FreezeOptimizer(sgd(momentum=0.9), freeze_rate=0.75)
    loss = crossentropy()
    data = batches(*blobs())
    if way == "freeze":
        kf.freeze(model, *data[0], loss=loss, optimizer=optimizer)

    step = training_step(model, optimizer, loss, jit_compile)
    for x, y in data * EPOCHS:
        step(tf.constant(x), tf.constant(y))
    assert_equals_by_hand(model, mask=optimizer.mask)
    assert int(optimizer.iterations) == EPOCHS * len(data)


class Sequence(keras.utils.PyDataset):
    def __init__(self, data):
        super().__init__()
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


def forever(data):
    while True:
        yield from data


INPUTS = {
    "numpy": lambda data: [np.concatenate(part) for part in zip(*data, strict=True)],
    "float64": lambda data: [
        np.concatenate(part).astype("float64") for part in zip(*data, strict=True)
    ],
    "tf_data": lambda data: [
        tf.data.Dataset.from_tensor_slices(
            tuple(np.concatenate(part) for part in zip(*data, strict=True))
        ).batch(BATCH)
    ],
    "py_dataset": lambda data: [Sequence(data)],
    "generator": lambda data: [forever(data)],
}


@each_way
@pytest.mark.parametrize("kind", INPUTS)
def test_any_input_of_fit_is_an_input_of_freeze(kind, way):
    data = batches(*blobs())
    model = compiled(dense_model(), run_eagerly=True)
    if way == "freeze":
        given = INPUTS[kind](data)
        kf.freeze(model, *(a[:BATCH] for a in given) if len(given) == 2 else given)
    arguments = {"batch_size": BATCH} if kind in ("numpy", "float64") else {}
    if kind == "generator":
        arguments["steps_per_epoch"] = len(data)
    fit(model, *INPUTS[kind](data), epochs=EPOCHS, **arguments)
    assert_equals_by_hand(model)


CLASS_WEIGHT = {0: 5.0, 1: 0.25, 2: 1.0}
SAMPLE_WEIGHT = np.where(np.arange(48) % 7 == 0, 20.0, 0.5).astype("float32")


def weighted_crossentropy(y_and_weight, logits):
    y, weight = y_and_weight
    return tf.reduce_mean(weight * tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


@each_way
@pytest.mark.parametrize("kind", ["class_weight", "sample_weight", "both_as_dataset"])
def test_weighted_losses_decide_and_train(kind, way):
    x, y = blobs()
    of_class = np.array([CLASS_WEIGHT[c] for c in y], "float32")
    weight = {
        "class_weight": of_class,
        "sample_weight": SAMPLE_WEIGHT,
        "both_as_dataset": SAMPLE_WEIGHT * of_class,
    }[kind]
    data = [(x_, (y_, w_)) for x_, y_, w_ in batches(x, y, weight)]
    expected = train_by_hand(dense_model(), data, weighted_crossentropy)
    assert any(not np.array_equal(m, by_hand()[0][i]) for i, m in expected[0].items())

    model = compiled(dense_model(), run_eagerly=True)
    dataset = tf.data.Dataset.from_tensor_slices((x, y, weight)).batch(BATCH)
    if way == "freeze" and kind == "both_as_dataset":
        kf.freeze(model, dataset)
    elif way == "freeze":
        kf.freeze(model, x[:BATCH], y[:BATCH], sample_weight=weight[:BATCH])
    if kind == "class_weight":
        fit(model, x, y, batch_size=BATCH, epochs=EPOCHS, class_weight=CLASS_WEIGHT)
    elif kind == "sample_weight":
        fit(model, x, y, batch_size=BATCH, epochs=EPOCHS, sample_weight=weight)
    else:
        fit(model, dataset, epochs=EPOCHS)
    assert_equals_by_hand(model, expected)


class ActivityPenalty(kl.Layer):
    def call(self, inputs):
        self.add_loss(0.5 * keras.ops.mean(inputs**2))
        return inputs


def penalised_model(kind):
    keras.utils.set_random_seed(0)
    regularizer = keras.regularizers.L2(0.3) if kind == "regularizer" else None
    extra = [ActivityPenalty()] if kind == "add_loss" else []
    return keras.Sequential(
        [
            keras.Input((6,)),
            kl.Dense(8, activation="tanh", kernel_regularizer=regularizer),
            *extra,
            kl.Dense(3),
        ]
    )


@pytest.mark.parametrize("way", ["freeze", "freeze_before_compile", "first_batch"])
@pytest.mark.parametrize("kind", ["regularizer", "add_loss"])
def test_a_models_own_penalties_belong_to_the_loss(kind, way):
    x, y = blobs()
    by_hand_model = penalised_model(kind)

    def loss(y_true, logits):
        entropy = crossentropy()(y_true, logits)
        kernel = by_hand_model.layers[0].kernel.value
        if kind == "regularizer":
            return entropy + 0.3 * tf.reduce_sum(kernel**2)
        return entropy + tf.add_n(by_hand_model.losses)

    plain = train_by_hand(penalised_model("none"), batches(x, y))
    expected = train_by_hand(by_hand_model, batches(x, y), loss)
    assert any(not np.array_equal(m, plain[0][i]) for i, m in expected[0].items())
    model = penalised_model(kind)
    optimizer = kf.FreezeOptimizer(sgd(momentum=0.9), freeze_rate=0.75)
    if way == "freeze_before_compile":
        kf.freeze(model, x[:BATCH], y[:BATCH], loss=crossentropy(), optimizer=optimizer)
    compiled(model, optimizer, run_eagerly=True)
    if way == "freeze":
        kf.freeze(model, x[:BATCH], y[:BATCH])
    fit(model, x, y, batch_size=BATCH, epochs=EPOCHS)
    assert_equals_by_hand(model, expected)


def model_of_two_outputs():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    hidden = kl.Dense(8, activation="tanh")(inputs)
    return keras.Model(
        inputs,
        {"label": kl.Dense(3, name="label")(hidden), "size": kl.Dense(1, name="size")(hidden)},
    )


@each_way
@pytest.mark.parametrize("run_eagerly", [True, False])
def test_several_losses_are_weighted_as_compiled(way, run_eagerly):
    x, y = blobs()
    size = np.linalg.norm(x, axis=1, keepdims=True) - 4.0

    def loss(targets, outputs, label_weight=2.0, size_weight=0.25):
        y_true, size_true = targets
        error = tf.reduce_mean((size_true - outputs["size"]) ** 2)
        entropy = crossentropy()(y_true, outputs["label"])
        return label_weight * entropy + size_weight * error

    data = [(x_, (y_, s_)) for x_, y_, s_ in batches(x, y, size)]
    expected = train_by_hand(model_of_two_outputs(), data, loss)
    otherwise = functools.partial(loss, size_weight=0.5)
    plain = train_by_hand(model_of_two_outputs(), data, otherwise)
    assert any(not np.array_equal(m, plain[0][i]) for i, m in expected[0].items())
    model = compiled(
        model_of_two_outputs(),
        loss={"label": crossentropy(), "size": "mse"},
        loss_weights={"label": 2.0, "size": 0.25},
        run_eagerly=run_eagerly,
    )
    targets = {"label": y, "size": size}
    if way == "freeze":
        kf.freeze(model, x[:BATCH], {name: t[:BATCH] for name, t in targets.items()})
    fit(model, x, targets, batch_size=BATCH, epochs=EPOCHS)
    assert_equals_by_hand(model, expected)


def test_overridden_train_step_and_compute_loss_are_respected():
    class Doubled(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            entropy = super().compute_loss(x, y, y_pred, sample_weight, training)
            return entropy + keras.ops.mean(y_pred**2)

    def build():
        keras.utils.set_random_seed(0)
        return Doubled([keras.Input((6,)), kl.Dense(8, activation="tanh"), kl.Dense(3)])

    def loss(y_true, logits):
        return crossentropy()(y_true, logits) + tf.reduce_mean(logits**2)

    x, y = blobs()
    expected = train_by_hand(build(), batches(x, y), loss)
    model = compiled(build(), run_eagerly=True)
    kf.freeze(model, x[:BATCH], y[:BATCH])
    fit(model, x, y, batch_size=BATCH, epochs=EPOCHS)
    assert_equals_by_hand(model, expected)


@each_way
def test_learning_rate_scheduler_sets_the_inner_rate(way):
    x, y = blobs()
    expected = train_by_hand(dense_model(), batches(x, y), rates=(0.2, 0.02))
    model = compiled(dense_model())
    if way == "freeze":
        kf.freeze(model, x[:BATCH], y[:BATCH])
    rates = [0.2, 0.02]
    callback = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rates[epoch])
    history = fit(model, x, y, batch_size=BATCH, epochs=2, callbacks=[callback])
    assert_equals_by_hand(model, expected)
    np.testing.assert_allclose(history.history["learning_rate"], rates, rtol=1e-6)


def test_learning_rate_schedule_follows_the_steps():
    x, y = blobs()
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.2, 0.02])
    expected = train_by_hand(dense_model(), batches(x, y), rates=(0.2, 0.02))
    model = compiled(dense_model(), kf.FreezeOptimizer(keras.optimizers.SGD(schedule, 0.9), 0.75))
    fit(model, x, y, batch_size=BATCH, epochs=2)
    assert_equals_by_hand(model, expected)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.02)


def test_callbacks_that_watch_training(tmp_path):
    """ReduceLROnPlateau, EarlyStopping and ModelCheckpoint, where nothing counts as better."""
    x, y = blobs()
    model = compiled(dense_model())
    mask = kf.freeze(model, x, y)
    start = values_of(model.trainable_variables)
    after_epoch = []
    callbacks = [
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: after_epoch.append(values_of(model.trainable_variables))
        ),
        keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e3),
        keras.callbacks.ModelCheckpoint(
            tmp_path / "{epoch}.weights.h5", monitor="loss", save_weights_only=True
        ),
        keras.callbacks.EarlyStopping(
            "loss", min_delta=1e3, patience=3, restore_best_weights=True, start_from_epoch=0
        ),
    ]
    fit(model, x, y, epochs=10, callbacks=callbacks)
    assert len(after_epoch) == 4
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1 * 0.5**3)
    for v, best, last in zip(model.trainable_variables, *after_epoch[::3], strict=True):
        assert same_bits(value_of(v), best)
        assert not np.array_equal(best, last)
    assert_frozen_bits_kept(model.trainable_variables, mask, start)

    fresh = compiled(dense_model())
    fresh.load_weights(tmp_path / "4.weights.h5")
    for v, last in zip(fresh.trainable_variables, after_epoch[3], strict=True):
        assert same_bits(value_of(v), last)


@each_way
def test_training_that_meets_nan_stops_with_frozen_weights_as_they_were(way):
    x, y = blobs()
    model = compiled(dense_model())
    start = values_of(model.trainable_variables)
    if way == "freeze":
        kf.freeze(model, x[:BATCH], y[:BATCH])
    x[2 * BATCH] = np.nan
    seen = []
    callbacks = [
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: seen.append(step)),
    ]
    fit(model, x, y, batch_size=BATCH, epochs=3, callbacks=callbacks)
    assert seen == [0, 1, 2]
    assert_frozen_bits_kept(model.trainable_variables, kf.get_mask(model), start)
    assert any(np.isnan(value_of(v)).any() for v in model.trainable_variables)


def test_tensorboard_logs_the_inner_learning_rate(tmp_path):
    pytest.importorskip("tensorboard")
    x, y = blobs()
    model = compiled(dense_model(), kf.FreezeOptimizer(sgd(0.25), 0.75), run_eagerly=True)
    fit(model, x, y, callbacks=[keras.callbacks.TensorBoard(tmp_path, histogram_freq=1)])
    logged = {}
    for file in (tmp_path / "train").glob("events*"):
        for record in tf.data.TFRecordDataset(str(file)):
            for value in tf.compat.v1.Event.FromString(record.numpy()).summary.value:
                logged[value.tag] = tf.make_ndarray(value.tensor)
    assert logged["epoch_learning_rate"] == pytest.approx(0.25)


def test_evaluate_and_predict_do_not_decide_the_mask():
    x, y = blobs()
    model = compiled(dense_model(), run_eagerly=True)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    assert kf.get_mask(model) is None
    fit(model, x, y, validation_data=(x, y))
    assert kf.get_mask(model) is not None


def test_epochs_in_two_calls_are_epochs_in_one():
    x, y = blobs()
    model = compiled(dense_model())
    for _ in range(EPOCHS):
        fit(model, x, y, batch_size=BATCH)
    assert_equals_by_hand(model)


def test_a_replaced_mask_trains_the_new_weights_in_fit():
    x, y = blobs()
    model = compiled(dense_model())
    first = kf.freeze(model, x, y)
    fit(model, x, y, batch_size=BATCH)
    start = values_of(model.trainable_variables)
    opposite = {e.path: ~e.trained for e in first.entries}
    second = kf.freeze(model, mask=opposite, overwrite=True)
    fit(model, x, y, batch_size=BATCH)
    assert_frozen_bits_kept(model.trainable_variables, second, start)
    assert_trained_moved(model.trainable_variables, second, start)


@each_way
def test_a_layer_made_untrainable_after_the_mask_is_decided_stays_as_it_is(way):
    """Fine-tuning: the optimizer, compiled once more, is given fewer variables than before."""
    x, y = blobs()
    model = compiled(dense_model())
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y)
    mask = kf.get_mask(model)
    variables = model.trainable_variables
    start = values_of(variables)
    model.get_layer("head").trainable = False
    compiled(model, model.optimizer)
    fit(model, x, y)
    assert_frozen_bits_kept(variables, mask, start)
    moved = [(value_of(v) != old).any() for v, old in zip(variables, start, strict=True)]
    assert moved == [True, True, True, True, False, False]


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_function_traced_for_a_replaced_mask_moves_nothing_that_is_frozen(jit_compile):
    model = dense_model()
    variables = model.trainable_variables
    optimizer = kf.FreezeOptimizer(sgd(), freeze_rate=0.75)
    parities = [
        {v.path: np.indices(v.shape).sum(0) % 2 == parity for v in variables if is_weight(v)}
        for parity in (0, 1)
    ]
    kf.freeze(model, mask=parities[0], optimizer=optimizer)

    @tf.function(jit_compile=jit_compile)
    def step():
        optimizer.apply([tf.ones(v.shape) for v in variables], variables)

    step()
    mask = kf.freeze(model, mask=parities[1], optimizer=optimizer, overwrite=True)
    before = values_of(variables)
    try:
        step()
    except tf.errors.InvalidArgumentError as error:
        assert "Trace it again" in error.message  # noqa: PT017 - XLA has no way to raise
    assert_frozen_bits_kept(variables, mask, before)


@pytest.mark.parametrize("frozen_weights", ["keep", "decay"])
def test_an_eager_loop_over_kernels_of_many_shapes_is_no_warning_of_retracing(
    frozen_weights, monkeypatch
):
    widths = range(31, 38)
    model = keras.Sequential([keras.Input((30,)), *(kl.Dense(width) for width in widths)])
    inner = keras.optimizers.SGD(0.01)
    optimizer = kf.FreezeOptimizer(inner, 0.9, frozen_weights=frozen_weights, l2=1e-3)
    model.compile(optimizer, "mse", run_eagerly=True)
    x, y = np.ones((4, 30), "float32"), np.ones((4, widths[-1]), "float32")
    kf.freeze(model, x, y)
    messages = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *rest: messages.append(text))
    fit(model, x, y)
    assert not [text for text in messages if "retracing" in text]


def test_autograph_rewrites_nothing_that_the_optimizer_calls():
    called, rewritten = [], []

    def criterion(weights, gradients):
        called.append(True)
        scores = tf.abs(weights * gradients)
        try:
            if tf.reduce_sum(scores) > 0:
                rewritten.append(True)
        except TypeError:  # of a tensor whose value is not known yet
            pass
        return scores

    model = dense_model()
    optimizer = kf.FreezeOptimizer(sgd(), 0.75, criterion=criterion)
    x, y = blobs()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = crossentropy()(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step()
    assert called
    assert not rewritten
