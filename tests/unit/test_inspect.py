"""`python -m keras_freeze inspect`: needs no Keras, prints bounded and safe text."""

import os
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from helpers import blobs, compiled, two_dense_layers
from hypothesis import given
from hypothesis import strategies as st

import keras_freeze as kf
from keras_freeze._utils.text import printable
from keras_freeze.storage.coding.entropy import Encoder
from keras_freeze.storage.coding.masks import count_masks, decode_masks, encode_masks
from keras_freeze.storage.container import read_container, write_container

FRAMEWORKS = ("keras", "tensorflow", "jax", "torch")
HOSTILE = "\x1b[2Jred\x07\n\r\u202eabc\u200b\u2066\ud800\x9b31m\x7f\u2028"


def frozen_file(path):
    model = compiled(two_dense_layers())
    kf.reinitialize(model, seed=3)
    kf.freeze(model, *blobs())
    kf.save(model, path)
    return path


def rewritten(path, **fields):
    """The file with other fields in its header, all checksums right."""
    content = read_container(path)
    sections = (content.mask, content.exponents, content.mantissas)
    write_container(path, {**content.header, **fields}, *sections)
    return path


def variable(path="layer/kernel", shape=(2, 3), **fields):
    """A variable of zeros."""
    record = {"path": path, "shape": list(shape), "source": ["constant", 0], "crc32": 0}
    return {**record, **fields}


def described(path, variables, mask=b"", name="model"):
    """A file of constants, with a mask for those variables that have one."""
    model = {"class_name": "Model", "config": {"name": name}}
    header = {"versions": {"keras": "3"}, "model": model, "variables": variables}
    write_container(path, header, mask, Encoder().finish(), b"")
    return path


def assert_safe(text):
    for character in text:
        kind = unicodedata.category(character)
        assert (kind[0] != "C" and kind not in ("Zl", "Zp")) or character == "\n", repr(character)
    text.encode()


def run(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, **options)


# Without Keras


def test_inspect_imports_no_framework(tmp_path):
    path = frozen_file(tmp_path / "model.freeze")
    done = run("-X", "importtime", "-m", "keras_freeze", "inspect", str(path), text=True)
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert "keras_freeze.storage.inspection" in imported
    assert not imported & set(FRAMEWORKS)
    assert done.stdout.rstrip("\n") == str(kf.storage.inspect(path))


def test_the_command_line_is_quiet(tmp_path):
    done = run("-m", "keras_freeze", "inspect", str(frozen_file(tmp_path / "model.freeze")))
    assert done.stderr == b""


@pytest.mark.cases(1)
@pytest.mark.parametrize("options", [("-m", "keras_freeze"), ("-Bmkeras_freeze",)])
def test_the_version_is_printed(options):
    done = run("-v", *options, "--version", text=True)
    assert done.stdout.strip() == f"keras_freeze {kf.__version__}"
    assert "import 'keras'" not in done.stderr


WITHOUT_FRAMEWORKS = """
import sys
sys.argv, sys.orig_argv = ["-m"], ["python", "-m", "keras_freeze"]
import {module}
assert not set({frameworks}) & set(sys.modules), sorted(set({frameworks}) & set(sys.modules))
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "module",
    [
        "command_line.main",
        "masks.mask",
        "_utils.files",
        "_utils.text",
        "_utils.bits",
        "storage.container",
        "storage.coding.entropy",
        "storage.errors",
        "storage.header",
        "storage.inspection",
        "storage.coding.masks",
        "storage.masks",
    ],
)
def test_what_reads_descriptions_imports_no_framework_and_goes_first(module):
    program = WITHOUT_FRAMEWORKS.format(module=f"keras_freeze.{module}", frameworks=FRAMEWORKS)
    done = run("-c", program, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "orig_argv", "expected"),
    [
        (["-m", "inspect", "f"], ["python", "-m", "keras_freeze", "inspect", "f"], True),
        (["-m"], ["python", "-Bmkeras_freeze"], True),
        (["-m", "-m", "keras_freeze"], ["python", "-m", "program", "-m", "keras_freeze"], False),
        (["-m", "keras_freeze"], ["python", "-m", "program", "keras_freeze"], False),
        (["-m"], ["python", "-m", "keras_freeze.program"], False),
        (["program.py"], ["python", "program.py", "-m", "keras_freeze"], False),
        (["-c", "-m", "keras_freeze"], ["python", "-c", "pass", "-m", "keras_freeze"], False),
        ([""], ["python"], False),
    ],
)
def test_only_the_command_line_itself_is_light(argv, orig_argv, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert kf._is_command_line() == expected


@pytest.mark.slow
def test_a_module_that_is_run_registers_the_optimizer(tmp_path):
    (tmp_path / "program.py").write_text(
        "import keras_freeze, keras\n"
        "print(keras.saving.get_registered_object('keras_freeze>FreezeOptimizer').__name__)\n"
    )
    done = run("-m", "program", "-m", "keras_freeze", cwd=tmp_path, text=True)
    assert done.stdout.strip() == "FreezeOptimizer"


# Text


def test_printable_leaves_ordinary_text_alone():
    for text in ("dense/kernel", "schicht_ü/核", "", "a\\b 'c'"):
        assert printable(text, 50) == text


@given(st.text(st.characters(exclude_categories=())), st.integers(10, 40))
def test_printable_text_is_safe_and_short(text, longest):
    shown = printable(text, longest)
    assert_safe(shown)
    assert "\n" not in shown
    assert len(shown) <= 10 * longest  # an escape has up to ten characters
    assert printable(shown, 10 * longest) == shown


def test_hostile_names_are_printed_as_escapes(tmp_path):
    path = described(
        tmp_path / "model.freeze",
        [
            variable(HOSTILE),
            variable("b", source=["initializer", {"class_name": HOSTILE, "config": {}}]),
        ],
        name=HOSTILE,
    )
    rewritten(path, versions={HOSTILE: HOSTILE})
    printed = str(kf.storage.inspect(path))
    assert_safe(printed)
    assert "\\x1b[2Jred" in printed
    assert "\\ud800" in printed
    done = run("-m", "keras_freeze", "inspect", str(path), env={**os.environ, "LC_ALL": "C"})
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout


def test_a_name_that_the_terminal_lacks_is_printed_as_an_escape(tmp_path):
    path = described(tmp_path / "model.freeze", [variable("schicht_ü")])
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = run("-m", "keras_freeze", "inspect", str(path), env=environment, text=True)
    assert done.returncode == 0
    assert "schicht_\\xfc" in done.stdout


def test_a_hostile_file_name_is_printed_as_escapes(tmp_path):
    path = described(tmp_path / "a\x1b[2J\nb.freeze", [variable()])
    assert_safe(str(kf.storage.inspect(path)))
    path.write_bytes(b"other")
    done = run("-m", "keras_freeze", "inspect", str(path), text=True)
    assert_safe(done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "fields",
    [
        {"variables": [variable(HOSTILE, source=["constant", 1 << 40])]},
        {"variables": [variable(source=[HOSTILE])]},
        {"variables": [variable(dtype=HOSTILE)]},
        {"model": {"class_name": HOSTILE, "config": {}}},
        {"model": {"class_name": "Dense", "module": HOSTILE, "config": {"name": HOSTILE}}},
        {"base": HOSTILE},
        {"generator": HOSTILE},
    ],
)
def test_errors_of_load_quote_no_hostile_text(fields, tmp_path, capsys):
    path = rewritten(frozen_file(tmp_path / "model.freeze"), **fields)
    with pytest.raises(kf.FreezeFileError) as raised:
        kf.load(path)
    assert_shown_safely(raised.value)


def test_errors_of_load_are_short(tmp_path):
    path = frozen_file(tmp_path / "model.freeze")
    rewritten(path, model={"class_name": "x" * 1_000_000, "config": {}})
    with pytest.raises(kf.FreezeFileError) as raised:
        kf.load(path)
    assert len(str(raised.value)) < 3_000


def assert_shown_safely(error):
    """The error and all that Python prints with it."""
    import traceback

    for line in traceback.format_exception_only(error):
        assert_safe(line)
    while error is not None:
        assert_safe(str(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_a_mask_file_of_hostile_text_is_quoted_safely(tmp_path):
    import hashlib
    import json

    text = json.dumps({"entries": [{"shape": [1], HOSTILE: 1}], "num_rescued": 0}).encode()
    body = b"keras_freeze mask 1\n" + len(text).to_bytes(8, "little") + text + b"\0"
    path = tmp_path / "\x1b[2J.mask"
    path.write_bytes(body + hashlib.sha256(body).digest())
    with pytest.raises(ValueError, match="not valid") as raised:
        kf.FreezeMask.load(path)
    assert_shown_safely(raised.value)


# Size


def test_a_table_of_many_variables_is_cut_and_says_so(tmp_path):
    number = 20_000
    names = ["n" * 100_000] + [f"v{i}" for i in range(number - 1)]
    path = described(tmp_path / "model.freeze", [variable(name) for name in names])
    found = kf.storage.inspect(path)
    printed = str(found)
    assert len(found.rows) == number
    assert len(printed) < 500_000
    assert f"... and {number - 1_000:,} more variables" in printed


@pytest.mark.parametrize("rate", ["one rate", "levels"])
def test_masks_too_large_to_count_are_not_decoded(rate, tmp_path):
    encoder = Encoder()
    encoder.bits(2 if rate == "one rate" else 3, 2)
    path = described(
        tmp_path / "model.freeze",
        [variable(shape=(1 << 30, 1), mask=[0, 1], dtype="bool"), variable("bias", (2,))],
        encoder.finish(),
    )
    found = kf.storage.inspect(path)
    assert found.freeze_rate is None
    assert [row.num_stored for row in found.rows] == [None, 0]
    assert "not counted" in str(found)
    assert "? stored" in str(found)


def test_masks_of_one_value_are_counted_whatever_their_size(tmp_path):
    encoder = Encoder()
    encoder.bits(0, 2)  # all frozen
    encoder.bits(1, 2)  # all trained
    large, small = variable(shape=(1 << 30,), mask=[0, 1], dtype="bool"), variable(mask=[1, 1])
    path = described(tmp_path / "model.freeze", [large, small], encoder.finish())
    found = kf.storage.inspect(path)
    assert [row.num_stored for row in found.rows] == [0, 6]
    assert found.freeze_rate == (1 << 30) / ((1 << 30) + 6)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5))
def test_counts_are_those_of_the_decoded_masks(seeds):
    masks = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        shape = tuple(rng.integers(0, 12, rng.integers(0, 4)))
        masks.append(rng.random(shape) < rng.choice([0.0, 0.02, 0.5, 1.0]))
    stream, shapes = encode_masks(masks), [mask.shape for mask in masks]
    counts = [int(mask.sum()) for mask in decode_masks(stream, shapes)]
    assert count_masks(stream, shapes, 10**6) == counts == [int(mask.sum()) for mask in masks]


def test_inspect_finds_the_rates_of_the_mask(tmp_path):
    path = frozen_file(tmp_path / "model.freeze")
    mask = kf.FreezeMask.load(path)
    found = kf.storage.inspect(path)
    assert found.freeze_rate == mask.freeze_rate
    stored = {row.path.split("/", 1)[1]: row.num_stored for row in found.rows}
    assert stored["body/kernel"] == mask["body/kernel"].sum()
    parameters = 6 * 8 + 8 + 8 * 3 + 3
    assert found.real_freeze_rate == (mask.num_weights - mask.num_trained) / parameters
