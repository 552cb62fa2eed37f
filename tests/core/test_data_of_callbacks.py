"""The data that callbacks are given: of every kind that `fit` takes, checked before training."""

import tracemalloc

import keras
import numpy as np
import pytest
import scipy.sparse
from helpers import blobs, compiled, sgd, two_dense_layers

import keras_freeze as kf
from keras_freeze.callbacks import GradientFlowHistory, RegrowTrained

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)

X, Y = blobs()
SPARSE = ["csr_matrix", "csc_matrix", "coo_matrix", "lil_array", "csc_array", "coo_array"]


class Pieces(keras.utils.PyDataset):
    def __init__(self, x):
        super().__init__()
        self.x = x

    def __len__(self):
        return len(Y) // 12

    def __getitem__(self, index):
        rows = slice(12 * index, 12 * index + 12)
        return self.x[rows], Y[rows]


class Watch(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.masks = []

    def on_train_batch_end(self, batch, logs=None):
        self.masks.append(kf.get_mask(self.model))


def masks_of(x=X, y=Y, model=two_dense_layers, **arguments):
    """The masks that RegrowTrained chooses with these data, in training with others."""
    keras.utils.set_random_seed(0)
    network = compiled(model(), kf.FreezeOptimizer(sgd(), 0.5))
    of_network = X if len(network.inputs) == 1 else {"a": X[:, :4], "b": X[:, 4:]}
    kf.freeze(network, of_network, Y)
    watch = Watch()
    callbacks = [RegrowTrained(0.4, 2, x=x, y=y, **arguments), watch]
    network.fit(of_network, Y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
    assert watch.masks[-1] != watch.masks[0]
    return watch.masks


def two_inputs():
    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    x = keras.layers.Dense(8, "tanh", name="fc")(keras.layers.Concatenate()([a, b]))
    return keras.Model({"a": a, "b": b}, keras.layers.Dense(3, name="head")(x))


@pytest.mark.cases(1)
@pytest.mark.parametrize("batch_size", [None, 12, 100])
@pytest.mark.parametrize("kind", SPARSE)
def test_masks_move_by_sparse_matrices_as_by_dense_ones(kind, batch_size):
    x = np.where(X > 0, X, 0.0)
    sparse = getattr(scipy.sparse, kind)(x.astype("float64"))
    assert masks_of(sparse, batch_size=batch_size) == masks_of(x, batch_size=batch_size)


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("batch_size", [None, 12])
@pytest.mark.parametrize("kind", ["tensors", "float64", "strided", "masked arrays"])
def test_masks_move_by_every_kind_of_array(kind, batch_size):
    kinds = {
        "tensors": keras.ops.convert_to_tensor,
        "float64": lambda array: array.astype("float64") if array.ndim > 1 else array,
        "strided": lambda array: np.repeat(array, 2, axis=0)[::2],
        "masked arrays": np.ma.masked_array,
    }
    convert = kinds[kind]
    expected = masks_of(batch_size=batch_size)
    assert masks_of(convert(X), convert(Y), batch_size=batch_size) == expected


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("kind", ["arrays", "tensors", "sparse"])
def test_masks_move_by_dicts_of_arrays(kind):
    convert = {
        "arrays": np.asarray,
        "tensors": keras.ops.convert_to_tensor,
        "sparse": scipy.sparse.coo_array,
    }[kind]
    inputs = {"a": X[:, :4], "b": X[:, 4:]}
    expected = masks_of(inputs, model=two_inputs, batch_size=12)
    given = {name: convert(array) if name == "b" else array for name, array in inputs.items()}
    if kind != "sparse" or keras.backend.backend() == "torch":  # else it cannot be concatenated
        assert masks_of(given, model=two_inputs, batch_size=12) == expected


@pytest.mark.same_on_all
def test_masks_move_by_batches_of_a_dataset():
    expected = masks_of(X[:24], Y[:24])
    assert masks_of(Pieces(X), None, steps=2) != masks_of(Pieces(X), None)
    assert masks_of([X[:24]], Y[:24]) == expected
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(24)
        assert masks_of(data, None) == expected


@pytest.mark.same_on_all
@pytest.mark.parametrize("make", [RegrowTrained, GradientFlowHistory])
def test_data_are_checked_without_copies(make):
    x, y = np.zeros((1000, 1000), "float64"), np.zeros(1000, "int64")
    make(x=x, y=y)
    tracemalloc.start()
    callback = make(x=x, y=y, batch_size=10)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < x.nbytes / 20
    assert callback is not None


@pytest.mark.same_on_all
@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.array([{}] * len(Y)), ValueError, "`x` must be arrays of numbers"),
        ({"a": X, "b": np.array([{}] * len(Y))}, ValueError, "`x` must be arrays of numbers"),
        ([X, X[1:]], ValueError, r"of one length.*47 and 48"),
        (scipy.sparse.csc_array(X[1:]), ValueError, r"of one length.*47 and 48"),
        (scipy.sparse.coo_array(X[:, 0]), ValueError, "a sparse array of scipy has two dimensions"),
        (X.tolist(), ValueError, "use np.asarray for a list of numbers"),
        (iter([(X, Y)]), TypeError, "can be read again"),
        ((pair for pair in [(X, Y)]), TypeError, "can be read again"),
        ("x", TypeError, "arrays or a dataset of batches"),
        (dict, TypeError, "arrays or a dataset of batches"),
    ],
)
@pytest.mark.parametrize("batch_size", [None, 8])
@pytest.mark.parametrize("make", [RegrowTrained, GradientFlowHistory])
def test_data_that_cannot_be_used_are_refused_before_training(make, batch_size, x, error, message):
    with pytest.raises(error, match=message):
        make(x=x, y=Y, batch_size=batch_size)
