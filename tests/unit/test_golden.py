"""Files of every version that was released keep loading, the same to the last bit."""

import hashlib
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_freeze as kf
from keras_freeze.masks import Structure
from keras_freeze.masks.frozen_variables import decisions_about

FOLDER = Path(__file__).parents[1] / "golden"

# SHA-256 of all weights, and the base, as they were when the files were written.
FILES = {
    "version1_keep": ("14b884d693be0af1c8dbaee7bcd5517c02a0e78be47398c0fc0bd6e2b463d2bd", None),
    "version1_decay": ("234186c2a21b712e91c3087dcbb7a0e87788b4139667d826b56a62c180d97eae", None),
    "version1_settings": (
        "be63b17ca2dd7106a2e49685314cc38be826b75409f266248950b9268ffad624",
        None,
    ),
    "version1_delta": (
        "a744442e2a464baa605c6517d356cb358d9ff2e51f3fe50f09faf01a9f0f37f9",
        "version1_keep",
    ),
    "version2_distribution": (
        "e5416d23b4ca05e1a8750563e040667669ebe8be8c5cd5f99451257999ee468f",
        None,
    ),
    "version2_drawn": ("37fcd2ff20e5c86fe6718bb5e8e4283aa8026c2845731e996a04f0e8b693dbe6", None),
    "version2_grid": ("016dc4eff442239ce2417923ce8556ac4bb687aeb87b300735d98a5c3887e53b", None),
    "version2_ranked": ("5692391b23d7f9f4e234e4318752ce21d9647c4a945f5d95b5bd0fe4e0c76608", None),
    "version2_structure": (
        "867979d62fe6faad225c681100221f3be8689893a83b92f8f8dee27c43e4f38f",
        None,
    ),
    "version2_tiles": ("ab194bb539e7ef5e1a90764d1d9577fef266eb8da95e819103ef812a2b6b22c4", None),
}


# The same mask alone: as version 1 of the format, and as a file of keras_freeze 0.1.0 from before
# masks became `.freeze` files.
MASKS = ("version1_mask.freeze", "old.mask")


def digest_of(model):
    weights = b"".join(np.asarray(weight).tobytes() for weight in model.get_weights())
    return hashlib.sha256(weights).hexdigest()


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", list(FILES))
def test_released_files_keep_loading(name):
    digest, base = FILES[name]
    path = None if base is None else FOLDER / f"{base}.freeze"
    model = kf.load(FOLDER / f"{name}.freeze", base=path)
    assert digest_of(model) == digest
    assert kf.get_mask(model) == kf.FreezeMask.load(FOLDER / f"{name}.freeze")
    if base is not None:
        on_base = kf.load(path)
        kf.apply_delta(on_base, FOLDER / f"{name}.freeze")
        assert digest_of(on_base) == digest


def test_settings_of_released_files_keep_their_meaning():
    for name, distribution in [
        ("version1_settings", "global"),
        ("version2_distribution", (("conv*", 0.5), ("fc2/kernel", 0.75))),
    ]:
        model = kf.load(FOLDER / f"{name}.freeze")
        assert model.optimizer.settings.distribution == distribution
        (decision,) = decisions_about(model.trainable_variables)
        assert decision.settings == model.optimizer.settings
    assert [int(entry.trained.sum()) for entry in kf.get_mask(model).entries] == [18, 72, 10]


def test_the_structure_of_a_released_file_keeps_its_meaning():
    model = kf.load(FOLDER / "version2_structure.freeze")
    settings = model.optimizer.settings
    assert settings.structure == Structure((3, 2), score="sum")
    assert settings.distribution == (("conv", 0.5),)
    mask = kf.get_mask(model)
    assert [int(entry.trained.sum()) for entry in mask.entries] == [18, 108, 36]
    blocks = mask["fc1/kernel"].reshape(48, 3, 5, 2).any((1, 3))
    assert mask["fc1/kernel"].sum() == 6 * blocks.sum()


def test_the_tiles_of_a_released_file_keep_their_meaning():
    found = kf.storage.inspect(FOLDER / "version2_tiles.freeze")
    assert [row.tile for row in found.rows] == [None, None, (5, 4), None, (5, 4), *[None] * 3]
    mask = kf.FreezeMask.load(FOLDER / "version2_tiles.freeze")
    assert [int(entry.trained.sum()) for entry in mask.entries] == [24, 93, 188]


def test_a_released_file_trains_on():
    keras.utils.set_random_seed(0)
    model = kf.load(FOLDER / "version1_keep.freeze")
    assert int(model.optimizer.iterations) == 12
    x = np.random.default_rng(0).normal(size=(16, 8, 8, 1)).astype("float32")
    model.fit(x, np.arange(16) % 4, verbose=0)
    assert int(model.optimizer.iterations) == 13


@pytest.mark.parametrize("name", MASKS)
def test_released_masks_keep_loading(name):
    mask = kf.FreezeMask.load(FOLDER / name)
    assert mask == kf.FreezeMask.load(FOLDER / "version1_settings.freeze")
    assert mask.paths == ("lenet/fc1/kernel", "lenet/fc2/kernel", "lenet/fc3/kernel")
    assert (mask.num_trained, mask.num_rescued) == (89, 0)
    assert all(entry.is_weight for entry in mask.entries)


def test_every_golden_file_is_tested():
    names = {f"{name}.freeze" for name in FILES} | set(MASKS)
    assert {path.name for path in FOLDER.iterdir()} == names
