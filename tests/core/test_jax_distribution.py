"""One model on two devices of JAX: `keras.distribution`'s data and model parallelism."""

import keras
import numpy as np
import pytest
from axes import WAYS
from helpers import blobs, crossentropy, same_bits, value_of, values_of
from processes import HIDE_TENSORFLOW, run_python

import keras_freeze as kf

pytestmark = [
    pytest.mark.skipif(keras.backend.backend() != "jax", reason="keras.distribution is for JAX"),
    pytest.mark.cases(2),
    pytest.mark.slow,
]

BATCH = 12
INNER = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
}
# AdamW has no "decay".
CASES = [
    (way, inner, frozen)
    for way in WAYS
    for inner, frozen in (("sgd", "keep"), ("sgd", "zero"), ("sgd", "decay"), ("adamw", "keep"))
]
MOVING = ("moving", "sgd", "keep")


def model_after_training(way, inner, frozen):
    """A model after a pass of `fit`, and its first values."""
    dense = keras.layers.Dense
    layers = [dense(8, activation="tanh", name="body"), dense(4, name="head")]
    model = keras.Sequential([keras.Input((6,)), *layers])
    kf.reinitialize(model, seed=3)
    optimizer = kf.FreezeOptimizer(
        INNER[inner](), 0.75, frozen_weights=frozen, l2=0.1 if frozen == "decay" else 0.0
    )
    model.compile(optimizer=optimizer, loss=crossentropy())
    x, y = blobs()
    before = values_of(model.trainable_variables)
    if way != "first_batch":
        kf.freeze(model, x[:BATCH], y[:BATCH])
    regrow = kf.callbacks.RegrowTrained(0.5, 1, x=x, y=y, batch_size=BATCH, end=3)
    callbacks = [regrow] if way == "moving" else []
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    return model, before


def set_distribution(kind):
    devices = keras.distribution.list_devices()
    assert len(devices) == 2
    if kind == "data":
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
        return
    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), devices)
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*body.*kernel"] = (None, "model")
    layout[".*body/bias"] = ("model",)
    layout[".*head.*kernel"] = ("model", None)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    )


def main(kind, path):
    """Trains every case on two devices and writes what comes of it."""
    set_distribution(kind)
    results = {}
    for case in [*CASES, MOVING]:
        model, _ = model_after_training(*case)
        kernel = model.layers[0].kernel.value
        parts = {shard.data.shape for shard in kernel.addressable_shards}
        assert len(kernel.sharding.device_set) == 2
        assert parts == ({(6, 8)} if kind == "data" else {(6, 4)})
        for i, variable in enumerate(model.trainable_variables):
            results["-".join([*case, str(i)])] = value_of(variable)
        for entry in kf.get_mask(model).entries:
            results["-".join([*case, f"mask{entry.position}"])] = entry.trained
    np.savez(path, **results)


@pytest.fixture(scope="module", params=["data", "model"])
def on_two_devices(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("devices") / "results.npz"
    code = f"{HIDE_TENSORFLOW}import test_jax_distribution as tests; tests.main(*sys.argv[1:])"
    flag = "--xla_force_host_platform_device_count=2"
    run_python(code, request.param, path, XLA_FLAGS=flag, JAX_PLATFORMS="cpu")
    with np.load(path) as results:
        return dict(results)


@pytest.mark.parametrize(("way", "inner", "frozen"), [*CASES, MOVING])
def test_two_devices_train_as_one(way, inner, frozen, on_two_devices):
    model, before = model_after_training(way, inner, frozen)
    prefix = f"{way}-{inner}-{frozen}-"
    for entry in kf.get_mask(model).entries:
        mask = on_two_devices[f"{prefix}mask{entry.position}"]
        assert np.array_equal(mask, entry.trained)
        after, start = on_two_devices[prefix + str(entry.position)], before[entry.position]
        if frozen == "keep":
            assert same_bits(after[~mask], start[~mask])
        elif frozen == "zero":
            assert not after[~mask].any()
        else:
            assert (np.abs(after) < np.abs(start))[~mask].all()
    for i, value in enumerate(values_of(model.trainable_variables)):
        np.testing.assert_allclose(on_two_devices[prefix + str(i)], value, rtol=1e-4, atol=1e-6)
        assert np.abs(value - before[i]).max() > 1e-3
