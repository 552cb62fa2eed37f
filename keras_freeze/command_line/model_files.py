"""Models in files: `.keras` or `.freeze`."""

import zipfile

import keras

from keras_freeze._utils.files import replacing
from keras_freeze.model_state import is_built
from keras_freeze.storage.container import is_container
from keras_freeze.storage.errors import first_reason
from keras_freeze.storage.loading import load
from keras_freeze.storage.saving import save


def open_model(path: str, compile: bool = False) -> keras.Model:
    """Load a model from a `.keras` or `.freeze` file.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is another kind of file, or cannot be loaded.
    """
    if is_container(path):
        return load(path, compile=compile)
    _check_keras_file(path)
    # The file decides what Keras does here, so that errors of any type are possible.
    try:
        model = keras.models.load_model(path, compile=compile)
    except Exception as error:
        raise ValueError(f"{path!r} cannot be loaded: {_reason(error)}") from error
    if not isinstance(model, keras.Model) or not is_built(model):
        raise ValueError(f"{path!r} does not hold a model that is built.")
    return model


def verify_keras_file(path: str) -> keras.Model:
    """Load a `.keras` file after comparing its parts with their checksums.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If it is damaged, is another kind of file, or cannot be loaded.
    """
    _check_keras_file(path)
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except Exception as error:
        raise ValueError(f"{path!r} is damaged: {first_reason(error)}") from error
    if damaged is not None:
        raise ValueError(f"{path!r} is damaged: its part {damaged!r} does not match its checksum.")
    return open_model(path, compile=True)


def write_model(model: keras.Model, path: str) -> None:
    """Write a model to a `.keras` or `.freeze` file, as the name says.

    Raises:
        OSError: If the file cannot be written.
        ValueError: If such a file cannot hold the model.
    """
    if path.endswith(".freeze"):
        save(model, path, include_frozen=True)
        return
    with replacing(path) as temporary:
        model.save(temporary)


def _reason(error: Exception) -> str:
    """Return what is wrong, without advice that only programs can follow."""
    reason = first_reason(error)
    if "could not locate" in reason.lower():
        what = reason.partition(". ")[0]
        return f"{what}. Import the module that registers it: --import MODULE."
    return reason.partition(" If you trust")[0]  # of lambdas, and how to run them nevertheless


def _check_keras_file(path: str) -> None:
    # Keras would load HDF5 files, too, which it protects less.
    if not path.endswith(".keras") or not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path!r} is neither a `.freeze` file nor a `.keras` file, or it has been cut short."
        )
