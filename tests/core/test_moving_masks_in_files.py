"""Training in which the mask moves goes on bit for bit from a file, a backup or a checkpoint."""

import keras
import numpy as np
import pytest
from axes import OPTIMIZERS
from delta_cases import assert_same_weights
from helpers import compiled, dense_model, sgd, two_dense_layers, value_of
from moving_mask_cases import SCHEDULES, Watch, X, Y, gradual, rigl, train, with_loaded_weights

import keras_freeze as kf

few = pytest.mark.cases(4, tensorflow=1, jax=1)
pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)


@few
@pytest.mark.parametrize("inner", ["momentum", "adam", "schedule_free", "muon", "averaging"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_epochs", [1, 2])
def test_training_that_is_saved_and_loaded_goes_on_bit_for_bit(
    inner, schedule, num_epochs, tmp_path
):
    rate, make = SCHEDULES[schedule]

    def begun(epochs):
        optimizer = kf.FreezeOptimizer(OPTIMIZERS[inner](), 0.7)
        model = compiled(dense_model(), optimizer)
        kf.freeze(model, X[:8], Y[:8], freeze_rate=rate)
        watch = Watch(model)
        train(model, make(), watch, epochs=epochs)
        return model, watch

    whole, watched = begun(3)
    model, _ = begun(num_epochs)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    watch = Watch(loaded)
    watch.starts = dict(zip(watch.starts, watched.starts.values(), strict=True))
    train(loaded, make(), watch, epochs=3, initial_epoch=num_epochs)
    assert watch.masks[-1] == watched.masks[-1]
    assert_same_weights(loaded, whole)
    for one, other in zip(loaded.optimizer.variables, whole.optimizer.variables, strict=True):
        if np.size(value_of(one)):
            assert np.array_equal(value_of(one), value_of(other)), one.path


@pytest.mark.cases(1, tensorflow=0)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_backup_and_restore_goes_on_where_training_was_interrupted(schedule, tmp_path):
    rate, make = SCHEDULES[schedule]

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyboardInterrupt

    def started():
        model = compiled(dense_model(), kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7))
        kf.freeze(model, X[:8], Y[:8], freeze_rate=rate)
        return model

    whole = started()
    train(whole, make())
    broken = started()
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train(broken, make(), backup, Interrupt())
    again = started()
    train(again, make(), keras.callbacks.BackupAndRestore(tmp_path))
    assert kf.get_mask(again) == kf.get_mask(whole)
    assert_same_weights(again, whole)


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_file_holds_the_last_mask_alone(schedule, tmp_path):
    rate, make = SCHEDULES[schedule]
    sizes = {}
    for name, callbacks in {"moved": [make()], "fixed": []}.items():
        model = two_dense_layers()
        kf.reinitialize(model, seed=1)
        model = compiled(model, kf.FreezeOptimizer(OPTIMIZERS["momentum"](), 0.7))
        final = 0.9 if schedule.startswith("gradual") and not callbacks else rate
        kf.freeze(model, X[:8], Y[:8], freeze_rate=final)
        train(model, *callbacks)
        path = tmp_path / f"{name}.freeze"
        kf.save(model, path)
        sizes[name] = path.stat().st_size
        loaded = kf.load(path)
        assert kf.get_mask(loaded) == kf.get_mask(model)
        assert_same_weights(loaded, model)
    assert abs(sizes["moved"] - sizes["fixed"]) <= 24


@pytest.mark.same_on_all
def test_a_file_with_the_optimizer_goes_on_bit_for_bit(tmp_path):
    def begun():
        model = two_dense_layers()
        kf.reinitialize(model, seed=1)
        model = compiled(model, kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7))
        kf.freeze(model, X[:8], Y[:8])
        train(model, rigl(), epochs=1)
        return model

    whole = begun()
    train(whole, rigl(), epochs=1)
    kf.save(begun(), tmp_path / "model.freeze", include_optimizer=True)
    loaded = kf.load(tmp_path / "model.freeze")
    train(loaded, rigl(), epochs=1)
    assert kf.get_mask(loaded) == kf.get_mask(whole)
    assert_same_weights(loaded, whole)


@pytest.mark.parametrize("has_base", [False, True], ids=["seeds", "base"])
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (rigl, {"freeze_rate": 0.7, "distribution": {"head": 0.0}}),
        (lambda: gradual(0.0, 0.9, 10, 16), {"freeze_rate": 0.9}),
        (lambda: gradual(0.0, 0.9, 2, 16), {"freeze_rate": 0.9, "distribution": {"head": 0.0}}),
    ],
    ids=["rigl", "gradual before it begins", "gradual"],
)
@few
def test_a_file_goes_on_bit_for_bit_where_weights_are_trained_whole(
    make, settings, has_base, tmp_path
):
    base = with_loaded_weights() if has_base else None

    def begun():
        model = two_dense_layers()
        if has_base:
            model.set_weights(base.get_weights())
        else:
            kf.reinitialize(model, seed=1)
        model = compiled(model, kf.FreezeOptimizer(OPTIMIZERS["adam"](), **settings))
        if make is rigl:
            kf.freeze(model, X[:8], Y[:8])
        train(model, make(), epochs=1)
        return model

    whole, other = begun(), begun()
    assert any(entry.trained.all() for entry in kf.get_mask(other).entries)
    train(whole, make(), epochs=1)
    kf.save(other, tmp_path / "model.freeze", base=base, include_optimizer=True)
    loaded = kf.load(tmp_path / "model.freeze", base=base)
    assert_same_weights(loaded, other)
    train(loaded, make(), epochs=1)
    assert kf.get_mask(loaded) == kf.get_mask(whole)
    assert_same_weights(loaded, whole)


def test_starts_that_weights_trained_whole_did_not_have_are_not_in_a_file(tmp_path):
    model = two_dense_layers()
    kf.reinitialize(model, seed=1)
    model.get_layer("head").kernel.assign(0.5 * model.get_layer("head").kernel)
    settings = {"freeze_rate": 0.7, "distribution": {"head": 0.0}}
    model = compiled(model, kf.FreezeOptimizer(sgd(), **settings))
    kf.freeze(model, X[:8], Y[:8])
    train(model, rigl(), epochs=1)
    kf.save(model, tmp_path / "model.freeze", include_optimizer=True)
    with pytest.raises(ValueError, match="not known"):
        train(kf.load(tmp_path / "model.freeze"), rigl(), epochs=1)


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("is_frozen_before", [True, False])
@pytest.mark.parametrize("inner", ["adam", "muon"])
@pytest.mark.parametrize(("num_trained", "num_saved"), [(2, 1), (1, 2), (1, 1)])
def test_weights_of_another_moment_are_where_training_goes_on(
    num_trained, num_saved, inner, is_frozen_before, tmp_path
):
    def trained(epochs):
        model = compiled(two_dense_layers(), kf.FreezeOptimizer(OPTIMIZERS[inner](), 0.7))
        if is_frozen_before:
            kf.freeze(model, X[:8], Y[:8], freeze_rate=0.5)
        train(model, gradual(0.5, end=8), epochs=epochs)
        return model

    trained(num_saved).save_weights(tmp_path / "some.weights.h5")
    model = trained(num_trained)
    model.load_weights(tmp_path / "some.weights.h5")
    train(model, gradual(0.5, end=8), epochs=3 - num_saved)
    whole = trained(3)
    assert kf.get_mask(model) == kf.get_mask(whole)
    assert_same_weights(model, whole)


@pytest.mark.same_on_all
def test_what_was_rescued_stays_after_loading_and_takes_no_place(tmp_path):
    def trained(epochs):
        model = two_dense_layers()
        kf.reinitialize(model, seed=1)
        compiled(model, kf.FreezeOptimizer(OPTIMIZERS["accumulating"](), 0.7))
        train(model, gradual(0.3, begin=0, end=1, frequency=1), epochs=epochs)
        return model

    whole, half = trained(3), trained(2)
    mask = kf.get_mask(half)
    assert (mask.num_trained, mask.num_rescued) == (8, 1)
    kf.save(half, tmp_path / "half.freeze", include_optimizer=True)
    half = kf.load(tmp_path / "half.freeze")
    train(half, gradual(0.3, begin=0, end=1, frequency=1), epochs=1)
    assert_same_weights(half, whole)
    for one, other in zip(kf.get_mask(half).entries, kf.get_mask(whole).entries, strict=True):
        assert np.array_equal(one.trained, other.trained), one.path


@pytest.mark.same_on_all
def test_the_mask_of_a_draw_moves_and_is_stored(tmp_path):
    model = two_dense_layers()
    kf.reinitialize(model, seed=1)
    model = compiled(model, kf.FreezeOptimizer(sgd(), 0.7))
    kf.freeze(model, X[:8], Y[:8], drawn=True)
    watch = Watch(model)
    train(model, rigl(), watch)
    kf.save(model, tmp_path / "model.freeze")
    assert watch.num_changes
    assert kf.get_mask(kf.load(tmp_path / "model.freeze")) == kf.get_mask(model)


@pytest.mark.same_on_all
def test_a_delta_with_the_optimizer_goes_on_bit_for_bit(tmp_path):
    base = with_loaded_weights()

    def begun():
        model = two_dense_layers()
        model.set_weights(base.get_weights())
        model = compiled(model, kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7))
        kf.freeze(model, X[:8], Y[:8])
        train(model, rigl(), epochs=1)
        return model

    whole = begun()
    train(whole, rigl(), epochs=1)
    kf.save(begun(), tmp_path / "model.freeze", base=base, include_optimizer=True)
    loaded = kf.load(tmp_path / "model.freeze", base=base)
    train(loaded, rigl(), epochs=1)
    assert kf.get_mask(loaded) == kf.get_mask(whole)
    assert_same_weights(loaded, whole)


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("schedule", ["gradual", "rigl"])
def test_a_checkpoint_between_a_step_and_its_change_goes_on_bit_for_bit(schedule, tmp_path):
    rate, make = SCHEDULES[schedule]

    def started():
        model = compiled(two_dense_layers(), kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7))
        kf.freeze(model, X[:8], Y[:8], freeze_rate=rate)
        return model

    path = str(tmp_path / "{epoch}-{batch}.keras")
    save = keras.callbacks.ModelCheckpoint(path, save_freq=6)  # which comes before the change
    whole = started()
    change = make() if schedule == "gradual" else rigl(6)
    train(whole, save, change)
    loaded = keras.models.load_model(tmp_path / "1-6.keras")
    train(loaded, make() if schedule == "gradual" else rigl(6), epochs=2, initial_epoch=1)
    assert kf.get_mask(loaded) == kf.get_mask(whole)
    assert_same_weights(loaded, whole)
