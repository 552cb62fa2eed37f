"""The `.freeze` file: what is saved comes back bit for bit, wherever its values come from."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import pytest
import storage_cases
from helpers import blobs, compiled, same_bits, sgd, value_of, values_of
from keras import layers

import keras_freeze as kf
from keras_freeze.initializers.portable import VarianceScaling
from keras_freeze.storage.container import DICTIONARIES, read_container, write_container
from keras_freeze.storage.keras_model import bits_of, set_bits

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)


def trained(model, *, optimizer=None, reinitialize=True, freeze=True):
    """The model, frozen and trained for a few steps."""
    if reinitialize:
        kf.reinitialize(model, seed=5)
    if optimizer is None:
        optimizer = kf.FreezeOptimizer(keras.optimizers.Adam(1e-2), freeze_rate=0.8)
    model.compile(optimizer=optimizer, loss="mse")
    x, y = storage_cases.data_for(model)
    if freeze:
        kf.freeze(model, x, y)
    storage_cases.train_on(model, x, y)
    return model


def mlp(**arguments):
    return trained(storage_cases.MODELS["mlp"](), **arguments)


def assert_same_variables(first, second):
    assert len(first.variables) == len(second.variables)
    for a, b in zip(first.variables, second.variables, strict=True):
        assert same_bits(value_of(a), value_of(b)), a.path


def save_and_load(model, folder, **arguments):
    kf.save(model, folder / "model.freeze", **arguments)
    return kf.load(folder / "model.freeze")


def assert_comes_back_in_a_fresh_process(models, folder):
    """Saves models, loads them elsewhere, and compares outputs and, by name, further training."""
    expected = {}
    for name, model in models.items():
        x, _ = storage_cases.data_for(model)
        kf.save(model, folder / f"{name}.freeze", include_optimizer="optimizer" in name)
        expected[name] = storage_cases.outputs_of(model, x)
    script = Path(storage_cases.__file__)
    subprocess.run([sys.executable, str(script), str(folder)], check=True)
    for name, model in models.items():
        found = np.load(folder / f"{name}.npz")
        assert np.array_equal(found["outputs"], expected[name]), name
        if "optimizer" in name:
            storage_cases.train_on(model, *storage_cases.data_for(model))
            for i, value in enumerate(storage_cases.bytes_of(model)):
                assert np.array_equal(found[f"variable_{i}"], value), (name, i)


@pytest.mark.slow
def test_every_kind_of_model_comes_back_in_a_fresh_process(tmp_path):
    models = {name: trained(make()) for name, make in storage_cases.MODELS.items()}
    assert_comes_back_in_a_fresh_process(models, tmp_path)


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


@pytest.mark.exhaustive
def test_models_as_keras_drew_them_train_on_in_a_fresh_process(tmp_path):
    models = {}
    for name in ("attention", "bidirectional", "convolutional", "mixed_float16", "subclassed"):
        keras.utils.set_random_seed(len(models))
        model = storage_cases.MODELS[name]()
        models[f"{name}-optimizer"] = trained(model, reinitialize=False)
    assert_comes_back_in_a_fresh_process(models, tmp_path)


@pytest.mark.exhaustive
def test_the_networks_of_the_paper_come_back_in_a_fresh_process(tmp_path):
    shapes = {"vgg16_d": (32, 32, 3), "resnet34": (16, 16, 3)}
    models = {}
    for name, make in kf.models.MODELS.items():
        optimizer = kf.FreezeOptimizer(sgd(0.01, momentum=0.9), freeze_rate=0.99)
        model = make(10, shapes.get(name, (28, 28, 1)), seed=3)
        models[name] = trained(model, optimizer=optimizer, reinitialize=False)
    assert_comes_back_in_a_fresh_process(models, tmp_path)


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


METHODS = {
    "keep": {},
    "zero": {"frozen_weights": "zero"},
    "decay": {"frozen_weights": "decay", "l2": 0.05},
}


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("include_optimizer", [False, True])
def test_every_method_comes_back_and_trains_on(method, include_optimizer, tmp_path):
    optimizer = kf.FreezeOptimizer(sgd(0.05, momentum=0.9), 0.8, **METHODS[method])
    model = mlp(optimizer=optimizer)
    loaded = save_and_load(model, tmp_path, include_optimizer=include_optimizer)
    assert_same_variables(model, loaded)
    assert kf.get_mask(loaded) == kf.get_mask(model)
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    data = storage_cases.data_for(model)
    storage_cases.train_on(loaded, *data)
    if include_optimizer:
        storage_cases.train_on(model, *data)
        assert_same_variables(model, loaded)
    # Trained on, it can be saved again.
    assert_same_variables(loaded, save_and_load(loaded, tmp_path))


OPTIMIZERS = {
    "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1),
    "averages": lambda: sgd(0.01, momentum=0.9, use_ema=True),
    "accumulation": lambda: sgd(0.01, gradient_accumulation_steps=2),
    "schedule": lambda: sgd(keras.optimizers.schedules.CosineDecay(0.1, 20), momentum=0.9),
    "schedule_free": lambda: keras.optimizers.ScheduleFreeAdamW(1e-2),
    "lamb": lambda: keras.optimizers.Lamb(1e-2),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("freeze", [True, False], ids=["freeze", "first_batch"])
def test_training_on_from_the_file_is_training_on(name, freeze, tmp_path):
    if (name, keras.backend.backend()) == ("averages", "jax"):
        pytest.skip("plain Keras fails in the second `fit`: variable and average share a buffer")
    model = mlp(optimizer=kf.FreezeOptimizer(OPTIMIZERS[name](), 0.8), freeze=freeze)
    loaded = save_and_load(model, tmp_path, include_optimizer=True)
    for one in (model, loaded):
        storage_cases.train_on(one, *storage_cases.data_for(one))
    assert_same_variables(model, loaded)
    assert kf.get_mask(loaded) == kf.get_mask(model)
    for a, b in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        # Markers of traced functions have no entries, and their shapes count what was traced.
        assert 0 in a.shape or same_bits(value_of(a), value_of(b)), a.path


def test_without_the_optimizer_the_moments_are_fresh_and_the_rate_is_kept(tmp_path):
    model = mlp()
    model.optimizer.learning_rate = 0.125
    loaded = save_and_load(model, tmp_path)
    assert float(loaded.optimizer.learning_rate) == 0.125
    assert int(loaded.optimizer.iterations) == 0
    assert int(model.optimizer.iterations) > 0
    moments = [v for v in loaded.optimizer.inner_optimizer.variables if "momentum" in v.path]
    assert moments
    assert not any(value_of(v).any() for v in moments)


def test_without_what_it_is_compiled_with_a_file_is_smaller_and_has_its_mask(tmp_path):
    model = mlp()
    kf.save(model, tmp_path / "whole.freeze")
    loaded = save_and_load(model, tmp_path, include_compile=False)
    assert (tmp_path / "model.freeze").stat().st_size < (tmp_path / "whole.freeze").stat().st_size
    assert_same_variables(model, loaded)
    assert not loaded.compiled
    assert kf.get_mask(loaded) == kf.get_mask(model)
    # Compiled by hand, it trains on with this mask.
    frozen = [
        value_of(v)[~kf.get_mask(model)[v]] for v in model.weights if v.path.endswith("kernel")
    ]
    compiled(loaded, kf.FreezeOptimizer(sgd(), freeze_rate=0.8), loss="mse")
    storage_cases.train_on(loaded, *storage_cases.data_for(loaded))
    mask = kf.get_mask(loaded)
    kept = [value_of(v)[~mask[v]] for v in loaded.weights if v.path.endswith("kernel")]
    assert all(map(same_bits, frozen, kept))
    with pytest.raises(ValueError, match="`include_compile` must be True"):
        kf.save(model, tmp_path / "x.freeze", include_optimizer=True, include_compile=False)


def test_a_plain_keras_model_is_saved_whole_and_trains_on(tmp_path):
    model = mlp(optimizer=keras.optimizers.Adam(1e-2), freeze=False)
    loaded = save_and_load(model, tmp_path, include_optimizer=True)
    assert kf.get_mask(loaded) is None
    for one in (model, loaded):
        storage_cases.train_on(one, *storage_cases.data_for(one))
    assert_same_variables(model, loaded)


def test_an_untrained_model_takes_hardly_more_than_its_configuration(tmp_path):
    model = kf.models.lenet_300_100(seed=1)
    loaded = save_and_load(model, tmp_path)
    assert_same_variables(model, loaded)
    assert (tmp_path / "model.freeze").stat().st_size < 1200


def test_a_model_of_a_custom_loop_keeps_its_mask_in_the_file(tmp_path):
    model = storage_cases.MODELS["mlp"]()
    kf.reinitialize(model)
    x, y = storage_cases.data_for(model)
    optimizer = kf.FreezeOptimizer(sgd(), 0.8)
    mask = kf.freeze(model, x, y, loss="mse", optimizer=optimizer)
    loaded = save_and_load(model, tmp_path)
    assert_same_variables(model, loaded)
    assert kf.FreezeMask.load(tmp_path / "model.freeze") == mask
    assert not loaded.compiled


def test_not_compiled_on_request(tmp_path):
    model = mlp()
    kf.save(model, tmp_path / "model.freeze")
    loaded = kf.load(tmp_path / "model.freeze", compile=False)
    assert_same_variables(model, loaded)
    assert not loaded.compiled


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


def test_decayed_weights_are_set_to_one_factor_times_their_start(tmp_path):
    kernel = VarianceScaling(1.0, "fan_avg", "uniform", seed=5, stream=0).values((48, 20))
    optimizer = kf.FreezeOptimizer(sgd(0.05), 0.8, frozen_weights="decay", l2=0.05)
    model = mlp(optimizer=optimizer)
    frozen = ~kf.get_mask(model).entries[0].trained
    before = value_of(model.layers[1].kernel)
    scale = value_of(optimizer.state.decay_scale)
    kf.save(model, tmp_path / "model.freeze")
    after = value_of(model.layers[1].kernel)
    assert 0.9 < scale < 0.999
    assert same_bits(after[frozen], (scale * kernel)[frozen])
    assert same_bits(after[~frozen], before[~frozen])
    np.testing.assert_allclose(after, before, rtol=1e-5)


def test_pruned_after_decay_needs_no_seed(tmp_path):
    optimizer = kf.FreezeOptimizer(sgd(0.05), 0.8, frozen_weights="decay", l2=0.05)
    model = mlp(optimizer=optimizer)
    kf.prune(model)
    assert_same_variables(model, save_and_load(model, tmp_path))
    sources = {row.source for row in kf.storage.inspect(tmp_path / "model.freeze").rows}
    assert "rest zero" in sources
    assert not any("seed" in source for source in sources)


@pytest.mark.parametrize("distribution", list(kf.initializers.DISTRIBUTIONS))
def test_every_distribution_comes_from_its_seed(distribution, tmp_path):
    model = storage_cases.MODELS["mlp"]()
    kf.reinitialize(model, distribution, seed=11)
    trained(model, reinitialize=False)
    assert_same_variables(model, save_and_load(model, tmp_path))
    rows = kf.storage.inspect(tmp_path / "model.freeze").rows
    assert rows[0].source == f"rest {distribution}, seed 11, stream 0"


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


def test_an_unknown_distribution_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "model.freeze"
    model = mlp()
    kf.save(model, path)

    def name_another(header):
        header["variables"][0]["source"][1] = "cauchy"

    with_changed_header(path, name_another)
    with pytest.raises(kf.FreezeFileError, match="distribution 'cauchy'"):
        kf.load(path)
    assert kf.FreezeMask.load(path) == kf.get_mask(model)


def test_frozen_weights_from_nowhere_are_an_error_that_says_what_to_do(tmp_path):
    model = mlp()
    kernel = model.layers[1].kernel
    kernel.assign(kernel + 1.0)
    with pytest.raises(ValueError, match=r"dense.*/kernel.*reinitialize.*`base`.*include_frozen"):
        kf.save(model, tmp_path / "model.freeze")
    assert not (tmp_path / "model.freeze").exists()
    assert_same_variables(model, save_and_load(model, tmp_path, include_frozen=True))


def test_weights_loaded_from_elsewhere_go_into_the_file_on_request(tmp_path):
    model = storage_cases.MODELS["mlp"]()
    model.set_weights([np.random.default_rng(0).normal(size=w.shape) for w in model.get_weights()])
    trained(model, reinitialize=False)
    loaded = save_and_load(model, tmp_path, include_frozen=True)
    assert_same_variables(model, loaded)
    assert kf.get_mask(loaded) == kf.get_mask(model)


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


def test_values_too_large_for_float16_are_an_error(tmp_path):
    model = mlp()
    bias = model.layers[1].bias
    bias.assign(bias + 1e6)
    pattern = r"`values` must be .*dense.*/bias.*Received: values='float16'"
    with pytest.raises(ValueError, match=pattern):
        kf.save(model, tmp_path / "model.freeze", values="float16")
    kf.save(model, tmp_path / "model.freeze", values="bfloat16")


def with_changed_header(path, change):
    container = read_container(path)
    change(container.header)
    write_container(
        path, container.header, container.mask, container.exponents, container.mantissas
    )


def test_other_numbers_from_a_keras_initializer_are_an_error_that_names_the_versions(tmp_path):
    path = tmp_path / "model.freeze"
    model = mlp(reinitialize=False)
    kf.save(model, path)

    def draw_others(header):
        header["versions"]["keras"] = "3.0.0"
        header["variables"][0]["source"][1]["config"]["seed"] += 1

    with_changed_header(path, draw_others)
    with pytest.raises(kf.FreezeFileError, match=r"kernel.*keras 3\.0\.0.*reinitialize"):
        kf.load(path)


def test_another_generator_is_an_error(tmp_path):
    path = tmp_path / "model.freeze"
    kf.save(mlp(), path)
    with_changed_header(path, lambda header: header.update(generator="philox-v2"))
    with pytest.raises(kf.FreezeFileError, match="philox-v2"):
        kf.load(path)


def test_another_version_of_the_format_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "model.freeze"
    monkeypatch.setattr("keras_freeze.storage.header.Header.version", 3)
    monkeypatch.setitem(DICTIONARIES, 3, DICTIONARIES[2])
    kf.save(mlp(), path)
    monkeypatch.undo()
    with pytest.raises(kf.FreezeFileError, match="version 3"):
        kf.load(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"\x89FREEZE\n", b"\x89FREEZE\r\n"])
def test_other_files_are_refused(content, tmp_path):
    path = tmp_path / "model.freeze"
    path.write_bytes(content)
    for read in (kf.load, kf.storage.inspect):
        with pytest.raises(kf.FreezeFileError, match=r"model\.freeze"):
            read(path)


def test_a_missing_file_is_the_usual_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        kf.load(tmp_path / "model.freeze")


def test_a_lambda_cannot_be_saved(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x * 2), layers.Dense(2)])
    with pytest.raises(ValueError, match="lambda function"):
        kf.save(model, tmp_path / "model.freeze")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile(loss=lambda y, p: keras.ops.mean((y - p) ** 2))
    with pytest.raises(ValueError, match="lambda function"):
        kf.save(model, tmp_path / "model.freeze")
    assert not list(tmp_path.iterdir())


class Doubled(layers.Layer):
    def call(self, inputs):
        return inputs * 2


def squared(y, p):
    return keras.ops.mean((y - p) ** 2)


def toggled():
    model = mlp()
    model.layers[1].trainable = False
    return model


def shared_by_submodels():
    shared = layers.Dense(8)

    def submodel():
        inputs = keras.Input((8,))
        return keras.Model(inputs, layers.Dense(8)(shared(inputs)))

    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Add()([submodel()(inputs), submodel()(inputs)]))


def with_a_function_of_its_own():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile(loss=squared)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: keras.Sequential([keras.Input((4,)), Doubled()]), "Doubled"),
        (with_a_function_of_its_own, "squared"),
        (shared_by_submodels, "6 variables, and the model has 8"),
        (toggled, "trainable"),
    ],
    ids=["class", "function", "shared", "toggled"],
)
def test_what_could_not_be_loaded_again_is_not_saved(make, words, tmp_path):
    model = make()
    with pytest.raises(ValueError, match="could not be loaded") as error:
        kf.save(model, tmp_path / "model.freeze")
    assert words in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_class_can_be_known_for_a_while(tmp_path):
    model = keras.Sequential([keras.Input((4,)), Doubled(), layers.Dense(2)])
    with keras.saving.custom_object_scope({"Doubled": Doubled}):
        assert_same_variables(model, save_and_load(model, tmp_path))
    with pytest.raises(kf.FreezeFileError, match="Doubled"):
        kf.load(tmp_path / "model.freeze")


@keras.saving.register_keras_serializable(package="test_storage")
class Linear(layers.Layer):
    """A layer that keeps no initializer."""

    def build(self, input_shape):
        shape = (input_shape[-1], 3)
        self.w = self.add_weight(name="kernel", shape=shape, initializer="glorot_uniform")

    def call(self, inputs):
        return inputs @ self.w


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


def test_the_policy_of_the_moment_does_not_change_the_optimizer(tmp_path):
    model = mlp()
    kf.save(model, tmp_path / "model.freeze", include_optimizer=True)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        loaded = kf.load(tmp_path / "model.freeze")
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(loaded.optimizer, kf.FreezeOptimizer)
    assert_same_variables(model, loaded)


def test_a_save_that_fails_does_not_settle_decayed_weights(tmp_path, monkeypatch):
    optimizer = kf.FreezeOptimizer(sgd(0.05), 0.8, frozen_weights="decay", l2=0.05)
    model = mlp(optimizer=optimizer)
    before = values_of(model.variables)

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("keras_freeze.storage.saving.write_container", fail)
    with pytest.raises(OSError, match="no space left"):
        kf.save(model, tmp_path / "model.freeze")
    for old, variable in zip(before, model.variables, strict=True):
        assert same_bits(old, value_of(variable))


def test_saving_leaves_the_random_state_alone(tmp_path):
    model = mlp()
    keras.utils.set_random_seed(3)
    expected = layers.Dense(2).kernel_initializer.seed
    keras.utils.set_random_seed(3)
    kf.save(model, tmp_path / "model.freeze")
    assert layers.Dense(2).kernel_initializer.seed == expected


@pytest.mark.parametrize("path", [None, 5, b"model.freeze", ["a"]])
def test_what_is_no_path_is_named(path):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    for use in (
        lambda: kf.save(model, path),
        lambda: kf.load(path),
        lambda: kf.storage.inspect(path),
        lambda: kf.apply_delta(model, path),
        lambda: kf.remove_delta(model, path),
    ):
        with pytest.raises(TypeError, match="`path`"):
            use()


def test_folders_and_bases_that_do_not_exist_are_named(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    with pytest.raises(FileNotFoundError, match="`path`"):
        kf.save(model, tmp_path / "missing" / "model.freeze")
    with pytest.raises(IsADirectoryError, match="`path`"):
        kf.save(model, tmp_path)
    with pytest.raises(FileNotFoundError, match="`base`"):
        kf.save(model, tmp_path / "model.freeze", base="missing.keras")
    with pytest.raises(ValueError, match="`base` must be a built model"):
        kf.save(model, tmp_path / "model.freeze", base=keras.Sequential([layers.Dense(2)]))
    with pytest.raises(TypeError, match="`compile`"):
        kf.load(tmp_path / "model.freeze", compile="no")


def test_a_model_that_is_not_built_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="must be a built model"):
        kf.save(keras.Sequential([layers.Dense(2)]), tmp_path / "model.freeze")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"values": "float8"}, ValueError),
        ({"values": None}, ValueError),
        ({"include_frozen": 1}, TypeError),
        ({"include_optimizer": "yes"}, TypeError),
        ({"base": 3}, TypeError),
    ],
)
def test_bad_arguments_are_named(arguments, error, tmp_path):
    with pytest.raises(error, match=f"`{next(iter(arguments))}`"):
        kf.save(mlp(), tmp_path / "model.freeze", **arguments)


def test_something_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(TypeError, match="`model`"):
        kf.save("model", tmp_path / "model.freeze")


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


def storage_rows(folder):
    return kf.storage.inspect(folder / "model.freeze").rows


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
