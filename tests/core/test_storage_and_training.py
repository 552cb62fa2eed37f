"""What is loaded from a `.freeze` file trains on: optimizers, methods, fresh processes."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import storage_cases
from helpers import compiled, same_bits, sgd, value_of, values_of
from saved_models import METHODS, assert_same_variables, mlp, save_and_load, trained

import keras_freeze as kf
from keras_freeze.initializers.portable import VarianceScaling

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)


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


@pytest.mark.cases(1)
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


@pytest.mark.cases(1)
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
