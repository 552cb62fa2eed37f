"""Tests of the recipes and of `train`: schedule, best epoch, determinism, results as files."""

import csv
import itertools
import json
import math

import keras
import numpy as np
import pytest

import keras_freeze as kf
from keras_freeze._utils.files import replacing
from keras_freeze.criteria.grasp_criterion import GraSP
from keras_freeze.paper import datasets, masking, preparation, training, training_callbacks
from keras_freeze.paper.datasets.training_batches import batches_in_memory
from keras_freeze.paper.training import METHODS, recipe_for, train

pytestmark = pytest.mark.cases(2)


def run(method="freezenet", freeze_rate=0.99, **arguments):
    arguments = {"epochs": 2, "verbose": False, **arguments}
    return train("mnist_5k", "lenet_300_100", method, freeze_rate, **arguments)


@pytest.fixture(scope="module")
def result():
    return run()


# Recipes


@pytest.mark.parametrize(
    ("dataset", "epochs", "batch_size", "learning_rate", "initializer"),
    [
        ("mnist", 250, 100, 0.1, "xavier_normal"),
        ("cifar10", 250, 128, 0.1, "xavier_normal"),
        ("cifar100", 250, 128, 0.1, "kaiming_uniform"),
        ("tiny_imagenet", 100, 128, 0.01, "kaiming_uniform"),
    ],
)
def test_recipes_have_the_papers_hyperparameters(
    dataset, epochs, batch_size, learning_rate, initializer
):
    recipe = recipe_for(dataset)
    assert (recipe.epochs, recipe.batch_size) == (epochs, batch_size)
    assert (recipe.learning_rate, recipe.initializer) == (learning_rate, initializer)
    assert (recipe.momentum, recipe.l2, recipe.validation_fraction) == (0.9, 5e-4, 0.1)


@pytest.mark.parametrize(
    ("dataset", "steps_per_epoch", "drops"),
    [
        ("mnist", 540, [25_000, 50_000, 75_000, 100_000, 125_000]),
        ("mnist", 450, [25_000, 50_000, 75_000, 100_000]),  # a validation split of 3/1
        ("cifar10", 352, [30_000, 60_000]),
        ("cifar100", 352, [30_000, 60_000]),
        ("tiny_imagenet", 704, [30 * 704, 60 * 704, 80 * 704]),
    ],
)
def test_the_rate_drops_where_the_paper_says(dataset, steps_per_epoch, drops):
    assert recipe_for(dataset).drop_steps(steps_per_epoch) == drops


@pytest.mark.parametrize(
    ("dataset", "epochs", "steps_per_epoch", "drops"),
    [
        ("mnist", 25, 540, [2_500, 5_000, 7_500, 10_000, 12_500]),
        ("mnist", 8, 540, [800, 1_600, 2_400, 3_200, 4_000]),
        ("tiny_imagenet", 10, 704, [3 * 704, 6 * 704, 8 * 704]),
        ("tiny_imagenet", 25, 704, [5_280, 15 * 704, 20 * 704]),
    ],
)
def test_fewer_epochs_shorten_the_schedule_in_proportion(dataset, epochs, steps_per_epoch, drops):
    recipe = recipe_for(dataset, epochs=epochs)
    assert recipe.epochs == epochs
    assert recipe.drop_steps(steps_per_epoch) == drops


def test_the_rate_is_a_tenth_from_the_step_after_each_drop():
    schedule = recipe_for("mnist").schedule(540)
    rates = [float(schedule(step)) for step in (0, 24_999, 25_000, 49_999, 50_000, 134_999)]
    np.testing.assert_allclose(rates, [0.1, 0.1, 0.01, 0.01, 0.001, 1e-6], rtol=1e-6)


def test_a_schedule_without_drops_is_a_number():
    assert training.Recipe(1, 100, 0.3).schedule(540) == 0.3


def test_recipes_take_a_rate_and_a_validation_split():
    recipe = recipe_for("cifar10", learning_rate=0.2, validation_fraction=0.05)
    assert (recipe.learning_rate, recipe.validation_fraction) == (0.2, 0.05)


def test_there_is_a_recipe_for_every_data_set():
    for name in datasets.NAMES:
        assert recipe_for(name).batch_size >= 1


def test_methods_are_the_papers():
    expected = {
        "baseline": ("snip", "keep", 0.0),
        "freezenet": ("snip", "keep", None),
        "freezenet-wd": ("snip", "decay", None),
        "grasp": (GraSP(samples_per_class=10), "zero", None),
        "snip": ("snip", "zero", None),
        "random": ("random", "keep", None),
    }
    assert expected == METHODS


# Training


def test_a_run_is_the_steps_of_its_recipe_from_its_seed(result):
    """The same run by hand, from data order to test accuracy."""
    images, labels = datasets.load_arrays("mnist_5k", "train", seed=0)
    model = kf.models.lenet_300_100(seed=0)
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([79, 119], [0.05, 0.005, 0.0005])
    optimizer = kf.FreezeOptimizer(
        keras.optimizers.SGD(rate, momentum=0.9), freeze_rate=0.99, l2=5e-4
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    orders = [np.random.default_rng([0, epoch]).permutation(4000) for epoch in range(2)]
    first = orders[0][:50]
    mask = kf.freeze(model, images[first], labels[first])
    accuracies = []
    for order in orders:
        model.fit(images[order], labels[order], batch_size=50, epochs=1, shuffle=False, verbose=0)
        held_out = datasets.load_arrays("mnist_5k", "validation", seed=0)
        accuracies.append(model.evaluate(*held_out, batch_size=500, verbose=0)[1])
    assert mask == kf.get_mask(result.model)
    np.testing.assert_allclose(result.history["val_accuracy"], accuracies, atol=2.5 / 500)


def test_the_same_seed_gives_the_same_result_and_another_seed_another(result):
    again, other = run(), run(seed=1)
    assert again.history == result.history
    assert (again.test_loss, again.best_epoch) == (result.test_loss, result.best_epoch)
    for first, second in zip(again.model.get_weights(), result.model.get_weights(), strict=True):
        assert np.array_equal(first, second)
    assert other.history != result.history


def test_training_leaves_global_random_state_alone():
    keras.utils.set_random_seed(5)
    expected = np.random.rand()
    keras.utils.set_random_seed(5)
    run(epochs=1)
    assert np.random.rand() == expected


def test_random_batches_cover_every_image_once_a_pass():
    images = np.arange(10, dtype=np.float32)[:, None]
    batches = batches_in_memory(images, np.arange(10), 4, seed=0)
    passes = [[labels.numpy() for _, labels in batches] for _ in range(2)]
    assert [len(batch) for batch in passes[0]] == [4, 4, 2]
    assert len(batches) == 3
    orders = [np.concatenate(batch_list) for batch_list in passes]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert list(orders[0]) != list(orders[1])


def test_the_result_has_the_weights_of_the_first_best_epoch(monkeypatch):
    """Validation accuracy is dictated: best in epochs 2 and 3, so the second epoch's weights."""
    seen = []

    class Dictate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_accuracy"] = [0.5, 0.9, 0.9, 0.7][epoch]
            seen.append([np.array(w) for w in self.model.get_weights()])

    original = keras.Model.fit

    def fit(self, *args, callbacks, **kwargs):
        return original(self, *args, callbacks=[Dictate(), *callbacks], **kwargs)

    monkeypatch.setattr(keras.Model, "fit", fit)
    result = run(epochs=4)
    assert result.best_epoch == 2
    kept = result.model.get_weights()
    assert all(np.array_equal(a, b) for a, b in zip(kept, seen[1], strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(kept, seen[2], strict=True))
    assert int(result.model.optimizer.iterations) == 2 * 80


def test_validation_and_test_numbers_are_those_of_the_kept_weights(result):
    assert result.validation_accuracy == max(result.history["val_accuracy"])
    held_out = datasets.load_arrays("mnist_5k", "test")
    loss, accuracy = result.model.evaluate(*held_out, batch_size=500, verbose=0)
    assert (result.test_loss, result.test_accuracy) == (
        pytest.approx(loss),
        pytest.approx(accuracy),
    )


def test_frozen_weights_keep_their_start(result):
    start = kf.models.lenet_300_100(seed=0)
    for trained, initial in zip(
        result.model.trainable_variables, start.trainable_variables, strict=True
    ):
        if trained.name == "kernel":
            frozen = ~kf.get_mask(result.model)[trained]
            assert np.array_equal(trained.numpy()[frozen], initial.numpy()[frozen])


def test_snip_sets_frozen_weights_to_zero():
    result = run("snip", 0.9, epochs=1)
    mask = kf.get_mask(result.model)
    for variable in result.model.trainable_variables:
        if variable.name == "kernel":
            assert not variable.numpy()[~mask[variable]].any()
            assert variable.numpy()[mask[variable]].all()


def test_freezenet_wd_keeps_the_shrinkage_that_belongs_to_its_weights():
    result = run("freezenet-wd", 0.9, epochs=1)
    start = kf.models.lenet_300_100(seed=0).layers[2].kernel.numpy()
    frozen = ~kf.get_mask(result.model)["fc1/kernel"]
    ratio = result.model.get_layer("fc1").kernel.numpy()[frozen] / start[frozen]
    assert 0.9 < ratio.min() <= ratio.max() < 1
    assert ratio.max() - ratio.min() < 1e-4


def test_the_baseline_trains_everything_whatever_the_rate():
    result = run("baseline", 0.99, epochs=1)
    assert result.freeze_rate == 0.0
    assert result.report.num_trained_weights == 266_200


@pytest.mark.exhaustive
def test_a_criterion_may_be_chosen_instead_of_the_methods_own():
    def first_come(weights, gradients):
        return keras.ops.zeros_like(weights)

    result = run(criterion=first_come, freeze_rate=0.5, epochs=1)
    assert result.criterion == "first_come"
    mask = kf.get_mask(result.model)["fc1/kernel"].reshape(-1)
    assert mask[:133_100].all()
    assert not mask[133_100:].any()
    assert run(criterion="magnitude", epochs=1).to_dict()["criterion"] == "magnitude"


def test_training_stops_and_says_so_when_the_loss_is_not_finite():
    with pytest.warns(RuntimeWarning, match="no longer finite"):
        result = run(epochs=3, learning_rate=1e30)
    assert (result.diverged_epoch, result.best_epoch) == (1, 0)
    assert len(result.history["loss"]) == 1
    assert "learning rate" in result.summary()
    start = kf.models.lenet_300_100(seed=0).get_weights()
    for kept, initial in zip(result.model.get_weights(), start, strict=True):
        assert np.array_equal(kept, initial)
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert values["history"]["loss"] == [None]
    assert values["validation_accuracy"] is None


def progress_of_two_epochs(seconds, capsys, monkeypatch):
    """The lines of a run by a clock that goes on by `seconds` each time someone looks at it."""
    monkeypatch.setattr(training_callbacks, "_clock", itertools.count(0.0, seconds).__next__)
    run(epochs=2, verbose=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.strip().splitlines()


def test_progress_is_one_short_line_at_the_end_of_a_quick_run(capsys, monkeypatch):
    (line,) = progress_of_two_epochs(0.0, capsys, monkeypatch)
    assert line.startswith("epoch 2/2, took 0 s")
    assert "best" in line


@pytest.mark.exhaustive
def test_progress_of_a_long_run_is_a_line_every_ten_seconds(capsys, monkeypatch):
    first, last = progress_of_two_epochs(10.0, capsys, monkeypatch)
    assert first.startswith("epoch 1/2, 20 s left: loss ")
    assert last.startswith("epoch 2/2, took ")


@pytest.mark.parametrize(
    ("error", "argument", "value"),
    [
        (ValueError, "dataset", "imagenet"),
        (ValueError, "model", "alexnet"),
        (ValueError, "method", "lottery"),
        (ValueError, "method", None),
        (ValueError, "freeze_rate", 1.1),
        (TypeError, "freeze_rate", "0.9"),
        (ValueError, "criterion", "best"),
        (TypeError, "criterion", 3),
        (ValueError, "epochs", 0),
        (TypeError, "epochs", 2.5),
        (TypeError, "epochs", True),
        (ValueError, "seed", -1),
        (TypeError, "seed", 0.5),
        (ValueError, "learning_rate", 0.0),
        (ValueError, "learning_rate", math.inf),
        (TypeError, "learning_rate", "fast"),
        (ValueError, "validation_fraction", 1.0),
        (TypeError, "validation_fraction", "tenth"),
    ],
)
def test_bad_arguments_are_named_with_what_was_received(error, argument, value):
    arguments = {
        "dataset": "mnist_5k",
        "model": "lenet_300_100",
        "method": "freezenet",
        "freeze_rate": 0.9,
        argument: value,
    }
    with pytest.raises(error, match=f"Received: {argument}={value!r}"):
        train(**arguments)


def test_unknown_names_list_the_choices():
    with pytest.raises(ValueError, match="'baseline', 'freezenet', 'freezenet-wd', 'snip'"):
        run("lottery")


# Results as files


def test_a_result_survives_json(result):
    values = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert values == result.to_dict()
    assert (values["dataset"], values["model"], values["method"]) == (
        "mnist_5k",
        "lenet_300_100",
        "freezenet",
    )
    assert values["recipe"]["learning_rate"] == 0.05
    assert values["report"]["num_trained_weights"] == 2_662
    assert values["report"]["freeze_rate"] == pytest.approx(0.99)
    assert values["versions"]["keras"] == keras.__version__
    assert values["seconds"] > 0


def test_a_result_is_saved_as_json_csv_and_keras(result, tmp_path):
    result.save(tmp_path / "new")
    files = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert files == ["history.csv", "model.keras", "result.json"]
    assert json.loads((tmp_path / "new/result.json").read_text()) == result.to_dict()
    with (tmp_path / "new/history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["epoch"]) for row in rows] == [1, 2]
    assert [float(row["val_loss"]) for row in rows] == result.history["val_loss"]
    loaded = keras.models.load_model(tmp_path / "new/model.keras")
    assert kf.get_mask(loaded) == kf.get_mask(result.model)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    target = tmp_path / "file.txt"
    target.write_text("old")

    def fail_halfway():
        with replacing(target) as path:
            path.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert target.read_text() == "old"
    with replacing(target) as path:
        path.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_grasp_scores_ten_images_of_each_class_however_short_the_passes(monkeypatch):
    seen = []

    def recorded(model, dataset, *, steps, drawn):
        labels = np.concatenate([y for _, y in dataset.take(steps).as_numpy_iterator()])
        seen.append(np.bincount(labels, minlength=10))
        return kf.freeze(model, dataset, steps=steps)

    monkeypatch.setattr(masking, "freeze", recorded)
    setup = training.prepare("mnist_5k", "lenet_300_100", "grasp", 0.99, steps_per_epoch=1)
    assert seen[0].min() >= 10
    assert setup.steps_per_epoch == 1
    assert setup.criterion == "GraSP(temperature=200.0, samples_per_class=10)"
    assert kf.get_mask(setup.network).num_trained == 2662


@pytest.mark.parametrize(
    ("model", "epochs", "compiled"),
    [("lenet_300_100", 250, True), ("lenet_300_100", 2, False), ("lenet_5_caffe", 250, False)],
)
def test_xla_compiles_long_runs_of_small_dense_networks(model, epochs, compiled):
    network = training.prepare("mnist_5k", model, "freezenet", 0.99, epochs=epochs).network
    assert network.jit_compile is compiled


@pytest.mark.exhaustive
def test_a_run_that_xla_compiles_trains_what_the_mask_says(monkeypatch):
    monkeypatch.setattr(preparation, "_STEPS_WORTH_XLA", 1)
    setup = training.prepare("mnist_5k", "lenet_300_100", "freezenet", 0.99, epochs=1)
    start = [v.numpy() for v in setup.network.trainable_variables]
    mask = kf.get_mask(setup.network)
    assert setup.fit(verbose=False).diverged_epoch is None
    for entry in mask.entries:
        now = setup.network.trainable_variables[entry.position].numpy()
        assert now[~entry.trained].tobytes() == start[entry.position][~entry.trained].tobytes()
        assert (now != start[entry.position])[entry.trained].mean() > 0.5
