"""Damaged `.freeze` files, which checksums find: refused by name, in bounded memory."""

import itertools

import numpy as np
import pytest
from file_layout import LENGTHS, PREAMBLE, SECTIONS, START, pack
from whole_files import MAKERS, READERS, assert_refused, flip_bits, peak_memory, whole_files

import keras_freeze as kf
from keras_freeze.storage import loading

# Keras reads every variable with it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.cases(2),
]
MEMORY_FOR_A_SMALL_FILE = 1 << 16  # bytes


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return whole_files(tmp_path_factory.mktemp("whole"))


@pytest.fixture(params=MAKERS)
def file(request, files):
    return files[request.param]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.freeze"


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


@pytest.mark.cases(1)
@pytest.mark.usefixtures("_no_model_is_built")
@pytest.mark.parametrize("number", [300, pytest.param(4_000, marks=pytest.mark.exhaustive)])
def test_ten_thousand_corruptions_are_refused_before_a_model_is_built(file, files, path, number):
    for damaged in corruptions(file, files, number):
        path.write_bytes(damaged)
        assert_refused(path)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("_no_model_is_built")
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_every_truncation_is_refused(file, path, every):
    for length in range(0, len(file.data), every):
        path.write_bytes(file.data[:length])
        assert_refused(path)


@pytest.mark.cases(1)
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
