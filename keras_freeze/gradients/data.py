"""Batches of data from anything that `fit` takes: arrays, datasets and iterables."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_freeze import backend
from keras_freeze._utils.validation import check_int, type_error, value_error

_DEFAULT_BATCH_SIZE = 32  # as in `fit`
_INFINITE_CARDINALITY = -1  # TensorFlow's

# (x, y, sample_weight, weight of the batch in the sum)
Batch = tuple[Any, Any, Any, float]


class Batches:
    """The first batches of a data set, or arrays as one batch.

    Args:
        x, y, sample_weight: arrays, or structures of arrays, of one batch; or a dataset as `x`.
        steps: how many batches of a dataset.
        batch_size: splits arrays into pieces, each with its share of the batch as its weight.

    Attributes:
        items: each batch as `fit` passes it to a `train_step`, and its weight in the sum.

    Raises:
        ValueError: for empty data, lengths that differ, or a dataset of fewer batches.
        TypeError: for `x` that is neither, or `steps` or `batch_size` that are not positive ints.
    """

    def __init__(
        self, x: Any, y: Any, sample_weight: Any, steps: int, batch_size: int | None
    ) -> None:
        _check_data(x)
        check_int("steps", steps, minimum=1)
        if batch_size is not None:
            check_int("batch_size", batch_size, minimum=1)
        if is_dataset(x):
            _check_alone(y=y, sample_weight=sample_weight, batch_size=batch_size)
            self.items = [(_tensors(item), 1.0) for item in _first(_items(x), steps)]
        else:
            if steps != 1:
                raise ValueError(
                    "Arrays are one batch; `steps` is for datasets. Received: "
                    f"steps={steps} with arrays."
                )
            pieces = _pieces(arrays_of(x, y, sample_weight), batch_size)
            self.items = [
                (keras.utils.pack_x_y_sample_weight(*parts), weight) for *parts, weight in pieces
            ]

    @property
    def num_wholes(self) -> int:
        """How many batches these are: pieces of arrays are one."""
        are_pieces = any(weight != 1.0 for _, weight in self.items)
        return 1 if are_pieces else len(self.items)

    @property
    def wholes(self) -> list[list[Batch]]:
        """The batches, each in its pieces."""
        return [list(self)] if self.num_wholes == 1 else [[batch] for batch in self]

    def __iter__(self) -> Iterator[Batch]:
        for item, weight in self.items:
            yield (*keras.utils.unpack_x_y_sample_weight(item), weight)


class Passes:
    """Any number of passes over arrays, cut into batches, or over a dataset, without keeping it.

    Args:
        x, y, sample_weight: as in `Batches`, but arrays may be of any length.
        steps: the first so many batches of each pass; None for all.
        batch_size: of arrays; None for 32, as in `fit`.

    Raises:
        ValueError, TypeError: as `Batches`; for an endless dataset without `steps`; and where a
            pass has fewer than `steps` batches, after the last one.
    """

    def __init__(
        self, x: Any, y: Any, sample_weight: Any, steps: int | None, batch_size: int | None
    ) -> None:
        self._steps = steps
        if steps is not None:
            check_int("steps", steps, minimum=1)
        _check_data(x)
        if not is_dataset(x):
            arrays = arrays_of(x, y, sample_weight)
            if batch_size is None:
                batch_size = _DEFAULT_BATCH_SIZE
            check_int("batch_size", batch_size, minimum=1)
            self._make_pass = functools.partial(_cut, arrays, batch_size)
            return
        _check_alone(y=y, sample_weight=sample_weight, batch_size=batch_size)
        if steps is None and _is_endless(x):
            raise ValueError("Argument `x` is an endless dataset: pass `steps`, too.")
        self._make_pass = functools.partial(_read, x)

    def __iter__(self) -> Iterator[Any]:
        batches = self._make_pass()
        return batches if self._steps is None else _first(batches, self._steps)


def preprocessed(model: keras.Model, x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Return the data that a model's `fit` makes of its arguments before it cuts batches.

    The tasks of KerasHub preprocess what they are given: strings become tokens, images are scaled,
    targets may be made of inputs. All other models get the data unchanged. Arrays are preprocessed
    at once, a dataset batch by batch.
    """
    if not preprocesses(model):
        return x, y, sample_weight
    _check_data(x)
    if is_dataset(x):
        return _PreprocessedDataset(x, model.preprocess_samples), y, sample_weight
    return keras.utils.unpack_x_y_sample_weight(model.preprocess_samples(x, y, sample_weight))


def preprocesses(model: keras.Model) -> bool:
    """Return whether a model's `fit` preprocesses its data, as the tasks of KerasHub do."""
    return hasattr(model, "preprocess_samples") and getattr(model, "preprocessor", None) is not None


class _PreprocessedDataset:
    """The batches of a dataset, preprocessed; read as often as the dataset itself can be."""

    def __init__(self, dataset: Any, preprocess: Callable[..., Any]) -> None:
        self._dataset = dataset
        self._preprocess = preprocess

    def __iter__(self) -> Iterator[Any]:
        for item in _items(self._dataset):
            yield self._preprocess(*keras.utils.unpack_x_y_sample_weight(item))

    @property
    def is_endless(self) -> bool:
        return _is_endless(self._dataset)


def check_readable_again(x: Any) -> None:
    """Raise ValueError for data that can be read only once."""
    if isinstance(x, Iterator):
        raise ValueError(
            "Argument `x` must be arrays, a dataset, or something else that can be read "
            f"twice. Received: an iterator, x={x!r}"
        )


def length_of(data: Any) -> int:
    """Return the number of samples in a batch or in arrays."""
    return int(tree.flatten(data)[0].shape[0])


def _check_data(x: Any) -> None:
    if x is None or isinstance(x, (str, type)):
        raise type_error("x", x, "arrays or a dataset of batches")


def is_dataset(x: Any) -> bool:
    """Return whether data are batches rather than arrays."""
    if isinstance(x, keras.utils.PyDataset):
        return True
    is_array = hasattr(x, "shape") or isinstance(x, (list, tuple, Mapping))
    return isinstance(x, Iterable) and not is_array


def _check_alone(**given: Any) -> None:
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise ValueError(
            f"With a dataset as `x`, {' and '.join(wrong)} must be None: the dataset gives batches "
            "of inputs, targets and sample weights."
        )


def _is_endless(dataset: Any) -> bool:
    if isinstance(dataset, _PreprocessedDataset):
        return dataset.is_endless
    if isinstance(dataset, keras.utils.PyDataset):
        return dataset.num_batches is None
    cardinality = getattr(dataset, "cardinality", None)  # of a tf.data.Dataset
    return cardinality is not None and int(cardinality()) == _INFINITE_CARDINALITY


def _read(dataset: Any) -> Iterator[Any]:
    """Yield (x, y, sample_weight) of each batch in one pass over a dataset."""
    for item in _items(dataset):
        yield tuple(_tensors(part) for part in keras.utils.unpack_x_y_sample_weight(item))


def _items(dataset: Any) -> Iterator[Any]:
    if not isinstance(dataset, keras.utils.PyDataset):
        yield from dataset
        return
    endless = dataset.num_batches is None
    for index in itertools.count() if endless else range(dataset.num_batches):
        item = dataset[index]
        if isinstance(item, list):
            item = tuple(item)
        yield item if isinstance(item, (tuple, dict)) else (item,)


def _first(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """Yield the first batches; raise an error after the last one if there are fewer."""
    count = 0
    for batch in itertools.islice(batches, steps):
        count += 1
        yield batch
    if count < steps:
        raise ValueError(
            f"Argument `x` must be a dataset of at least steps={steps} batches. "
            f"Received: a dataset of {count} batches."
        )


def _cut(arrays: Any, batch_size: int) -> Iterator[Any]:
    """Yield pieces of arrays of one length, as tensors."""
    for start in range(0, length_of(arrays), batch_size):
        yield _tensors_of(take(arrays, slice(start, start + batch_size)))


def arrays_of(x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Return arrays of one length that can be cut; sparse matrices of scipy in their CSR format.

    They are checked by their first rows, without a copy of all that is an array already.

    Raises:
        ValueError, TypeError: as `Batches`.
    """
    _check_data(x)
    parts = {"x": x, "y": y, "sample_weight": sample_weight}
    data = tuple(
        tree.map_structure(functools.partial(_array, name=name), part)
        for name, part in parts.items()
    )
    sizes = sorted(
        {int(a.shape[0]) if len(a.shape) else 0 for a in tree.flatten(data) if a is not None}
    )
    if len(sizes) != 1 or sizes[0] == 0:
        raise ValueError(
            "Arguments `x`, `y` and `sample_weight` must be arrays of one length of at least 1; a "
            "list or a dict is a structure of arrays, so use np.asarray for a list of numbers. "
            f"Received: arrays of length {' and '.join(map(str, sizes))}."
        )
    for name, part in zip(parts, data, strict=True):
        _tensors_of(take(part, slice(0, 1)), name)
    return data


def take(arrays: Any, rows: slice) -> Any:
    """Return some rows of what `arrays_of` returns."""

    def part(array: Any) -> Any:
        if array is None or int(array.shape[0]) <= rows.stop - rows.start:
            return array
        return backend.rows(array, rows) if ops.is_tensor(array) else array[rows]

    return tree.map_structure(part, arrays)


def _pieces(data: tuple[Any, Any, Any], batch_size: int | None) -> list[Batch]:
    size = length_of(data)
    return [(*piece, length_of(piece) / size) for piece in _cut(data, batch_size or size)]


def _tensors(data: Any) -> Any:
    """Convert a batch to tensors as `fit` does, of its dtypes and sparse where its are."""
    return _tensors_of(tree.map_structure(_array, data))


def _tensors_of(arrays: Any, name: str = "x") -> Any:
    return tree.map_structure(functools.partial(_tensor, name=name), arrays)


def _array(value: Any, name: str = "x") -> Any:
    """Convert a value that is no tensor to an array, or to a sparse matrix that can be cut."""
    if value is None or ops.is_tensor(value):
        return value
    if isinstance(value, str):
        raise type_error(name, value, "arrays")
    if _is_scipy(value) and len(value.shape) != 2:
        raise value_error(name, value, "arrays; a sparse array of scipy has two dimensions")
    with _errors_about(name, value):
        return value.tocsr() if _is_scipy(value) else np.asarray(value)


def _tensor(value: Any, name: str) -> Any:
    if value is None or ops.is_tensor(value):
        return value if value is None else ops.convert_to_tensor(value)
    with _errors_about(name, value):
        if np.issubdtype(value.dtype, np.floating):
            value = value.astype(keras.config.floatx())
        if not _is_scipy(value):
            return ops.convert_to_tensor(value)
    return backend.sparse_tensor(value.tocoo())


@contextlib.contextmanager
def _errors_about(name: str, value: Any) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        accepted = f"arrays of numbers, which {keras.backend.backend()} takes as tensors"
        raise value_error(name, value, accepted) from error


def _is_scipy(value: Any) -> bool:
    return type(value).__module__.startswith("scipy.sparse") and hasattr(value, "tocsr")
