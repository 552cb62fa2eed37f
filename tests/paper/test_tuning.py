"""Searches with KerasTuner, and the hypermodel that they build networks with."""

import gc
import sys

import keras
import keras_tuner
import numpy as np
import pytest
import tensorflow as tf

import keras_freeze as kf
from keras_freeze.paper.training import LEARNING_RATES
from keras_freeze.paper.tuning import FreezeHyperModel, LogRange, check_trials

pytestmark = pytest.mark.filterwarnings("ignore:Even though the `tf.config")


@pytest.fixture(autouse=True)
def _without_collection(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: None)  # a good part of a second before each trial


@pytest.fixture
def _eagerly():
    """Tracing is most of the work of trials as short as these."""
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


def hypermodel(freeze_rates=0.99, **arguments):
    arguments = {"epochs": 1, "steps_per_epoch": 2, "learning_rates": (0.05, 0.1), **arguments}
    return FreezeHyperModel("mnist_5k", "lenet_300_100", freeze_rates, **arguments)


def searched(kind, model, folder, *, callbacks=(), **arguments):
    arguments = {"objective": "val_accuracy", **arguments}
    tuner = kind(model, directory=str(folder), project_name="search", **arguments)
    tuner.search(verbose=0, callbacks=list(callbacks))
    return tuner


def values_of(tuner, name):
    return [trial.hyperparameters.values.get(name) for trial in tuner.oracle.trials.values()]


def assert_frozen_at_start(model, seed=0):
    """The mask is that of the first 50 images of the seed's order, and frozen weights are old."""
    images, labels = kf.datasets.load_arrays("mnist_5k", "train", seed=seed)
    first = np.random.default_rng([seed, 0]).permutation(len(images))[:50]
    start = kf.models.lenet_300_100(seed=seed)
    start.compile(
        kf.FreezeOptimizer(keras.optimizers.SGD(), freeze_rate=0.99, seed=seed),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    mask = kf.freeze(start, images[first], labels[first])
    assert kf.get_mask(model) == mask
    for variable, old in zip(model.trainable_variables, start.trainable_variables, strict=True):
        if variable.name == "kernel":
            same = variable.numpy() == old.numpy()
            assert same[~mask[old]].all()
            assert not same[mask[old]].all()


def test_the_papers_grid_is_a_tenth_times_powers_of_two():
    assert LEARNING_RATES == (0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


@pytest.mark.usefixtures("_eagerly")
def test_random_search_gives_the_best_network_with_its_mask(tmp_path):
    """With accuracies that are dictated, the best epoch is the second of the second trial."""
    seen = {}

    class Dictate(keras.callbacks.Callback):
        def __deepcopy__(self, memo):  # KerasTuner copies callbacks; the notes are to be shared
            return Dictate()

        def on_epoch_end(self, epoch, logs=None):
            trial = len(seen) // 3
            logs["val_accuracy"] = [[0.5, 0.6, 0.4], [0.7, 0.9, 0.8]][trial][epoch]
            seen[trial, epoch] = self.model.get_weights()

    model = hypermodel(epochs=3, learning_rates=LogRange(0.01, 1.0), seeds=5)
    tuner = searched(
        keras_tuner.RandomSearch, model, tmp_path, callbacks=[Dictate()], max_trials=2, seed=1
    )
    check_trials(tuner)
    rates = values_of(tuner, "learning_rate")
    assert len(set(rates)) == 2
    assert all(0.01 <= rate <= 1 for rate in rates)
    (best,) = tuner.get_best_models()
    assert len(seen) == 6
    for found, expected, other in zip(best.get_weights(), seen[1, 1], seen[1, 2], strict=True):
        assert np.array_equal(found, expected)
        assert not np.array_equal(found, other)
    assert_frozen_at_start(best, seed=5)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_eagerly")
def test_bayesian_search_fits_its_model_to_trials(tmp_path):
    model = hypermodel(freeze_rates=(0.9, 0.99), learning_rates=LogRange(0.01, 1.0))
    arguments = {"max_trials": 3, "num_initial_points": 2, "seed": 1, "objective": "val_loss"}
    tuner = searched(keras_tuner.BayesianOptimization, model, tmp_path, **arguments)
    check_trials(tuner)
    assert len(tuner.oracle.trials) == 3
    assert all(np.isfinite(trial.score) for trial in tuner.oracle.trials.values())


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_eagerly")
def test_grid_search_tries_each_rate_once_and_the_baseline_without_one(tmp_path):
    model = hypermodel((0.9, 0.99), methods=("baseline", "snip"), learning_rates=0.1, seeds=(3,))
    tuner = searched(keras_tuner.GridSearch, model, tmp_path)
    check_trials(tuner)
    tried = list(zip(values_of(tuner, "method"), values_of(tuner, "freeze_rate"), strict=True))
    assert tried == [("baseline", None), ("snip", 0.9), ("snip", 0.99)]
    assert values_of(tuner, "learning_rate") == [0.1] * 3
    assert values_of(tuner, "seed") == [3] * 3


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_eagerly")
def test_hyperband_continues_trials_with_their_mask_in_the_same_schedule(tmp_path):
    """The rate drops after the first of two epochs, and in the middle of the second."""
    begun, rates = [], []

    class Watch(keras.callbacks.Callback):
        def __deepcopy__(self, memo):
            return Watch()

        def on_train_begin(self, logs=None):
            begun.append((int(self.model.optimizer.iterations), self.model.get_weights()))
            assert kf.get_mask(self.model).num_trained == 2_662

        def on_epoch_end(self, epoch, logs=None):
            rates.append((epoch, float(self.model.optimizer.learning_rate)))

    arguments = {"max_epochs": 2, "factor": 2, "seed": 1}
    model = hypermodel(epochs=2, learning_rates=(0.05, 0.1, 0.2, 0.4))
    tuner = searched(keras_tuner.Hyperband, model, tmp_path, callbacks=[Watch()], **arguments)
    check_trials(tuner)
    assert values_of(tuner, "tuner/initial_epoch")[:3] == [0, 0, 1]
    assert values_of(tuner, "tuner/epochs")[:3] == [1, 1, 2]
    assert [iterations for iterations, _ in begun[:3]] == [0, 0, 2]
    start = kf.models.lenet_300_100(seed=0).get_weights()
    assert all(np.array_equal(a, b) for a, b in zip(begun[0][1], start, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(begun[2][1], start, strict=True))
    peak = values_of(tuner, "learning_rate")[2]
    assert [epoch for epoch, _ in rates[:3]] == [0, 0, 1]
    assert rates[2][1] == pytest.approx(peak / 100)


@pytest.mark.usefixtures("_eagerly")
def test_a_network_that_is_continued_is_as_far_in_the_schedule_as_its_epochs():
    model, hp = hypermodel(epochs=3, learning_rates=0.1), keras_tuner.HyperParameters()
    network = model.build(hp)
    model.fit(hp, network, epochs=3, initial_epoch=2, verbose=0)
    assert int(network.optimizer.iterations) == 3 * 2
    assert float(network.optimizer.learning_rate) == pytest.approx(0.001)


@pytest.mark.usefixtures("_eagerly")
def test_a_trial_that_diverges_counts_as_guessing(tmp_path):
    model = hypermodel(epochs=3, learning_rates=1e30, methods="freezenet-wd")
    tuner = searched(keras_tuner.GridSearch, model, tmp_path, objective="val_loss")
    check_trials(tuner)
    (trial,) = tuner.oracle.trials.values()
    assert trial.score == pytest.approx(np.log(10))
    assert trial.metrics.get_best_value("val_accuracy") == pytest.approx(0.1)
    (model,) = tuner.get_best_models()
    start = kf.models.lenet_300_100(seed=0).get_weights()
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), start, strict=True))


@pytest.mark.usefixtures("_eagerly")
def test_trials_that_fail_are_an_error_that_shows_why(tmp_path, capsys):
    class Fail(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            if self.model.optimizer.learning_rate > 0.07:
                raise OSError("the disk is full")

    tuner = searched(keras_tuner.GridSearch, hypermodel(), tmp_path, callbacks=[Fail()])
    with pytest.raises(RuntimeError, match="1 of 2 trials failed") as caught:
        check_trials(tuner)
    assert "'learning_rate': 0.1" in str(caught.value)
    assert "OSError: the disk is full" in str(caught.value)
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.usefixtures("_eagerly")
def test_everything_random_comes_from_the_seed():
    histories, weights = [], []
    for seed in (1, 1, 2):
        keras.utils.set_random_seed(len(weights))
        model = hypermodel(seeds=(1, 2))
        hp = keras_tuner.HyperParameters()
        hp.values["seed"] = seed
        network = model.build(hp)
        histories.append(model.fit(hp, network, verbose=0).history)
        weights.append(network.get_weights())
    assert histories[0] == histories[1] != histories[2]
    assert all(np.array_equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))


@pytest.mark.usefixtures("_eagerly")
def test_a_network_that_was_built_before_another_is_trained_on_its_own_data():
    histories = []
    for build_another in (False, True):
        model, hp = hypermodel(seeds=(1, 2)), keras_tuner.HyperParameters()
        network = model.build(hp)
        if build_another:
            other = keras_tuner.HyperParameters()
            other.values["seed"] = 2
            model.build(other)
        histories.append(model.fit(hp, network, verbose=0).history)
    assert histories[0] == histories[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"methods": "lottery"}, r"`method` must be one of .*Received: method='lottery'"),
        ({"freeze_rates": (0.9, 1.5)}, "Received: freeze_rate=1.5"),
        ({"freeze_rates": ()}, r"`freeze_rates` must be .*Received: freeze_rates=\(\)"),
        ({"learning_rates": (0.1, -1.0)}, "Received: learning_rate=-1.0"),
        ({"epochs": 0}, "Received: epochs=0"),
        ({"schedule": "rigl"}, "`schedule` must be None in a search.*Received: schedule='rigl'"),
    ],
)
def test_bad_arguments_are_named_when_a_hypermodel_is_made(arguments, message):
    with pytest.raises(ValueError, match=message):
        hypermodel(**arguments)


def test_unknown_models_and_data_sets_are_named():
    with pytest.raises(ValueError, match="Received: model='alexnet'"):
        FreezeHyperModel("mnist_5k", ["lenet_5_caffe", "alexnet"], 0.9)
    with pytest.raises(ValueError, match="Received: dataset='imagenet'"):
        FreezeHyperModel("imagenet", "lenet_5_caffe", 0.9)


@pytest.mark.parametrize(
    ("error", "low", "high"),
    [(ValueError, 0.0, 1.0), (ValueError, 1.0, 0.1), (ValueError, 0.1, 0.1), (TypeError, "a", 1)],
)
def test_a_range_needs_two_numbers_in_order(error, low, high):
    with pytest.raises(error, match="Received"):
        LogRange(low, high)


def test_without_keras_tuner_the_error_says_what_to_install(monkeypatch):
    for name in ("_keras_tuner", "hypermodel", "sweep", "tuning"):
        monkeypatch.delitem(sys.modules, f"keras_freeze.paper.{name}")
    monkeypatch.delitem(sys.modules, "keras_freeze.tuning", raising=False)
    monkeypatch.setitem(sys.modules, "keras_tuner", None)
    with pytest.raises(ImportError, match="pip install keras-tuner "):
        import keras_freeze.tuning  # noqa: F401
