"""Arguments, models and masks that callbacks which move masks refuse."""

import keras
import pytest
from axes import OPTIMIZERS
from helpers import compiled, sgd, two_dense_layers
from moving_mask_cases import SCHEDULES, X, Y, gradual, train

import keras_freeze as kf
from keras_freeze.callbacks import GradualFreezing, RegrowTrained

pytestmark = pytest.mark.same_on_all


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


def test_a_batch_size_for_a_dataset_is_an_error():
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return X[:8], Y[:8]

    with pytest.raises(ValueError, match="batch_size"):
        RegrowTrained(0.3, 1, "gradient", x=Data(), batch_size=4)
    RegrowTrained(0.3, 1, "gradient", x=Data(), steps=2)


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


def test_a_schedule_that_is_over_before_weights_are_trained_is_warned_of():
    model = compiled(two_dense_layers(), kf.FreezeOptimizer(sgd(), 0.9))
    schedule = GradualFreezing(0.0, 0.9, begin=0, end=4)
    train(model, schedule)
    kf.unfreeze(model)  # the optimizer's count of steps goes on
    with pytest.warns(UserWarning, match=r"none has been trained yet.*later than the 12 steps"):
        train(model, schedule)
