"""Values as bit patterns, unsigned integers of their width; needs no Keras."""

import zlib
from typing import Any

import ml_dtypes
import numpy as np

from keras_freeze.storage.header import WIDTHS


def as_bits(values: Any, dtype: str) -> np.ndarray:
    """Values of a dtype as a vector of bit patterns."""
    array = np.ascontiguousarray(np.asarray(values)).reshape(-1)
    return array.view(f"u{WIDTHS[dtype]}")


def from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    """The values of bit patterns."""
    return bits.view(numpy_dtype(dtype))


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy's dtype for a name of Keras's."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def little_endian(bits: np.ndarray) -> Any:
    """Bit patterns as a buffer of bytes, the same on every machine."""
    return np.ascontiguousarray(bits, bits.dtype.newbyteorder("<")).data


def checksum(bits: np.ndarray) -> int:
    """CRC-32 of bit patterns as little-endian bytes."""
    return zlib.crc32(little_endian(bits))
