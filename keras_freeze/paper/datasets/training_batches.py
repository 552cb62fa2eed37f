"""The batches that a run trains on: the same ones each time it is repeated."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from keras_freeze.paper.datasets.catalog import info
from keras_freeze.paper.datasets.loading import load, load_arrays
from keras_freeze.paper.datasets.sources import import_tensorflow

if TYPE_CHECKING:
    import tensorflow as tf


def training_batches(
    dataset: str, batch_size: int, **source: Any
) -> "Callable[[], tf.data.Dataset]":
    """Return a function whose every call gives the same batches, from the first epoch on.

    Args:
        dataset: a name of `keras_freeze.datasets.NAMES`.
        batch_size: images per batch; the last one of a pass may be smaller.
        **source: `seed`, `data_dir` and `validation_fraction`, as `keras_freeze.datasets.load`
            takes them.
    """
    if info(dataset).augment:
        return functools.partial(load, dataset, batch_size=batch_size, **source)
    constant = import_tensorflow().constant
    images, labels = (constant(array) for array in load_arrays(dataset, **source))
    return functools.partial(batches_in_memory, images, labels, batch_size, source["seed"])


def batches_in_memory(
    images: "tf.Tensor", labels: "tf.Tensor", batch_size: int, seed: int
) -> "tf.data.Dataset":
    """Return batches whose order is new on each pass and depends on the seed and the pass alone."""
    tf = import_tensorflow()
    count = len(labels)
    passes = itertools.count()

    def order() -> Iterator[np.ndarray]:
        yield np.random.default_rng([seed, next(passes)]).permutation(count)

    # Python runs once per epoch; a generator of batches took a fifth more time per step.
    indices = tf.data.Dataset.from_generator(
        order, output_signature=tf.TensorSpec((count,), tf.int64)
    )
    indices = indices.unbatch().batch(batch_size)
    indices = indices.apply(tf.data.experimental.assert_cardinality(-(-count // batch_size)))
    return indices.map(
        lambda chosen: (tf.gather(images, chosen), tf.gather(labels, chosen))
    ).prefetch(tf.data.AUTOTUNE)
