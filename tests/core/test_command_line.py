"""`python -m keras_freeze diff | apply | remove | verify`: called as functions.

tests/end_to_end/test_command_line_processes.py runs them as processes.
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest
import storage_cases
from delta_cases import adapted, assert_same_weights, copy_of, pretrained
from helpers import same_bits, sgd, value_of

import keras_freeze as kf
from keras_freeze.command_line.main import main

pytestmark = pytest.mark.cases(None, tensorflow=0, jax=0)


class Terminal:
    """A folder in which commands run, and what they print."""

    def __init__(self, folder, capsys):
        self.folder, self.capsys = folder, capsys

    def run(self, *arguments):
        """The exit status, what is on standard output, and the lines on standard error."""
        self.capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as stopped:  # by argparse
            status = stopped.code
        captured = self.capsys.readouterr()
        return status, captured.out, captured.err.splitlines()

    def succeeds(self, *arguments):
        status, printed, complaints = self.run(*arguments)
        assert (status, complaints) == (0, [])
        return printed

    def answers(self, *arguments):
        return json.loads(self.succeeds(*arguments, "--json"))

    def fails(self, *arguments):
        """The message of a command that fails, which is a line, and leaves the folder as it was."""
        before = self.content()
        status, printed, complaints = self.run(*arguments)
        assert status == 1
        assert printed == ""
        assert len(complaints) == 1
        assert complaints[0].startswith("keras_freeze: error: ")
        assert self.content() == before
        return complaints[0]

    def content(self):
        return {path.name: path.read_bytes() for path in self.folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A base, a copy that was trained without a FreezeOptimizer, and the folder of their files."""
    folder = tmp_path_factory.mktemp("models")
    base = pretrained()
    base.save(folder / "base.keras")
    tuned = copy_of(base)
    tuned.compile(optimizer=sgd(0.01), loss="mse")
    x, y = storage_cases.data_for(tuned)
    storage_cases.train_on(tuned, x, y + 1)
    tuned.save(folder / "tuned.keras")
    kf.save(tuned, folder / "delta.freeze", base=base)
    return base, tuned, folder


@pytest.fixture
def terminal(models, tmp_path, capsys, monkeypatch):
    """A folder with base.keras, tuned.keras, and delta.freeze between them."""
    for path in models[2].iterdir():
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    return Terminal(tmp_path, capsys)


@pytest.fixture
def base(models):
    return models[0]


@pytest.fixture
def tuned(models):
    return models[1]


def size(path):
    with open(path, "rb") as file:
        return len(file.read())


# diff


def test_diff_writes_what_save_does(terminal, base, tuned):
    printed = terminal.succeeds("diff", "base.keras", "tuned.keras", "-o", "d.freeze")
    assert_same_weights(kf.load("d.freeze", base=base), tuned)
    assert abs(size("d.freeze") - size("delta.freeze")) < 50  # names of layers differ
    assert printed.startswith(f"d.freeze: {size('d.freeze'):,} bytes\n")


def test_diff_counts_the_values_that_differ(terminal, base):
    changed = copy_of(base)
    kernel = value_of(changed.layers[-1].kernel)
    kernel[3:5, 1] += 1
    changed.layers[-1].kernel.assign(kernel)
    changed.save("changed.keras")
    found = terminal.answers("diff", "base.keras", "changed.keras", "-o", "d.freeze")
    assert found == {
        "delta": "d.freeze",
        "delta_bytes": size("d.freeze"),
        "base_bytes": size("base.keras"),
        "model_bytes": size("changed.keras"),
        "num_values": 3003,
        "num_differing": 2,
        "num_new": 0,
    }


def test_diff_counts_the_values_of_a_new_head(terminal, base):
    model = keras.Sequential([*copy_of(base).layers[:-1], keras.layers.Dense(5, name="new")])
    model.build((None, 8, 6))
    model.save("new.keras")
    found = terminal.answers("diff", "base.keras", "new.keras", "-o", "d.freeze")
    assert found["num_new"] == found["num_differing"] == 20 * 5 + 5
    assert_same_weights(kf.load("d.freeze", base=base), model)
    terminal.succeeds("apply", "base.keras", "d.freeze", "-o", "again.keras")
    assert_same_weights(keras.models.load_model("again.keras"), model)
    message = terminal.fails("apply", "base.keras", "d.freeze", "-o", "m.keras", "--keep-undo", "u")
    assert "leave --keep-undo out" in message


def test_diff_keeps_the_mask_of_a_model_that_was_frozen(terminal, base):
    model = adapted(base)
    model.save("frozen.keras")
    terminal.succeeds("diff", "base.keras", "frozen.keras", "-o", "d.freeze")
    loaded = kf.load("d.freeze", base=base)
    assert kf.get_mask(loaded) == kf.get_mask(model)
    assert_same_weights(loaded, model)


def test_diff_rounds_values_where_asked_to(terminal, base, tuned):
    arguments = ("diff", "base.keras", "tuned.keras", "-o")
    terminal.succeeds(*arguments, "exact.freeze")
    terminal.succeeds(*arguments, "d.freeze", "--values", "float16")
    assert size("d.freeze") < 0.75 * size("exact.freeze")
    kernel = kf.load("d.freeze", base=base).layers[-1].kernel
    expected = value_of(tuned.layers[-1].kernel).astype("float16").astype("float32")
    assert same_bits(value_of(kernel), expected)


def test_freeze_files_are_bases_and_models_too(terminal, base, tuned):
    for name, model in (("base.freeze", base), ("tuned.freeze", tuned)):
        kf.save(model, name)
    terminal.succeeds("diff", "base.freeze", "tuned.freeze", "-o", "d.freeze")
    assert_same_weights(kf.load("d.freeze", base=base), tuned)


# apply and remove


def test_apply_writes_the_model_compiled_as_it_was(terminal, tuned):
    found = terminal.answers("apply", "base.keras", "delta.freeze", "-o", "model.keras")
    assert found == {"model": "model.keras", "model_bytes": size("model.keras")}
    model = keras.models.load_model("model.keras")
    assert_same_weights(model, tuned)
    assert model.loss == "mse"


def test_apply_writes_a_freeze_file_that_needs_no_base(terminal, base):
    model = adapted(base)
    kf.save(model, "delta.freeze", base=base)
    terminal.succeeds("apply", "base.keras", "delta.freeze", "-o", "model.freeze")
    loaded = kf.load("model.freeze")
    assert_same_weights(loaded, model)
    assert kf.get_mask(loaded) == kf.get_mask(model)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["again.keras", "again.freeze"])
def test_remove_gives_the_base_back_bit_for_bit(name, terminal, base):
    terminal.succeeds(
        "apply", "base.keras", "delta.freeze", "-o", "model.keras", "--keep-undo", "undo"
    )
    terminal.succeeds("remove", "model.keras", "undo", "-o", name)
    again = kf.load(name) if name.endswith(".freeze") else keras.models.load_model(name)
    assert_same_weights(again, base)


def test_an_existing_output_is_replaced(terminal, tuned):
    (terminal.folder / "model.keras").write_bytes(b"older")
    terminal.succeeds("apply", "base.keras", "delta.freeze", "-o", "model.keras")
    assert_same_weights(keras.models.load_model("model.keras"), tuned)


def test_names_of_files_are_printed_safely(terminal):
    name = "a\x1b[2J.keras"
    printed = terminal.succeeds("apply", "base.keras", "delta.freeze", "-o", name)
    assert printed.startswith("a\\x1b[2J.keras: ")
    assert terminal.answers("verify", name)["file"] == name


# verify


def test_verify_loads_each_kind_of_file(terminal, base):
    model = adapted(base)
    kf.save(model, "model.freeze", include_frozen=True)
    kf.get_mask(model).save("mask.freeze")
    cases = {
        ("base.keras",): ("a .keras file", 3003),
        ("model.freeze",): ("a model", 3003),
        ("mask.freeze",): ("a mask", kf.get_mask(model).num_weights),
        ("delta.freeze", "--base", "base.keras"): ("a delta", 3003),
    }
    for arguments, (kind, number) in cases.items():
        expected = {"file": arguments[0], "valid": True, "error": None}
        expected |= {"kind": kind, "num_values": number}
        assert terminal.answers("verify", *arguments) == expected
    printed = terminal.succeeds("verify", "base.keras")
    assert printed == "base.keras: valid, a .keras file, 3,003 values\n"


def damage(path, place=0.5):
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["base.keras", "delta.freeze"])
def test_verify_finds_damage(name, terminal):
    damage(terminal.folder / name)
    message = terminal.fails("verify", name)
    assert f"'{name}'" in message
    status, printed, complaints = terminal.run("verify", name, "--json")
    found = json.loads(printed)
    assert status == 1
    assert not found["valid"]
    assert complaints == [f"keras_freeze: error: {found['error']}"]


def test_verify_needs_the_base_of_a_delta(terminal):
    assert "pass this model" in terminal.fails("verify", "delta.freeze")
    assert "on another base" in terminal.fails("verify", "delta.freeze", "--base", "tuned.keras")
    message = terminal.fails("verify", "base.keras", "--base", "tuned.keras")
    assert "leave --base out" in message


# Errors


def test_bad_files_are_an_error_in_one_line_and_leave_outputs_as_they_were(terminal, base):
    (terminal.folder / "other").write_bytes(b"something else")
    (terminal.folder / "other.keras").write_bytes(b"something else")
    (terminal.folder / "m.keras").write_bytes(b"an older file")
    (terminal.folder / "folder.keras").mkdir()
    terminal.succeeds(
        "apply", "base.keras", "delta.freeze", "-o", "tuned2.keras", "--keep-undo", "undo"
    )
    cases = {
        ("diff", "missing.keras", "base.keras", "-o", "d"): "There is no file 'missing.keras'",
        ("diff", "base.keras", "folder.keras", "-o", "d"): "'folder.keras' is a folder",
        ("diff", "base.keras", "other", "-o", "d"): "neither a `.freeze` file nor a `.keras` file",
        ("diff", "other.keras", "base.keras", "-o", "d"): "neither a `.freeze` file nor",
        ("diff", "base.keras", "delta.freeze", "-o", "d"): "was saved on a base",
        ("diff", "base.keras", "tuned.keras", "-o", "no/d"): "The folder of 'no/d' does not exist",
        ("apply", "tuned.keras", "delta.freeze", "-o", "m.keras"): "was saved on another base",
        ("apply", "base.keras", "base.keras", "-o", "m.keras"): "not a valid `.freeze` file",
        ("apply", "base.keras", "delta.freeze", "-o", "folder.keras"): "'folder.keras' is a folder",
        ("remove", "base.keras", "undo", "-o", "m.keras"): "was saved on another base",
        ("inspect", "missing"): "There is no file 'missing'",
        ("inspect", "."): "'.' is a folder",
        ("inspect", "base.keras"): "not a valid `.freeze` file",
        ("verify", "other"): "neither a `.freeze` file nor a `.keras` file",
        ("verify", "base.keras", "--import", "no_module"): "'no_module' cannot be imported",
    }
    for arguments, expected in cases.items():
        assert expected in terminal.fails(*arguments), arguments


def test_an_output_is_never_one_of_the_other_files(terminal):
    (terminal.folder / "link.freeze").symlink_to("delta.freeze")
    cases = [
        ("diff", "base.keras", "tuned.keras", "-o", "base.keras"),
        ("diff", "base.keras", "tuned.keras", "-o", "./tuned.keras"),
        ("apply", "base.keras", "delta.freeze", "-o", "link.freeze"),
        ("apply", "base.keras", "delta.freeze", "-o", "m.keras", "--keep-undo", "m.keras"),
        ("apply", "base.keras", "delta.freeze", "-o", "m.keras", "--keep-undo", "base.keras"),
        ("remove", "base.keras", "delta.freeze", "-o", "base.keras"),
    ]
    for arguments in cases:
        assert "are one file" in terminal.fails(*arguments), arguments


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("other",),
        ("diff", "base.keras", "tuned.keras"),
        ("diff", "base.keras", "tuned.keras", "-o", "d", "--values", "float64"),
        ("apply", "base.keras", "delta.freeze", "-o", "model.h5"),
        ("remove", "base.keras", "undo", "-o", "model"),
    ],
)
def test_wrong_usage_has_status_two(arguments, terminal):
    status, printed, complaints = terminal.run(*arguments)
    assert (status, printed) == (2, "")
    assert complaints[0].startswith("usage: python -m keras_freeze")


def test_code_in_a_keras_file_is_not_run(terminal):
    layers = [keras.Input((4,)), keras.layers.Lambda(lambda x: x + 1), keras.layers.Dense(2)]
    keras.Sequential(layers).save("lambda.keras")
    message = terminal.fails("diff", "base.keras", "lambda.keras", "-o", "d")
    assert "lambda" in message
    assert "safe_mode" not in message


def test_a_file_in_an_older_format_of_keras_is_refused(terminal, base):
    base.save("base.h5")
    assert "neither" in terminal.fails("verify", "base.h5")


def test_a_part_of_a_keras_file_that_is_damaged_is_named(terminal):
    with zipfile.ZipFile("base.keras") as file:
        offset = file.getinfo("config.json").header_offset
    content = bytearray((terminal.folder / "base.keras").read_bytes())
    content[offset + 60] ^= 1
    (terminal.folder / "base.keras").write_bytes(content)
    assert "its part 'config.json' does not match" in terminal.fails("verify", "base.keras")


# Uses names of the package that `python -m keras_freeze` imports only when it needs them.
MODULE = """
import keras
import keras_freeze as kf

used = kf.FreezeOptimizer, kf.initializers.XavierNormal, kf.models

@keras.saving.register_keras_serializable("layers_of_user")
class Scaled(keras.layers.Dense):
    pass
"""


@pytest.fixture
def own_layers(terminal, monkeypatch):
    """The name of a module whose class is in the model of own.keras, and is not registered."""
    (terminal.folder / "layers_of_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(terminal.folder)
    module = importlib.import_module("layers_of_user")
    keras.Sequential([keras.Input((4,)), module.Scaled(3, name="scaled")]).save("own.keras")
    forget("layers_of_user")
    yield "layers_of_user"
    forget("layers_of_user")


def forget(module):
    sys.modules.pop(module, None)
    keras.saving.get_custom_objects().pop(f"{module}>Scaled", None)


def test_custom_classes_come_from_imported_modules(terminal, own_layers):
    message = terminal.fails("verify", "own.keras")
    assert "Could not locate class 'Scaled'" in message
    assert "--import MODULE" in message
    assert terminal.answers("verify", "own.keras", "--import", own_layers)["num_values"] == 15


def test_a_module_that_cannot_be_imported_is_an_error(terminal, monkeypatch):
    (terminal.folder / "broken.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(terminal.folder)
    message = terminal.fails("verify", "base.keras", "--import", "broken")
    assert "'broken' cannot be imported (ZeroDivisionError)" in message


@pytest.mark.slow
@pytest.mark.same_on_all
def test_an_imported_module_may_use_the_package_in_a_process_of_its_own(terminal, own_layers):
    command = [sys.executable, "-m", "keras_freeze", "verify", "own.keras", "--json"]
    done = subprocess.run(
        [*command, "--import", own_layers],
        env={**os.environ, "KERAS_BACKEND": keras.backend.backend()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_values"] == 15


@pytest.mark.filterwarnings("always::UserWarning")
def test_warnings_are_one_line_each(terminal):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(50)])
    model.compile(kf.FreezeOptimizer(sgd(0.1), 0.5), loss="mse")
    kf.freeze(model, np.ones((2, 4)), np.ones((2, 50)))
    model.save("model.keras")
    keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]).save("base.keras")
    status, _, complaints = terminal.run("diff", "base.keras", "model.keras", "-o", "d.freeze")
    assert status == 0
    assert len(complaints) == 1
    assert complaints[0].startswith("keras_freeze: warning: ")
    assert "reinitialize" in complaints[0]  # weights that only this version of Keras can draw


# inspect


def test_inspect_prints_its_fields_as_json(terminal):
    found = terminal.answers("inspect", "delta.freeze")
    expected = kf.storage.inspect("delta.freeze")
    assert found["total_bytes"] == sum(found["num_bytes"].values()) == size("delta.freeze")
    assert found["digest"] == expected.digest
    assert found["base"] == expected.base
    assert [row["path"] for row in found["rows"]] == [row.path for row in expected.rows]
    assert found["rows"][0]["shape"] == list(expected.rows[0].shape)
