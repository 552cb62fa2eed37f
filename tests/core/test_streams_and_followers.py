"""What follows a stream: late or in the background, and models that something else changes."""

import gc
import shutil
import time
import weakref

import pytest
from delta_cases import assert_same_weights as assert_equal
from stream_cases import digest, frozen, network, train
from stream_folders import copied, full, long_stream, update

import keras_freeze as kf

pytestmark = [
    pytest.mark.cases(None, tensorflow=1, jax=1),
    pytest.mark.filterwarnings("ignore:A model follows its stream no further"),
]


@pytest.fixture(name="stream", scope="module")
def stream_files(tmp_path_factory):
    return long_stream(tmp_path_factory.mktemp("stream"))


@pytest.mark.same_on_all
def test_a_follower_that_was_behind_goes_on_from_a_complete_file(stream, tmp_path):
    folder = copied(stream, tmp_path, {full(0), update(1)})
    model = network()
    kf.follow(model, folder)
    assert digest(model) == stream[1][1]
    for name in (full(6), update(7)):
        shutil.copy(stream[0] / name, folder / name)
    assert kf.follow(model, folder).number == 7
    assert digest(model) == stream[1][7]


@pytest.mark.same_on_all
def test_a_model_that_was_changed_by_something_else_is_not_touched(stream, tmp_path):
    folder = copied(stream, tmp_path, {full(0), update(1)})
    model = network()
    kf.follow(model, folder)
    train(model, 0)
    before = digest(model)
    shutil.copy(stream[0] / update(2), folder)
    with pytest.raises(ValueError, match="has changed since the last update"):
        kf.follow(model, folder)
    assert digest(model) == before


@pytest.mark.same_on_all
def test_an_update_is_described_as_such(stream):
    with pytest.raises(kf.FreezeFileError, match="an update of a stream"):
        kf.storage.inspect(stream[0] / update(1))
    with pytest.raises(kf.FreezeFileError, match="an update of a stream"):
        kf.load(stream[0] / update(1), base=network())


@pytest.mark.same_on_all
def test_a_complete_file_is_a_delta_like_any_other(stream):
    model = network()
    loaded = kf.load(stream[0] / full(6), base=model)
    assert digest(loaded) == stream[1][6]
    kf.apply_delta(model, stream[0] / full(6))
    assert digest(model) == stream[1][6]


@pytest.mark.same_on_all
def test_a_model_that_nobody_needs_is_not_kept(stream):
    model = network()
    kf.follow(model, stream[0])
    watched = weakref.ref(model)
    del model
    gc.collect()
    assert watched() is None


@pytest.mark.same_on_all
def test_one_folder_may_be_named_in_several_ways(stream, tmp_path, monkeypatch):
    folder = copied(stream, tmp_path, {full(0), update(1)})
    monkeypatch.chdir(folder.parent)
    model = network()
    kf.follow(model, folder)
    shutil.copy(stream[0] / update(2), folder)
    assert kf.follow(model, folder.name).number == 2
    assert kf.follow(model, f"file://{folder}").number == 2
    assert digest(model) == stream[1][2]


@pytest.mark.same_on_all
def test_a_model_is_followed_in_the_background(tmp_path):
    model, served = frozen(network()), network()
    seen = set()
    with kf.follow(served, tmp_path, every=0.01) as follower:
        assert follower.number is None
        publisher = kf.DeltaPublisher(model, tmp_path, full_every=3)
        states = {digest(served)}
        for step in range(10):
            train(model, step)
            states.add(digest(model))
            publisher.publish()
            with follower.lock:
                seen.add(digest(served))
        for _ in range(1000):
            if follower.number == 9:
                break
            time.sleep(0.01)
        with pytest.raises(ValueError, match="already"):
            follower.start(1.0)
    assert seen <= states
    assert_equal(served, model)


@pytest.mark.same_on_all
def test_errors_in_the_background_are_told_and_pass(stream, tmp_path):
    folder = copied(stream, tmp_path, {full(0)})
    (folder / update(1)).write_bytes(b"damaged")
    model = network()
    with kf.follow(model, folder, every=0.01) as follower:
        for _ in range(1000):
            if follower.error is not None:
                break
            time.sleep(0.01)
        assert update(1) in str(follower.error)
        shutil.copy(stream[0] / update(1), folder / update(1))
        for _ in range(1000):
            if follower.number == 1:
                break
            time.sleep(0.01)
    assert follower.error is None
    assert digest(model) == stream[1][1]
