"""Standardized images, as a `tf.data.Dataset` or as NumPy arrays."""

import functools
import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze._utils.validation import check_bool, check_int, check_one_of, value_error
from keras_freeze.paper.datasets import augmentation, catalog, sources
from keras_freeze.paper.datasets.splitting import check_fraction, split_indices

if TYPE_CHECKING:
    import tensorflow as tf

SPLITS = ("train", "validation", "test")

PathLike = str | os.PathLike[str]


def load(
    name: str,
    *,
    split: str = "train",
    batch_size: int | None = None,
    augment: bool | None = None,
    seed: int = 0,
    data_dir: PathLike | None = None,
    validation_fraction: float | None = None,
) -> "tf.data.Dataset":
    """Load one split of a data set, standardized, batched and ready for `fit`.

    The training split comes in a new random order, with new flips and shifts, on each pass over
    the dataset. Order and draws depend on `seed` and on the number of the pass alone: a second
    dataset loaded with the same seed gives the same batches, pass by pass, whatever else used
    random numbers in between. Validation and test come in a fixed order and are never augmented.
    The images stay in memory as bytes; batches are made from them as they are needed.

    Standardization (the paper, section 4): the mean of the whole training set, validation images
    included, is subtracted and the result divided by the set's deviation; one scalar each for
    MNIST, one per color channel for CIFAR and Tiny ImageNet. Augmentation: each image is
    mirrored left to right with probability 1/2 and moved by up to 4 pixels each way. What moves
    in is zero after standardization, the mean color, as in SNIP's published code.

    Args:
        name: one of `NAMES`. "mnist_5k" needs no network; the others come through
            tensorflow-datasets.
        split: "train", "validation" or "test". Tiny ImageNet's own test images have no labels:
            its 10,000 official validation images are the test split, and validation is held out
            from the training images as for the others.
        batch_size: images per batch; the last one may be smaller. None: the paper's, see `info`.
        augment: whether to flip and shift. None: on for the training split of CIFAR and Tiny
            ImageNet, else off.
        seed: a non-negative integer. It chooses the validation images, the order and the
            augmentation; the test split is the same for every seed.
        data_dir: the folder where TFDS keeps prepared data sets; it may be read-only if the data
            set is prepared. None: TFDS's default. "mnist_5k" ignores it.
        validation_fraction: the share of the training set held out for validation, between 0
            and 1. None: 0.1, the paper's 9/1; for "mnist_5k" 1/9, 500 of its 4,500 images.

    Returns:
        A `tf.data.Dataset` of images, float32 of shape (batch, height, width, channels), and
        labels, int32 of shape (batch,). Its `len` is the number of batches.

    Raises:
        ValueError: an unknown name or split, a number out of range, or `augment=True` on another
            split than "train".
        TypeError: an argument of the wrong type.
        FileNotFoundError: `data_dir` does not exist; or Tiny ImageNet has not been downloaded by
            hand yet, with what to do.
        ConnectionError: the data set is not prepared and its host cannot be reached; raised
            within seconds, with what to do.
        ImportError: an optional package is missing, with what to install; or TensorFlow, which
            `tf.data` needs on every backend.

    Example:
        >>> images, labels = next(iter(load("mnist_5k", split="train", batch_size=32)))
        >>> tuple(images.shape), tuple(labels.shape)
        ((32, 28, 28, 1), (32,))
    """
    facts = catalog.info(name)
    training = check_one_of("split", split, SPLITS) == "train"
    if batch_size is None:
        batch_size = facts.batch_size
    check_int("batch_size", batch_size, minimum=1)
    augment = check_bool("augment", facts.augment and training if augment is None else augment)
    if augment and not training:
        raise value_error("augment", augment, f"False for the split {split!r}")
    tf = sources.import_tensorflow()
    images, labels, members = _select(name, split, seed, data_dir, validation_fraction)
    mean, scale = _statistics(name, _as_text(data_dir))
    passes = itertools.count()

    def batches() -> Iterator[tuple[np.ndarray, ...]]:
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1, next(passes))))
        order = rng.permutation(members) if training else members
        flip, shift = augmentation.draw(rng, len(order))
        for start in range(0, len(order), batch_size):
            stop = start + batch_size
            chosen = order[start:stop]
            yield images[chosen], labels[chosen], flip[start:stop], shift[start:stop]

    def finish(images: Any, labels: Any, flip: Any, shift: Any) -> tuple[Any, Any]:
        standardized = (tf.cast(images, tf.float32) - mean) * scale
        if augment:
            standardized = augmentation.flip_and_shift(standardized, flip, shift)
        return standardized, labels

    signature = (
        tf.TensorSpec((None, *facts.image_shape), tf.uint8),
        tf.TensorSpec((None,), tf.int32),
        tf.TensorSpec((None,), tf.bool),
        tf.TensorSpec((None, 2), tf.int32),
    )
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(-(-len(members) // batch_size)))
    return dataset.map(finish, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def load_arrays(
    name: str,
    split: str = "train",
    *,
    seed: int = 0,
    data_dir: PathLike | None = None,
    validation_fraction: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Load one split of a data set, standardized, as NumPy arrays in memory.

    The images are those of `load`, bit for bit, without augmentation. The training split comes in
    a random order that depends on `seed`, so that its first rows are a random sample.

    The arrays take 4 bytes per value: 170 MB for MNIST's training split, 550 MB for CIFAR's, 4.4 GB
    for Tiny ImageNet's.

    Args:
        name, split, seed, data_dir, validation_fraction: as in `load`.

    Returns:
        Images, float32 of shape (n, height, width, channels), and labels, int32 of shape (n,).
        Both are copies.

    Raises:
        ValueError, TypeError, FileNotFoundError, ConnectionError, ImportError: as in `load`; but
            "mnist_5k" needs no TensorFlow.

    Example:
        >>> x, y = load_arrays("mnist_5k", "test")
        >>> x.shape, y.shape
        ((500, 28, 28, 1), (500,))
    """
    images, labels, members = _select(name, split, seed, data_dir, validation_fraction)
    mean, scale = _statistics(name, _as_text(data_dir))
    standardized = images[members].astype(np.float32)
    standardized -= mean
    standardized *= scale
    return standardized, labels[members]


def _select(
    name: str,
    split: str,
    seed: int,
    data_dir: PathLike | None,
    validation_fraction: float | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return raw images and labels, and the positions of those that make up the split."""
    facts = catalog.info(name)
    check_one_of("split", split, SPLITS)
    check_int("seed", seed)
    fraction = facts.validation_fraction
    if validation_fraction is not None:
        fraction = check_fraction("validation_fraction", validation_fraction)
    part = "test" if split == "test" else "train"
    images, labels = sources.read(name, part, _as_text(data_dir))
    if split == "test":
        return images, labels, np.arange(len(labels))
    training, validation = split_indices(labels, fraction, seed)
    return images, labels, training if split == "train" else validation


@functools.lru_cache(maxsize=4)
def _statistics(name: str, data_dir: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and reciprocal deviation of the whole training set's bytes.

    Both float32, of shape (channels,) where each channel has its own, else of shape (1,).
    """
    images, _ = sources.read(name, "train", data_dir)
    channels = images.shape[-1] if catalog.info(name).per_channel else 1
    values = images.reshape(len(images), -1)
    # Integer sums are exact.
    total = values.sum(axis=0, dtype=np.int64).reshape(-1, channels).sum(axis=0)
    squares = np.einsum("ij,ij->j", values, values, dtype=np.int64)
    squares = squares.reshape(-1, channels).sum(axis=0)
    count = images.size // channels
    mean = total / count
    deviation = np.sqrt(squares / count - mean**2)
    return mean.astype(np.float32), (1 / deviation).astype(np.float32)


def _as_text(data_dir: PathLike | None) -> str | None:
    if data_dir is None:
        return None
    return os.path.abspath(os.path.expanduser(os.fspath(data_dir)))
