"""Deltas that any process can remove, and several of them in memory at once."""

import itertools
import os
import shutil
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import storage_cases
from delta_cases import adapted, assert_same_weights, copy_of, pretrained, weights
from helpers import same_bits, value_of, values_of

import keras_freeze as kf
from keras_freeze.storage.patches import Patch

pytestmark = pytest.mark.cases(None, tensorflow=2, jax=2)


@pytest.fixture(name="original", scope="module")
def trained_networks(tmp_path_factory):
    """A base, networks that were trained from it, by name, and a folder with a file of each."""
    base, folder = pretrained(), tmp_path_factory.mktemp("deltas")
    networks = {
        "few": adapted(base, 1, 0.99),
        "many": adapted(base, 2, 0.5),
        "pruned": adapted(base, 3, 0.9, frozen_weights="zero"),
        "all": copy_of(base),
    }
    for variable in networks["all"].trainable_variables:
        variable.assign(variable * 1.25)
    for name, network in networks.items():
        kf.save(network, folder / f"{name}.freeze", base=base)
    return base, networks, folder


@pytest.fixture(name="base")
def base_model(original):
    return copy_of(original[0])


@pytest.fixture(name="files")
def delta_files(original, tmp_path):
    """The networks, by name; a file of each is in `tmp_path`."""
    _, networks, folder = original
    for path in folder.iterdir():
        shutil.copy(path, tmp_path)
    return networks


def assert_bits(model, values):
    for old, variable in zip(values, weights(model), strict=True):
        assert same_bits(old, value_of(variable)), variable.path


@pytest.mark.same_on_all
def test_every_switch_gives_the_network_bit_for_bit(base, files, tmp_path):
    before = values_of(weights(base))
    deltas = kf.DeltaSet(base)
    for name in files:
        deltas.add(name, tmp_path / f"{name}.freeze")
        assert deltas.active is None
        assert_bits(base, before)
    names = [*files, None]
    for name in [*names, *reversed(names), "few", "many", "few"]:
        deltas.switch(name)
        assert deltas.active == name
        if name is None:
            assert_bits(base, before)
        else:
            assert_same_weights(base, files[name])
    assert set(deltas) == set(files)
    assert len(deltas) == 4
    assert "few" in deltas
    num_values = sum(value_of(v).size for v in weights(base))
    assert 0 < deltas.num_bytes < 4 * 12 * num_values


@pytest.mark.same_on_all
def test_a_set_takes_more_deltas_while_one_is_on(base, files, tmp_path):
    deltas = kf.DeltaSet(base)
    deltas.add("few", tmp_path / "few.freeze")
    deltas.switch("few")
    deltas.add("many", tmp_path / "many.freeze")
    assert deltas.active == "few"
    assert_same_weights(base, files["few"])
    deltas.remove("few")
    assert deltas.active is None
    assert list(deltas) == ["many"]


@pytest.mark.same_on_all
def test_bad_names_and_files_leave_the_set_as_it_was(base, files, tmp_path):
    before = values_of(weights(base))
    deltas = kf.DeltaSet(base)
    deltas.add("few", tmp_path / "few.freeze")
    with pytest.raises(ValueError, match="must be new"):
        deltas.add("few", tmp_path / "many.freeze")
    with pytest.raises(TypeError, match="`name`"):
        deltas.add(3, tmp_path / "many.freeze")
    with pytest.raises(ValueError, match="'few'"):
        deltas.switch("other")
    with pytest.raises(ValueError, match="name of a delta"):
        deltas.remove("other")
    for method, name in itertools.product((deltas.switch, deltas.remove), (["few"], {}, 3, b"few")):
        with pytest.raises(TypeError, match=r"`name` must be .*the name of a delta"):
            method(name)
    kf.save(base, tmp_path / "whole.freeze")
    with pytest.raises(kf.FreezeFileError, match="not a delta"):
        deltas.add("whole", tmp_path / "whole.freeze")
    kf.save(copy_of(base), tmp_path / "foreign.freeze", base=files["all"])
    with pytest.raises(kf.FreezeFileError, match="another base"):
        deltas.add("foreign", tmp_path / "foreign.freeze")
    with pytest.raises(OSError, match="missing"):
        deltas.add("missing", tmp_path / "missing.freeze")
    assert list(deltas) == ["few"]
    assert_bits(base, before)
    with pytest.raises(TypeError, match="model"):
        kf.DeltaSet("base.keras")


@pytest.mark.cases(1)
@pytest.mark.parametrize("active", ["few", None])
def test_a_model_that_was_trained_since_is_not_switched(active, base, files, tmp_path):
    deltas = kf.DeltaSet(base)
    deltas.add("few", tmp_path / "few.freeze")
    deltas.switch(active)
    base.layers[-1].bias.assign(base.layers[-1].bias + 1.0)
    before = values_of(weights(base))
    with pytest.raises(ValueError, match=r"bias.*has changed"):
        deltas.switch("few" if active is None else None)
    assert deltas.active == active
    assert_bits(base, before)


@pytest.mark.same_on_all
def test_training_that_only_the_next_delta_would_replace_is_kept(base, files, tmp_path):
    deltas = kf.DeltaSet(base)
    only_bias = copy_of(base)
    only_bias.layers[-1].bias.assign(only_bias.layers[-1].bias + 1.0)
    kf.save(only_bias, tmp_path / "bias.freeze", base=base)
    only_kernel = copy_of(base)
    only_kernel.layers[-1].kernel.assign(only_kernel.layers[-1].kernel + 1.0)
    kf.save(only_kernel, tmp_path / "kernel.freeze", base=base)
    for name in ("bias", "kernel"):
        deltas.add(name, tmp_path / f"{name}.freeze")
    deltas.switch("kernel")
    base.layers[-1].bias.assign(base.layers[-1].bias + 3.0)
    before = values_of(weights(base))
    with pytest.raises(ValueError, match=r"bias.*has changed"):
        deltas.switch("bias")
    assert deltas.active == "kernel"
    assert_bits(base, before)


@pytest.mark.same_on_all
def test_an_error_in_the_middle_leaves_the_model_as_it_was(base, files, tmp_path, monkeypatch):
    deltas = kf.DeltaSet(base)
    for name in ("few", "many"):
        deltas.add(name, tmp_path / f"{name}.freeze")
    deltas.switch("few")
    before, calls = values_of(weights(base)), []
    apply = Patch.apply

    def fail(patch, variables):
        calls.append(patch)
        apply(patch, variables)
        if len(calls) == 7:
            raise MemoryError("no memory")

    monkeypatch.setattr(Patch, "apply", fail)
    with pytest.raises(MemoryError):
        deltas.switch("many")
    assert_bits(base, before)
    assert deltas.active == "few"


@pytest.mark.same_on_all
def test_deltas_are_applied_one_on_the_other_and_removed_in_turn(base, files, tmp_path):
    before = values_of(weights(base))
    kf.apply_delta(base, tmp_path / "few.freeze")
    between = values_of(weights(base))
    further = copy_of(base)
    further.layers[-1].bias.assign(further.layers[-1].bias + 1.0)
    kf.save(further, tmp_path / "further.freeze", base=base)
    kf.apply_delta(base, tmp_path / "further.freeze")
    assert_same_weights(base, further)
    with pytest.raises(ValueError, match=r"further\.freeze"):
        kf.remove_delta(base, tmp_path / "few.freeze")
    kf.remove_delta(base, tmp_path / "further.freeze")
    assert_bits(base, between)
    kf.remove_delta(base, tmp_path / "few.freeze")
    assert_bits(base, before)


class Counters(keras.layers.Layer):
    """Variables that are not floating-point numbers."""

    def build(self, shape):
        self.flags = self.add_weight(
            shape=(40,), dtype="bool", initializer="zeros", trainable=False
        )
        self.counts = self.add_weight(
            shape=(40,), dtype="int32", initializer="zeros", trainable=False
        )

    def call(self, x):
        return x


@pytest.mark.same_on_all
def test_variables_of_other_types_are_replaced(tmp_path):
    base = keras.Sequential([keras.Input((4,)), Counters(), keras.layers.Dense(3)])
    tuned = copy_of(base)
    flags, counts = tuned.layers[0].flags, tuned.layers[0].counts
    flags.assign(np.arange(40) == 7)
    counts.assign(np.where(np.arange(40) == 9, 5, 0))
    with keras.saving.custom_object_scope({"Counters": Counters}):
        kf.save(tuned, tmp_path / "d.freeze", base=base)
    before = values_of(weights(base))
    kf.apply_delta(base, tmp_path / "d.freeze")
    assert_same_weights(base, tuned)
    kf.remove_delta(base, tmp_path / "d.freeze")
    assert_bits(base, before)


@pytest.mark.same_on_all
def test_threads_that_hold_the_lock_see_one_delta(base, files, tmp_path):
    deltas = kf.DeltaSet(base)
    for name in files:
        deltas.add(name, tmp_path / f"{name}.freeze")
    expected = {name: values_of(weights(network)) for name, network in files.items()}
    wrong = []

    def serve(name):
        for _ in range(10):
            with deltas.lock:
                deltas.switch(name)
                seen = values_of(weights(base))
            if not all(map(same_bits, seen, expected[name])):
                wrong.append(name)

    threads = [threading.Thread(target=serve, args=(name,)) for name in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.cases(1)
@pytest.mark.same_on_all
@pytest.mark.parametrize("name", ["few", "pruned", "all"])
def test_an_undo_file_turns_the_model_back(name, base, files, tmp_path):
    before = values_of(weights(base))
    kf.apply_delta(base, tmp_path / f"{name}.freeze", keep_undo=tmp_path / "undo.freeze")
    assert_same_weights(base, files[name])
    elsewhere = copy_of(base)  # nobody knows of a delta on this one
    kf.apply_delta(elsewhere, tmp_path / "undo.freeze")
    assert_bits(elsewhere, before)
    kf.remove_delta(base, tmp_path / f"{name}.freeze")
    assert_bits(base, before)
    with pytest.raises(kf.FreezeFileError, match="another base"):
        kf.apply_delta(copy_of(base), tmp_path / "undo.freeze")


@pytest.mark.same_on_all
def test_an_undo_file_that_cannot_be_written_leaves_the_base(base, files, tmp_path, monkeypatch):
    before = values_of(weights(base))
    path = tmp_path / "few.freeze"
    with pytest.raises(FileNotFoundError, match="no folder"):
        kf.apply_delta(base, path, keep_undo=tmp_path / "missing" / "undo.freeze")
    with pytest.raises(ValueError, match="keep_undo"):
        kf.apply_delta(base, path, keep_undo=path)
    with pytest.raises(TypeError, match="keep_undo"):
        kf.apply_delta(base, path, keep_undo=3)
    monkeypatch.setattr("keras_freeze.storage.saving.write_container", _full_disk)
    with pytest.raises(OSError, match="No space"):
        kf.apply_delta(base, path, keep_undo=tmp_path / "undo.freeze")
    assert_bits(base, before)
    monkeypatch.undo()
    kf.apply_delta(base, path)  # none is applied


def _full_disk(*_):
    raise OSError(28, "No space left on device")


REMOVE = """
import sys, keras, keras_freeze as kf
model = keras.models.load_model(sys.argv[1])
kf.apply_delta(model, sys.argv[2])
model.save(sys.argv[3])
"""


@pytest.mark.exhaustive
def test_another_process_removes_a_delta(base, files, tmp_path):
    before = values_of(weights(base))
    kf.apply_delta(base, tmp_path / "few.freeze", keep_undo=tmp_path / "undo.freeze")
    base.save(tmp_path / "patched.keras")
    names = ("patched.keras", "undo.freeze", "back.keras")
    arguments = [str(tmp_path / name) for name in names]
    subprocess.run([sys.executable, "-c", REMOVE, *arguments], check=True, env=os.environ)
    assert_bits(keras.models.load_model(tmp_path / "back.keras"), before)


def test_predictions_follow_the_switch(base, files, tmp_path):
    x, _ = storage_cases.data_for(base)
    plain = storage_cases.outputs_of(base, x)
    deltas = kf.DeltaSet(base)
    deltas.add("few", tmp_path / "few.freeze")
    deltas.switch("few")
    assert np.array_equal(
        storage_cases.outputs_of(base, x), storage_cases.outputs_of(files["few"], x)
    )
    deltas.switch(None)
    assert np.array_equal(storage_cases.outputs_of(base, x), plain)


def with_statistics(shift):
    """A network that normalizes its inputs by statistics of data that are shifted."""
    keras.utils.set_random_seed(3)
    normalization = keras.layers.Normalization()
    normalization.adapt(inputs() + shift)
    network = keras.Sequential([keras.Input((8,)), normalization, keras.layers.Dense(2)])
    network.compile("sgd", "mse")
    return network


def inputs():
    return np.random.default_rng(0).normal(size=(32, 8)).astype("float32")


def switch(base, tuned, folder):
    deltas = kf.DeltaSet(base)
    deltas.add("a", folder / "a.freeze")
    deltas.switch("a")


def apply(base, tuned, folder):
    kf.apply_delta(base, folder / "a.freeze")


def follow(base, tuned, folder):
    kf.DeltaPublisher(tuned, folder / "stream", base=base).publish()
    kf.follow(base, folder / "stream")


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("way", [switch, apply, follow])
def test_compiled_functions_have_the_statistics_of_the_delta(way, tmp_path):
    base, tuned = with_statistics(0.0), with_statistics(5.0)
    kf.save(tuned, tmp_path / "a.freeze", base=base)
    x, y = inputs(), np.ones((32, 2), "float32")
    expected = tuned.predict(x, verbose=0)
    losses = [model.evaluate(x, y, verbose=0) for model in (base, tuned)]
    assert losses[0] != losses[1]
    assert not np.array_equal(base.predict(x, verbose=0), expected)
    way(base, tuned, tmp_path)
    assert np.array_equal(base.predict(x, verbose=0), expected)
    assert base.evaluate(x, y, verbose=0) == losses[1]
    for model in (base, tuned):
        model.fit(x, y, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(base, tuned)


def test_a_model_that_has_lora_since_switches_its_base(base, files, tmp_path):
    deltas = kf.DeltaSet(base)
    deltas.add("few", tmp_path / "few.freeze")
    before, own = values_of(weights(base)), weights(base)
    base.layers[1].enable_lora(2)
    added = {id(v): value_of(v) for v in base.variables if all(v is not one for one in own)}
    deltas.switch("few")
    for variable, tuned in zip(own, weights(files["few"]), strict=True):
        assert same_bits(value_of(variable), value_of(tuned)), variable.path
    deltas.switch(None)
    for variable, value in zip(own, before, strict=True):
        assert same_bits(value_of(variable), value), variable.path
    assert all(same_bits(added[id(v)], value_of(v)) for v in base.variables if id(v) in added)


@pytest.mark.same_on_all
def test_a_model_that_has_other_variables_since_stays_as_it_is(base, files, tmp_path):
    deltas = kf.DeltaSet(base)
    deltas.add("few", tmp_path / "few.freeze")
    kf.apply_delta(base, tmp_path / "few.freeze")
    base.quantize("int8")
    before = values_of(base.variables)
    for change in (
        lambda: deltas.switch("few"),
        lambda: deltas.add("again", tmp_path / "few.freeze"),
        lambda: kf.remove_delta(base, tmp_path / "few.freeze"),
    ):
        with pytest.raises(ValueError, match="The model no longer has the variable"):
            change()
    assert all(map(same_bits, before, values_of(base.variables)))
    assert deltas.active is None


@pytest.mark.same_on_all
def test_a_callback_of_the_users_may_switch_and_save_after_any_step(base, files, tmp_path):
    """JAX takes the values out of the variables while it trains."""
    base.layers[2].trainable = False  # its statistics stay, too
    base.compile(keras.optimizers.SGD(0.0), "mse")
    deltas = kf.DeltaSet(base)
    deltas.add("few", tmp_path / "few.freeze")

    class Switch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                deltas.switch("few")
                kf.save(self.model, tmp_path / "saved.freeze")

    base.fit(*storage_cases.data_for(base), batch_size=4, verbose=0, callbacks=[Switch()])
    assert_same_weights(kf.load(tmp_path / "saved.freeze"), files["few"])
    assert_same_weights(base, files["few"])
