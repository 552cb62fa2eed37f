"""Runs of small networks on JAX train by several batches in a call, and are what they were."""

import dataclasses

import keras
import numpy as np
import pytest

import keras_freeze as kf
from keras_freeze.paper import backup, training

pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="Keras's JAX trainer is meant"),
    pytest.mark.slow,
]


def prepare(method="freezenet", freeze_rate=0.99, *, model="lenet_300_100", **settings):
    settings = {"epochs": 2, **settings}
    return training.prepare("mnist_5k", model, method, freeze_rate, seed=3, **settings)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("method", "freeze_rate"),
    [("freezenet", 0.99), ("freezenet-wd", 0.9), ("snip", 0.9), ("random", 0.9), ("baseline", 0)],
)
def test_they_train_like_single_steps(method, freeze_rate):
    several = prepare(method, freeze_rate, l2=0.01)
    assert several.together == 80
    single = dataclasses.replace(prepare(method, freeze_rate, l2=0.01), together=1)
    results = [setup.fit(verbose=False) for setup in (several, single)]
    assert results[0].history.keys() == results[1].history.keys()
    for name, values in results[0].history.items():
        np.testing.assert_allclose(values, results[1].history[name], rtol=1e-3)
    assert results[0].best_epoch == results[1].best_epoch
    counts = [int(setup.network.optimizer.iterations) for setup in (several, single)]
    assert counts[0] == counts[1] == 80 * results[0].best_epoch
    entries = {entry.position: entry.trained for entry in kf.get_mask(several.network).entries}
    variables = (setup.network.trainable_variables for setup in (several, single))
    for position, pair in enumerate(zip(*variables, strict=True)):
        value, expected = map(np.asarray, pair)
        np.testing.assert_allclose(value, expected, rtol=1e-3, atol=1e-5)
        frozen = ~entries.get(position, np.ones(value.shape, bool))  # biases are trained
        assert value[frozen].tobytes() == expected[frozen].tobytes()


class _Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            raise KeyboardInterrupt


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_the_network_is_an_ordinary_one_afterwards(is_interrupted):
    setup = prepare(epochs=2 if is_interrupted else 1)
    network = setup.network
    if is_interrupted:
        with pytest.raises(KeyboardInterrupt):
            setup.fit([_Interrupt()], verbose=False)
    else:
        accuracy = setup.fit(verbose=False).test_accuracy
        assert network.evaluate(setup.test, return_dict=True, verbose=0)["accuracy"] == accuracy
    assert "train_step" not in vars(network)
    assert network.steps_per_execution == 80
    before = int(network.optimizer.iterations)
    network.fit(setup.batches(), shuffle=False, verbose=0)
    assert int(network.optimizer.iterations) == before + 80


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, monkeypatch):
    def short():
        return prepare("freezenet-wd", 0.9, epochs=3, steps_per_epoch=20)

    monkeypatch.setattr(backup, "_SECONDS_BETWEEN_BACKUPS", 0.0)
    expected = short().fit(verbose=False)
    path = tmp_path / "run.npz"
    with pytest.raises(KeyboardInterrupt):
        short().fit([_Interrupt()], verbose=False, backup=path)
    result = short().fit(verbose=False, backup=path)
    assert result.history == expected.history
    pairs = zip(result.model.get_weights(), expected.model.get_weights(), strict=True)
    assert all(value.tobytes() == wanted.tobytes() for value, wanted in pairs)


@pytest.mark.parametrize(
    ("settings", "together"),
    [
        ({"steps_per_epoch": 7}, 7),
        ({"validation_fraction": 0.2}, 72),
        ({"validation_fraction": 0.301}, 1),  # the last batch has 46 images
        ({"schedule": "rigl"}, 1),
        ({"model": "lenet_5_caffe"}, 1),
    ],
)
def test_how_many_steps_are_one_call(settings, together):
    assert prepare(**settings).together == together


def test_distributed_data_train_step_by_step():
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    try:
        setup = prepare(epochs=1, steps_per_epoch=4)
        assert setup.together == 1
        assert np.isfinite(setup.fit(verbose=False).history["loss"]).all()
    finally:
        keras.distribution.set_distribution(None)
