"""NumPy arrays whose memory TensorFlow and JAX take over rather than copy."""

from collections.abc import Sequence

import numpy as np

_ALIGNMENT = 64  # bytes: what the widest instructions of processors ask for


def with_entries(array: np.ndarray, changes: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return an aligned copy of an array with other values at flat indices, set in turn."""
    memory = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    for indices, values in changes:
        copy.reshape(-1)[indices.astype(np.intp, copy=False)] = values  # int32 takes twice as long
    return copy
