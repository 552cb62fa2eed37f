"""What two devices of JAX exchange in a training step, with `keras.distribution.DataParallel`."""

import json

import collectives
import keras
import numpy as np
import pytest
from helpers import crossentropy, values_of
from keras import layers
from processes import HIDE_TENSORFLOW, run_python

import keras_freeze as kf
from keras_freeze import _keras_private

pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="keras.distribution is for JAX"),
    pytest.mark.slow,
]

SIZE = 12
KINDS = ("convolutions", "attention", "embedding", "regularized", "mixed_float16", "several")


def network(kind):
    keras.utils.set_random_seed(3)
    normalized = (
        [layers.BatchNormalization(), layers.Dropout(0.2)] if kind == "convolutions" else []
    )
    if kind == "attention":
        x = keras.Input((8, 6))
        attended = layers.MultiHeadAttention(2, 4)(x, x)
        return keras.Model(
            x, layers.Dense(4)(layers.Flatten()(layers.LayerNormalization()(attended)))
        )
    if kind == "embedding":
        body = [keras.Input((8,)), layers.Embedding(16, 6), layers.Flatten()]
        return keras.Sequential([*body, layers.Dense(4)])
    regularizer = "l2" if kind == "regularized" else None
    return keras.Sequential([
        keras.Input((8, 6)),
        layers.Conv1D(6, 3, strides=2, activation="relu", kernel_regularizer=regularizer),
        *normalized,
        layers.SeparableConv1D(5, 2), layers.Flatten(), layers.Dense(4),
    ])  # fmt: skip


def data(kind):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4 * SIZE, 8, 6)).astype("float32")
    y = x[:, 0, :4].argmax(axis=1)
    if kind == "embedding":
        x = rng.integers(0, 16, size=(4 * SIZE, 8))
    return x, y, rng.uniform(0.5, 2.0, size=len(x)).astype("float32")


def trained(kind):
    """A model after four steps of `fit` with sample weights."""
    policy = kind if kind.startswith("mixed") else "float32"
    keras.config.set_dtype_policy(policy)
    try:
        model = network(kind)
        optimizer = kf.FreezeOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), freeze_rate=0.75)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
        if kind == "several":
            inner = optimizer
            optimizer = keras.optimizers.MultiOptimizer(lambda variable: inner)
        model.compile(optimizer, crossentropy(), weighted_metrics=["accuracy"])
    finally:
        keras.config.set_dtype_policy("float32")
    x, y, weights = data(kind)
    kf.freeze(model, x[:SIZE], y[:SIZE])
    history = model.fit(x, y, SIZE, sample_weight=weights, shuffle=False, verbose=0)
    return model, history.history


def num_exchanged(model, kind):
    """How many numbers two devices exchange in the step that `fit` compiles."""
    import jax

    def of_all(part):
        layout = keras.distribution.distribution().get_data_layout(part.shape).backend_layout
        return jax.device_put(part[:SIZE], layout)

    state = _keras_private.state_of(model, is_taken=False)
    step = jax.jit(model.train_step).lower(state, tuple(map(of_all, data(kind))))
    return collectives.num_exchanged(step.compile().as_text())


def main(path):
    """Trains every kind on two devices and writes what comes of it."""
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    found = {}
    for kind in KINDS:
        model, history = trained(kind)
        found.update({f"{kind}-{i}": v for i, v in enumerate(values_of(model.variables))})
        found[f"{kind}-history"] = json.dumps(history)
        found[f"{kind}-exchanged"] = num_exchanged(model, kind)
    np.savez(path, **found)


@pytest.fixture(scope="module")
def on_two_devices(tmp_path_factory):
    path = tmp_path_factory.mktemp("devices") / "results.npz"
    code = f"{HIDE_TENSORFLOW}import test_compact_sums_of_jax as tests; tests.main(*sys.argv[1:])"
    flag = "--xla_force_host_platform_device_count=2"
    run_python(code, path, XLA_FLAGS=flag, JAX_PLATFORMS="cpu")
    with np.load(path) as results:
        return dict(results)


@pytest.mark.parametrize("kind", KINDS)
def test_two_devices_exchange_what_is_trained_and_train_as_one(kind, on_two_devices):
    model, history = trained(kind)
    tolerance = 1e-2 if kind == "mixed_float16" else 1e-4
    for name, values in json.loads(str(on_two_devices[f"{kind}-history"])).items():
        np.testing.assert_allclose(values, history[name], rtol=tolerance)
    for i, value in enumerate(values_of(model.variables)):
        other = on_two_devices[f"{kind}-{i}"]
        np.testing.assert_allclose(other, value, rtol=tolerance, atol=tolerance / 10)
    counts = [row.num_trained for row in kf.report(model).rows]
    sizes = [row.size for row in kf.report(model).rows]
    expected = sum(counts)
    if kind in ("embedding", "regularized"):  # whose first layer is not restricted
        expected += sizes[0] - counts[0]
    if kind == "convolutions":  # sums for the statistics of BatchNormalization, and their gradients
        expected += 4 * 6
    if kind == "several":  # a MultiOptimizer takes dense gradients alone
        expected = sum(sizes)
    assert on_two_devices[f"{kind}-exchanged"] == expected
