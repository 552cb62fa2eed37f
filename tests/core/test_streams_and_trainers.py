"""What publishes a stream: `fit`, resumed or failing trainers, and what they refuse."""

import os
from pathlib import Path

import keras
import numpy as np
import pytest
from delta_cases import assert_same_weights as assert_equal
from helpers import sgd
from stream_cases import RATE, frozen, network, train
from stream_folders import full, names, update

import keras_freeze as kf
from keras_freeze.storage import DeltaPublisher
from keras_freeze.storage.streams import folder as folder_module

pytestmark = [
    pytest.mark.cases(None, tensorflow=1, jax=1),
    pytest.mark.filterwarnings("ignore:A model follows its stream no further"),
]


@pytest.mark.same_on_all
def test_a_network_that_is_trained_on_a_grid_is_sent_exactly(tmp_path):
    model = frozen(network(), grid=0.05)
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(64, 6)), rng.normal(size=(64, 5))
    follower = network()
    publish = kf.callbacks.PublishDeltas(tmp_path, every=2)
    model.fit(x, y, batch_size=8, callbacks=[publish], verbose=0)
    kf.follow(follower, tmp_path)
    assert_equal(follower, model)
    updates = [tmp_path / name for name in names(tmp_path) if "update" in name]
    assert len(updates) == 4
    num_statistics = 2 * 16 * 4
    assert max(path.stat().st_size for path in updates) < 250 + num_statistics


@pytest.mark.cases(1)
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_training_is_published_every_so_many_steps_and_at_the_end(steps_per_execution, tmp_path):
    if keras.backend.backend() == "torch" and steps_per_execution > 1:
        pytest.skip("Keras refuses it")
    model, follower = network(), network()
    optimizer = kf.FreezeOptimizer(sgd(0.05), 0.9)  # the first batch decides
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(80, 6)), rng.normal(size=(80, 5))
    publish = kf.callbacks.PublishDeltas(tmp_path, every=4)
    model.fit(x, y, batch_size=8, epochs=3, callbacks=[publish], verbose=0)
    # Keras counts the last steps of an epoch, which are two here, as `steps_per_execution`.
    assert publish.publisher.number == {1: 7, 4: 9}[steps_per_execution]
    kf.follow(follower, tmp_path)
    assert_equal(follower, model)
    model.fit(x, y, batch_size=8, epochs=1, callbacks=[publish], verbose=0)
    kf.follow(follower, tmp_path)
    assert_equal(follower, model)


@pytest.mark.same_on_all
def test_a_trainer_goes_on_with_its_stream(tmp_path):
    base, follower = network(), network()
    model = frozen(network())
    publisher = kf.DeltaPublisher(model, tmp_path, base=base)
    for step in range(3):
        train(model, step)
        publisher.publish()
    kf.follow(follower, tmp_path)
    resumed = frozen(network())  # from an earlier checkpoint
    train(resumed, 0)
    with pytest.raises(ValueError, match="`base` must be given where a stream is continued"):
        kf.DeltaPublisher(resumed, tmp_path)
    publisher = kf.DeltaPublisher(resumed, tmp_path, base=base)
    assert publisher.publish() == 3
    assert kf.follow(follower, tmp_path).number == 3
    assert_equal(follower, resumed)
    train(resumed, 1)
    publisher.publish()
    kf.follow(follower, tmp_path)
    assert_equal(follower, resumed)
    late = network()
    kf.follow(late, tmp_path)
    assert_equal(late, resumed)
    other = network()
    train(other, 9)
    with pytest.raises(ValueError, match="choose another folder"):
        kf.DeltaPublisher(resumed, tmp_path, base=other)


@pytest.mark.same_on_all
def test_what_a_killed_trainer_was_writing_is_removed_by_the_next_one(tmp_path, monkeypatch):
    model, folder = network(), tmp_path / "stream"
    publisher = DeltaPublisher(model, folder)
    for _ in range(2):
        publisher.publish()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 2**22 + 1)  # no process has this number
        patch.setattr(os, "replace", lambda *_: None)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        publisher.publish()
    (left,) = folder.glob(".kf-*-update.freeze")
    assert DeltaPublisher(network(), folder).publish() == 2
    assert not left.exists()
    assert sorted(os.listdir(folder)) == [
        "000000000000-full.freeze",
        "000000000001-update.freeze",
        "000000000002-full.freeze",
    ]


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_that_could_not_be_written_is_passed_over(is_there, tmp_path, monkeypatch):
    model, follower = frozen(network()), network()
    publisher = kf.DeltaPublisher(model, tmp_path)
    publisher.publish()
    write = publisher._folder.write

    def fail(name, content):
        if is_there:
            write(name, content)
        raise OSError("the connection was lost")

    monkeypatch.setattr(publisher._folder, "write", fail)
    train(model, 1)
    with pytest.raises(OSError, match="lost"):
        publisher.publish()
    monkeypatch.undo()
    kf.follow(follower, tmp_path)
    for step in (2, 3):
        train(model, step)
        publisher.publish()
        kf.follow(follower, tmp_path)
        assert_equal(follower, model)


@pytest.mark.same_on_all
def test_two_trainers_in_one_folder_are_noticed(tmp_path):
    first, second = frozen(network()), frozen(network())
    one = kf.DeltaPublisher(first, tmp_path)
    one.publish()
    other = kf.DeltaPublisher(second, tmp_path, base=network())
    train(first, 0)
    one.publish()
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    with pytest.raises(FileExistsError, match="another trainer"):
        other.publish()
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


@pytest.mark.same_on_all
def test_layers_that_are_changed_in_between_are_refused(tmp_path):
    layers = [keras.layers.Dense(4, name=name) for name in "abc"]
    model = keras.Sequential([keras.Input((4,)), *layers])
    publisher = kf.DeltaPublisher(model, tmp_path)
    publisher.publish()
    model.layers[0].enable_lora(4)
    with pytest.raises(ValueError, match="enable_lora"):
        publisher.publish()
    assert names(tmp_path) == [full(0)]


@pytest.mark.same_on_all
def test_training_goes_on_where_a_file_cannot_be_written(tmp_path, monkeypatch):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(32, 6)), rng.normal(size=(32, 5))
    model, follower = frozen(network()), network()
    publish = kf.callbacks.PublishDeltas(tmp_path, every=1)
    write = folder_module._LocalFolder.write

    def fail(folder, name, content):
        if name == update(2):
            raise OSError("the disk is full")
        write(folder, name, content)

    monkeypatch.setattr(folder_module._LocalFolder, "write", fail)
    with pytest.warns(UserWarning, match="could not be published.*full"):
        model.fit(x, y, batch_size=8, callbacks=[publish], verbose=0)
    kf.follow(follower, tmp_path)
    assert_equal(follower, model)
    assert full(3) in names(tmp_path)


@pytest.mark.same_on_all
def test_values_that_float16_lacks_are_refused_in_updates_too(tmp_path):
    model = frozen(network())
    publisher = kf.DeltaPublisher(model, tmp_path, values="float16")
    publisher.publish()
    model.get_layer("last").bias.assign(np.full(5, 1e5, "float32"))
    with pytest.raises(ValueError, match=r"bias.*(1e\+05|100000)"):
        publisher.publish()
    assert names(tmp_path) == [full(0)]


@pytest.mark.same_on_all
def test_a_callback_publishes_one_model(tmp_path):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(16, 6)), rng.normal(size=(16, 5))
    publish = kf.callbacks.PublishDeltas(tmp_path, every=1)
    frozen(network()).fit(x, y, callbacks=[publish], verbose=0)
    with pytest.raises(ValueError, match="another model"):
        frozen(network()).fit(x, y, callbacks=[publish], verbose=0)


@pytest.mark.same_on_all
def test_what_another_callback_restores_is_published(tmp_path):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(16, 6)), rng.normal(size=(16, 5))
    model, follower = frozen(network()), network()
    restore = keras.callbacks.EarlyStopping("loss", mode="max", restore_best_weights=True)
    publish = kf.callbacks.PublishDeltas(tmp_path, every=1)
    model.fit(x, y, epochs=3, callbacks=[restore, publish], verbose=0)
    kf.follow(follower, tmp_path)
    assert_equal(follower, model)


@pytest.mark.same_on_all
def test_bad_arguments_are_named(tmp_path):
    model = frozen(network())
    another = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    for arguments, error, match in (
        ({"folder": 3}, TypeError, "`folder`"),
        ({"values": "int4"}, ValueError, "`values`"),
        ({"values": 3}, ValueError, "`values`"),
        ({"full_every": 0}, ValueError, "`full_every`"),
        ({"base": another}, ValueError, "architecture"),
    ):
        with pytest.raises(error, match=match):
            kf.DeltaPublisher(model, **{"folder": tmp_path, **arguments})
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="`folder`"):
        kf.DeltaPublisher(model, tmp_path / "file")
    with pytest.raises(ValueError, match="`every`"):
        kf.callbacks.PublishDeltas(tmp_path, every=0)
    with pytest.raises(ValueError, match="`every`"):
        kf.follow(model, tmp_path, every=-1.0)
    with pytest.raises(TypeError, match="`model`"):
        kf.follow("model", tmp_path)
    assert names(tmp_path) == ["file"]


@pytest.mark.same_on_all
def test_decaying_weights_are_refused(tmp_path):
    model = frozen(network(), frozen_weights="decay", l2=0.01)
    with pytest.raises(ValueError, match="decay"):
        kf.DeltaPublisher(model, tmp_path)
    assert names(tmp_path) == []


@pytest.mark.same_on_all
def test_weights_that_begin_to_decay_are_refused(tmp_path):
    model = frozen(network())
    publisher = kf.DeltaPublisher(model, tmp_path)
    publisher.publish()
    x, y = np.ones((4, 6)), np.ones((4, 5))
    model.compile(kf.FreezeOptimizer(sgd(0.05), RATE, frozen_weights="decay", l2=0.01), loss="mse")
    kf.freeze(model, x, y, overwrite=True)
    model.train_on_batch(x, y)
    with pytest.raises(ValueError, match="decay"):
        publisher.publish()
    assert names(tmp_path) == [full(0)]
