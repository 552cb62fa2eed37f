"""Callbacks do on each backend what they do for a plain optimizer; frozen weights stay."""

import axes
import keras
import numpy as np
import pytest
from helpers import (
    assert_frozen_bits_kept,
    assert_trained_moved,
    blobs,
    compiled,
    crossentropy,
    dense_model,
    fit,
    same_bits,
    sgd,
    values_of,
)
from keras import callbacks as kc
from tensorboard.backend.event_processing import event_accumulator

import keras_freeze as kf

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)

BACKEND = keras.backend.backend()
BATCH = 12
EPOCHS = 3
MOMENTUM = 0.5  # of moving averages
X, Y = blobs()

each_way = pytest.mark.parametrize("way", axes.WAYS)


def frozen_model(way, inner=None):
    inner = sgd(momentum=0.9) if inner is None else inner
    model = compiled(dense_model(), kf.FreezeOptimizer(inner, 0.75))
    if way == "freeze":
        kf.freeze(model, X[:BATCH], Y[:BATCH])
    return model


def train(model, *callbacks, epochs=EPOCHS, batch_size=BATCH):
    """Trains, checks what must and what must not have moved, and gives the history."""
    before = values_of(model.trainable_variables)
    history = fit(
        model,
        X,
        Y,
        batch_size=batch_size,
        epochs=epochs,
        validation_data=(X, Y),
        callbacks=list(callbacks),
    )
    assert_frozen_bits_kept(model.trainable_variables, kf.get_mask(model), before)
    assert_trained_moved(model.trainable_variables, kf.get_mask(model), before)
    return history.history


def same_variables(first, second):
    pairs = zip(values_of(first.variables), values_of(second.variables), strict=True)
    return all(same_bits(*pair) for pair in pairs)


def watching(folder):
    return [
        kf.callbacks.GradientFlowHistory(X, Y),
        kf.callbacks.FreezeBoard(folder / "board", X, Y),
        kc.TensorBoard(folder / "board"),
        kc.CSVLogger(folder / "log.csv"),
        kc.TerminateOnNaN(),
        kc.ModelCheckpoint(folder / "{epoch}.keras"),
        kc.BackupAndRestore(folder / "backup"),
    ]


@pytest.mark.cases(1)
@each_way
def test_callbacks_that_watch_leave_training_as_it_is(tmp_path, way):
    watched, alone = frozen_model(way), frozen_model(way)
    train(watched, *watching(tmp_path))
    train(alone)
    assert same_variables(watched, alone)
    assert kf.get_mask(watched) == kf.get_mask(alone)


@pytest.mark.cases(1)
@each_way
def test_gradient_flow_is_in_the_history(way):
    flow = kf.callbacks.GradientFlowHistory(X, Y)
    history = train(frozen_model(way), flow)
    assert flow.history["epoch"] == [0, 1, 2, 3]
    assert flow.history["gradient_flow"][1:] == history["gradient_flow"]
    assert np.isfinite(flow.history["gradient_flow"]).all()
    assert min(flow.history["gradient_flow"]) > 0


@pytest.mark.cases(1)
@each_way
def test_freeze_board_writes_a_drift_of_zero_and_the_rate(tmp_path, way):
    train(frozen_model(way), kf.callbacks.FreezeBoard(tmp_path, X, Y))
    found = event_accumulator.EventAccumulator(str(tmp_path / "freeze")).Reload()
    assert set(found.Tags()["scalars"]) >= {"frozen_drift", "freeze_rate", "gradient_flow"}
    assert [event.value for event in found.Scalars("frozen_drift")] == [0.0] * EPOCHS
    assert [event.value for event in found.Scalars("freeze_rate")] == [0.75] * EPOCHS


@pytest.mark.cases(1)
@each_way
def test_early_stopping_restores_the_weights_of_the_best_epoch(way):
    model, one_epoch = frozen_model(way), frozen_model(way)
    # By this measure the first epoch is the best.
    history = train(model, kc.EarlyStopping("loss", mode="max", restore_best_weights=True))
    train(one_epoch, epochs=1)
    assert len(history["loss"]) == 2
    assert all(
        same_bits(*pair)
        for pair in zip(
            values_of(model.trainable_variables),
            values_of(one_epoch.trainable_variables),
            strict=True,
        )
    )


@pytest.mark.cases(1)
@each_way
def test_reduce_on_plateau_lowers_the_inner_rate(way):
    model = frozen_model(way)
    plateau = kc.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1e9)
    train(model, plateau)
    # Nothing counts as an improvement after the first epoch.
    assert float(model.optimizer.inner_optimizer.learning_rate) == np.float32(0.025)


@pytest.mark.cases(1)
@each_way
def test_scheduled_rates_decide_the_steps(way):
    def train_at(*rates):
        model = frozen_model(way, keras.optimizers.SGD(1.0))
        train(model, kc.LearningRateScheduler(lambda epoch: rates[epoch]), epochs=len(rates))
        assert float(model.optimizer.inner_optimizer.learning_rate) == np.float32(rates[-1])
        return values_of(model.trainable_variables)

    # A rate of zero changes nothing that is trained, so that this is one epoch.
    pairs = zip(train_at(0.1, 0.0), train_at(0.1), strict=True)
    assert all(same_bits(*pair) for pair in pairs)


@pytest.mark.cases(1)
@each_way
def test_checkpoint_of_the_best_epoch_has_its_weights_and_the_mask(tmp_path, way):
    model, one_epoch = frozen_model(way), frozen_model(way)
    path = tmp_path / "best.keras"
    train(model, kc.ModelCheckpoint(path, "loss", mode="max", save_best_only=True))
    train(one_epoch, epochs=1)
    best = keras.models.load_model(path)
    assert same_variables(best, one_epoch)
    assert kf.get_mask(best) == kf.get_mask(model)


def averaging():
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=MOMENTUM)


class Seen(kc.Callback):
    """Keeps the weights of each epoch and of each evaluation."""

    def on_train_begin(self, logs=None):
        self.of_epochs, self.of_evaluations = [], []

    def on_epoch_end(self, epoch, logs=None):
        self.of_epochs.append(values_of(self.model.trainable_variables))

    def on_test_begin(self, logs=None):
        self.of_evaluations.append(values_of(self.model.trainable_variables))


@pytest.mark.cases(1)
@each_way
def test_swapped_averages_are_evaluated_and_keep_frozen_bits(way):
    model, seen = frozen_model(way, averaging()), Seen()
    mask_from = values_of(model.trainable_variables)
    train(model, kc.SwapEMAWeights(), seen, batch_size=len(X))  # a step is an epoch
    average = None
    for weights, evaluated in zip(seen.of_epochs, seen.of_evaluations, strict=True):
        average = weights if average is None else averaged(average, weights)
        for found, expected in zip(evaluated, average, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
        for variable, found, start in zip(
            model.trainable_variables, evaluated, mask_from, strict=True
        ):
            if variable.path.endswith("kernel"):
                frozen = ~kf.get_mask(model)[variable]
                assert same_bits(found[frozen], start[frozen])
    for found, expected in zip(values_of(model.trainable_variables), average, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def averaged(average, weights):
    pairs = zip(average, weights, strict=True)
    return [MOMENTUM * old + (1 - MOMENTUM) * new for old, new in pairs]


@pytest.mark.skipif(BACKEND != "jax", reason="of Keras on JAX")
@pytest.mark.parametrize("is_plain", [True, False])
def test_second_fit_with_averages_fails_for_plain_keras_on_jax_too(is_plain):
    """After `fit`, weights and averages are the same array, which JAX may not overwrite twice."""
    optimizer = averaging()
    model = dense_model()
    model.compile(optimizer if is_plain else kf.FreezeOptimizer(optimizer, 0.75), crossentropy())
    fit(model, X, Y)
    with pytest.raises(TypeError, match="not callable"):
        fit(model, X, Y)


class AfterFirstEpoch(kc.Callback):
    """Calls a function of the model once, and keeps the weights there were after it."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.result = self.function(self.model)
            self.start = values_of(self.model.trainable_variables)


@pytest.mark.cases(1)
@each_way
def test_mask_replaced_during_fit_decides_from_then_on(way):
    model = frozen_model(way)

    def invert(model):
        mask = {entry.path: ~entry.trained for entry in kf.get_mask(model).entries}
        return kf.freeze(model, mask=mask, overwrite=True)

    replace = AfterFirstEpoch(invert)
    fit(model, X, Y, batch_size=BATCH, epochs=EPOCHS, callbacks=[replace])
    assert kf.get_mask(model) == replace.result
    assert_frozen_bits_kept(model.trainable_variables, replace.result, replace.start)
    assert_trained_moved(model.trainable_variables, replace.result, replace.start)


@pytest.mark.cases(1)
@each_way
def test_network_reinitialized_during_fit_trains_on_from_its_new_start(way):
    model, masks = frozen_model(way), []

    def reinitialize(model):
        masks.append(kf.get_mask(model))
        kf.reinitialize(model, "xavier_normal", seed=4)

    anew = AfterFirstEpoch(reinitialize)
    fit(model, X, Y, batch_size=BATCH, epochs=EPOCHS, callbacks=[anew])
    assert kf.get_mask(model) == masks[0]
    assert same_bits(anew.start[0], kf.initializers.XavierNormal(4, 0).values((6, 8)))
    assert_frozen_bits_kept(model.trainable_variables, masks[0], anew.start)
    assert_trained_moved(model.trainable_variables, masks[0], anew.start)
    assert int(model.optimizer.iterations) == (EPOCHS - 1) * len(X) // BATCH
