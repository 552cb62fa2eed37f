"""The `.freeze` file: what is saved comes back bit for bit, wherever its values come from."""

import os
import subprocess
import sys

import keras
import ml_dtypes
import numpy as np
import pytest
import storage_cases
from helpers import blobs, compiled, same_bits, sgd, value_of, values_of
from keras import layers
from saved_models import METHODS, assert_same_variables, mlp, save_and_load, storage_rows, trained

import keras_freeze as kf
from keras_freeze.storage.keras_model import bits_of, set_bits

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="others have 64 bits at any time")
def test_values_of_64_bits_are_not_rounded_by_jax(tmp_path):
    import jax

    base = storage_cases.MODELS["float64"]()
    before = values_of(base.variables)
    base.save(tmp_path / "base.keras")
    with jax.enable_x64(True):
        kf.save(trained(storage_cases.MODELS["float64"]()), tmp_path / "model.freeze")
        wide = keras.models.load_model(tmp_path / "base.keras")
        kf.save(trained(wide, reinitialize=False), tmp_path / "delta", base=tmp_path / "base.keras")
        assert value_of(kf.load(tmp_path / "model.freeze").variables[0]).dtype == "float64"
    with pytest.raises(kf.storage.FreezeFileError, match="jax_enable_x64"):
        kf.load(tmp_path / "model.freeze")
    with pytest.raises(kf.storage.FreezeFileError, match="jax_enable_x64"):
        kf.storage.apply_delta(base, tmp_path / "delta")
    assert all(map(same_bits, before, values_of(base.variables)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", list(storage_cases.MODELS))
def test_every_kind_of_model_comes_back_as_keras_drew_it(name, tmp_path):
    model = storage_cases.MODELS[name]()
    x, y = storage_cases.data_for(model)
    model.compile(kf.FreezeOptimizer(sgd(), freeze_rate=0.8), loss="mse")
    kf.freeze(model, x, y)
    for variable in model.trainable_variables:  # as if trained, but quicker
        mask = kf.get_mask(model)
        chosen = mask[variable] if variable.path in mask.paths else np.ones(variable.shape, bool)
        variable.assign(np.where(chosen, value_of(variable) * 2 + 1, value_of(variable)))
    assert_same_variables(model, save_and_load(model, tmp_path))


def test_an_untrained_model_takes_hardly_more_than_its_configuration(tmp_path):
    model = kf.models.lenet_300_100(seed=1)
    loaded = save_and_load(model, tmp_path)
    assert_same_variables(model, loaded)
    assert (tmp_path / "model.freeze").stat().st_size < 1200


def test_the_mask_can_be_read_alone(tmp_path):
    model = mlp()
    kf.save(model, tmp_path / "model.freeze")
    mask = kf.FreezeMask.load(tmp_path / "model.freeze")
    assert mask == kf.get_mask(model)
    assert mask.num_rescued == kf.get_mask(model).num_rescued
    other = storage_cases.MODELS["mlp"]()
    assert kf.freeze(compiled(other, loss="mse"), mask=mask) == mask


def test_a_file_without_a_mask_has_none_to_read(tmp_path):
    kf.save(storage_cases.MODELS["mlp"](), tmp_path / "model.freeze")
    with pytest.raises(kf.FreezeFileError, match="without a freezing mask"):
        kf.FreezeMask.load(tmp_path / "model.freeze")


def test_equal_models_give_equal_files(tmp_path):
    for name in "ab":
        keras.utils.set_random_seed(0)
        keras.backend.clear_session()
        kf.save(mlp(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_saving_changes_nothing(tmp_path):
    model = mlp()
    before = values_of(model.variables + model.optimizer.variables)
    kf.save(model, tmp_path / "model.freeze", include_optimizer=True)
    for old, variable in zip(before, model.variables + model.optimizer.variables, strict=True):
        assert same_bits(old, value_of(variable))


@pytest.mark.cases(1)
@pytest.mark.parametrize("distribution", list(kf.initializers.DISTRIBUTIONS))
def test_every_distribution_comes_from_its_seed(distribution, tmp_path):
    model = storage_cases.MODELS["mlp"]()
    kf.reinitialize(model, distribution, seed=11)
    trained(model, reinitialize=False)
    assert_same_variables(model, save_and_load(model, tmp_path))
    rows = kf.storage.inspect(tmp_path / "model.freeze").rows
    assert rows[0].source == f"rest {distribution}, seed 11, stream 0"


@pytest.mark.cases(1)
@pytest.mark.parametrize("method", ["keep", "decay"])
@pytest.mark.parametrize("name", list(kf.initializers.CONSTANTS))
def test_equal_weights_come_back_as_one_constant_and_train_on(name, method, tmp_path):
    model = storage_cases.MODELS["mlp"]()
    kf.reinitialize(model, name)
    optimizer = kf.FreezeOptimizer(sgd(1e-3), 0.8, **METHODS[method])
    trained(model, optimizer=optimizer, reinitialize=False)
    loaded = save_and_load(model, tmp_path)
    assert_same_variables(model, loaded)
    frozen = ~kf.get_mask(model).entries[0].trained
    (value,) = np.unique(value_of(model.layers[1].kernel)[frozen])
    start = np.float32(1.0 if name == "ones" else np.sqrt(2 / (48 + 20)))
    assert value == start if method == "keep" else 0.9 * start < value < start
    assert storage_rows(tmp_path)[0].source == f"rest constant {value}"
    for again in (model, loaded):
        storage_cases.train_on(again, *storage_cases.data_for(again))
    assert_same_variables(model, loaded)
    assert_same_variables(loaded, save_and_load(loaded, tmp_path))


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["standard_normal", "ones", "constant_sigma"])
@pytest.mark.parametrize("method", ["keep", "decay"])
def test_one_frozen_weight_alone_comes_back(name, method, tmp_path):
    model = storage_cases.MODELS["mlp"]()
    kf.reinitialize(model, name, seed=3)
    model.compile(kf.FreezeOptimizer(sgd(1e-3), 0.5, **METHODS[method]), loss="mse")
    kf.freeze(model, mask=lambda weight: np.arange(np.prod(weight.shape)).reshape(weight.shape) > 0)
    storage_cases.train_on(model, *storage_cases.data_for(model))
    assert kf.get_mask(model).num_trained == kf.get_mask(model).num_weights - 2
    assert_same_variables(model, save_and_load(model, tmp_path))


def test_weights_loaded_from_elsewhere_go_into_the_file_on_request(tmp_path):
    model = storage_cases.MODELS["mlp"]()
    model.set_weights([np.random.default_rng(0).normal(size=w.shape) for w in model.get_weights()])
    trained(model, reinitialize=False)
    loaded = save_and_load(model, tmp_path, include_frozen=True)
    assert_same_variables(model, loaded)
    assert kf.get_mask(loaded) == kf.get_mask(model)


@pytest.mark.cases(1)
@pytest.mark.parametrize("values", ["float16", "bfloat16"])
def test_rounded_values_are_those_of_the_dtype(values, tmp_path):
    import ml_dtypes

    model = mlp()
    exact = tmp_path / "exact.freeze"
    kf.save(model, exact)
    loaded = save_and_load(model, tmp_path, values=values)
    mask = kf.get_mask(model).entries[0].trained
    kernel, rounded = value_of(model.layers[1].kernel), value_of(loaded.layers[1].kernel)
    dtype = np.dtype(getattr(ml_dtypes, values, values))
    assert same_bits(rounded[mask], kernel[mask].astype(dtype).astype("float32"))
    assert same_bits(rounded[~mask], kernel[~mask])
    statistics, kept = model.layers[2].moving_mean, loaded.layers[2].moving_mean
    assert same_bits(value_of(statistics), value_of(kept))
    assert (tmp_path / "model.freeze").stat().st_size < exact.stat().st_size


@keras.saving.register_keras_serializable(package="test_storage")
class Linear(layers.Layer):
    """A layer that keeps no initializer."""

    def build(self, input_shape):
        shape = (input_shape[-1], 3)
        self.w = self.add_weight(name="kernel", shape=shape, initializer="glorot_uniform")

    def call(self, inputs):
        return inputs @ self.w


@pytest.mark.cases(1)
@pytest.mark.parametrize("layer", [Linear, lambda: layers.DepthwiseConv1D(3)], ids=["own", "depth"])
def test_seeds_of_reinitialize_are_kept_by_every_layer(layer, tmp_path):
    model = keras.Sequential([keras.Input((8, 6)), layer(), layers.Flatten()])
    kf.reinitialize(model, "xavier_normal", seed=5)  # `Linear` does not keep its own initializer
    trained(model, reinitialize=False)
    loaded = save_and_load(model, tmp_path)
    assert_same_variables(model, loaded)
    assert_same_variables(model, save_and_load(loaded, tmp_path))


def test_quantized_layers_are_saved_whole(tmp_path):
    model = keras.Sequential([keras.Input((8,)), layers.Dense(6), layers.Dense(3)])
    model.quantize("int8")
    assert_same_variables(model, save_and_load(model, tmp_path))


def test_saving_leaves_the_random_state_alone(tmp_path):
    model = mlp()
    keras.utils.set_random_seed(3)
    expected = layers.Dense(2).kernel_initializer.seed
    keras.utils.set_random_seed(3)
    kf.save(model, tmp_path / "model.freeze")
    assert layers.Dense(2).kernel_initializer.seed == expected


def test_lenet_5_caffe_is_as_small_as_promised(tmp_path):
    x, y = kf.datasets.load_arrays("mnist_5k", "train")
    model = kf.models.lenet_5_caffe(seed=0)
    optimizer = kf.FreezeOptimizer(sgd(0.05, momentum=0.9), freeze_rate=0.995, l2=5e-4)
    compiled(model, optimizer, metrics=["accuracy"])
    kf.freeze(model, x[:100], y[:100])
    model.fit(x, y, batch_size=100, verbose=0)
    loaded = save_and_load(model, tmp_path)
    assert_same_variables(model, loaded)
    assert (tmp_path / "model.freeze").stat().st_size <= 12.5 * 1024


def test_the_command_line_prints_what_is_inside(tmp_path):
    path = tmp_path / "model.freeze"
    kf.save(mlp(), path)
    command = [sys.executable, "-m", "keras_freeze", "inspect", str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    inspection = kf.storage.inspect(path)
    assert printed.strip() == str(inspection)
    assert inspection.total_bytes == os.path.getsize(path)
    for part in ("q = 0.8", "fingerprint", "mantissas", "variance_scaling", "seed 5"):
        assert part in printed
    damaged = bytearray(path.read_bytes())
    damaged[80] ^= 1
    path.write_bytes(damaged)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "section 'header'" in done.stderr
    assert "Traceback" not in done.stderr


def test_constants_are_portable(tmp_path):
    kf.save(storage_cases.MODELS["mlp"](), tmp_path / "model.freeze")
    sources = {row.path.split("/")[-1]: row.source for row in storage_rows(tmp_path)}
    assert sources["gamma"] == "rest constant 1.0"
    assert sources["beta"] == "rest zero"


@keras.saving.register_keras_serializable(package="tests")
class Table(keras.layers.Layer):
    """A layer with a table of numbers of any dtype, which are not trained."""

    def __init__(self, table_dtype, **arguments):
        super().__init__(**arguments)
        self.table_dtype = table_dtype

    def build(self, shape):
        self.table = self.add_weight(
            shape=(16, 16), dtype=self.table_dtype, initializer="ones", trainable=False
        )

    def call(self, x):
        return x

    def get_config(self):
        return {**super().get_config(), "table_dtype": self.table_dtype}


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "int8"])
def test_every_bit_pattern_of_a_short_dtype_comes_back(dtype, tmp_path):
    if keras.backend.backend() == "tensorflow" and dtype.startswith("float8"):
        pytest.skip("TensorFlow cannot create such a variable")
    model = keras.Sequential([keras.Input((4,)), Table(dtype), keras.layers.Dense(2)])
    kf.reinitialize(model, seed=1)
    compiled(model)
    kf.freeze(model, *blobs(features=4, classes=2))
    table = next(layer for layer in model.layers if isinstance(layer, Table)).table
    size = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    patterns = np.arange(256).astype(f"uint{8 * size}") * (1 if size == 1 else 257)
    set_bits(table, patterns, dtype)
    expected = bits_of(table)
    assert len(set(expected.tolist())) > 200
    kf.save(model, tmp_path / "model.freeze")
    loaded = kf.load(tmp_path / "model.freeze", custom_objects={"Table": Table})
    table = next(layer for layer in loaded.layers if isinstance(layer, Table)).table
    assert np.array_equal(bits_of(table), expected)
