"""The rates, distributions and structures that a mask keeps while it moves."""

import keras
import numpy as np
import pytest
from axes import OPTIMIZERS
from helpers import compiled, sgd, two_dense_layers
from moving_mask_cases import SCHEDULES, Watch, X, Y, gradual, rigl, train

import keras_freeze as kf
from keras_freeze.callbacks import GradualFreezing
from keras_freeze.masks.distributions import groups_of

pytestmark = pytest.mark.same_on_all


def test_a_distribution_holds_while_the_rate_rises():
    optimizer = kf.FreezeOptimizer(sgd(), 0.0, distribution={"head": 0.5})
    model = compiled(two_dense_layers(), optimizer)
    train(model, gradual(0.0, 0.9))
    mask = kf.get_mask(model)
    assert mask["body/kernel"].sum() == 4  # floor(0.1 * 48)
    assert mask["head/kernel"].sum() == 12


@pytest.mark.cases(1)
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


def test_rates_hold_that_are_given_by_another_name_of_the_model():
    model = compiled(
        two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.0, distribution={"head/kernel": 0.5})
    )
    kf.freeze(model, X[:8], Y[:8])
    compiled(model, kf.FreezeOptimizer(sgd(), 0.0, distribution={"earlier/head/kernel": 0.5}))
    train(model, gradual(0.5, 0.9))
    assert kf.get_mask(model)["head/kernel"].sum() == 12


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


def test_the_fraction_falls_to_zero_at_the_end():
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(0.0), 0.5))
    kf.freeze(model, X[:8], Y[:8])
    watch = Watch(model)
    train(model, rigl(1, 1.0, end=6), watch)
    assert all(mask == watch.masks[5] for mask in watch.masks[5:])


def test_the_rate_is_that_of_the_polynomial():
    callback = GradualFreezing(0.2, 0.8, 10, 20, power=2)
    assert [callback.rate(step) for step in (0, 10, 15, 20, 30)] == [0.2, 0.2, 0.65, 0.8, 0.8]
    assert GradualFreezing(0.5, 0.5, 3, 3).rate(3) == 0.5


@pytest.mark.parametrize("structure", ["column", "row", (2, 4), "2:4"])
@pytest.mark.parametrize("schedule", ["rigl", "set", "gradual"])
@pytest.mark.cases(1)
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
