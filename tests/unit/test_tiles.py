"""Masks of whole tiles in files: found, exact, smaller than without, and refused where wrong."""

import format_reader
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import keras_freeze as kf
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.masks.structure import select_units
from keras_freeze.storage.coding.masks import count_masks, decode_masks, encode_masks, tile_of
from keras_freeze.storage.coding.tiles import SINGLE, Tile, largest_tile
from keras_freeze.storage.container import read_container, write_container

SHAPES = [
    (37,),
    (64,),
    (23, 31),
    (24, 32),
    (1, 50),
    (50, 1),
    (3, 3, 8, 12),
    (2, 3, 7, 9),
    (4, 5, 6),
]


@st.composite
def tiled_masks(draw):
    """A mask of random tiles, made entry by entry, and the size of these."""
    shape = draw(st.sampled_from(SHAPES))
    rows, columns = (1, 1, *shape)[-2:]
    height, width = draw(st.integers(1, rows)), draw(st.integers(1, columns))
    chosen = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).random((*shape[:-2], 50, 64))
    rate, mask = draw(st.sampled_from([0.02, 0.3, 0.9])), np.zeros(shape, bool)
    for place in np.ndindex(*shape):
        row, column = (0, *place)[-2:]
        mask[place] = chosen[(*place[:-2], row // height, column // width)] < rate
    return mask, Tile(height, width)


def saved(path, masks):
    """The masks after a file, which the second reader and `inspect` read alike."""
    entries = [MaskEntry(i, f"layer_{i}/kernel", m, is_weight=True) for i, m in enumerate(masks)]
    FreezeMask(entries).save(path)
    found = FreezeMask.load(path)
    for entry, (_, _, other, _), mask in zip(
        found.entries, format_reader.read_mask_only(path), masks, strict=True
    ):
        np.testing.assert_array_equal(entry.trained, mask)
        np.testing.assert_array_equal(other, mask)
    counts = [row.num_trained for row in kf.storage.inspect(path).rows]
    assert counts == [int(mask.sum()) for mask in masks]
    return kf.storage.inspect(path)


@given(tiled_masks())
def test_masks_of_tiles_come_back(drawn):
    mask, tile = drawn
    assume(tile != SINGLE)
    stream = encode_masks([tile.tiles(mask), mask])
    shapes, keys = [mask.shape] * 2, [tile, None]
    for found in decode_masks(stream, shapes, keys):
        assert found.flags.c_contiguous
        np.testing.assert_array_equal(found, mask)
    assert count_masks(stream, shapes, 10**6, keys) == [int(mask.sum())] * 2


@given(tiled_masks())
def test_the_largest_tiles_are_found(drawn):
    mask, tile = drawn
    found = largest_tile(mask)
    np.testing.assert_array_equal(found.mask(found.tiles(mask), mask.shape), mask)
    assert found.height >= tile.height
    assert found.width >= tile.width
    rows, columns = (1, 1, *mask.shape)[-2:]
    for larger in [Tile(2 * found.height, found.width), Tile(found.height, 2 * found.width)]:
        if larger.height <= rows and larger.width <= columns:
            assert not np.array_equal(larger.mask(larger.tiles(mask), mask.shape), mask)


@given(tiled_masks())
def test_tiles_are_taken_where_they_take_fewer_bytes(drawn):
    mask, tile = drawn
    chosen = tile_of(mask)
    plain = len(encode_masks([mask]))
    if chosen is not None:
        assert len(encode_masks([chosen.tiles(mask)])) < plain - 16
    elif tile != SINGLE:
        assert len(encode_masks([tile.tiles(mask)])) >= plain - 32


@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1), st.floats(0.1, 0.9))
def test_masks_without_structure_have_no_tiles(shape, seed, rate):
    mask = np.random.default_rng(seed).random((*shape[:-1], 3 * shape[-1])) < rate
    assert tile_of(mask) is None


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1,), (1, 1), (40, 30)])
@pytest.mark.parametrize("value", [False, True])
def test_masks_of_one_value_have_no_tiles(shape, value):
    assert tile_of(np.full(shape, value)) is None


def test_masks_of_n_of_m_have_no_tiles():
    scores = np.random.default_rng(0).random((64, 64), np.float32)
    (mask,) = select_units(kf.masks.Structure("2:4"), [scores], scores.size // 4)
    assert tile_of(mask) is None


@pytest.mark.cases(1)
@pytest.mark.parametrize("units", [(4, 4), (5, 3), (7, 9), (1, 8)])
def test_blocks_of_a_structure_are_tiles(units, tmp_path):
    rng = np.random.default_rng(0)
    scores = [rng.random(shape, np.float32) for shape in ((100, 70), (3, 3, 32, 48))]
    size = sum(array.size for array in scores)
    masks = select_units(kf.masks.Structure(units), scores, size // 10)
    found = saved(tmp_path / "mask.freeze", masks)
    for row, mask in zip(found.rows, masks, strict=True):
        assert row.tile == (min(units[0], mask.shape[-2]), min(units[1], mask.shape[-1]))
    assert "mask of {} x {} tiles".format(*found.rows[0].tile) in str(found)
    tiles = sum(array.size / units[0] / units[1] for array in scores)
    entropy = -0.1 * np.log2(0.1) - 0.9 * np.log2(0.9)
    assert found.num_bytes["mask"] < 1.3 * tiles * entropy / 8 + 40


def test_a_file_takes_fewer_bytes_with_tiles(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for number in range(20):
        height, width = rng.integers(1, 9, 2)
        mask = np.kron(rng.random((8, 9)) < rng.random(), np.ones((height, width), bool))
        with_tiles = saved(tmp_path / f"{number}.freeze", [mask])
        with monkeypatch.context() as patch:
            patch.setattr("keras_freeze.storage.masks.tile_of", lambda mask: None)
            without = saved(tmp_path / f"{number}_plain.freeze", [mask])
        assert with_tiles.total_bytes <= without.total_bytes
        if with_tiles.rows[0].tile is None:
            assert with_tiles.digest == without.digest


def test_the_version_says_whether_there_are_tiles(tmp_path):
    path = tmp_path / "mask.freeze"
    for mask, version in [(np.eye(40, dtype=bool), 1), (np.kron(np.eye(40), np.ones((4, 4))), 2)]:
        saved(path, [mask.astype(bool)])
        assert path.read_bytes()[8] == version


# Other content


def file_with(path, tile, shape=(40, 30), described=()):
    """A file of a mask whose header has another fourth element than it was written with."""
    mask = np.kron(np.random.default_rng(0).random((10, 10)) < 0.3, np.ones((4, 3), bool))
    saved(path, [mask])
    content = read_container(path)
    (variable,) = content.header["variables"]
    assert variable["mask"] == [0, 1, 0, [4, 3]]
    variable |= {"mask": [0, 1, 0, tile], "shape": list(shape), **dict(described)}
    write_container(path, content.header, content.mask, b"", b"", 2)
    return path


@pytest.mark.parametrize(
    ("tile", "shape"),
    [
        *(([0, 3], (40, 30)), ([4, 0], (40, 30)), ([0, 0], (40, 30)), ([1, 1], (40, 30))),
        *(([-4, 3], (40, 30)), ([4.0, 3], (40, 30)), ([True, 3], (40, 30)), (["4", 3], (40, 30))),
        *(
            ([41, 3], (40, 30)),
            ([4, 31], (40, 30)),
            ([2**47, 3], (40, 30)),
            ([4, 10**30], (40, 30)),
        ),
        *(([4], (40, 30)), ([4, 3, 1], (40, 30)), (4, (40, 30)), (None, (40, 30)), ({}, (40, 30))),
        *(([2, 3], (30,)), ([4, 3], (0, 30)), ([4, 3], (40, 0)), ([1, 2], ()), ([4, 3], (3, 3, 3))),
        *(([4, 3], (2**24, 2**24 - 1)), ([2**20, 2**20], (2**23, 2**23))),
    ],
)
def test_tiles_that_a_variable_does_not_have_are_refused(tile, shape, tmp_path):
    path = file_with(tmp_path / "mask.freeze", tile, shape)
    for read in (FreezeMask.load, kf.storage.inspect):
        with pytest.raises(kf.FreezeFileError, match=r"mask\.freeze"):
            read(path)


@pytest.mark.parametrize(
    "described",
    [
        {"drawn": [0, 0]},
        {"ranked": []},
        {"mask": [0, 1, 1, [4, 3]]},
        {"mask": [0, 1, 0, [4, 3], 0]},
        {"mask": [0, 1, 0]},
        {"mask": [0, 1, [4, 3]]},
    ],
)
def test_contradictions_are_refused(described, tmp_path):
    path = file_with(tmp_path / "mask.freeze", [4, 3], described=described.items())
    with pytest.raises(kf.FreezeFileError, match=r"mask\.freeze"):
        FreezeMask.load(path)


@pytest.mark.parametrize("tile", [[2, 3], [8, 3], [4, 6], [40, 30], [4, 2]])
def test_other_tiles_than_those_in_the_stream_make_another_mask_or_an_error(tile, tmp_path):
    path = file_with(tmp_path / "mask.freeze", tile)
    try:
        (entry,) = FreezeMask.load(path).entries
    except kf.FreezeFileError:
        return
    assert entry.trained.shape == (40, 30)
    assert largest_tile(entry.trained)[0] % tile[0] == largest_tile(entry.trained)[1] % tile[1] == 0


@given(stream=st.binary(max_size=200), height=st.integers(1, 60), width=st.integers(1, 40))
def test_any_bytes_are_tiles_or_an_error(stream, height, width):
    shapes, tile = [(60, 40), (2, 60, 40)], Tile(height, width)
    try:
        masks = decode_masks(stream, shapes, [tile, tile])
    except kf.FreezeFileError:
        return
    assert [mask.shape for mask in masks] == shapes
