"""Files whose checksums are right, and whose content is not: refused, or never a wrong model."""

import contextlib
import copy
import json
import pickle
import zlib
from typing import Any

import keras
import numpy as np
import pytest
from file_layout import DICTIONARIES, PREAMBLE, SECTIONS, START, sealed
from helpers import blobs, compiled, dense_model, same_bits, value_of, values_of
from whole_files import (
    MAKERS,
    MISSING,
    READERS,
    TWICE,
    assert_refused,
    changed,
    file_of,
    flip_bits,
    peak_memory,
    rebuilt,
    whole_files,
)

import keras_freeze as kf

# Keras reads every variable with it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.cases(2),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return whole_files(tmp_path_factory.mktemp("whole"))


@pytest.fixture(params=MAKERS)
def file(request, files):
    return files[request.param]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.freeze"


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
@pytest.mark.cases(1)
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


@pytest.mark.cases(1)
def test_no_changed_header_loads_as_a_model_with_other_values(file, path):
    rng = np.random.default_rng(1)
    header = file.content.header
    everywhere = [place for place in places(header) if not is_configuration(place)]
    for index in rng.choice(len(everywhere), 40):
        change = CHANGES[rng.integers(len(CHANGES))]
        load_what_is_written(
            path, rebuilt(file, changed(header, everywhere[index], change)), file.base
        )


@pytest.mark.cases(1)
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


@pytest.mark.cases(1)
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


@pytest.mark.cases(1)
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
