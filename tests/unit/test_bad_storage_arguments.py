"""Arguments that saving and loading do not accept: refused by name, and nothing is written."""

from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import keras_freeze as kf


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, the same with other biases, and files of both."""
    folder = tmp_path_factory.mktemp("files")
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    kf.reinitialize(model, "xavier_normal", seed=0)
    kf.save(model, folder / "model.freeze")
    other = kf.load(folder / "model.freeze")
    other.layers[0].bias.assign([1.0, 2.0])
    kf.save(other, folder / "delta.freeze", base=model)
    mask = kf.FreezeMask.from_scores([np.arange(6.0)], 0.5)
    mask.save(folder / "mask.freeze")
    return {"model": model, "mask": mask, "folder": folder}


def unbuilt():
    return keras.Sequential([layers.Dense(2)])


NO_PATHS = (None, 3, b"model.freeze", ["model.freeze"], Path, str, object())
NO_BOOLEANS = (None, 0, 1, "True", np.True_, bool)
NO_MODELS = (None, "model", 3, keras.Model, keras.Sequential, layers.Dense(2))

BAD = [
    *((kf.save, "model", value, TypeError) for value in NO_MODELS),
    (kf.save, "model", unbuilt, ValueError),
    *((kf.save, "path", value, TypeError) for value in NO_PATHS),
    *((kf.save, "base", value, TypeError) for value in (3, b"x", ["x"], keras.Model, Path)),
    (kf.save, "base", "missing.keras", FileNotFoundError),
    (kf.save, "base", unbuilt, ValueError),
    *((kf.save, "values", value, ValueError) for value in (None, 16, "float64", "f4", str)),
    (kf.save, "values", kf.storage.Grid, ValueError),
    *((kf.save, "include_optimizer", value, TypeError) for value in NO_BOOLEANS),
    *((kf.save, "include_frozen", value, TypeError) for value in NO_BOOLEANS),
    *((kf.save, "include_compile", value, TypeError) for value in NO_BOOLEANS),
    *((kf.load, "path", value, TypeError) for value in NO_PATHS),
    *((kf.load, "base", value, TypeError) for value in (3, b"x", ["x"], keras.Model, Path)),
    (kf.load, "base", "missing.keras", FileNotFoundError),
    (kf.load, "base", unbuilt, ValueError),
    *((kf.load, "compile", value, TypeError) for value in NO_BOOLEANS),
    *((kf.load, "custom_objects", value, TypeError) for value in (3, "x", [("x", 1)], dict)),
    *((kf.load, "max_bytes", value, TypeError) for value in (1.5, "1", True, [1], int)),
    *((kf.load, "max_bytes", value, ValueError) for value in (0, -1)),
    *((kf.apply_delta, "model", value, TypeError) for value in NO_MODELS),
    (kf.apply_delta, "model", unbuilt, ValueError),
    *((kf.apply_delta, "path", value, TypeError) for value in NO_PATHS),
    *((kf.remove_delta, "model", value, TypeError) for value in NO_MODELS),
    (kf.remove_delta, "model", unbuilt, ValueError),
    *((kf.remove_delta, "path", value, TypeError) for value in NO_PATHS),
    *((kf.storage.inspect, "path", value, TypeError) for value in NO_PATHS),
    *((kf.FreezeMask.save, "path", value, TypeError) for value in NO_PATHS),
    *((kf.FreezeMask.load, "path", value, TypeError) for value in NO_PATHS),
]


@pytest.mark.parametrize(("function", "name", "value", "error"), BAD)
def test_bad_arguments_are_refused_by_name(function, name, value, error, files, tmp_path):
    folder = files["folder"]
    arguments = {
        kf.save: {"model": files["model"], "path": tmp_path / "new.freeze"},
        kf.load: {"path": folder / ("delta.freeze" if name == "base" else "model.freeze")},
        kf.apply_delta: {"model": files["model"], "path": folder / "delta.freeze"},
        kf.remove_delta: {"model": files["model"], "path": folder / "delta.freeze"},
        kf.storage.inspect: {"path": folder / "model.freeze"},
        kf.FreezeMask.save: {"self": files["mask"], "path": tmp_path / "new.freeze"},
        kf.FreezeMask.load: {"path": folder / "mask.freeze"},
    }[function]
    value = value() if value is unbuilt else value
    with pytest.raises(error, match=rf"Argument `{name}` must .*Received: {name}="):
        function(**{**arguments, name: value})
    assert not list(tmp_path.iterdir())


READERS = (kf.load, kf.storage.inspect, kf.FreezeMask.load)


@pytest.mark.parametrize("read", READERS)
def test_paths_without_a_file_are_named(read, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"missing\.freeze"):
        read(tmp_path / "missing.freeze")
    with pytest.raises(OSError, match=tmp_path.name):
        read(tmp_path)


@pytest.mark.parametrize("write", ["model", "mask"])
def test_places_where_no_file_can_be_are_named(write, files, tmp_path):
    save = files["mask"].save if write == "mask" else lambda path: kf.save(files["model"], path)
    with pytest.raises(FileNotFoundError, match=r"`path` .*missing"):
        save(tmp_path / "missing" / "new.freeze")
    with pytest.raises(IsADirectoryError, match=r"`path` .*folder"):
        save(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("content", [b"", b"\0", b"PK\3\4", b"keras_freeze mask 2\n", b"x" * 200])
def test_other_files_are_named(read, content, tmp_path):
    path = tmp_path / "other.file"
    path.write_bytes(content)
    with pytest.raises(kf.FreezeFileError, match=r"other\.file.* is not a valid `\.freeze` file"):
        read(path)


def test_files_of_another_kind_are_refused(files):
    folder, model = files["folder"], files["model"]
    with pytest.raises(kf.FreezeFileError, match=r"mask\.freeze.*mask only.*FreezeMask\.load"):
        kf.load(folder / "mask.freeze")
    with pytest.raises(kf.FreezeFileError, match=r"mask\.freeze.*mask only"):
        kf.load(folder / "delta.freeze", base=folder / "mask.freeze")
    with pytest.raises(kf.FreezeFileError, match=r"mask\.freeze.*mask only"):
        kf.apply_delta(model, folder / "mask.freeze")
    with pytest.raises(kf.FreezeFileError, match=r"model\.freeze.*without a base"):
        kf.load(folder / "model.freeze", base=model)
    with pytest.raises(kf.FreezeFileError, match=r"model\.freeze.*not a delta"):
        kf.apply_delta(model, folder / "model.freeze")
    with pytest.raises(ValueError, match=r"delta\.freeze.*not applied"):
        kf.remove_delta(model, folder / "delta.freeze")
    with pytest.raises(kf.FreezeFileError, match=r"model\.freeze.*without a freezing mask"):
        kf.FreezeMask.load(folder / "model.freeze")
