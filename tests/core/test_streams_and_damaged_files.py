"""Files of a stream that are missing, foreign, damaged or late: refused, or of no harm."""

import copy
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stream_cases import digest, frozen, network, train
from stream_folders import copied, full, long_stream, names, refused, stream_of, update

import keras_freeze as kf
from keras_freeze.storage.container import container_bytes, parse_container

pytestmark = [
    pytest.mark.cases(None, tensorflow=1, jax=1),
    pytest.mark.filterwarnings("ignore:A model follows its stream no further"),
]


@pytest.fixture(name="stream", scope="module")
def stream_files(tmp_path_factory):
    return long_stream(tmp_path_factory.mktemp("stream"))


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


@pytest.mark.cases(1)
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
def test_a_damaged_update_before_a_complete_file_is_not_needed(stream, tmp_path):
    folder = copied(stream, tmp_path)
    model = network()
    kf.follow(model, copied(stream, tmp_path, {full(0), update(1)}))
    (folder / update(3)).write_bytes(b"damaged")
    model = network()
    assert kf.follow(model, folder).number == 7
    assert digest(model) == stream[1][7]


@pytest.mark.same_on_all
def test_a_stream_that_is_begun_anew_is_noticed(stream, tmp_path):
    folder = copied(stream, tmp_path, {full(0), *map(update, range(1, 4))})
    model = network()
    kf.follow(model, folder)
    shutil.rmtree(folder)
    assert "begun anew" in refused(folder, model)
    stream_of(folder, num_updates=1)
    assert "begun anew" in refused(folder, model)
