"""Files with a mask: what they bring back, damage, old versions, and wrong headers."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mask_cases import mask_of_two_weights

import keras_freeze as kf
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.storage.container import write_container
from keras_freeze.storage.errors import FreezeFileError


@pytest.fixture
def mask():
    return mask_of_two_weights()


# Files


@given(data=st.data())
def test_files_bring_everything_back(tmp_path_factory, data):
    arrays = data.draw(
        st.lists(
            hnp.arrays(np.bool_, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)), max_size=4
        )
    )
    entries = [
        MaskEntry(
            3 * index + 1,
            data.draw(st.sampled_from(["", "fc/kernel", "größe/\ud800"])),
            array,
            data.draw(st.booleans()),
        )
        for index, array in enumerate(arrays)
    ]
    mask = FreezeMask(entries, num_rescued=data.draw(st.integers(0, 9)))
    path = tmp_path_factory.mktemp("masks") / "network.mask"
    mask.save(path)
    loaded = FreezeMask.load(path)
    assert loaded == mask
    assert (loaded.paths, loaded.num_rescued) == (mask.paths, mask.num_rescued)
    assert [entry.is_weight for entry in loaded.entries] == [e.is_weight for e in mask.entries]
    assert all(not entry.trained.flags.writeable for entry in loaded.entries)


def test_saving_leaves_one_file_and_replaces_an_older_one(mask, tmp_path):
    path = tmp_path / "network.mask"
    FreezeMask([]).save(path)
    mask.save(str(path))
    assert list(tmp_path.iterdir()) == [path]
    assert FreezeMask.load(str(path)) == mask


def test_a_failed_save_keeps_the_older_file_and_leaves_no_other(mask, tmp_path, monkeypatch):
    path = tmp_path / "network.mask"
    mask.save(path)

    def no_space(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.replace", no_space)
    with pytest.raises(OSError, match="No space"):
        FreezeMask([]).save(path)
    assert list(tmp_path.iterdir()) == [path]
    assert FreezeMask.load(path) == mask


def test_the_file_is_small(tmp_path):
    FreezeMask.from_scores([np.arange(80_000)], 0.9).save(tmp_path / "network.mask")
    assert (tmp_path / "network.mask").stat().st_size < 10_000 + 300


@pytest.fixture
def small_file(tmp_path):
    path = tmp_path / "small.mask"
    FreezeMask([MaskEntry(0, "a", np.array([True, False, True]))], num_rescued=1).save(path)
    return path


def test_damage_of_any_byte_is_noticed(small_file):
    content = small_file.read_bytes()
    for index in range(len(content)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(content)
            damaged[index] ^= flip
            small_file.write_bytes(damaged)
            with pytest.raises(FreezeFileError, match=r"small\.mask"):
                FreezeMask.load(small_file)


def test_truncation_anywhere_is_noticed(small_file):
    content = small_file.read_bytes()
    for length in range(len(content)):
        small_file.write_bytes(content[:length])
        with pytest.raises(FreezeFileError, match=r"small\.mask"):
            FreezeMask.load(small_file)


@pytest.mark.parametrize("extra", [b"\0", b"more"])
def test_bytes_at_the_end_are_noticed(small_file, extra):
    small_file.write_bytes(small_file.read_bytes() + extra)
    with pytest.raises(FreezeFileError, match="made longer"):
        FreezeMask.load(small_file)


def test_foreign_files_are_named(tmp_path):
    path = tmp_path / "weights.npz"
    np.savez(path, np.ones(3))
    with pytest.raises(ValueError, match=r"weights\.npz.* is not a valid `.freeze` file"):
        FreezeMask.load(path)
    with pytest.raises(FileNotFoundError):
        FreezeMask.load(tmp_path / "nothing")


def test_another_version_is_named(small_file):
    content = small_file.read_bytes()
    small_file.write_bytes(content[:8] + b"\3" + content[9:])
    with pytest.raises(FreezeFileError, match=r"version 3.*upgrade"):
        FreezeMask.load(small_file)


# Files that keras_freeze 0.1.0 wrote before masks became `.freeze` files


def with_valid_checksum(header, bits=b"\xa0"):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = b"keras_freeze mask 1\n" + len(encoded).to_bytes(8, "little") + encoded + bits
    return content + hashlib.sha256(content).digest()


def header_with(**changes):
    entry = {"position": 0, "path": "a", "shape": [3], "is_weight": True}
    return {"entries": [{**entry, **changes}], "num_rescued": 0}


def test_old_files_are_read(small_file):
    saved = FreezeMask.load(small_file)
    small_file.write_bytes(with_valid_checksum({**header_with(), "num_rescued": 1}))
    loaded = FreezeMask.load(small_file)
    assert loaded == saved
    assert (loaded.paths, loaded.num_rescued) == (saved.paths, 1)


def test_damage_of_an_old_file_is_noticed(small_file):
    content = with_valid_checksum(header_with())
    changed = [content[:length] for length in range(len(content))] + [content + b"\0"]
    for index in range(len(content)):
        changed.append(content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :])
    for damaged in changed:
        small_file.write_bytes(damaged)
        with pytest.raises(FreezeFileError, match=r"small\.mask"):
            FreezeMask.load(small_file)


@pytest.mark.parametrize(
    "header",
    [
        header_with(shape=[2**62]),
        header_with(shape=[10**30, 10**30]),
        header_with(shape=[-3]),
        header_with(shape=["3"]),
        header_with(shape=3),
        header_with(shape=[3] + [1] * 100),
        header_with(position=-1),
        header_with(position="0"),
        {"entries": [{"position": 0}], "num_rescued": 0},
        {"entries": header_with()["entries"] * 2, "num_rescued": 0},
        {"entries": header_with()["entries"]},
        {"entries": header_with()["entries"], "num_rescued": "1"},
        [],
        b"no json",
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_headers_that_make_no_sense_are_refused(small_file, header):
    small_file.write_bytes(with_valid_checksum(header))
    with pytest.raises(FreezeFileError, match=r"small\.mask.*header of the file is not valid"):
        FreezeMask.load(small_file)


# What a `.freeze` file with a mask only may say


def described(**changes):
    variable = {"path": "a", "shape": [3], "mask": [0, 1]}
    return {"versions": {}, "content": "mask", "variables": [{**variable, **changes}]}


@pytest.mark.parametrize(
    "header",
    [
        described(shape=[2**62]),
        described(shape=[-3]),
        described(shape=["3"]),
        described(shape=3),
        described(shape=[1] * 33),
        described(mask=[-1, 1]),
        described(mask=[2**31, 1]),
        described(mask=[0, 2]),
        described(mask=[0]),
        described(mask=[0, 1, 0]),
        described(path=None),
        {**described(), "num_rescued": "1"},
        {**described(), "num_rescued": -1},
        {**described(), "versions": []},
        {**described(), "variables": {}},
        {**described(), "variables": described()["variables"] * 2},
        {**described(), "content": "masks"},
        {**described(), "content": ["mask"]},
        {"content": "mask"},
        {},
    ],
)
def test_headers_of_masks_are_checked(tmp_path, header):
    path = tmp_path / "hostile.freeze"
    write_container(path, header, b"\0\0\0\x80" * 2, b"", b"")
    for read in (FreezeMask.load, kf.storage.inspect):
        with pytest.raises(FreezeFileError, match=r"hostile\.freeze.*header .* not valid"):
            read(path)


@pytest.mark.parametrize(
    "sections",
    [(b"", b"\0" * 4, b""), (b"", b"", b"\0"), (b"\0", b"", b""), (b"\xff" * 64, b"", b"")],
)
def test_sections_of_masks_are_checked(tmp_path, sections):
    path = tmp_path / "hostile.freeze"
    write_container(path, described(), *sections)
    for read in (FreezeMask.load, kf.storage.inspect):
        with pytest.raises(FreezeFileError, match=r"hostile\.freeze"):
            read(path)


def test_masks_larger_than_the_memory_are_refused(tmp_path):
    path = tmp_path / "hostile.freeze"
    write_container(path, described(shape=[2**40]), b"", b"", b"")  # a terabyte of masks
    for read in (FreezeMask.load, kf.storage.inspect):
        with pytest.raises(FreezeFileError, match="more than the limit"):
            read(path)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (FreezeMask([MaskEntry(2**31, "a", np.ones(2, bool))]), "position is"),
        (FreezeMask([MaskEntry(0, "a", np.ones([1] * 33, bool))]), "shape is"),
        (FreezeMask([], num_rescued=-1), "num_rescued is"),
    ],
)
def test_masks_that_could_not_be_loaded_are_not_saved(tmp_path, mask, message):
    with pytest.raises(ValueError, match=f"does not fit into a `.freeze` file.*{message}"):
        mask.save(tmp_path / "mask.freeze")
    assert not list(tmp_path.iterdir())


def test_a_file_with_a_mask_only_is_not_a_model(mask, tmp_path):
    path = tmp_path / "mask.freeze"
    mask.save(path)
    with pytest.raises(FreezeFileError, match=r"mask\.freeze.*holds a mask only.*FreezeMask\.load"):
        kf.load(path)


def test_a_file_with_a_mask_only_is_described(mask, tmp_path):
    path = tmp_path / "mask.freeze"
    mask.save(path)
    found = kf.storage.inspect(path)
    assert found.model is None
    assert found.freeze_rate == mask.freeze_rate
    assert found.real_freeze_rate is None
    assert found.total_bytes == path.stat().st_size
    assert [row.path for row in found.rows] == list(mask.paths)
    assert [row.num_trained for row in found.rows] == [mask[p].sum() for p in mask.paths]
    printed = str(found)
    assert "a mask only, saved with keras_freeze" in printed
    assert f"q = {mask.freeze_rate:.6g}\n" in printed
    assert f"{found.rows[0].num_trained} trained" in printed
