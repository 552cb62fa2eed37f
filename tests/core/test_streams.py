"""Streams: what a follower has equals what the publisher had, whole or not at all."""

import copy
import gc
import os
import shutil
import time
import uuid
import weakref
from pathlib import Path

import format_reader
import keras
import numpy as np
import pytest
from helpers import same_bits, sgd, value_of
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import RATE, digest, frozen, network, train, weights

import keras_freeze as kf
from keras_freeze.storage import DeltaPublisher
from keras_freeze.storage.container import container_bytes, parse_container
from keras_freeze.storage.streams import folder as folder_module

pytestmark = [
    pytest.mark.cases(None, tensorflow=1, jax=1),
    pytest.mark.filterwarnings("ignore:A model follows its stream no further"),
]


def copy_of(model):
    copied = keras.models.clone_model(model)
    copied.set_weights(model.get_weights())
    return copied


def assert_equal(first, second):
    for a, b in zip(weights(first), weights(second), strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


def names(folder):
    return sorted(os.listdir(folder))


def stream_of(folder, num_updates=4, full_every=100, **arguments):
    """A stream of so many files, and the digests of the trainer's states."""
    model = frozen(network())
    publisher = DeltaPublisher(model, folder, full_every=full_every, **arguments)
    states = []
    for number in range(num_updates + 1):
        assert publisher.publish() == number
        states.append(digest(model))
        train(model, number)
    return states


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed_bfloat16", "float64"])
def test_a_follower_has_every_state_of_the_trainer(dtype, tmp_path):
    if dtype == "float64" and keras.backend.backend() == "jax":
        pytest.skip("without 64 bits")
    model = frozen(network(dtype))
    follower = network(dtype)
    publisher = kf.DeltaPublisher(model, tmp_path, full_every=3)
    for step in range(8):
        number = publisher.publish()
        followed = kf.follow(follower, tmp_path)
        assert followed.number == number == step
        assert_equal(follower, model)
        assert followed.update() is False
        train(model, step)
    late = network(dtype)
    assert kf.follow(late, tmp_path).number == 7
    assert_equal(late, follower)
    assert [name for name in names(tmp_path) if "full" in name] == [full(0), full(4)]


@pytest.mark.parametrize("values", ["bfloat16", "float16"])
def test_rounded_values_are_those_of_the_trainer_rounded(values, tmp_path):
    model = frozen(network())
    start = network()
    follower = network()
    publisher = kf.DeltaPublisher(model, tmp_path, values=values, full_every=2)
    trained = {variable.path for variable in model.trainable_variables}
    mask = kf.get_mask(model)
    for step in range(4):
        train(model, step)
        publisher.publish()
        kf.follow(follower, tmp_path)
        for one, own, old in zip(weights(follower), weights(model), weights(start), strict=True):
            expected = value_of(own)
            if own.path in trained:
                entry = mask.find(own)
                rounded = value_of(keras.ops.cast(keras.ops.cast(expected, values), "float32"))
                is_trained = np.ones(own.shape, bool) if entry is None else entry.trained
                expected = np.where(is_trained, rounded, value_of(old))
            assert same_bits(value_of(one), expected), (step, own.path)


@pytest.mark.same_on_all
@pytest.mark.parametrize("step", [0.05, 0.001])
def test_values_on_a_grid_are_next_to_those_of_the_trainer(step, tmp_path):
    model, follower, start = frozen(network()), network(), network()
    publisher = kf.DeltaPublisher(model, tmp_path, values=kf.storage.Grid(step), full_every=3)
    trainable = {variable.path for variable in model.trainable_variables}
    for number in range(7):
        train(model, number)
        publisher.publish()
        kf.follow(follower, tmp_path)
        for one, own, old in zip(weights(follower), weights(model), weights(start), strict=True):
            found, expected = value_of(one), value_of(own)
            if own.path not in trainable:
                assert same_bits(found, expected)
                continue
            steps = (found - value_of(old)).astype("float64") / step
            assert np.abs(steps - np.rint(steps)).max() < 1e-2
            assert np.abs(found - expected).max() <= 0.51 * step
    late = network()
    kf.follow(late, tmp_path)
    assert_equal(late, follower)


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
@pytest.mark.parametrize("values", ["float32", "bfloat16", kf.storage.Grid(0.02)])
def test_a_reader_written_from_the_description_alone_agrees(values, tmp_path):
    model, start, follower = frozen(network()), network(), network()
    base = [(variable.path, value_of(variable)) for variable in start.variables]
    publisher = kf.DeltaPublisher(model, tmp_path, values=values)
    for step in range(5):
        publisher.publish()
        kf.follow(follower, tmp_path)
        files = [tmp_path / full(0), *(tmp_path / update(n) for n in range(1, step + 1))]
        for (label, found), variable in zip(
            format_reader.read_stream(files, base), follower.variables, strict=True
        ):
            assert label.endswith("seed_generator_state") or same_bits(found, value_of(variable))
        train(model, step)


@pytest.mark.same_on_all
@pytest.mark.parametrize("share", [0.001, 0.1])
@pytest.mark.parametrize("values", ["float32", "bfloat16"])
def test_few_changed_values_take_few_bytes(values, share, tmp_path):
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(500, name="a")])
    kf.reinitialize(model, seed=1)
    start, follower = copy_of(model), copy_of(model)
    base = [(variable.path, value_of(variable)) for variable in start.variables]
    publisher = kf.DeltaPublisher(model, tmp_path, values=values)
    rng = np.random.default_rng(0)
    for step in range(4):
        kernel = value_of(model.layers[0].kernel)
        moved = rng.random(kernel.shape) < share
        model.layers[0].kernel.assign(np.where(moved, kernel * 1.5 + 1e-3, kernel))
        publisher.publish()
        kf.follow(follower, tmp_path)
        files = [tmp_path / full(0), *(tmp_path / update(n) for n in range(1, step + 1))]
        for (_, found), one, own, old in zip(
            format_reader.read_stream(files, base),
            weights(follower),
            weights(model),
            weights(start),
            strict=True,
        ):
            assert same_bits(found, value_of(one))
            if values == "float32":
                assert same_bits(value_of(one), value_of(own))
            unmoved = value_of(own) == value_of(old)
            assert same_bits(value_of(one)[unmoved], value_of(old)[unmoved])
    sizes = [(tmp_path / update(n)).stat().st_size for n in range(2, 4)]
    assert max(sizes) < 300 + 20_000 * share * (4 + 12 / 8) + 2_000 * share**0.5


@pytest.mark.same_on_all
def test_a_trainer_without_a_mask_is_followed_too(tmp_path):
    model, follower = network(), network()
    publisher = kf.DeltaPublisher(model, tmp_path)
    for step in range(3):
        train(model, step, scale=1e-4)
        publisher.publish()
        kf.follow(follower, tmp_path)
        assert_equal(follower, model)


@pytest.mark.same_on_all
def test_a_new_mask_begins_with_a_complete_file(tmp_path):
    model, follower = frozen(network()), network()
    publisher = kf.DeltaPublisher(model, tmp_path)
    for step in range(6):
        if step == 3:
            rng = np.random.default_rng(7)
            x, y = rng.normal(size=(8, 6)), rng.normal(size=(8, 5))
            kf.freeze(model, x, y, overwrite=True)
        train(model, step)
        publisher.publish()
        if step != 2:
            kf.follow(follower, tmp_path)
            assert_equal(follower, model)
    assert [name for name in names(tmp_path) if "full" in name][-1].startswith("000000000003")


@pytest.mark.same_on_all
def test_pruned_networks_are_followed(tmp_path):
    model, follower = frozen(network(), frozen_weights="zero"), network()
    publisher = kf.DeltaPublisher(model, tmp_path, base=network(), full_every=2)
    for step in range(5):
        train(model, step)
        publisher.publish()
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


@pytest.fixture(name="stream", scope="module")
def stream_files(tmp_path_factory):
    """A folder with a complete file, five updates, another complete file and one update."""
    folder = tmp_path_factory.mktemp("stream")
    return folder, stream_of(folder, num_updates=7, full_every=5)


def refused(folder, model, **arguments):
    """What `follow` says; the model must be as it was."""
    before = digest(model)
    with pytest.raises((kf.FreezeFileError, FileNotFoundError)) as caught:
        kf.follow(model, folder, **arguments)
    assert digest(model) == before
    return str(caught.value)


def copied(stream, tmp_path, chosen=None):
    folder = tmp_path / uuid.uuid4().hex
    folder.mkdir()
    for name in names(stream[0]):
        if chosen is None or name in chosen:
            shutil.copy(stream[0] / name, folder / name)
    return folder


def full(number):
    return f"{number:012d}-full.freeze"


def update(number):
    return f"{number:012d}-update.freeze"


@pytest.mark.same_on_all
def test_missing_files_are_named(stream, tmp_path):
    folder = copied(stream, tmp_path, {full(0), update(1), update(3)})
    assert f"{update(2)!r} is missing" in refused(folder, network())
    folder = copied(stream, tmp_path, {update(1), update(2)})
    assert "no complete file" in refused(folder, network())
    assert "no complete file" in refused(tmp_path / "nowhere", network())
    # What lies before a complete file may be deleted.
    folder = copied(stream, tmp_path, {full(6), update(7)})
    model = network()
    assert kf.follow(model, folder).number == 7
    assert digest(model) == stream[1][7]


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
def test_renamed_files_are_refused(stream, tmp_path):
    folder = copied(stream, tmp_path, {full(0), update(1), update(2)})
    os.replace(folder / update(2), folder / update(1))
    assert "have been renamed" in refused(folder, network())
    folder = copied(stream, tmp_path, {full(0), update(2)})
    os.replace(folder / full(0), folder / full(1))
    assert "have been renamed" in refused(folder, network())


@pytest.mark.same_on_all
def test_foreign_files_are_refused(stream, tmp_path):
    other = tmp_path / "other"
    stream_of(other, num_updates=2)
    folder = copied(stream, tmp_path, {full(0), update(1)})
    shutil.copy(other / update(2), folder)
    assert "belongs to the stream" in refused(folder, network())
    model = network()
    kf.follow(model, copied(stream, tmp_path, {full(0)}))
    assert "another base" in refused(folder, frozen_and_trained())
    shutil.copy(other / full(0), folder / full(0))
    assert "belongs to the stream" in refused(folder, network())
    kf.save(frozen(network()), folder / full(3), base=network())
    assert "belongs to no stream" in refused(folder, network())


def frozen_and_trained():
    model = frozen(network())
    train(model, 1)
    return model


@pytest.mark.same_on_all
def test_another_stream_in_the_folder_is_refused_by_a_follower_of_the_first(stream, tmp_path):
    folder = copied(stream, tmp_path, {full(0), update(1)})
    model = network()
    kf.follow(model, folder)
    stream_of(tmp_path / "other", num_updates=5, full_every=4)
    shutil.copy(tmp_path / "other" / full(5), folder / full(5))
    assert "has followed so far" in refused(folder, model)


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
@pytest.mark.parametrize("name", [full(0), update(3)])
def test_damaged_files_are_named_and_change_nothing(name, stream, tmp_path):
    folder = copied(stream, tmp_path, {full(0), *map(update, range(1, 6))})
    content = (folder / name).read_bytes()
    rng = np.random.default_rng(0)
    for cut in (0, 50, len(content) - 1):
        (folder / name).write_bytes(content[:cut])
        assert name in refused(folder, network())
    for place in rng.integers(0, len(content), 25):
        changed = bytearray(content)
        changed[place] ^= 1 << rng.integers(8)
        (folder / name).write_bytes(changed)
        assert name in refused(folder, network())
    (folder / name).write_bytes(content)
    model = network()
    kf.follow(model, folder)
    assert digest(model) == stream[1][5]


def mutated(content, rng):
    """The file with another header or other sections, and right checksums."""
    container = parse_container(content, "a file")
    header = copy.deepcopy(container.header)
    sections = [container.mask, container.exponents, container.mantissas]
    fields = header["update"] if "update" in header else header["stream"]
    for _ in range(rng.integers(1, 3)):
        kind = rng.integers(5)
        if kind == 0:
            fields[rng.integers(len(fields))] = ODD[rng.integers(len(ODD))]
        elif kind == 1 and isinstance(fields[-1], str) and fields[-1]:
            place = rng.integers(len(fields[-1]))
            fields[-1] = fields[-1][:place] + rng.choice(list("svdcept")) + fields[-1][place + 1 :]
        elif kind == 2:
            section = bytearray(sections[rng.integers(3)]) or bytearray(4)
            section[rng.integers(len(section))] ^= 1 << rng.integers(8)
            sections[rng.integers(3)] = bytes(section)
        elif kind == 3:
            which = rng.integers(3)
            sections[which] = sections[which][: 4 * rng.integers(len(sections[which]) // 4 + 1)]
        else:
            fields.append(ODD[rng.integers(len(ODD))])
    return container_bytes(header, *sections, 2)


ODD = [None, -1, 0, 2**70, 1.5, "", "s" * 500, "0" * 32, [], {}, True, "\0"]
ODD += [[[1, "float32", 0]], [[2**21, "float32", 0]], [[4, "int8", 0.1]], [[4, "bfloat16", -1]]]
ODD += [[[7, "float32", 1e-300]]]


@pytest.mark.same_on_all
@pytest.mark.parametrize(
    "count", [60, pytest.param(3_000, marks=pytest.mark.exhaustive)], ids=["some", "many"]
)
def test_other_content_with_right_checksums_is_refused_or_harmless(count, stream, tmp_path):
    rng = np.random.default_rng(count)
    folder = copied(stream, tmp_path, {full(0), *map(update, range(1, 4))})
    model, accepted = network(), 0
    for number in range(count):
        name = (full(0), update(1), update(3))[number % 3]
        content = (stream[0] / name).read_bytes()
        (folder / name).write_bytes(mutated(content, rng))
        before = digest(model)
        try:
            kf.follow(model, folder)
        except kf.FreezeFileError:
            assert digest(model) == before
        else:
            accepted += 1
            assert digest(model) == stream[1][3]
            model = network()
        (folder / name).write_bytes(content)
    assert accepted < count / 4


@pytest.mark.same_on_all
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_order_of_arrival_gives_states_of_the_trainer_or_errors(data, stream, tmp_path_factory):
    """Files arrive late, twice, out of order or never: never a state that nobody had."""
    folder = tmp_path_factory.mktemp("arrival")
    arrivals = data.draw(st.lists(st.sampled_from(names(stream[0])), min_size=3, max_size=14))
    model = network()
    allowed = {digest(model), *stream[1]}
    for name in arrivals:
        shutil.copy(stream[0] / name, folder / name)
        before = digest(model)
        try:
            follower = kf.follow(model, folder)
        except (kf.FreezeFileError, FileNotFoundError):
            assert digest(model) == before
        else:
            assert digest(model) == stream[1][follower.number]
        assert digest(model) in allowed


@pytest.mark.same_on_all
def test_nothing_but_files_of_the_stream_is_read_or_written(stream, tmp_path):
    folder = copied(stream, tmp_path)
    (folder / "notes.txt").write_text("mine")
    (folder / "99-update.freeze").write_text("not a name of a stream")
    (folder / "..000000000009-update.freeze").write_text("nor is this")
    (folder / ".kf-0-000000000009-update.freeze").write_text("unfinished")
    model = network()
    assert kf.follow(model, folder).number == 7
    assert digest(model) == stream[1][7]
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.same_on_all
def test_a_file_that_is_larger_than_its_values_is_not_read(stream, tmp_path):
    folder = copied(stream, tmp_path, {full(0)})
    with open(folder / update(1), "wb") as file:
        file.truncate(1 << 36)  # takes no space on the disk
    assert "more than the limit" in refused(folder, network())


@pytest.mark.same_on_all
def test_folders_may_be_urls(tmp_path):
    pytest.importorskip("fsspec")
    for url in (f"memory://{uuid.uuid4().hex}/run", f"file://{tmp_path}/run"):
        model, follower = frozen(network()), network()
        with pytest.raises(FileNotFoundError, match="no complete file"):
            kf.follow(follower, url)
        publisher = kf.DeltaPublisher(model, url, full_every=2)
        for step in range(4):
            train(model, step)
            publisher.publish()
            kf.follow(follower, url)
            assert_equal(follower, model)


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


@pytest.mark.same_on_all
def test_a_damaged_update_before_a_complete_file_is_not_needed(stream, tmp_path):
    folder = copied(stream, tmp_path)
    model = network()
    kf.follow(model, copied(stream, tmp_path, {full(0), update(1)}))
    (folder / update(3)).write_bytes(b"damaged")
    model = network()
    assert kf.follow(model, folder).number == 7
    assert digest(model) == stream[1][7]


@pytest.mark.same_on_all
@pytest.mark.parametrize("values", ["bfloat16", kf.storage.Grid(0.02)])
@pytest.mark.parametrize("case", ["values that never change", "its own grid", "a new mask"])
def test_complete_files_that_round_otherwise_are_followed_too(case, values, tmp_path):
    base = network()
    base.get_layer("last").bias.assign(np.linspace(-1, 1, 5).astype("float32") / 3)
    model, follower = copy_of(base), copy_of(base)
    frozen(model, grid=0.05 if case == "its own grid" else None)
    publisher = kf.DeltaPublisher(model, tmp_path, values=values, full_every=2)
    for step in range(9):
        if step == 4 and case == "a new mask":
            rng = np.random.default_rng(7)
            kf.freeze(model, rng.normal(size=(8, 6)), rng.normal(size=(8, 5)), overwrite=True)
        train(model, step)
        model.get_layer("last").bias.assign(base.get_layer("last").bias)
        publisher.publish()
        kf.follow(follower, tmp_path)
        late = copy_of(base)
        kf.follow(late, tmp_path)
        assert_equal(late, follower)


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
@pytest.mark.parametrize("change", ["prune", "set_weights", "reinitialize"])
def test_frozen_weights_that_something_changes_are_published(change, tmp_path):
    model, follower = frozen(network()), network()
    publisher = kf.DeltaPublisher(model, tmp_path, base=network())
    for step in range(5):
        if step == 2 and change == "set_weights":
            model.set_weights([weight * 2 for weight in model.get_weights()])
        elif step == 2:
            {"prune": kf.prune, "reinitialize": kf.reinitialize}[change](model)
        publisher.publish()
        kf.follow(follower, tmp_path)
        assert_equal(follower, model)
        train(model, step)
    assert [name for name in names(tmp_path) if "full" in name] == [full(0), full(2)]


@pytest.mark.same_on_all
def test_a_stream_that_is_begun_anew_is_noticed(stream, tmp_path):
    folder = copied(stream, tmp_path, {full(0), *map(update, range(1, 4))})
    model = network()
    kf.follow(model, folder)
    shutil.rmtree(folder)
    assert "begun anew" in refused(folder, model)
    stream_of(folder, num_updates=1)
    assert "begun anew" in refused(folder, model)


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


@pytest.mark.same_on_all
def test_a_value_that_is_not_finite_is_published(tmp_path):
    model, follower = frozen(network()), network()
    publisher = kf.DeltaPublisher(model, tmp_path, values=kf.storage.Grid(0.1))
    publisher.publish()
    for value in (np.nan, np.inf, 1.0):
        model.get_layer("last").bias.assign(np.full(5, value, "float32"))
        publisher.publish()
        kf.follow(follower, tmp_path)
        found = value_of(follower.get_layer("last").bias)
        assert np.allclose(found, value, atol=0.06, equal_nan=True)
