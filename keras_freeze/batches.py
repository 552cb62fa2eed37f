"""The batches of data that a model is looked at with, from whatever `fit` takes."""

import functools
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops, tree

# (x, y, sample_weight, weight of the batch in the sum)
Batch = tuple[Any, Any, Any, float]


class Batches:
    """The first batches of a data set, or arrays as one batch.

    Args:
        x, y, sample_weight: arrays, or structures of arrays, of one batch; or a dataset as `x`.
        steps: how many batches of a dataset.
        batch_size: splits arrays into pieces, each with its share of the batch as its weight.

    Raises:
        ValueError: for empty data, lengths that differ, or a dataset of fewer batches.
        TypeError: for `x` that is neither, or `steps` or `batch_size` that are not positive ints.
    """

    def __init__(
        self, x: Any, y: Any, sample_weight: Any, steps: int, batch_size: int | None
    ) -> None:
        if x is None or isinstance(x, str):
            raise TypeError(
                f"Argument `x` must be arrays or a dataset of batches. Received: x={x!r}"
            )
        _check_positive("steps", steps)
        if batch_size is not None:
            _check_positive("batch_size", batch_size)
        if _is_dataset(x):
            given = {"y": y, "sample_weight": sample_weight, "batch_size": batch_size}
            wrong = [name for name, value in given.items() if value is not None]
            if wrong:
                raise ValueError(
                    f"With a dataset as `x`, {' and '.join(wrong)} must be None: the dataset "
                    "gives batches of inputs, targets and sample weights."
                )
            self._batches = _dataset_batches(x, steps)
        else:
            if steps != 1:
                raise ValueError(
                    "Arrays are one batch; `steps` is for datasets. Received: "
                    f"steps={steps} with arrays."
                )
            self._batches = _array_batches(x, y, sample_weight, batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"Argument `{name}` must be a positive int. Received: {name}={value!r}")
    if value < 1:
        raise ValueError(f"Argument `{name}` must be a positive int. Received: {name}={value!r}")


def _is_dataset(x: Any) -> bool:
    if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)):
        return True
    is_array = hasattr(x, "shape") or isinstance(x, (list, tuple, Mapping))
    return isinstance(x, Iterable) and not is_array


def _dataset_batches(dataset: Any, steps: int) -> list[Batch]:
    if isinstance(dataset, keras.utils.PyDataset):
        number = dataset.num_batches
        number = steps if number is None else min(number, steps)
        items: Iterable[Any] = (dataset[index] for index in range(number))
    else:
        items = islice(iter(dataset), steps)
    batches = []
    for item in items:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(item)
        batches.append((_tensors(x), _tensors(y), _tensors(sample_weight), 1.0))
    if len(batches) < steps:
        raise ValueError(
            f"Argument `x` must be a dataset of at least steps={steps} batches. "
            f"Received: a dataset of {len(batches)} batches."
        )
    return batches


def _array_batches(x: Any, y: Any, sample_weight: Any, batch_size: int | None) -> list[Batch]:
    data = tuple(_tensors(part) for part in (x, y, sample_weight))
    sizes = sorted(
        {int(a.shape[0]) if len(a.shape) else 0 for a in tree.flatten(data) if a is not None}
    )
    if len(sizes) != 1 or sizes[0] == 0:
        raise ValueError(
            "Arguments `x`, `y` and `sample_weight` must be arrays of one length of at least 1; a "
            "list or a dict is a structure of arrays, so use np.asarray for a list of numbers. "
            f"Received: arrays of length {' and '.join(map(str, sizes))}."
        )
    size = sizes[0]
    if batch_size is None:
        return [(*data, 1.0)]
    batches = []
    for start in range(0, size, batch_size):
        rows = slice(start, min(start + batch_size, size))
        piece = tree.map_structure(functools.partial(_take, rows), data)
        batches.append((*piece, (rows.stop - rows.start) / size))
    return batches


def _take(rows: slice, array: Any) -> Any:
    return None if array is None else array[rows]


def _tensors(data: Any) -> Any:
    """Arrays as tensors of the dtypes that `fit` gives them."""

    def convert(value: Any) -> Any:
        if value is None or isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
            return value
        if not tf.is_tensor(value):
            value = np.asarray(value)
            if np.issubdtype(value.dtype, np.floating):
                value = value.astype(keras.config.floatx())
        return ops.convert_to_tensor(value)

    return tree.map_structure(convert, data)
