"""Streams: what a follower has equals what the publisher had, whole or rounded."""

import uuid

import format_reader
import keras
import numpy as np
import pytest
from delta_cases import assert_same_weights as assert_equal
from delta_cases import copy_of
from helpers import same_bits, value_of
from stream_cases import frozen, network, train, weights
from stream_folders import full, names, update

import keras_freeze as kf

pytestmark = [
    pytest.mark.cases(None, tensorflow=1, jax=1),
    pytest.mark.filterwarnings("ignore:A model follows its stream no further"),
]


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "mixed_bfloat16", "float64"])
def test_a_follower_has_every_state_of_the_trainer(dtype, tmp_path):
    if dtype == "float64" and keras.backend.backend() == "jax":
        pytest.skip("without 64 bits")
    model = frozen(network(dtype))
    follower = network(dtype)
    publisher = kf.DeltaPublisher(model, tmp_path, full_every=3)
    for step in range(8):
        number = publisher.publish()
        followed = kf.follow(follower, tmp_path)
        assert followed.number == number == step
        assert_equal(follower, model)
        assert followed.update() is False
        train(model, step)
    late = network(dtype)
    assert kf.follow(late, tmp_path).number == 7
    assert_equal(late, follower)
    assert [name for name in names(tmp_path) if "full" in name] == [full(0), full(4)]


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("values", ["bfloat16", "float16"])
def test_rounded_values_are_those_of_the_trainer_rounded(values, tmp_path):
    model = frozen(network())
    start = network()
    follower = network()
    publisher = kf.DeltaPublisher(model, tmp_path, values=values, full_every=2)
    trained = {variable.path for variable in model.trainable_variables}
    mask = kf.get_mask(model)
    for step in range(4):
        train(model, step)
        publisher.publish()
        kf.follow(follower, tmp_path)
        for one, own, old in zip(weights(follower), weights(model), weights(start), strict=True):
            expected = value_of(own)
            if own.path in trained:
                entry = mask.find(own)
                rounded = value_of(keras.ops.cast(keras.ops.cast(expected, values), "float32"))
                is_trained = np.ones(own.shape, bool) if entry is None else entry.trained
                expected = np.where(is_trained, rounded, value_of(old))
            assert same_bits(value_of(one), expected), (step, own.path)


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("step", [0.05, 0.001])
def test_values_on_a_grid_are_next_to_those_of_the_trainer(step, tmp_path):
    model, follower, start = frozen(network()), network(), network()
    publisher = kf.DeltaPublisher(model, tmp_path, values=kf.storage.Grid(step), full_every=3)
    trainable = {variable.path for variable in model.trainable_variables}
    for number in range(7):
        train(model, number)
        publisher.publish()
        kf.follow(follower, tmp_path)
        for one, own, old in zip(weights(follower), weights(model), weights(start), strict=True):
            found, expected = value_of(one), value_of(own)
            if own.path not in trainable:
                assert same_bits(found, expected)
                continue
            steps = (found - value_of(old)).astype("float64") / step
            assert np.abs(steps - np.rint(steps)).max() < 1e-2
            assert np.abs(found - expected).max() <= 0.51 * step
    late = network()
    kf.follow(late, tmp_path)
    assert_equal(late, follower)


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("values", ["float32", "bfloat16", kf.storage.Grid(0.02)])
def test_a_reader_written_from_the_description_alone_agrees(values, tmp_path):
    model, start, follower = frozen(network()), network(), network()
    base = [(variable.path, value_of(variable)) for variable in start.variables]
    publisher = kf.DeltaPublisher(model, tmp_path, values=values)
    for step in range(5):
        publisher.publish()
        kf.follow(follower, tmp_path)
        files = [tmp_path / full(0), *(tmp_path / update(n) for n in range(1, step + 1))]
        for (label, found), variable in zip(
            format_reader.read_stream(files, base), follower.variables, strict=True
        ):
            assert label.endswith("seed_generator_state") or same_bits(found, value_of(variable))
        train(model, step)


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("share", [0.001, 0.1])
@pytest.mark.parametrize("values", ["float32", "bfloat16"])
def test_few_changed_values_take_few_bytes(values, share, tmp_path):
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(500, name="a")])
    kf.reinitialize(model, seed=1)
    start, follower = copy_of(model), copy_of(model)
    base = [(variable.path, value_of(variable)) for variable in start.variables]
    publisher = kf.DeltaPublisher(model, tmp_path, values=values)
    rng = np.random.default_rng(0)
    for step in range(4):
        kernel = value_of(model.layers[0].kernel)
        moved = rng.random(kernel.shape) < share
        model.layers[0].kernel.assign(np.where(moved, kernel * 1.5 + 1e-3, kernel))
        publisher.publish()
        kf.follow(follower, tmp_path)
        files = [tmp_path / full(0), *(tmp_path / update(n) for n in range(1, step + 1))]
        for (_, found), one, own, old in zip(
            format_reader.read_stream(files, base),
            weights(follower),
            weights(model),
            weights(start),
            strict=True,
        ):
            assert same_bits(found, value_of(one))
            if values == "float32":
                assert same_bits(value_of(one), value_of(own))
            unmoved = value_of(own) == value_of(old)
            assert same_bits(value_of(one)[unmoved], value_of(old)[unmoved])
    sizes = [(tmp_path / update(n)).stat().st_size for n in range(2, 4)]
    assert max(sizes) < 300 + 20_000 * share * (4 + 12 / 8) + 2_000 * share**0.5


@pytest.mark.same_on_all
def test_a_trainer_without_a_mask_is_followed_too(tmp_path):
    model, follower = network(), network()
    publisher = kf.DeltaPublisher(model, tmp_path)
    for step in range(3):
        train(model, step, scale=1e-4)
        publisher.publish()
        kf.follow(follower, tmp_path)
        assert_equal(follower, model)


@pytest.mark.same_on_all
def test_a_new_mask_begins_with_a_complete_file(tmp_path):
    model, follower = frozen(network()), network()
    publisher = kf.DeltaPublisher(model, tmp_path)
    for step in range(6):
        if step == 3:
            rng = np.random.default_rng(7)
            x, y = rng.normal(size=(8, 6)), rng.normal(size=(8, 5))
            kf.freeze(model, x, y, overwrite=True)
        train(model, step)
        publisher.publish()
        if step != 2:
            kf.follow(follower, tmp_path)
            assert_equal(follower, model)
    assert [name for name in names(tmp_path) if "full" in name][-1].startswith("000000000003")


@pytest.mark.same_on_all
def test_pruned_networks_are_followed(tmp_path):
    model, follower = frozen(network(), frozen_weights="zero"), network()
    publisher = kf.DeltaPublisher(model, tmp_path, base=network(), full_every=2)
    for step in range(5):
        train(model, step)
        publisher.publish()
        kf.follow(follower, tmp_path)
        assert_equal(follower, model)


@pytest.mark.same_on_all
def test_folders_may_be_urls(tmp_path):
    pytest.importorskip("fsspec")
    for url in (f"memory://{uuid.uuid4().hex}/run", f"file://{tmp_path}/run"):
        model, follower = frozen(network()), network()
        with pytest.raises(FileNotFoundError, match="no complete file"):
            kf.follow(follower, url)
        publisher = kf.DeltaPublisher(model, url, full_every=2)
        for step in range(4):
            train(model, step)
            publisher.publish()
            kf.follow(follower, url)
            assert_equal(follower, model)


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("values", ["bfloat16", kf.storage.Grid(0.02)])
@pytest.mark.parametrize("case", ["values that never change", "its own grid", "a new mask"])
def test_complete_files_that_round_otherwise_are_followed_too(case, values, tmp_path):
    base = network()
    base.get_layer("last").bias.assign(np.linspace(-1, 1, 5).astype("float32") / 3)
    model, follower = copy_of(base), copy_of(base)
    frozen(model, grid=0.05 if case == "its own grid" else None)
    publisher = kf.DeltaPublisher(model, tmp_path, values=values, full_every=2)
    for step in range(9):
        if step == 4 and case == "a new mask":
            rng = np.random.default_rng(7)
            kf.freeze(model, rng.normal(size=(8, 6)), rng.normal(size=(8, 5)), overwrite=True)
        train(model, step)
        model.get_layer("last").bias.assign(base.get_layer("last").bias)
        publisher.publish()
        kf.follow(follower, tmp_path)
        late = copy_of(base)
        kf.follow(late, tmp_path)
        assert_equal(late, follower)


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("change", ["prune", "set_weights", "reinitialize"])
def test_frozen_weights_that_something_changes_are_published(change, tmp_path):
    model, follower = frozen(network()), network()
    publisher = kf.DeltaPublisher(model, tmp_path, base=network())
    for step in range(5):
        if step == 2 and change == "set_weights":
            model.set_weights([weight * 2 for weight in model.get_weights()])
        elif step == 2:
            {"prune": kf.prune, "reinitialize": kf.reinitialize}[change](model)
        publisher.publish()
        kf.follow(follower, tmp_path)
        assert_equal(follower, model)
        train(model, step)
    assert [name for name in names(tmp_path) if "full" in name] == [full(0), full(2)]


@pytest.mark.same_on_all
def test_a_value_that_is_not_finite_is_published(tmp_path):
    model, follower = frozen(network()), network()
    publisher = kf.DeltaPublisher(model, tmp_path, values=kf.storage.Grid(0.1))
    publisher.publish()
    for value in (np.nan, np.inf, 1.0):
        model.get_layer("last").bias.assign(np.full(5, value, "float32"))
        publisher.publish()
        kf.follow(follower, tmp_path)
        found = value_of(follower.get_layer("last").bias)
        assert np.allclose(found, value, atol=0.06, equal_nan=True)
