"""Files of networks whose masks consist of whole blocks: they hold one entry for each block."""

import json

import keras
import numpy as np
import pytest
from file_layout import sealed
from format_reader import read
from helpers import blobs, compiled, fit, same_bits, sgd, value_of

import keras_freeze as kf
from keras_freeze.storage.container import read_container

pytestmark = pytest.mark.same_on_all

BLOCKS = np.array([[1, 0, 1, 0, 0, 1], [0, 1, 0, 0, 1, 0], [1, 1, 0, 1, 0, 0]], bool)


def network(seed=3):
    keras.utils.set_random_seed(seed)
    dense = [keras.layers.Dense(40, "relu", name="body"), keras.layers.Dense(3, name="head")]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(14, name="first"), *dense])
    kf.reinitialize(model, "kaiming_uniform", seed=seed)
    return model


def trained(model, **settings):
    """The network after a few steps; the mask is one of the user, of 5 x 7 blocks."""
    compiled(model, kf.FreezeOptimizer(sgd(), **settings))
    mask = BLOCKS.repeat(5, 0).repeat(7, 1)[:14, :40]
    kf.freeze(model, mask={"body/kernel": mask, "head/bias": np.arange(3) < 2})
    fit(model, *blobs(), batch_size=16)
    return model


def assert_same_model(model, loaded):
    assert kf.get_mask(loaded) == kf.get_mask(model)
    for a, b in zip(model.variables, loaded.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


@pytest.mark.cases(1)
@pytest.mark.parametrize("frozen_weights", ["keep", "zero", "decay"])
@pytest.mark.parametrize("kind", ["complete", "delta"])
def test_any_mask_of_whole_blocks_takes_few_bytes(kind, frozen_weights, tmp_path):
    path, base, known = tmp_path / "model.freeze", None, None
    if kind == "delta":
        base = network()
        known = [(v.path, value_of(v)) for v in base.variables]
    model = trained(network(), frozen_weights=frozen_weights, l2=0.01)
    kf.save(model, path, base=base)
    assert_same_model(model, kf.load(path, base=base))
    assert kf.FreezeMask.load(path) == kf.get_mask(model)
    found, shown = read(path, known), kf.storage.inspect(path)
    assert found.reads["tiles"] == 1
    for variable, (_, values) in zip(model.variables, found.variables, strict=True):
        assert same_bits(value_of(variable), values)
    tiles = {row.path.partition("/")[2]: row.tile for row in shown.rows}
    assert {name: tile for name, tile in tiles.items() if tile} == {"body/kernel": (5, 7)}
    assert shown.num_bytes["mask"] <= 12
    assert "mask of 5 x 7 tiles" in str(shown)


def test_a_delta_with_tiles_is_applied_and_removed(tmp_path):
    path, base = tmp_path / "model.freeze", network()
    before = [value_of(v) for v in base.variables]
    model = trained(network())
    kf.save(model, path, base=base)
    kf.apply_delta(base, path)
    for a, b in zip(model.variables, base.variables, strict=True):
        assert same_bits(value_of(a), value_of(b))
    kf.remove_delta(base, path)
    assert all(same_bits(value_of(v), b) for v, b in zip(base.variables, before, strict=True))


def test_values_on_a_grid_go_with_tiles(tmp_path):
    path, model = tmp_path / "model.freeze", trained(network())
    kf.quantize(model, step=0.01)
    kf.save(model, path, include_optimizer=True)
    assert_same_model(model, kf.load(path))
    assert read(path).reads["tiles"] == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "tile", [[0, 7], [5, 0], [1, 1], [15, 7], [5, 41], [2**47, 2**47], [5], 5, [5, 7, 5], ["5", 7]]
)
def test_tiles_that_do_not_fit_are_refused(tile, tmp_path):
    path = tmp_path / "model.freeze"
    kf.save(trained(network()), path)
    container = read_container(path)
    (body,) = (v for v in container.header["variables"] if v["path"].endswith("body/kernel"))
    assert body["mask"][2:] == [0, [5, 7]]
    body["mask"][3] = tile
    sections = container.mask, container.exponents, container.mantissas
    path.write_bytes(sealed(json.dumps(container.header).encode(), *sections, version=2))
    for reader in (kf.load, kf.FreezeMask.load, kf.storage.inspect):
        with pytest.raises(kf.FreezeFileError, match=r"model\.freeze.*not valid"):
            reader(path)


@pytest.mark.cases(1)
@pytest.mark.parametrize("field", [{"drawn": [0, 0]}, {"ranked": [0, 0]}])
def test_masks_of_tiles_are_neither_drawn_nor_ranked(field, tmp_path):
    path = tmp_path / "model.freeze"
    kf.save(trained(network()), path)
    container = read_container(path)
    for variable in container.header["variables"]:
        if "mask" in variable:
            variable |= field
    sections = container.mask, container.exponents, container.mantissas
    path.write_bytes(sealed(json.dumps(container.header).encode(), *sections, version=2))
    with pytest.raises(kf.FreezeFileError, match="drawn, ranked"):
        kf.load(path)
