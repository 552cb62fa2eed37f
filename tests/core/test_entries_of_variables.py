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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scalar_has_one_entry(dtype):
    variable = keras.Variable(2.0, dtype=dtype)
    value = np.array([3.0], backend.to_numpy(variable).dtype)
    assert value.dtype.name == dtype
    backend.assign_at(variable, np.array([0]), value)
    assert backend.values_at(variable, np.array([0])) == value
    assert backend.to_numpy(variable).shape == ()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_read_before_stays(dtype):
    variable = keras.Variable(np.ones((3, 5)), dtype=dtype)
    array, tensor = backend.to_numpy(variable), keras.ops.add(variable, 0)
    view = keras.ops.reshape(variable, (15,))  # it shares the memory of the value
    backend.assign_at(variable, np.array([4]), np.array([3.0], array.dtype))
    assert (array == 1.0).all()
    assert (backend.to_numpy(tensor) == 1.0).all()
    if keras.backend.backend() != "torch":  # whose tensors are changed in place
        assert (backend.to_numpy(view) == 1.0).all()


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="of JAX's arrays")
@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_variable_is_bound_to_its_device_only_if_it_was(dtype, is_bound):
    import jax

    step = jax.jit(lambda value: value + 1, donate_argnums=0)
    variable = keras.Variable(np.zeros((3, 5)), dtype=dtype)
    if is_bound:
        variable.assign(jax.device_put(variable.value, jax.devices()[0]))
    variable.assign(step(variable.value))
    for number in (2, 3):
        values = np.array([10 * number], backend.to_numpy(variable).dtype)
        backend.assign_at(variable, np.array([4]), values)
        assert variable.value.committed == is_bound
        variable.assign(step(variable.value))
        assert backend.values_at(variable, np.array([0, 4])).tolist() == [number, 10 * number + 1]
    assert step._cache_size() == 1
