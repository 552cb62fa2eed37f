"""Values as bit patterns, which are unsigned integers of the same width."""

import zlib
from typing import Any

import ml_dtypes
import numpy as np

# Bytes of one value, by the names that Keras gives to dtypes.
WIDTHS = {
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint16": 2,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "float64": 8,
    "int64": 8,
    "uint64": 8,
}


def as_bits(values: Any) -> np.ndarray:
    """Return the values of an array as a vector of bit patterns."""
    array = np.ascontiguousarray(values).reshape(-1)
    return array.view(f"u{array.itemsize}")


def from_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Return the values of bit patterns."""
    return bits.view(numpy_dtype(dtype))


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return NumPy's dtype for the name of a Keras dtype."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def rounded_to(bits: np.ndarray, dtype: str, other: str) -> np.ndarray:
    """Return values in another dtype; all as bit patterns."""
    if dtype == other:
        return bits
    with np.errstate(over="ignore"):
        return as_bits(from_bits(bits, dtype).astype(numpy_dtype(other)))


def little_endian(bits: np.ndarray) -> Any:
    """Return bit patterns as a little-endian buffer, the same on every machine."""
    return np.ascontiguousarray(bits, bits.dtype.newbyteorder("<")).data


def checksum(bits: np.ndarray) -> int:
    """Return CRC-32 of bit patterns as little-endian bytes."""
    return zlib.crc32(little_endian(bits))
