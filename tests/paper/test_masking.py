"""How the mask of a run comes about, and how it changes in training."""

import json

import keras
import numpy as np
import pytest

import keras_freeze as kf
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.paper.masking import SCHEDULES, first_epoch_with_last_mask, shuffled
from keras_freeze.paper.run import Run
from keras_freeze.paper.training import prepare, train
from keras_freeze.paper.training_callbacks import KeepBest

pytestmark = pytest.mark.cases(2)

KERNELS = ("fc1/kernel", "fc2/kernel", "fc3/kernel")


def setup_of(method="freezenet", freeze_rate=0.99, **settings):
    return prepare("mnist_5k", "lenet_300_100", method, freeze_rate, **settings)


def mask_of(**settings):
    return kf.get_mask(setup_of(**settings).network)


def counts_of(mask):
    return [int(mask[path].sum()) for path in KERNELS]


def kernels_of(network):
    return [v.numpy() for v in network.trainable_variables if v.name == "kernel"]


def some_mask():
    generator = np.random.default_rng(0)
    arrays = [generator.random((40, 30)) < 0.1, generator.random((3, 3, 2, 5)) < 0.3]
    return FreezeMask(
        [MaskEntry(2 * i, f"{i}/kernel", array) for i, array in enumerate(arrays)], num_rescued=1
    )


def test_a_shuffled_mask_trains_as_many_weights_of_each_variable_elsewhere():
    mask = some_mask()
    other = shuffled(mask, seed=3)
    for before, after in zip(mask.entries, other.entries, strict=True):
        assert (after.position, after.path) == (before.position, before.path)
        assert after.trained.shape == before.trained.shape
        assert after.trained.sum() == before.trained.sum()
        assert not np.array_equal(after.trained, before.trained)
    assert other.num_rescued == 1


def test_a_shuffled_mask_follows_from_its_seed():
    assert shuffled(some_mask(), seed=3) == shuffled(some_mask(), seed=3)
    assert shuffled(some_mask(), seed=3) != shuffled(some_mask(), seed=4)


def test_variables_of_one_shape_are_shuffled_differently():
    trained = np.arange(100) < 50
    mask = FreezeMask([MaskEntry(0, "a/kernel", trained), MaskEntry(2, "b/kernel", trained)])
    first, second = (entry.trained for entry in shuffled(mask, seed=0).entries)
    assert not np.array_equal(first, second)


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ["freezenet", "snip"])
def test_a_run_with_a_shuffled_mask_begins_with_the_usual_weights(method):
    network = setup_of(method, mask="shuffled").network
    mask, usual = kf.get_mask(network), mask_of(method=method)
    assert mask == shuffled(usual, seed=0)
    start = kernels_of(kf.models.lenet_300_100(seed=0))
    for path, kernel, initial in zip(KERNELS, kernels_of(network), start, strict=True):
        trained = mask[path]
        frozen = initial[~trained] if method == "freezenet" else np.zeros((~trained).sum())
        assert np.array_equal(kernel[trained], initial[trained])
        assert np.array_equal(kernel[~trained], frozen)


def test_a_run_with_a_drawn_mask_has_what_freeze_draws():
    usual, drawn = mask_of(), mask_of(mask="drawn")
    assert counts_of(drawn) == counts_of(usual)
    assert drawn != usual
    network = setup_of().network
    images, labels = next(iter(setup_of().batches()))
    assert kf.freeze(network, images, labels, drawn=True, overwrite=True) == drawn


@pytest.mark.cases(1)
@pytest.mark.parametrize("criterion", ["snip", "synflow", "magnitude", "random"])
def test_the_distribution_tells_where_the_rate_applies(criterion):
    uniform = mask_of(criterion=criterion, distribution="uniform")
    assert counts_of(uniform) == [2352, 300, 10]
    erk = mask_of(criterion=criterion, distribution="erk")
    assert sum(counts_of(erk)) == 2662
    assert np.mean(erk["fc3/kernel"]) > np.mean(erk["fc2/kernel"]) > np.mean(erk["fc1/kernel"])


class MaskAfterEpochs(keras.callbacks.Callback):
    """Remembers how many weights are trained, and the mask, after each epoch."""

    def on_train_begin(self, logs=None):
        self.masks = [kf.get_mask(self.model)]

    def on_epoch_end(self, epoch, logs=None):
        self.masks.append(kf.get_mask(self.model))


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ["freezenet", "snip"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_changes_the_mask_and_then_leaves_it(schedule, method):
    seen = MaskAfterEpochs()
    result = train(
        "mnist_5k",
        "lenet_300_100",
        method,
        0.99,
        epochs=4,
        schedule=schedule,
        callbacks=[seen],
        verbose=False,
    )
    counts = [mask.num_trained for mask in seen.masks]
    if schedule == "gradual":
        assert counts[0] == 266_200
        assert 2662 < counts[1] < 266_200
        assert counts[2:] == [2662] * 3
        assert seen.masks[2] == seen.masks[3] == seen.masks[4]
        assert result.best_epoch >= 2
    else:
        assert counts == [2662] * 5
        assert len({str(counts_of(mask)) for mask in seen.masks}) == 1
        assert len({mask.fingerprint for mask in seen.masks[:4]}) == 4
        assert seen.masks[3] == seen.masks[4]
        assert result.best_epoch >= 3
    mask = kf.get_mask(result.model)
    assert mask == seen.masks[-1]
    assert result.report.num_trained_weights == 2662
    start = kernels_of(kf.models.lenet_300_100(seed=0))
    for path, kernel, initial in zip(KERNELS, kernels_of(result.model), start, strict=True):
        frozen = initial[~mask[path]] if method == "freezenet" else 0.0
        assert np.all(kernel[~mask[path]] == frozen)
    written = json.loads(json.dumps(result.to_dict()))
    assert (written["distribution"], written["mask"]) == ("global", "computed")
    assert written["schedule"] == schedule


@pytest.mark.cases(1)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_with_a_schedule_may_diverge(schedule):
    with pytest.warns(RuntimeWarning, match="weights of the end, since no epoch with the last"):
        result = train(
            "mnist_5k",
            "lenet_300_100",
            "freezenet",
            0.99,
            epochs=4,
            learning_rate=1e30,
            schedule=schedule,
            verbose=False,
        )
    assert (result.diverged_epoch, result.best_epoch) == (1, 0)
    assert result.validation_accuracy is None


@pytest.mark.parametrize(
    ("schedule", "epochs", "steps_per_epoch", "first"),
    [
        (None, 10, 540, 1),
        ("gradual", 10, 540, 2),  # the learning rate drops after 1,000 steps
        ("gradual", 250, 540, 47),  # after 25,000
        ("gradual", 250, 10, 125),  # never
        ("rigl", 4, 540, 3),
        ("set", 10, 540, 8),
        ("set", 1, 540, 1),
    ],
)
def test_the_best_epoch_has_the_last_mask(schedule, epochs, steps_per_epoch, first):
    run = Run("mnist", "lenet_300_100", "freezenet", 0.9, epochs=epochs, schedule=schedule)
    assert first_epoch_with_last_mask(run, steps_per_epoch) == first


def test_epochs_before_the_first_that_counts_are_not_kept():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    best = KeepBest(first_epoch=2)
    best.set_model(model)
    best.on_train_begin()
    for epoch, accuracy in enumerate([0.9, 0.5, 0.4]):
        model.set_weights([np.full((2, 1), epoch), np.zeros(1)])
        best.on_epoch_end(epoch, {"val_loss": 1.0, "val_accuracy": accuracy})
    best.on_train_end()
    assert best.epoch == 2
    assert (model.get_weights()[0] == 1).all()
