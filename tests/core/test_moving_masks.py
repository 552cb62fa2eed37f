"""Callbacks that change the mask while `fit` trains, with every kind of update and treatment."""

import dataclasses
import itertools

import keras
import numpy as np
import pytest
from axes import OPTIMIZERS
from delta_cases import assert_same_weights
from helpers import (
    blobs,
    compiled,
    crossentropy,
    dense_model,
    same_bits,
    sgd,
    two_dense_layers,
    value_of,
    values_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from own_steps import OwnStep

import keras_freeze as kf
from keras_freeze import backend
from keras_freeze.callbacks import GradualFreezing, RegrowTrained
from keras_freeze.masks.distributions import groups_of
from keras_freeze.optimizer import mask_changes
from keras_freeze.optimizer.compact_update import CompactUpdate
from keras_freeze.optimizer.dense_update import DenseUpdate
from keras_freeze.optimizer.inner_optimizer import slots_of

BACKEND = keras.backend.backend()
X, Y = blobs()
COMPACT = ("sgd", "momentum", "adam", "amsgrad", "adagrad", "rmsprop", "schedule_free")
DENSE = ("averaging", "muon", "lamb")

few = pytest.mark.cases(4, tensorflow=1, jax=1)
pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)
slow_elsewhere = pytest.mark.slow_on("tensorflow", "jax")


class Watch(keras.callbacks.Callback):
    """Checks after each step that every weight outside the mask has its frozen value."""

    def __init__(self, model):
        super().__init__()
        self.starts = {v.path: value_of(v) for v in model.trainable_variables}
        self.masks = []

    def on_train_batch_end(self, batch, logs=None):
        mask = kf.get_mask(self.model)
        optimizer = self.model.optimizer
        for variable in self.model.trainable_variables:
            entry = mask.find(variable)
            if entry is None:
                continue
            start = self.starts[variable.path]
            expected = start if optimizer.frozen_weights == "keep" else np.zeros_like(start)
            frozen = ~entry.trained
            assert same_bits(value_of(variable)[frozen], expected[frozen]), (batch, variable.path)
        self.masks.append(mask)

    @property
    def counts(self):
        return [mask.num_trained for mask in self.masks]

    @property
    def num_changes(self):
        return sum(a != b for a, b in itertools.pairwise(self.masks))


def rigl(frequency=3, fraction=0.4, **arguments):
    return RegrowTrained(fraction, frequency, "gradient", x=X, y=Y, batch_size=16, **arguments)


def gradual(initial=0.0, final=0.9, begin=2, end=9, frequency=2, **arguments):
    return GradualFreezing(initial, final, begin, end, frequency, **arguments)


SCHEDULES = {
    "rigl": (0.7, rigl),
    "set": (0.7, lambda: RegrowTrained(0.4, 3, "random")),
    "gradual": (0.0, gradual),
    "gradual from a half": (0.5, lambda: gradual(0.5)),
}


def train(model, *callbacks, epochs=2, **arguments):
    model.fit(
        X,
        Y,
        batch_size=8,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
        **arguments,
    )


@few
@pytest.mark.parametrize("is_frozen_before", [True, False])
@pytest.mark.parametrize("frozen_weights", ["keep", "zero"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("inner", [*COMPACT, *DENSE])
def test_what_is_outside_the_mask_has_its_frozen_value(
    inner, schedule, frozen_weights, is_frozen_before
):
    rate, make = SCHEDULES[schedule]
    optimizer = kf.FreezeOptimizer(OPTIMIZERS[inner](), 0.7, frozen_weights=frozen_weights)
    model = compiled(dense_model(), optimizer)
    watch = Watch(model)
    if is_frozen_before:
        kf.freeze(model, X[:8], Y[:8], freeze_rate=rate)
    train(model, make(), watch)
    assert watch.num_changes >= 3
    if schedule.startswith("gradual"):
        assert watch.counts[-1] == 7 + watch.masks[-1].num_rescued  # floor(0.1 * 72)
        assert watch.masks[-1].num_rescued <= 1
        assert sorted(watch.counts, reverse=True) == watch.counts
    else:
        assert set(watch.counts) == {21}  # floor(0.3 * 72)
    assert isinstance(optimizer.update, CompactUpdate if inner in COMPACT else DenseUpdate)


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


@settings(max_examples={"torch": 25, "tensorflow": 3, "jax": 3}[BACKEND])
@given(
    fraction=st.floats(0.05, 1.0),
    frequency=st.integers(1, 5),
    begin=st.integers(0, 4),
    length=st.none() | st.integers(0, 9),
    rate=st.sampled_from([0.0, 0.3, 0.8, 0.97, 1.0]),
    inner=st.sampled_from(["adam", "momentum", "muon"]),
    frozen_weights=st.sampled_from(["keep", "zero"]),
    num_gradual=st.integers(0, 7),
)
def test_random_schedules_one_after_the_other_keep_frozen_values(
    fraction, frequency, begin, length, rate, inner, frozen_weights, num_gradual
):
    optimizer = kf.FreezeOptimizer(OPTIMIZERS[inner](), rate, frozen_weights=frozen_weights)
    model = compiled(two_dense_layers(), optimizer)
    watch = Watch(model)
    end = None if length is None else begin + length
    kf.freeze(model, X[:8], Y[:8])
    train(
        model, RegrowTrained(fraction, frequency, "random", begin=begin, end=end), watch, epochs=1
    )
    assert len(set(watch.counts)) == 1
    mask = kf.get_mask(model)
    more = GradualFreezing(mask.freeze_rate, 1.0, 6, 6 + num_gradual, frequency)
    train(model, more, watch, epochs=2)
    assert watch.counts[-1] == 0


# By hand: one linear layer with the mean squared error.


class ByHand:
    """Adam and RigL in float64, entry by entry."""

    def __init__(self, start, mask):
        self.start, self.mask = start.astype("float64"), mask.copy()
        self.weights = self.start.copy()
        self.first, self.second = np.zeros_like(self.start), np.zeros_like(self.start)
        self.count = 0

    def gradient(self, x, y):
        error = x @ self.weights - y
        return 2 * x.T @ error / error.size

    def step(self, x, y, rate=0.01):
        gradient = self.gradient(x, y)
        self.count += 1
        for i in np.ndindex(self.mask.shape):
            if not self.mask[i]:
                continue
            self.first[i] += 0.1 * (gradient[i] - self.first[i])
            self.second[i] += 0.001 * (gradient[i] ** 2 - self.second[i])
            first = self.first[i] / (1 - 0.9**self.count)
            second = self.second[i] / (1 - 0.999**self.count)
            self.weights[i] -= rate * first / (np.sqrt(second) + 1e-7)

    def move(self, x, y, fraction):
        gradient = np.abs(self.gradient(x, y))
        moved = np.abs(self.weights - self.start)
        inside = sorted(zip(*np.nonzero(self.mask), strict=True), key=lambda i: moved[i])
        leaving = inside[: int(fraction * len(inside))]
        for i in leaving:
            self.mask[i] = False
        outside = sorted(zip(*np.nonzero(~self.mask), strict=True), key=lambda i: -gradient[i])
        joining = outside[: len(leaving)]
        for i in set(leaving) - set(joining):
            self.weights[i] = self.start[i]
            self.first[i] = self.second[i] = 0.0
        for i in joining:
            self.mask[i] = True


@pytest.mark.parametrize("is_averaging", [False, True], ids=["compact", "dense"])
def test_adam_and_rigl_are_what_they_are_by_hand(is_averaging):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(8, 6)).astype("float32")
    y = rng.normal(size=(8, 5)).astype("float32")
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(5, use_bias=False, name="linear")]
    )
    inner = keras.optimizers.Adam(0.01, use_ema=is_averaging)
    model.compile(kf.FreezeOptimizer(inner, 0.6), "mse")
    kf.freeze(model, x, y)
    (kernel,) = model.trainable_variables
    hand = ByHand(value_of(kernel), kf.get_mask(model)["linear/kernel"])
    regrow = RegrowTrained(0.5, 2, "gradient", x=x, y=y)
    watch = Watch(model)
    model.fit(x, y, batch_size=8, epochs=11, verbose=0, callbacks=[regrow, watch])
    for step in range(1, 12):
        hand.step(x.astype("float64"), y)
        if step % 2 == 0:
            hand.move(x.astype("float64"), y, 0.5)
        assert np.array_equal(watch.masks[step - 1]["linear/kernel"], hand.mask), step
    if not is_averaging:  # else `fit` puts averages into the variables in the end
        np.testing.assert_allclose(value_of(kernel), hand.weights, rtol=0, atol=2e-6)


@slow_elsewhere
def test_slots_of_what_stays_are_kept_and_those_of_what_joins_are_fresh():
    optimizer = kf.FreezeOptimizer(keras.optimizers.Adagrad(0.05), 0.5)
    model = compiled(two_dense_layers(), optimizer)
    kf.freeze(model, X[:8], Y[:8])
    train(model, epochs=1)
    before = kf.get_mask(model)
    # The only change comes after the last step, so that no step has changed the slots since.
    train(model, RegrowTrained(0.5, 1, "random", begin=12, end=12), epochs=1)
    now = kf.get_mask(model)
    slots = slots_of(optimizer.inner_optimizer)["_accumulators"]
    assert now != before
    for path in ("body/kernel", "head/kernel"):
        (slot,) = (s for s in slots if path.replace("/", "_") in s.path)
        accumulators = np.zeros(now[path].shape, "float32")
        accumulators[now[path]] = value_of(slot)
        assert (accumulators[now[path] & ~before[path]] == np.float32(0.1)).all()  # Adagrad's start
        assert (accumulators[now[path] & before[path]] > 0.1).all()


ONE_VARIABLE_EACH = sorted(OPTIMIZERS.keys() - {"multi"})


@pytest.mark.parametrize("way", ["compact", "dense"])
@pytest.mark.parametrize("schedule", ["rigl", "gradual from a half"])
@pytest.mark.parametrize("inner", ONE_VARIABLE_EACH)
@pytest.mark.cases(4, tensorflow=1, jax=1)
def test_slots_start_as_those_of_an_optimizer_that_is_built_anew(inner, schedule, way, monkeypatch):
    states = []
    for is_known in (True, False):
        if not is_known:
            monkeypatch.setattr(mask_changes, "has_uniform_slots", lambda inner: False)
        model = two_dense_layers()
        optimizer = kf.FreezeOptimizer(OPTIMIZERS[inner](), 0.5)
        compiled(model, optimizer)
        kf.freeze(model, X[:8], Y[:8])
        if way == "dense":
            train(model, epochs=0)
            mask_changes.change_update(optimizer, compact=False)
        train(model, SCHEDULES[schedule][1](), epochs=1)
        states.append(values_of([*model.variables, *optimizer.variables]))
    assert all(same_bits(*pair) for pair in zip(*states, strict=True))


@pytest.mark.parametrize("schedule", ["rigl", "gradual from a half"])
@pytest.mark.parametrize("inner", ["momentum", "adam", "ftrl", "accumulating"])
@pytest.mark.cases(4, tensorflow=1, jax=1)
def test_a_change_creates_no_second_set_of_slots(inner, schedule, monkeypatch):
    model = two_dense_layers()
    optimizer = kf.FreezeOptimizer(OPTIMIZERS[inner](), 0.5)
    kf.freeze(compiled(model, optimizer), X[:8], Y[:8])
    mask_changes.change_update(optimizer, compact=False)
    monkeypatch.setattr(backend, "STEPS_ARE_EAGER", False)  # there, vectors of new sizes are needed
    created = []
    create = keras.optimizers.Optimizer.add_variable

    def record(self, shape, *args, **kwargs):
        created.append(shape)
        return create(self, shape, *args, **kwargs)

    monkeypatch.setattr(keras.optimizers.Optimizer, "add_variable", record)
    watch = Watch(model)
    # Until `end`, the masks of both have dense updates.
    train(model, SCHEDULES[schedule][1]() if schedule == "rigl" else gradual(0.5, end=50), watch)
    assert watch.num_changes >= 2
    assert set(created) <= {(1,)}


@pytest.mark.skipif(BACKEND == "torch", reason="nothing is traced on PyTorch")
@pytest.mark.parametrize("inner", ["adam", "muon"])
def test_a_mask_that_moves_needs_no_new_training_step(inner):
    traces = []

    def loss(y, outputs):
        traces.append(None)
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    model = two_dense_layers()
    model.compile(kf.FreezeOptimizer(OPTIMIZERS[inner](), 0.7), loss)
    kf.freeze(model, X[:8], Y[:8])
    watch = Watch(model)
    train(model, RegrowTrained(0.4, 1, "random", begin=4), watch, epochs=1)
    num_traces = len(traces)
    train(model, RegrowTrained(0.4, 1, "random"), watch, epochs=3)
    assert watch.num_changes >= 15
    assert len(traces) == num_traces


@pytest.mark.skipif(BACKEND == "torch", reason="nothing is traced on PyTorch")
def test_gradual_freezing_needs_two_new_training_steps():
    traces = []

    def loss(y, outputs):
        traces.append(None)
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    model = two_dense_layers()
    model.compile(kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7), loss)
    train(model, epochs=0)
    train(model, GradualFreezing(0.0, 0.9, 20, 21), epochs=1)
    num_traces = len(traces)
    model = two_dense_layers()
    model.compile(kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7), loss)
    traces.clear()
    train(model, gradual(frequency=1), epochs=2)
    assert len(traces) <= 3 * num_traces


@slow_elsewhere
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


@slow_elsewhere
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


@slow_elsewhere
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


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("inner", ["momentum", "muon"])
@pytest.mark.cases(4, tensorflow=1, jax=1)
def test_what_is_trained_on_a_grid_stays_on_it(schedule, inner, tmp_path):
    rate, make = SCHEDULES[schedule]
    model = two_dense_layers()
    kf.reinitialize(model, seed=1)
    model = compiled(model, kf.FreezeOptimizer(OPTIMIZERS[inner](), 0.7, grid=0.0625))
    kf.freeze(model, X[:8], Y[:8], freeze_rate=rate)
    watch = Watch(model)
    train(model, make(), watch)
    for variable in model.trainable_variables:
        steps = (value_of(variable) - watch.starts[variable.path]).astype("float64") / 0.0625
        assert np.abs(steps - np.rint(steps)).max() < 1e-4
    kf.save(model, tmp_path / "model.freeze")
    assert_same_weights(kf.load(tmp_path / "model.freeze"), model)


def test_the_gradients_of_a_model_with_its_own_train_step_choose():
    class Model(OwnStep):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(3, name="head")

        def call(self, x):
            return self.layer(x)

        def loss_of(self, data):
            x, y = data
            return crossentropy()(y, self.layer(x)) * 1.5

    model = Model()
    model.build((None, 6))
    model.compile(kf.FreezeOptimizer(sgd(), 0.5))
    kf.freeze(model, X[:8], Y[:8])
    watch = Watch(model)
    train(model, rigl(), watch)
    assert watch.num_changes >= 3


@slow_elsewhere
def test_a_distribution_holds_while_the_rate_rises():
    optimizer = kf.FreezeOptimizer(sgd(), 0.0, distribution={"head": 0.5})
    model = compiled(two_dense_layers(), optimizer)
    train(model, gradual(0.0, 0.9))
    mask = kf.get_mask(model)
    assert mask["body/kernel"].sum() == 4  # floor(0.1 * 48)
    assert mask["head/kernel"].sum() == 12


@slow_elsewhere
@pytest.mark.parametrize("distribution", ["global", "uniform", "erk", {"head": 0.5}])
def test_the_rates_of_each_step_are_those_of_the_distribution(distribution):
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.3, distribution=distribution))
    watch = Watch(model)
    schedule = gradual(0.25, 0.75, begin=1, end=5, frequency=1, power=1)
    train(model, schedule, watch, epochs=1)
    shapes, paths = [(6, 8), (8, 3)], ["body/kernel", "head/kernel"]
    for step, mask in enumerate(watch.masks[:5], 1):
        rate, rates = 0.25 + 0.125 * (step - 1), distribution
        if not isinstance(rates, str):
            rates = (("head", 0.25 + 0.0625 * (step - 1)),)
        groups = groups_of(rates, rate, shapes, paths)
        assert mask.num_trained == sum(group.num_trained for group in groups)
        for group in groups:
            found = [int(mask[paths[member]].sum()) for member in group.members]
            assert sum(found) == group.num_trained


@slow_elsewhere
def test_rates_hold_that_are_given_by_another_name_of_the_model():
    model = compiled(
        two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.0, distribution={"head/kernel": 0.5})
    )
    kf.freeze(model, X[:8], Y[:8])
    compiled(model, kf.FreezeOptimizer(sgd(), 0.0, distribution={"earlier/head/kernel": 0.5}))
    train(model, gradual(0.5, 0.9))
    assert kf.get_mask(model)["head/kernel"].sum() == 12


def test_restricted_gradients_follow_the_mask():
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(OPTIMIZERS["momentum"](), 0.7))
    other = compiled(two_dense_layers(), kf.FreezeOptimizer(OPTIMIZERS["momentum"](), 0.7))
    for one in (model, other):
        kf.freeze(one, X[:8], Y[:8])
    kf.restore_gradients(other)
    train(model, rigl())
    train(other, rigl())
    assert kf.get_mask(model) == kf.get_mask(other)
    for one, expected in zip(values_of(model.variables), values_of(other.variables), strict=True):
        np.testing.assert_allclose(one, expected, rtol=0, atol=1e-5)


@slow_elsewhere
def test_the_loss_scale_of_mixed_precision_makes_no_difference():
    optimizer = kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7)
    model = dense_model(dtype="mixed_float16")
    model.compile(keras.optimizers.LossScaleOptimizer(optimizer), crossentropy())
    kf.freeze(model, X[:8], Y[:8])
    starts = values_of(model.trainable_variables)
    first = kf.get_mask(model)
    train(model, rigl())
    mask = kf.get_mask(model)
    assert mask != first
    for variable, start in zip(model.trainable_variables, starts, strict=True):
        entry = mask.find(variable)
        if entry is not None:
            assert same_bits(value_of(variable)[~entry.trained], start[~entry.trained])


@slow_elsewhere
def test_starts_that_were_drawn_with_seeds_are_found_again():
    model = two_dense_layers()
    kf.reinitialize(model, seed=1)
    model = compiled(model, kf.FreezeOptimizer(sgd(), 0.7))
    watch = Watch(model)
    kf.freeze(model, X[:8], Y[:8])
    train(model, epochs=1)  # without the callback
    train(model, rigl(), watch)
    assert watch.num_changes >= 3


def with_loaded_weights(**arguments):
    """A model whose starts no initializer gives."""
    model = two_dense_layers()
    model.set_weights([value + 1 for value in model.get_weights()])
    return compiled(model, kf.FreezeOptimizer(sgd(), 0.7, **arguments))


@slow_elsewhere
def test_starts_that_are_lost_are_an_error():
    model = with_loaded_weights()
    kf.freeze(model, X[:8], Y[:8])
    train(model, epochs=1)
    before = values_of(model.variables)
    with pytest.raises(ValueError, match="values before training, and these are not known"):
        train(model, rigl())
    assert all(map(same_bits, values_of(model.variables), before))


@slow_elsewhere
def test_a_pruned_network_needs_no_starts():
    model = with_loaded_weights(frozen_weights="zero")
    kf.freeze(model, X[:8], Y[:8])
    train(model, epochs=1)
    watch = Watch(model)
    train(model, rigl(), watch)
    assert watch.num_changes >= 3


@slow_elsewhere
def test_the_first_batch_decides_at_the_initial_rate():
    optimizer = kf.FreezeOptimizer(sgd(), 0.97)
    model = compiled(two_dense_layers(), optimizer)
    watch = Watch(model)
    train(model, gradual(0.5, begin=6), watch)
    assert watch.counts[0] == 36
    assert optimizer.freeze_rate == 0.97
    # The next optimizer inherits the mask by the settings of this one.
    compiled(model, kf.FreezeOptimizer(sgd(), 0.97))
    train(model, epochs=1)
    assert kf.get_mask(model).num_trained == watch.counts[-1]


@pytest.mark.skipif(BACKEND == "torch", reason="Keras on PyTorch executes one step at a time")
def test_steps_that_are_executed_together_change_the_mask_together():
    model = two_dense_layers()
    optimizer = kf.FreezeOptimizer(sgd(), 0.7)
    model.compile(optimizer, crossentropy(), steps_per_execution=4)
    kf.freeze(model, X[:8], Y[:8])
    watch = Watch(model)
    train(model, RegrowTrained(0.4, 3, "random"), watch)
    assert watch.num_changes >= 2


@slow_elsewhere
def test_the_fraction_falls_to_zero_at_the_end():
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(0.0), 0.5))
    kf.freeze(model, X[:8], Y[:8])
    watch = Watch(model)
    train(model, rigl(1, 1.0, end=6), watch)
    assert all(mask == watch.masks[5] for mask in watch.masks[5:])


@slow_elsewhere
def test_the_rate_is_that_of_the_polynomial():
    callback = GradualFreezing(0.2, 0.8, 10, 20, power=2)
    assert [callback.rate(step) for step in (0, 10, 15, 20, 30)] == [0.2, 0.2, 0.65, 0.8, 0.8]
    assert GradualFreezing(0.5, 0.5, 3, 3).rate(3) == 0.5


@slow_elsewhere
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GradualFreezing(0.5, 0.4, 0, 1), ValueError, "final_rate"),
        (lambda: GradualFreezing(-0.1, 0.4, 0, 1), ValueError, "initial_rate"),
        (lambda: GradualFreezing("a", 0.4, 0, 1), TypeError, "initial_rate"),
        (lambda: GradualFreezing(0.0, 0.4, 5, 1), ValueError, "end"),
        (lambda: GradualFreezing(0.0, 0.4, -5, 1), ValueError, "begin"),
        (lambda: GradualFreezing(0.0, 0.4, 0, 1, 0), ValueError, "frequency"),
        (lambda: GradualFreezing(0.0, 0.4, 0, 1, 1.5), TypeError, "frequency"),
        (lambda: GradualFreezing(0.0, 0.4, 0, 1, power=0), ValueError, "power"),
        (lambda: RegrowTrained(0.0, 1, "random"), ValueError, "fraction"),
        (lambda: RegrowTrained(1.5, 1, "random"), ValueError, "fraction"),
        (lambda: RegrowTrained(0.3, 0, "random"), ValueError, "frequency"),
        (lambda: RegrowTrained(0.3, 1, "nothing"), ValueError, "criterion"),
        (lambda: RegrowTrained(0.3, 1, "gradient"), ValueError, "Argument `x`"),
        (lambda: RegrowTrained(0.3, 1, "random", begin=2, end=1), ValueError, "end"),
        (lambda: GradualFreezing(0.0, 0.4, 0, None), TypeError, "end"),
        (lambda: RegrowTrained(0.3, 1, x=X, y=Y, batch_size=0), ValueError, "batch_size"),
        (lambda: RegrowTrained(0.3, 1, x=X, y=Y, steps=2), ValueError, "steps"),
        (lambda: RegrowTrained(0.3, 1, x=X, y=Y, steps="a"), TypeError, "steps"),
        (lambda: RegrowTrained(0.3, 1, x=X, y=Y[:5]), ValueError, "48"),
        (lambda: RegrowTrained(0.3, 1, x=X[:0], y=Y[:0]), ValueError, "at least 1"),
        (lambda: RegrowTrained(0.3, 1, x=iter([(X, Y)])), TypeError, "read once"),
    ],
)
def test_arguments_out_of_range_are_errors(make, error, message):
    with pytest.raises(error, match=message):
        make()


@slow_elsewhere
def test_a_batch_size_for_a_dataset_is_an_error():
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return X[:8], Y[:8]

    with pytest.raises(ValueError, match="batch_size"):
        RegrowTrained(0.3, 1, "gradient", x=Data(), batch_size=4)
    RegrowTrained(0.3, 1, "gradient", x=Data(), steps=2)


@slow_elsewhere
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: sgd(), "FreezeOptimizer"),
        (lambda: kf.FreezeOptimizer(sgd(), frozen_weights="decay", l2=0.1), "'decay'"),
        (lambda: kf.FreezeOptimizer(OPTIMIZERS["multi"]()), "MultiOptimizer"),
    ],
)
@pytest.mark.parametrize("schedule", ["set", "gradual"])
def test_models_whose_masks_cannot_move_are_errors(optimizer, message, schedule):
    model = compiled(two_dense_layers(), optimizer())
    with pytest.raises(ValueError, match=message):
        train(model, SCHEDULES[schedule][1]())


@slow_elsewhere
@pytest.mark.parametrize(
    ("distribution", "advises_a_rate"), [("global", True), ({"head": 0.9}, False)]
)
def test_a_mask_of_a_higher_rate_than_the_initial_one_is_an_error(distribution, advises_a_rate):
    optimizer = kf.FreezeOptimizer(sgd(), 0.9, distribution=distribution)
    model = compiled(two_dense_layers(), optimizer)
    kf.freeze(model, X[:8], Y[:8])
    with pytest.raises(ValueError, match=r"initial_rate=0\.5") as error:
        train(model, gradual(0.5))
    # The rates of patterns are not those that `freeze` is given.
    assert ("freeze_rate=0.5" in str(error.value)) == advises_a_rate


@slow_elsewhere
@pytest.mark.parametrize("structure", ["column", "row", (2, 4), "2:4"])
@pytest.mark.parametrize("schedule", ["rigl", "set", "gradual"])
@pytest.mark.cases(8, tensorflow=1, jax=1)
def test_a_structure_holds_while_the_mask_moves(schedule, structure):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    model = compiled(model, kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.5, structure=structure))
    kf.freeze(model, X[:8], Y[:8], freeze_rate=SCHEDULES[schedule][0] and 0.5)
    watch = Watch(model)
    callback = rigl(2, 0.7) if schedule == "rigl" else SCHEDULES[schedule][1]()
    train(model, callback, watch)
    assert watch.num_changes >= 2
    for mask in watch.masks:
        for entry in mask.entries:
            assert is_whole(entry.trained, structure)
    if schedule != "gradual" and structure != (2, 4):  # blocks at edges are smaller
        assert len(set(watch.counts)) == 1


def is_whole(trained, structure):
    """Whether a mask has a structure, of 8 rows at most."""
    if structure == "column":
        return (trained.all(0) == trained.any(0)).all()
    if structure == "row":
        return (trained.all(1) == trained.any(1)).all()
    if structure == "2:4":
        return all(trained[i : i + 4].sum(0).max() <= 2 for i in range(0, len(trained), 4))
    rows, columns = (range(0, n, step) for n, step in zip(trained.shape, structure, strict=True))
    blocks = [trained[i : i + 2, j : j + 4] for i in rows for j in columns]
    return all(block.all() == block.any() for block in blocks)


def trained_by(first):
    """A model whose starts no seed gives, trained with a callback."""
    model = with_loaded_weights()
    watch = Watch(model)
    kf.freeze(model, X[:8], Y[:8])
    train(model, first, watch, epochs=1)
    return model, watch


@slow_elsewhere
def test_starts_come_with_the_weights_when_the_model_is_compiled_again():
    model, watch = trained_by(rigl())
    compiled(model, kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7))
    train(model, rigl(), watch, epochs=1)
    assert watch.num_changes >= 2


@slow_elsewhere
def test_starts_are_known_of_a_model_that_was_frozen_and_not_trained(tmp_path):
    model = with_loaded_weights()
    kf.freeze(model, X[:8], Y[:8])
    compiled(model, kf.FreezeOptimizer(sgd(), 0.7))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        watch = Watch(one)
        train(one, rigl(), watch, epochs=1)
        assert watch.num_changes


@slow_elsewhere
def test_values_that_are_set_before_training_are_not_the_starts():
    model = two_dense_layers()
    kf.reinitialize(model, seed=1)
    model = compiled(model, kf.FreezeOptimizer(sgd(), 0.7))
    watch = Watch(model)
    kf.freeze(model, X[:8], Y[:8])
    kf.set_trained(model, kf.get_trained(model) + 1)
    train(model, rigl(), watch, epochs=1)
    assert watch.num_changes


@slow_elsewhere
def test_weights_and_state_that_are_set_back_have_their_own_starts():
    model = two_dense_layers()
    kf.reinitialize(model, seed=1)
    model = compiled(model, kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7))
    watch = Watch(model)
    kf.freeze(model, X[:8], Y[:8])
    train(model, rigl(), watch, epochs=1)
    kept = values_of(model.optimizer.variables), model.get_weights()
    train(model, rigl(), watch, epochs=1)
    model.optimizer.set_weights(kept[0])
    model.set_weights(kept[1])
    train(model, rigl(), watch, epochs=1)


@slow_elsewhere
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


@slow_elsewhere
@pytest.mark.parametrize("schedule", ["rigl", "set", "gradual"])
def test_a_training_that_diverges_ends_as_without_the_callback(schedule):
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(float("inf")), 0.5))
    kf.freeze(model, X[:8], Y[:8], freeze_rate=SCHEDULES[schedule][0] and 0.5)
    train(model, SCHEDULES[schedule][1]())
    assert not all(np.isfinite(value).all() for value in values_of(model.variables))


@slow_elsewhere
def test_a_pruned_model_keeps_its_zeros():
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.7))
    kf.freeze(model, X[:8], Y[:8])
    kf.prune(model)
    with pytest.raises(ValueError, match="frozen_weights='zero'"):
        train(model, rigl())


@slow_elsewhere
def test_accumulated_gradients_count_batches():
    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(inner, 0.0))
    watch = Watch(model)
    kf.freeze(model, X[:8], Y[:8])
    callback = GradualFreezing(0.0, 0.9, 0, 10, 2, power=1)
    train(model, callback, watch, epochs=2)  # 6 batches each
    rates = [mask.freeze_rate for mask in watch.masks]
    expected = [callback.rate(step - step % 2) for step in range(1, 13)]
    np.testing.assert_allclose(rates, expected, atol=1 / 36)


@slow_elsewhere
@pytest.mark.parametrize("schedule", ["gradual", "rigl"])
def test_one_fit_is_as_good_as_several(schedule):
    def trained(*numbers):
        model = compiled(two_dense_layers(), kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7))
        rate = 0.0 if schedule == "gradual" else 0.9
        kf.freeze(model, X[:8], Y[:8], freeze_rate=rate)
        done = 0
        for number in numbers:
            done += number
            callback = gradual(0.0, 0.97, 1, 15) if schedule == "gradual" else rigl()
            train(model, callback, epochs=done, initial_epoch=done - number)
        return model

    whole, parts = trained(4), trained(1, 1, 1, 1)
    assert kf.get_mask(whole) == kf.get_mask(parts)
    assert kf.get_mask(whole).num_rescued == kf.get_mask(parts).num_rescued
    assert_same_weights(parts, whole)


@slow_elsewhere
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


@slow_elsewhere
def test_a_callback_whose_fit_has_failed_serves_another_model():
    callback = RegrowTrained(0.5, 2, "random")
    broken = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.7))
    with pytest.raises(Exception, match=r"\w"):
        broken.fit(X, Y[:, None].repeat(7, 1), callbacks=[callback], verbose=0)
    model = compiled(dense_model(), kf.FreezeOptimizer(sgd(), 0.7))
    watch = Watch(model)
    train(model, callback, watch)
    assert watch.num_changes


@slow_elsewhere
def test_the_factors_of_adafactor_are_left_alone():
    inner = keras.optimizers.Adafactor(0.01, epsilon_1=1e-10)
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(inner, 0.5))
    # As many as the kernel has rows, and columns.
    kf.freeze(model, mask={"body/kernel": np.arange(48).reshape(6, 8) % 8 == 0})
    train(model, epochs=1)
    before = {n: values_of(s) for n, s in slots_of(inner).items() if n in ("_r", "_c")}
    train(model, RegrowTrained(0.5, 1, "random", begin=12, end=12), epochs=1)
    assert kf.get_mask(model)["body/kernel"].sum() == 6
    after = slots_of(inner)
    for name, values in before.items():
        for old, new in zip(values, after[name], strict=True):
            assert old.shape == tuple(new.shape)
            assert (value_of(new) >= 0).all()
            assert np.count_nonzero(value_of(new)) == np.count_nonzero(old)


@slow_elsewhere
def test_other_numbers_of_starts_than_the_mask_trains_are_refused(tmp_path):
    model, _ = trained_by(rigl())
    state = model.optimizer.state
    wrong = {position: values[1:] for position, values in state.trained_starts.values.items()}
    model.optimizer.set_trained_starts(dataclasses.replace(state.trained_starts, values=wrong))
    model.save(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="damaged"):
        keras.models.load_model(tmp_path / "model.keras")


@slow_elsewhere
def test_a_model_with_a_mask_and_no_optimizer_yet_is_initialized_again():
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.7))
    kf.freeze(model, X[:8], Y[:8])
    loaded = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.7))
    loaded.optimizer.restore(model.optimizer.state)
    assert not loaded.optimizer.built
    kf.reinitialize(loaded, seed=1)
    watch = Watch(loaded)
    train(loaded, rigl(), watch)
    assert watch.num_changes
