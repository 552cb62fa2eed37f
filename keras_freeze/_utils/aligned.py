"""NumPy arrays whose memory TensorFlow and JAX take over rather than copy."""

from typing import Any

import numpy as np

_ALIGNMENT = 64  # bytes: what the widest instructions of processors ask for


def with_entries(array: np.ndarray, indices: np.ndarray, values: Any) -> np.ndarray:
    """Return an aligned copy of an array that has `values` at flat `indices`."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    copy.reshape(-1)[indices.astype(np.intp, copy=False)] = values  # int32 takes twice as long
    return copy
