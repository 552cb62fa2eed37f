"""Single entries of a variable, read and replaced outside of training steps."""

import keras
import ml_dtypes
import numpy as np
import pytest

from keras_freeze import backend

DTYPES = ["float32", "float16", "bfloat16", "float64"]


def with_any_bits(shape, dtype, seed=0):
    """Values of all kinds, NaN with different bits included."""
    dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(seed)
    if dtype.itemsize == 8:  # JAX holds float32 instead
        return rng.normal(size=shape).astype(np.float32).astype(dtype)
    return rng.integers(0, 2 ** (8 * dtype.itemsize), shape, f"u{dtype.itemsize}").view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("places", [[], [4], [0, 3, 7, 14], list(range(15))], ids=len)
def test_only_the_entries_that_are_given_are_replaced(dtype, places):
    before, after = with_any_bits((3, 5), dtype), with_any_bits((3, 5), dtype, seed=1)
    variable = keras.Variable(np.zeros((3, 5)), dtype=dtype)
    backend.assign(variable, before)
    places = np.array(places, np.int32)
    backend.assign_at(variable, places, after.reshape(-1)[places])
    expected = before.copy()
    expected.reshape(-1)[places] = after.reshape(-1)[places]
    found = backend.to_numpy(variable)
    assert found.dtype == expected.dtype
    assert found.tobytes() == expected.tobytes()
    entries = backend.values_at(variable, places)
    assert entries.dtype == expected.dtype
    assert entries.tobytes() == expected.reshape(-1)[places].tobytes()


def test_a_scalar_has_one_entry():
    variable = keras.Variable(2.0)
    backend.assign_at(variable, np.array([0]), np.array([3.0], np.float32))
    assert backend.values_at(variable, np.array([0])) == [3.0]
    assert backend.to_numpy(variable).shape == ()
