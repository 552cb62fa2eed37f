"""TensorFlow, JAX and PyTorch: one seed and one batch, one mask, one network.

Each backend works in a process of its own. Scores differ in their last bits between backends, so
that the data are such that no two scores at the threshold are near each other, which is asserted.
"""

import functools
import importlib.util
import itertools
from pathlib import Path

import keras
import numpy as np
import pytest
from axes import WAYS
from helpers import blobs, crossentropy, same_bits, values_of
from keras import layers as kl
from processes import run_python

import keras_freeze as kf

BACKENDS = ("tensorflow", "jax", "torch")
BATCH, RATE = 16, 0.75

pytestmark = [
    pytest.mark.exhaustive,  # takes two minutes; test_determinism.py has the smallest of it
    pytest.mark.skipif(
        keras.backend.backend() != "tensorflow", reason="once for all backends is enough"
    ),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, BACKENDS)), reason="needs all three backends"
    ),
]


def dense():
    return [keras.Input((6,)), kl.Dense(8, activation="relu"), kl.Dense(3)]


def convolution():
    return [
        keras.Input((7, 7, 2)),
        kl.Conv2D(4, 3, padding="same"),
        kl.BatchNormalization(),
        kl.Activation("tanh"),
        kl.Conv2D(5, 3, strides=2),
        kl.Flatten(),
        kl.Dense(3),
    ]


def recurrent():
    return [keras.Input((5,), dtype="int32"), kl.Embedding(12, 4), kl.LSTM(5), kl.Dense(3)]


class Attention(kl.Layer):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.attention = kl.MultiHeadAttention(2, 3)
        self.norm = kl.LayerNormalization()

    def build(self, shape):
        self.attention.build(shape, shape)
        self.norm.build(shape)

    def call(self, x):
        return self.norm(x + self.attention(x, x))


keras.saving.register_keras_serializable("test_backends_agree")(Attention)


def attention():
    return [keras.Input((5, 4)), Attention(), kl.GlobalAveragePooling1D(), kl.Dense(3)]


NETWORKS = {f.__name__: f for f in (dense, convolution, recurrent, attention)}
FROZEN = ("keep", "zero", "decay")
# Most with the smallest network, and each choice at least once with the others.
CASES = [
    ("dense", *choices)
    for choices in [
        *itertools.product(("snip",), FROZEN, WAYS),
        *itertools.product(("magnitude", "random"), ("keep",), WAYS),
        ("grasp", "keep", "freeze"),
        ("synflow", "zero", "freeze"),
        ("fisher", "keep", "first_batch"),
        ("smallest_magnitude", "keep", "freeze"),
    ]
] + [
    (network, *choices)
    for network in ("convolution", "recurrent", "attention")
    for choices in (
        ("snip", "keep", "freeze"),
        ("snip", "keep", "first_batch"),
        ("grasp", "zero", "freeze"),
        ("magnitude", "decay", "first_batch"),
    )
]
SAVED = [(network, "snip", "keep", "freeze") for network in NETWORKS]


def batches(network):
    x, y = blobs(num=3 * BATCH)
    rng = np.random.default_rng(1)
    if network == "recurrent":
        x = (rng.integers(0, 4, (len(y), 5)) + 4 * y[:, None]).astype("int32")
    elif network != "dense":
        shape = {"convolution": (7, 7, 2), "attention": (5, 4)}[network]
        x = rng.normal(size=(len(y), *shape)) + rng.normal(size=(3, *shape))[y]
        x = x.astype("float32")
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(y), BATCH)]


def fresh_model(network):
    model = keras.Sequential(NETWORKS[network]())
    kf.reinitialize(model, seed=5)
    return model


def train(network, criterion, frozen, way):
    """A model after three steps."""
    model = fresh_model(network)
    optimizer = kf.FreezeOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9),
        RATE,
        criterion=criterion,
        frozen_weights=frozen,
        l2=0.1 if frozen == "decay" else 0.0,
    )
    model.compile(optimizer=optimizer, loss=crossentropy())
    data = batches(network)
    if way == "freeze":
        kf.freeze(model, *data[0])
    for x, y in data:
        model.train_on_batch(x, y)
    return model


@functools.cache
def scores(network, criterion):
    """The scores of all weights of a network before its first step, in order."""
    model = fresh_model(network)
    found = kf.compute_saliency(model, *batches(network)[0], criterion, loss=crossentropy())
    return np.concatenate([array.ravel() for array in found.values()])


def masks_and_values(model):
    entries = kf.get_mask(model).entries
    return {f"mask{e.position}": e.trained for e in entries} | {
        f"value{i}": value for i, value in enumerate(values_of(model.weights))
    }


def name_of(*parts):
    return "-".join(parts)


def write(folder):
    """Trains every case, and keeps what came of it and some of the models."""
    backend = keras.backend.backend()
    for case in CASES:
        model = train(*case)
        results = masks_and_values(model)
        path = Path(folder) / f"{name_of(backend, *case)}.npz"
        np.savez(path, scores=scores(*case[:2]), **results)
        if case in SAVED:
            kf.save(model, Path(folder) / f"{name_of(backend, *case)}.freeze")


def read(folder):
    """Loads all saved models and keeps what was in them, or what was wrong."""
    for path in sorted(Path(folder).glob("*.freeze")):
        try:
            results = masks_and_values(kf.load(path))
        except kf.FreezeFileError as error:
            results = {"error": np.array(str(error))}
        np.savez(path.with_name(f"{keras.backend.backend()}-reads-{path.stem}.npz"), **results)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("backends")
    write(folder)
    for backend in ("jax", "torch"):
        code = "import sys, test_backends_agree as tests; tests.write(sys.argv[1])"
        run_python(code, folder, backend=backend, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    read(folder)
    for backend in ("jax", "torch"):
        code = "import sys, test_backends_agree as tests; tests.read(sys.argv[1])"
        run_python(code, folder, backend=backend, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    return folder


def results_of(folder, *parts):
    with np.load(folder / f"{name_of(*parts)}.npz") as results:
        return dict(results)


def arrays(results, kind):
    return {name: array for name, array in results.items() if name.startswith(kind)}


@functools.cache
def positions(network):
    """For each trainable variable, its place among all weights."""
    model = fresh_model(network)
    places = {id(v): i for i, v in enumerate(model.weights)}
    return [places[id(v)] for v in model.trainable_variables]


def check_gap(all_scores):
    """The two scores next to the threshold are far apart, compared with how backends differ."""
    error = max(np.abs(scores - all_scores[0]).max() for scores in all_scores)
    ordered = np.sort(all_scores[0])[::-1]
    num_trained = round((1.0 - RATE) * ordered.size)
    first, last = ordered[num_trained - 1 : num_trained + 1]
    assert first - last > 10.0 * error, (first - last, error)


@pytest.mark.parametrize("case", CASES, ids=lambda case: name_of(*case))
def test_all_backends_train_the_same_weights_to_the_same_values(case, folder):
    tensorflow, *others = (results_of(folder, backend, *case) for backend in BACKENDS)
    check_gap([results["scores"] for results in (tensorflow, *others)])
    masks, values = arrays(tensorflow, "mask"), arrays(tensorflow, "value")
    assert any(not mask.all() for mask in masks.values())
    for other in others:
        assert arrays(other, "mask").keys() == masks.keys()
        assert all(np.array_equal(other[name], mask) for name, mask in masks.items())
        for name, value in values.items():
            np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=1e-5)
    start, moved = values_of(fresh_model(case[0]).weights), []
    for name, mask in masks.items():
        place = positions(case[0])[int(name.removeprefix("mask"))]
        frozen = [results[f"value{place}"][~mask] for results in (tensorflow, *others)]
        if case[2] == "keep":
            assert all(same_bits(array, start[place][~mask]) for array in frozen)
        elif case[2] == "zero":
            assert all(same_bits(array, np.zeros_like(array)) for array in frozen)
        moved.append(np.abs(values[f"value{place}"] - start[place])[mask].max())
    # By far more than backends may differ; the only trained weight of a layer may move less.
    assert min(moved) > 0
    assert max(moved) > 1e-3


@pytest.mark.parametrize("case", SAVED, ids=lambda c: c[0])
@pytest.mark.parametrize(("writer", "reader"), itertools.permutations(BACKENDS, 2))
def test_a_file_of_one_backend_is_the_same_network_on_another(writer, reader, case, folder):
    saved = results_of(folder, writer, *case)
    loaded = results_of(folder, reader, "reads", writer, *case)
    assert "error" not in loaded, loaded["error"]
    assert loaded.keys() == saved.keys() - {"scores"}
    assert all(same_bits(array, saved[name]) for name, array in loaded.items())
