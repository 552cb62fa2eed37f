"""Damaged and hostile `.freeze` files: refused by name, in bounded memory, never a wrong model."""

import contextlib
import copy
import itertools
import json
import os
import pickle
import subprocess
import sys
import textwrap
import tracemalloc
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from file_layout import DICTIONARIES, LENGTHS, PREAMBLE, SECTIONS, START, pack, sealed
from helpers import blobs, compiled, dense_model, fit, same_bits, sgd, value_of, values_of
from keras import layers
from keras.src.utils import python_utils

import keras_freeze as kf
from keras_freeze.storage import container, loading

# Keras reads every variable with it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.cases(2),
]

READERS = (kf.load, kf.FreezeMask.load, kf.storage.inspect)
MEMORY_FOR_A_SMALL_FILE = 1 << 16  # bytes


@dataclass(frozen=True)
class File:
    """A whole file: its bytes, what is in it, and the model that it is a delta on."""

    data: bytes
    content: container.Container
    base: keras.Model | None = None


def with_dropout():
    model = dense_model()
    model = keras.Sequential([*model.layers[:2], layers.Dropout(0.1), model.layers[2]])
    kf.reinitialize(model, seed=5)
    return model


def trained(model, drawn=False, **arguments):
    x, y = blobs()
    optimizer = kf.FreezeOptimizer(sgd(momentum=0.9), freeze_rate=0.75, **arguments)
    compiled(model, optimizer)
    kf.freeze(model, x, y, drawn=drawn)
    fit(model, x, y)
    return model


def file_of(path, model, base=None, **arguments):
    kf.save(model, path, base=base, **arguments)
    return File(path.read_bytes(), container.read_container(path), base)


def make_delta(path):
    base = dense_model(1)
    model = dense_model(1)
    model.set_weights(base.get_weights())
    return file_of(path, trained(model), base)


def make_decayed(path):
    model = trained(with_dropout(), frozen_weights="decay", l2=0.05)
    return file_of(path, model, values="float16", include_optimizer=True)


MAKERS = {
    "seeded": lambda path: file_of(path, trained(with_dropout())),
    "delta": make_delta,
    "decayed": make_decayed,
    # Version 2 of the format.
    "drawn": lambda path: file_of(path, trained(with_dropout(), drawn=True, grid=0.02)),
    "ranked": lambda path: file_of(path, trained(with_dropout(), criterion="random", grid=0.3)),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return {name: make(folder / f"{name}.freeze") for name, make in MAKERS.items()}


@pytest.fixture(params=MAKERS)
def file(request, files):
    return files[request.param]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.freeze"


def rebuilt(file, header=None, **sections):
    """The file with another header or other sections, all checksums right."""
    content = file.content
    parts = {name: getattr(content, name) for name in SECTIONS[1:]} | sections
    text = json.dumps(content.header if header is None else header).encode()
    return sealed(text, **parts, version=PREAMBLE.unpack_from(file.data)[1])


def assert_refused(path, readers=READERS):
    data = path.read_bytes()
    for read in readers:
        # Whether it is a file of ours is all that `FreezeMask.load` sees in the first eight bytes.
        is_ours = data[:8] == b"\x89FREEZE\n" or read != kf.FreezeMask.load
        with pytest.raises(kf.FreezeFileError if is_ours else ValueError) as caught:
            read(path)
        assert str(path) in str(caught.value)


def peak_memory(function, *arguments):
    """The bytes that a call holds at its worst moment."""
    tracemalloc.start()
    try:
        function(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# Corruptions that checksums find.


def flip_bits(rng, data, other):
    damaged = bytearray(data)
    for place in rng.integers(8 * len(data), size=rng.integers(1, 9)):
        damaged[place // 8] ^= 1 << place % 8
    return bytes(damaged)


def overwrite(rng, data, other):
    place, length = rng.integers(len(data)), rng.integers(1, 65)
    new = rng.bytes(length) if rng.integers(2) else bytes(length)
    return (data[:place] + new + data[place + length :])[: len(data)]


def truncate(rng, data, other):
    return data[: rng.integers(len(data))]


def append(rng, data, other):
    return data + (rng.bytes(rng.integers(1, 100)) if rng.integers(2) else other)


def insert(rng, data, other):
    place = rng.integers(len(data))
    return data[:place] + rng.bytes(rng.integers(1, 9)) + data[place:]


def cut_out(rng, data, other):
    place = rng.integers(len(data))
    return data[:place] + data[place + rng.integers(1, 65) :]


def splice(rng, data, other):
    return data[: rng.integers(len(data))] + other[rng.integers(len(other)) :]


def swap_sections(rng, data, other):
    """Two sections change places, with their lengths and checksums; the digest stays."""
    preamble = list(PREAMBLE.unpack_from(data))
    ends = START + np.cumsum([0, *(preamble[i] for i in LENGTHS)])
    sections = [data[start:end] for start, end in itertools.pairwise(ends)]
    first, second = rng.choice(4, 2, replace=False)
    for i in (0, 4):
        a, b = 3 + i + first, 3 + i + second
        preamble[a], preamble[b] = preamble[b], preamble[a]
    sections[first], sections[second] = sections[second], sections[first]
    return pack(preamble) + b"".join(sections) + data[ends[-1] :]


def announce_much(rng, data, other):
    """A length or the header's size becomes huge, and the preamble's own checksum fits."""
    preamble = list(PREAMBLE.unpack_from(data))
    field = rng.integers(2, 7)
    preamble[field] = min(2 ** int(rng.integers(20, 64)), 2**32 - 1 if field == 2 else 2**64 - 1)
    if field > 3 and rng.integers(2):
        preamble[3] = 2**64 - preamble[field]  # whose sum would be small in 64 bits
    return pack(preamble) + data[START:]


CORRUPTIONS = (
    flip_bits,
    overwrite,
    truncate,
    append,
    insert,
    cut_out,
    splice,
    swap_sections,
    announce_much,
)


def corruptions(file, files, count):
    """Damaged forms of a file, each of another kind than the one before."""
    rng = np.random.default_rng(len(file.data))
    others = [other for other in files.values() if other is not file]
    kinds = itertools.cycle(CORRUPTIONS)
    made = 0
    while made < count:
        damaged = next(kinds)(rng, file.data, others[made % len(others)].data)
        if damaged not in [whole.data for whole in files.values()]:
            made += 1
            yield damaged


@pytest.fixture
def _no_model_is_built(monkeypatch):
    def fail(*arguments):
        raise AssertionError("a damaged file has come as far as building a model")

    monkeypatch.setattr(loading, "build_model", fail)


@pytest.mark.usefixtures("_no_model_is_built")
@pytest.mark.parametrize("number", [300, pytest.param(4_000, marks=pytest.mark.exhaustive)])
def test_ten_thousand_corruptions_are_refused_before_a_model_is_built(file, files, path, number):
    for damaged in corruptions(file, files, number):
        path.write_bytes(damaged)
        assert_refused(path)


@pytest.mark.usefixtures("_no_model_is_built")
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_every_truncation_is_refused(file, path, every):
    for length in range(0, len(file.data), every):
        path.write_bytes(file.data[:length])
        assert_refused(path)


def test_corruptions_take_no_more_memory_than_the_file(file, files, path):
    for damaged in corruptions(file, files, 20 * len(CORRUPTIONS)):
        path.write_bytes(damaged)
        assert peak_memory(assert_refused, path) < MEMORY_FOR_A_SMALL_FILE


@pytest.mark.parametrize("section", range(4))
def test_errors_name_the_file_and_the_section(section, file, path):
    ends = START + np.cumsum([PREAMBLE.unpack_from(file.data)[i] for i in LENGTHS])
    damaged = bytearray(file.data)
    damaged[ends[section] - 1] ^= 1
    path.write_bytes(damaged)
    for read in READERS:
        with pytest.raises(kf.FreezeFileError, match=rf"model\.freeze.*'{SECTIONS[section]}'"):
            read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:40], "cut short"),
        (lambda data: data[:-1], "cut short"),
        (lambda data: data + b"x", "longer"),  # fails: it is said to be cut short
        (lambda data: data[:20] + b"x" + data[21:], "first 68 bytes"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "last 32 bytes"),
        (lambda data: data.replace(b"\n", b"\r\n"), "does not begin as one"),
    ],
)
def test_errors_say_what_has_happened(change, message, files, path):
    path.write_bytes(change(files["seeded"].data))
    with pytest.raises(kf.FreezeFileError, match=message):
        kf.load(path)


# Files whose checksums are right, and whose content is not.


def nested(depth):
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# No size here is one that some machine could have memory for.
ODD = (
    *(None, True, -1, 0, 1, 1.5, float("nan"), float("inf"), 2**40, 2**63, 10**400),
    *("", "x", "\0", "\ud800", "float64", "zero", "keras", [], [0], [[0]], {}, {"class_name": "x"}),
    *(nested(100), nested(600)),
)
MISSING, TWICE = object(), object()
CHANGES = (*ODD, MISSING, TWICE)


def places(value, place=()):
    """The places of all values inside a value, as keys and indices that lead there."""
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list) else []
    for key, inner in items:
        yield (*place, key)
        yield from places(inner, (*place, key))


def changed(header, place, change):
    """A copy of a header with something else at a place."""
    header = copy.deepcopy(header)
    *outer, last = place
    target = header
    for key in outer:
        target = target[key]
    if change is MISSING:
        del target[last]
    elif change is not TWICE:
        target[last] = change
    elif isinstance(target, list):
        target.insert(last, target[last])
    return header


def is_configuration(place):
    return place[0] == "model" and len(place) > 1


def variables_of(model):
    return list({id(variable): variable for variable in model.variables}.values())


def assert_as_announced(model, data):
    """Every variable of the model has the checksum that the file gives it."""
    _, version, _, length, *_ = PREAMBLE.unpack_from(data)
    text = zlib.decompressobj(zdict=DICTIONARIES[version]).decompress(data[START : START + length])
    records = json.loads(text)["variables"]
    for variable, record in zip(variables_of(model), records, strict=True):
        assert zlib.crc32(value_of(variable).tobytes()) == record["crc32"], record["path"]


@contextlib.contextmanager
def refused_if_at_all(path):
    """The block may raise, but only a FreezeFileError that names the file, or what `load` documents
    for a model that Keras cannot build or whose mask belongs to another network."""
    try:
        yield
    except ValueError as error:
        is_ours = isinstance(error, kf.FreezeFileError) and str(path) in str(error)
        others = ("Keras cannot build the model", "The mask that is loaded")
        if not is_ours and not str(error).startswith(others):
            raise


def read_what_is_written(path, data):
    path.write_bytes(data)
    with refused_if_at_all(path):
        assert str(path) in str(kf.storage.inspect(path))
    with refused_if_at_all(path):
        assert all(entry.trained.dtype == bool for entry in kf.FreezeMask.load(path).entries)


def load_what_is_written(path, data, base):
    path.write_bytes(data)
    with refused_if_at_all(path):
        assert_as_announced(kf.load(path, base=base), data)


def apply_what_is_written(path, data, base):
    """Applies a delta, which must be as announced or leave the base alone, and takes it off."""
    path.write_bytes(data)
    before = values_of(base.variables)
    with refused_if_at_all(path):
        kf.apply_delta(base, path)
        assert_as_announced(base, data)
        kf.remove_delta(base, path)
    for variable, old in zip(base.variables, before, strict=True):
        assert same_bits(value_of(variable), old), variable.path


@pytest.mark.slow
@pytest.mark.cases(2)
def test_every_changed_header_is_refused_or_harmless(file, path):
    header = file.content.header
    for place in places(header):
        if is_configuration(place):
            continue
        for change in CHANGES:
            data = rebuilt(file, changed(header, place, change))
            read_what_is_written(path, data)
            if file.base is not None:
                apply_what_is_written(path, data, file.base)


def test_no_changed_header_loads_as_a_model_with_other_values(file, path):
    rng = np.random.default_rng(1)
    header = file.content.header
    everywhere = [place for place in places(header) if not is_configuration(place)]
    for index in rng.choice(len(everywhere), 40):
        change = CHANGES[rng.integers(len(CHANGES))]
        load_what_is_written(
            path, rebuilt(file, changed(header, everywhere[index], change)), file.base
        )


def test_no_changed_configuration_loads_as_a_model_with_other_values(file, path):
    rng = np.random.default_rng(2)
    header = file.content.header
    inside = [place for place in places(header) if is_configuration(place)]
    for index in rng.choice(len(inside), 80):
        change = CHANGES[rng.integers(len(CHANGES))]
        data = rebuilt(file, changed(header, inside[index], change))
        load_what_is_written(path, data, file.base)


def changed_section(rng, section):
    """A section with other bytes: a few, all, fewer or more."""
    kind = rng.integers(4)
    if kind == 0 or not section:
        return rng.bytes(4 * rng.integers(20))
    if kind == 1:
        return section[: rng.integers(len(section))]
    if kind == 2:
        return section + rng.bytes(rng.integers(1, 9))
    return flip_bits(rng, section, b"")


@pytest.mark.cases(2)
@pytest.mark.parametrize("number", [300, pytest.param(10_000, marks=pytest.mark.exhaustive)])
def test_other_sections_are_refused_or_harmless(file, path, number):
    rng = np.random.default_rng(3)
    for i in range(number):
        name = SECTIONS[1 + i % 3]
        section = changed_section(rng, getattr(file.content, name))
        data = rebuilt(file, **{name: section})
        read_what_is_written(path, data)
        if file.base is not None:
            apply_what_is_written(path, data, file.base)
        if i < 40:
            load_what_is_written(path, data, file.base)


TEXTS = {
    "nothing": b"",
    "no object": b"[1]",
    "no JSON": b"{",
    "no UTF-8": b'{"model": "\xff"}',
    "a pickle": pickle.dumps({"model": {}}),
    "too deep": b"[" * 100_000 + b"]" * 100_000,
    "too many digits": b'{"variables": ' + b"9" * 100_000 + b"}",
    "nothing in it": b"{}",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_headers_that_are_none_are_refused(text, path):
    path.write_bytes(sealed(text))
    assert_refused(path)


def many_lists(num_bytes):
    return b"[" + b"[]," * (num_bytes // 3) + b"0]"


@pytest.mark.parametrize("announced", [None, 1000, 2**32 - 1])
def test_headers_that_unpack_to_something_enormous_are_refused(announced, path):
    path.write_bytes(sealed(many_lists(1 << 26), announced=announced))
    for read in READERS:
        assert peak_memory(assert_refused, path, (read,)) < 1 << 25


def with_first_variable(file, **described):
    """The file's header with something else said of its first variable."""
    header = copy.deepcopy(file.content.header)
    header["variables"][0].update(described)
    return header


SHAPES = {
    "more than all memory": [2**24, 2**24],
    "more than an integer holds": [2**47] * 10,
    "nothing, but long": [0, 2**47],
    "nothing, longer than an integer holds": [0, *[2**47] * 4],
    "more axes than an array has": [1] * 65 + [6, 8],
    "very many axes": [1] * 20_000,
}


@pytest.mark.parametrize("has_mask", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_impossible_shapes_are_refused_before_anything_is_allocated(shape, has_mask, files, path):
    header = with_first_variable(files["seeded"], shape=shape)
    if not has_mask:
        del header["variables"][0]["mask"]
    path.write_bytes(rebuilt(files["seeded"], header))
    for read in (kf.load, kf.storage.inspect):
        assert peak_memory(assert_refused, path, (read,)) < 1 << 24


def test_an_empty_variable_with_long_lines_is_refused(files, path):
    """Its mask says that every line has a level: mode 3, then one histogram of one symbol each."""
    header = with_first_variable(files["seeded"], shape=[0, 2**47])
    header["variables"] = header["variables"][:1]
    bits = "11" + 2 * ("1" + f"{97:08b}")
    path.write_bytes(rebuilt(files["seeded"], header, mask=range_coded(bits)))
    assert_refused(path, (kf.FreezeMask.load, kf.storage.inspect))


def range_coded(bits):
    """Bits of probability 1/2 as the mask's stream has them."""
    value = int(bits.ljust(64, "0"), 2)
    return np.array([value >> 32, value & 0xFFFFFFFF], "<u4").tobytes()


# Keras initializers whose values are not of the variable's shape.
@pytest.mark.parametrize("index", [0, -1])
def test_a_source_of_another_size_is_refused_and_leaves_the_base_as_it_is(index, path):
    base, model = dense_model(), dense_model()
    model.set_weights(base.get_weights())
    model.layers[0].bias.assign(np.ones(8))
    file = file_of(path, compiled_with_mask(model), base)
    header = copy.deepcopy(file.content.header)
    record = header["variables"][index]
    values = np.zeros((2, *record["shape"]), "float32")
    config = keras.initializers.serialize(keras.initializers.Constant(values.tolist()))
    record.update(source=["initializer", config], crc32=zlib.crc32(values.tobytes()))
    data = rebuilt(file, header)
    apply_what_is_written(path, data, base)
    load_what_is_written(path, data, base)


def compiled_with_mask(model):
    compiled(model)
    kf.freeze(model, *blobs())
    return model


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), pytest.param(10**400, id="huge")])
def test_a_decay_scale_that_cannot_be_is_refused(scale, files, path):
    header = {**files["decayed"].content.header, "decay_scale": scale}
    path.write_bytes(rebuilt(files["decayed"], header))
    assert_refused(path)


# No code from a file.


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_is_not_read(files, path, tmp_path):
    trace = tmp_path / "trace"
    pickled = pickle.dumps(Touch(trace))
    pickle.loads(pickled)
    assert trace.exists()
    trace.unlink()
    for data in (pickled, sealed(pickled), rebuilt(files["seeded"], mask=pickled)):
        path.write_bytes(data)
        assert_refused(path)
    path.write_bytes(files["delta"].data)
    base = tmp_path / "base.keras"
    base.write_bytes(pickled)
    with pytest.raises(ValueError, match=r"base\.keras"):
        kf.load(path, base=base)
    assert not trace.exists()


def lambda_that_touches(path):
    code, defaults, closure = python_utils.func_dump(
        eval(f"lambda x: (__import__('pathlib').Path({str(path)!r}).touch(), x)[1]")
    )
    config = {"code": code, "defaults": defaults, "closure": closure}
    return {"class_name": "__lambda__", "config": config}


def touching(path):
    """Configurations that make a file at a path, were they trusted, by name."""
    code = lambda_that_touches(path)
    call = {"module": "subprocess", "class_name": "run", "config": {"args": ["touch", str(path)]}}
    function = {"module": "os", "class_name": "function", "config": "mkdir"}
    in_layer = {"module": "keras.layers", "class_name": "Lambda", "registered_name": None}
    return {
        "lambda": code,
        "layer with a lambda": {**in_layer, "config": {"name": "a", "function": code}},
        "class": {**call, "registered_name": None},
        "function": {**function, "registered_name": "mkdir"},
        "layer with a function": {
            **in_layer,
            "config": {"name": "a", "function": function, "arguments": {"mode": 0}},
        },
    }


PLACES_FOR_CODE = {
    "model": ("model",),
    "layer": ("model", "config", "layers", 2),
    "activation": ("model", "config", "layers", 1, "config", "activation"),
    "loss": ("model", "compile_config", "loss"),
    "optimizer": ("model", "compile_config", "optimizer"),
    "initializer": ("variables", 0, "source", 1),
}


@pytest.mark.parametrize("kind", touching(""))
@pytest.mark.parametrize("place", PLACES_FOR_CODE)
def test_code_in_a_file_is_refused_and_not_run(place, kind, files, path, tmp_path):
    trace = tmp_path / "trace"
    header = copy.deepcopy(files["seeded"].content.header)
    if place == "initializer":
        header["variables"][0]["source"] = ["initializer", None]
    path.write_bytes(
        rebuilt(
            files["seeded"],
            changed(header, PLACES_FOR_CODE[place], touching(trace)[kind]),
        )
    )
    with pytest.raises(ValueError, match=r"model\.freeze|Keras "):
        kf.load(path)
    kf.storage.inspect(path)
    assert not trace.exists()


def with_lambda(place):
    """A model with a lambda function at a place."""
    function = {place: lambda *arguments: keras.ops.mean(arguments[-1])}
    layer = layers.Dense(3, **(function if place == "activation" else {}))
    between = [layers.Lambda(lambda x: 2 * x)] if place == "layer" else []
    model = keras.Sequential([keras.Input((6,)), *between, layer])
    rate = (lambda: 0.1) if place == "learning_rate" else 0.1
    criterion = (lambda w, g: w * g) if place == "criterion" else "snip"
    optimizer = kf.FreezeOptimizer(sgd(rate), criterion=criterion)
    model.compile(optimizer, function.get("loss", "mse"), metrics=[function.get("metrics", "mse")])
    return model


@pytest.mark.filterwarnings("ignore:The object being serialized includes a")
@pytest.mark.parametrize(
    "place", ["layer", "activation", "loss", "metrics", "learning_rate", "criterion"]
)
def test_saving_a_lambda_is_an_error_that_says_what_to_do(place, path):
    with pytest.raises(ValueError, match="register_keras_serializable"):
        kf.save(with_lambda(place), path)
    assert not list(path.parent.iterdir())


# Saves that are interrupted.


NUM_KILLS = 20
# The parent never runs TensorFlow, whose threads would not survive the fork. PyTorch saves slowly
# in a forked process.
KILLED_SAVES = """
    import itertools, os, shutil, signal, sys, time
    import keras, numpy as np
    import keras_freeze as kf

    def model(seed):
        model = keras.Sequential([keras.Input((200,)), keras.layers.Dense(500)])
        rng = np.random.default_rng(seed)
        model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
        return model

    def save_for_ever(path, first, written):
        models = [model(0), model(1)]
        for i in itertools.count(first):
            kf.save(models[i % 2], path)
            os.write(written, b".")

    path, num_kills = sys.argv[1], int(sys.argv[2])
    rng = np.random.default_rng(0)
    for i in range(num_kills):
        read, written = os.pipe()
        child = os.fork()
        if not child:
            try:
                save_for_ever(path, i, written)
            finally:
                os._exit(1)
        os.close(written)
        assert os.read(read, 1) == b"."
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        os.close(read)
        shutil.copy(path, f"{path}.{i}")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_killed_save_leaves_one_of_the_two_whole_files(path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED_SAVES), str(path), str(NUM_KILLS)]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    subprocess.run(command, check=True, env=environment)
    saved = [drawn(seed, (200, 500), (500,)) for seed in (0, 1)]
    found = []
    for i in range(NUM_KILLS):
        model = kf.load(path.with_name(f"{path.name}.{i}"), compile=False)
        equal = [all(map(same_bits, values_of(model.variables), values)) for values in saved]
        assert any(equal)
        found.append(equal.index(True))
    assert set(found) == {0, 1}


def drawn(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


@pytest.fixture
def old_file(files, path):
    path.write_bytes(files["seeded"].data)
    return path


def assert_save_fails_and_leaves(path, files):
    with pytest.raises(OSError, match=r"large|full|Permission"):
        kf.save(files["delta"].base, path, include_frozen=True)
    assert path.read_bytes() == files["seeded"].data
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_may_not_grow_leaves_the_old_one(files, old_file):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert_save_fails_and_leaves(old_file, files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("where", "step"), [(Path, "write_bytes"), (os, "fsync"), (os, "replace")])
def test_a_full_disk_leaves_the_old_file(where, step, files, old_file, monkeypatch):
    def fail(*arguments):
        raise OSError("the disk is full")

    monkeypatch.setattr(where, step, fail, raising=False)
    assert_save_fails_and_leaves(old_file, files)


def test_a_folder_without_write_permission_leaves_the_old_file(files, old_file):
    old_file.parent.chmod(0o500)
    try:
        if os.access(old_file.parent, os.W_OK):
            pytest.skip("this user may write everywhere")
        assert_save_fails_and_leaves(old_file, files)
    finally:
        old_file.parent.chmod(0o700)
