"""Slots of the optimizer when the mask moves, and training steps that are compiled anew."""

import keras
import numpy as np
import pytest
from axes import OPTIMIZERS
from helpers import compiled, same_bits, two_dense_layers, value_of, values_of
from moving_mask_cases import SCHEDULES, Watch, X, Y, gradual, train

import keras_freeze as kf
from keras_freeze import backend
from keras_freeze.callbacks import GradualFreezing, RegrowTrained
from keras_freeze.optimizer import mask_changes
from keras_freeze.optimizer.inner_optimizer import slots_of

BACKEND = keras.backend.backend()
pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)


@pytest.mark.same_on_all
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
@pytest.mark.cases(1, tensorflow=0, jax=0)
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
@pytest.mark.cases(1, tensorflow=0)
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


@pytest.mark.cases(None, jax=0)
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
@pytest.mark.parametrize(
    ("initial_rate", "is_frozen_before", "num_steps"),
    # The step of the first batch is one more.
    [(0.0, False, 3), (0.5, True, 3), (0.5, False, 4)],
)
@pytest.mark.cases(2, jax=2)
def test_gradual_freezing_needs_two_new_training_steps(initial_rate, is_frozen_before, num_steps):
    traces = []

    def loss(y, outputs):
        traces.append(None)
        return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

    def network():
        model = two_dense_layers()
        model.compile(kf.FreezeOptimizer(OPTIMIZERS["adam"](), 0.7), loss)
        return model

    train(network(), GradualFreezing(0.0, 0.9, 20, 21), epochs=1)
    num_traces = len(traces)
    model = network()
    if is_frozen_before:
        kf.freeze(model, X[:8], Y[:8], freeze_rate=initial_rate)
    traces.clear()
    train(model, gradual(initial_rate, frequency=1), epochs=2)
    assert len(traces) <= num_steps * num_traces


@pytest.mark.same_on_all
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
