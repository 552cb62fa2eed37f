"""`save(base=)` for models that were trained by any means: only what differs from the base."""

import keras
import ml_dtypes
import numpy as np
import pytest
import storage_cases
from delta_cases import assert_same_weights, copy_of, weights
from format_reader import read
from helpers import same_bits, sgd, value_of

import keras_freeze as kf
from keras_freeze._utils.bits import as_bits

pytestmark = pytest.mark.cases(None, tensorflow=0, jax=0)


def base_and_tuned(name="mlp", learning_rate=0.01):
    """A network that was trained, and a copy that was trained on, without a FreezeOptimizer."""
    keras.utils.set_random_seed(3)
    base = storage_cases.MODELS[name]()
    base.compile(optimizer=sgd(0.01), loss="mse")
    x, y = storage_cases.data_for(base)
    storage_cases.train_on(base, x, y)
    tuned = copy_of(base)
    tuned.compile(optimizer=sgd(learning_rate), loss="mse")
    storage_cases.train_on(tuned, x, y + 1)
    return base, tuned


def labelled(model):
    return [(v.path, value_of(v)) for v in model.variables]


@pytest.mark.cases(1)
@pytest.mark.parametrize("share", [1.0, 0.01])
@pytest.mark.parametrize("name", [name for name in storage_cases.MODELS if name != "lora"])
def test_any_trained_model_is_a_delta_on_its_base(name, share, tmp_path):
    base, tuned = base_and_tuned(name)
    rng = np.random.default_rng(0)
    for old, new in zip(weights(base), weights(tuned), strict=True):
        is_changed = rng.random(new.shape) < share
        new.assign(np.where(is_changed, value_of(new), value_of(old)))
    path, values = tmp_path / "d.freeze", labelled(base)
    kf.save(tuned, path, base=base)
    assert_same_weights(kf.load(path, base=base), tuned)
    found = read(path, values).variables  # by the second reader
    for (label, bits), variable in zip(found, tuned.variables, strict=True):
        assert label.endswith("seed_generator_state") or same_bits(bits, value_of(variable)), label
    kf.apply_delta(base, path)
    assert_same_weights(base, tuned)
    kf.remove_delta(base, path)
    for (label, old), variable in zip(values, base.variables, strict=True):
        assert label.endswith("seed_generator_state") or same_bits(old, value_of(variable))


def test_a_few_changed_values_take_a_few_bytes(tmp_path):
    base = kf.models.lenet_300_100(seed=0)
    tuned = copy_of(base)
    kf.save(tuned, tmp_path / "equal.freeze", base=base)
    kernel = value_of(tuned.get_layer("fc1").kernel)
    chosen = np.random.default_rng(0).choice(kernel.size, 100, replace=False)
    kernel.reshape(-1)[chosen] += 1
    tuned.get_layer("fc1").kernel.assign(kernel)
    kf.save(tuned, tmp_path / "d.freeze", base=base)
    sizes = [(tmp_path / f"{name}.freeze").stat().st_size for name in ("equal", "d")]
    # log2 of 235,200 over 100, in bits, to say which; and the values.
    assert sizes[1] - sizes[0] < 100 * (13 / 8 + 4) + 32
    assert_same_weights(kf.load(tmp_path / "d.freeze", base=base), tuned)
    row = kf.storage.inspect(tmp_path / "d.freeze").rows[0]
    assert row.num_stored == 100
    assert row.num_trained is None


def test_values_that_moved_little_take_fewer_bits_than_values(tmp_path):
    base, tuned = base_and_tuned("mlp", learning_rate=1e-4)
    kf.save(tuned, tmp_path / "d.freeze", base=base)
    kf.save(tuned, tmp_path / "whole.freeze")
    sizes = [(tmp_path / f"{name}.freeze").stat().st_size for name in ("d", "whole")]
    assert sizes[0] < 0.75 * sizes[1]


@pytest.mark.cases(1)
@pytest.mark.parametrize("values", ["bfloat16", "float16"])
def test_rounded_changes_are_what_is_rounded(values, tmp_path):
    base, tuned = base_and_tuned("mlp", learning_rate=1e-4)
    kf.save(tuned, tmp_path / "d.freeze", base=base, values=values)
    loaded = kf.load(tmp_path / "d.freeze", base=base)
    dtype = np.dtype(getattr(ml_dtypes, values, values))
    trainable = {v.path for v in tuned.trainable_variables}
    for one, exact, old in zip(weights(loaded), weights(tuned), weights(base), strict=True):
        expected = value_of(exact)
        if exact.path in trainable:
            is_changed = expected != value_of(old)
            expected = np.where(is_changed, expected.astype(dtype).astype("float32"), expected)
        assert same_bits(value_of(one), expected), exact.path
    found = read(tmp_path / "d.freeze", labelled(base)).variables
    for (_, values), one in zip(found, loaded.variables, strict=True):
        assert one.path.endswith("seed_generator_state") or same_bits(values, value_of(one))


def test_a_frozen_network_that_moved_little_stores_differences(tmp_path):
    base = kf.models.lenet_300_100(seed=0)
    tuned = copy_of(base)
    tuned.compile(kf.FreezeOptimizer(sgd(1e-4), 0.9), "sparse_categorical_crossentropy")
    x = np.random.default_rng(0).normal(size=(20, 28, 28, 1)).astype("float32")
    kf.freeze(tuned, x, np.arange(20) % 10)
    tuned.fit(x, np.arange(20) % 10, verbose=0)
    kf.save(tuned, tmp_path / "d.freeze", base=base)
    kf.save(tuned, tmp_path / "alone.freeze")
    sizes = [kf.storage.inspect(tmp_path / f"{n}.freeze").total_bytes for n in ("d", "alone")]
    assert sizes[0] < 0.7 * sizes[1]
    loaded = kf.load(tmp_path / "d.freeze", base=base)
    assert_same_weights(loaded, tuned)
    assert kf.get_mask(loaded) == kf.get_mask(tuned)
    found = read(tmp_path / "d.freeze", labelled(base))
    assert any(entry.get("differences") for entry in found.header["variables"])
    for (_, bits), one in zip(found.variables, loaded.variables, strict=True):
        assert same_bits(bits, value_of(one))


def test_special_values_come_back_bit_for_bit(tmp_path):
    base = keras.Sequential([keras.Input((8,)), keras.layers.Dense(64)])
    tuned = copy_of(base)
    kernel = value_of(base.layers[0].kernel)
    special = np.array(
        [0x7FC00001, 0xFFC00001, 0xFF800000, 0x7F800000, 1, 0x80000001, 0x80000000, 0, 0x7F7FFFFF],
        np.uint32,
    ).view(np.float32)
    kernel.reshape(-1)[: special.size] = special
    tuned.layers[0].kernel.assign(kernel)
    for first, second in ((base, tuned), (tuned, base)):
        kf.save(second, tmp_path / "d.freeze", base=first)
        loaded = kf.load(tmp_path / "d.freeze", base=first)
        expected = as_bits(value_of(second.layers[0].kernel))
        assert np.array_equal(as_bits(value_of(loaded.layers[0].kernel)), expected)
