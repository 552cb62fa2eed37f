"""Where the values of a variable come from that are not in the file."""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

from keras_freeze import initializers
from keras_freeze.storage.bits import as_bits, from_bits, numpy_dtype
from keras_freeze.storage.errors import FreezeFileError
from keras_freeze.storage.header import BASE, CONSTANT, INITIALIZER, SEED, WIDTHS, Source
from keras_freeze.storage.network import bits_of, dtype_of

Wanted = tuple[Source, tuple[int, ...], str]
"""A source, and the shape and dtype of the variable."""


def source_of(layer: Any, attribute: str) -> Source | None:
    """The source that a layer's initializer is, if it gives the same values again; else None."""
    initializer: Any = getattr(layer, attribute, None)
    for name, distribution in initializers.DISTRIBUTIONS.items():
        if type(initializer) is distribution:
            return Source(SEED, name, initializer.seed, initializer.stream)
    is_known = type(initializer) is initializers.ConstantSigma
    if not is_known and not type(initializer).__module__.startswith("keras."):
        return None
    config = initializer.get_config()
    if "seed" in config:
        # One that was made without a seed has drawn one, which its config leaves out.
        if not isinstance(getattr(initializer, "seed", None), int):
            return None
        config["seed"] = initializer.seed
    if isinstance(layer, keras.layers.EinsumDense) and config.get("input_axes", 0) is None:
        # It tells its initializer which axes of the kernel are outputs.
        kernel, outputs = layer.equation.split(",")[1].split("->")
        config["output_axes"] = [i for i, axis in enumerate(kernel) if axis in outputs]
        config["input_axes"] = [i for i, axis in enumerate(kernel) if axis not in outputs]
    initializer = type(initializer).from_config(config)
    return Source(INITIALIZER, config=keras.initializers.serialize(initializer))


def initializer_of(source: Source) -> keras.initializers.Initializer:
    """The initializer that a source of kind `SEED` or `INITIALIZER` describes.

    Raises:
        FreezeFileError: if there is none.
    """
    if source.kind == SEED:
        if source.distribution not in initializers.DISTRIBUTIONS:
            raise FreezeFileError(f"There is no distribution {source.distribution!r}.")
        return initializers.DISTRIBUTIONS[source.distribution](source.seed, source.stream)
    try:
        initializer = keras.initializers.deserialize(source.config)
    except Exception as error:  # Keras raises anything for a config that is not one
        raise FreezeFileError(f"Keras cannot make the initializer {source.config}.") from error
    if not isinstance(initializer, keras.initializers.Initializer):
        raise FreezeFileError(f"Keras makes no initializer of {source.config}.")
    return initializer


def regenerate(wanted: Sequence[Wanted], base: Sequence[Any] | None = None) -> list[np.ndarray]:
    """The values that sources give, as vectors of bit patterns.

    Args:
        wanted: sources, with the shapes and dtypes of their variables.
        base: the variables of the base.

    Raises:
        FreezeFileError: for a source that gives no such values.
    """
    with ThreadPoolExecutor() as executor:
        return list(executor.map(lambda one: _regenerate(one[0], one[1], one[2], base), wanted))


def guess(wanted: Sequence[Wanted], base: Sequence[Any] | None) -> list[np.ndarray | None]:
    """As `regenerate`, with None for a source that gives no such values."""

    def attempt(one: Wanted) -> np.ndarray | None:
        try:
            return _regenerate(one[0], one[1], one[2], base)
        except FreezeFileError:
            return None

    with ThreadPoolExecutor() as executor:
        return list(executor.map(attempt, wanted))


def scaled(bits: np.ndarray, dtype: str, factor: float) -> np.ndarray:
    """Values times FreezeNet-WD's factor, rounded once; all as bit patterns."""
    values = from_bits(bits, dtype)
    return as_bits(values * values.dtype.type(factor), dtype)


def _regenerate(
    source: Source, shape: tuple[int, ...], dtype: str, base: Sequence[Any] | None
) -> np.ndarray:
    if source.kind == CONSTANT:
        return np.full(math.prod(shape), source.pattern, f"u{WIDTHS[dtype]}")
    if source.kind == BASE:
        return _from_base(source.index, shape, dtype, base or ())
    initializer = initializer_of(source)
    if isinstance(initializer, initializers.SeededInitializer):
        return as_bits(initializer.values(shape).astype(numpy_dtype(dtype)), dtype)
    try:
        values = keras.ops.convert_to_numpy(initializer(shape, dtype=dtype))
        if (values.shape, values.dtype) != (shape, numpy_dtype(dtype)):
            raise ValueError(f"they are {values.dtype} of shape {values.shape}")
        return as_bits(values, dtype)
    except Exception as error:  # as above
        raise FreezeFileError(
            f"Keras's initializer {source.config} gives no {dtype} values of shape {shape}: {error}"
        ) from error


def _from_base(index: int, shape: tuple[int, ...], dtype: str, base: Sequence[Any]) -> np.ndarray:
    if index >= len(base) or (tuple(base[index].shape), dtype_of(base[index])) != (shape, dtype):
        raise FreezeFileError(f"The base has no variable {index} of shape {shape} and {dtype}.")
    return bits_of(base[index])
