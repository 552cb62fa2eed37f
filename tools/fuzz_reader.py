"""Coverage-guided fuzzing of the reader of `.freeze` files.

    pip install atheris  # no dependency of the project; Linux, Python 3.11 to 3.13
    python tools/fuzz_reader.py --runs=100000
    python tools/fuzz_reader.py --load --runs=2000

Half of the inputs are files as they are, half are the four sections of one, which get checksums
that fit, so that what is behind these is reached too. Anything but a FreezeFileError that names the
file is a crash, which libFuzzer prints and keeps. With `--load`, inputs go through all of `load`,
where any ValueError will do, since Keras has its say there; whatever is loaded has to have the
checksums that its file announces.
"""

import argparse
import json
import os
import random
import struct
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import atheris

with atheris.instrument_imports(include=["keras_freeze.storage"]):
    import keras_freeze as kf

import keras
import numpy as np

from keras_freeze.storage import header as headers
from keras_freeze.storage.container import read_container, write_container
from keras_freeze.storage.errors import naming
from keras_freeze.storage.header import Header
from keras_freeze.storage.loading import restored

# An input begins with its kind. That of sections goes on with the lengths of the first three.
_FILE, _SECTIONS = b"\0", b"\1"
_LENGTHS = struct.Struct("<3H")

_ODD = (
    *(None, True, -1, 0, 1, 2, 7, 64, 0.5, 1e999, 2**31, 2**47, 2**64, 10**400),
    *("", "float16", "bfloat16", "bool", "float64", "zero", "seed", "base", "xavier_normal"),
    *([], [0], ["zero"], ["base", 0], ["seed", "pm_sigma", 0, 0], [0, 1], {}),
)


class Reader:
    """What is fuzzed.

    Args:
        folder: where inputs are written, best in memory.
        base: what inputs may be deltas on.
        whole: whether to go through all of `load`.
    """

    def __init__(self, folder: Path, base: keras.Model, whole: bool) -> None:
        self._path = folder / "input.freeze"
        self._base = base
        self._whole = whole

    def __call__(self, data: bytes) -> None:
        if not write_input(self._path, data):
            return
        try:
            if self._whole:
                self._load()
            else:
                self._read()
        except kf.FreezeFileError as error:
            if str(self._path) not in str(error):
                raise
        except ValueError as error:
            if not self._whole or not str(error):
                raise

    def _read(self) -> None:
        str(kf.storage.inspect(self._path))
        with naming(self._path):
            content = read_container(self._path)
            header = Header.from_json(content.header)
            restored(header, content, self._base.variables)

    def _load(self) -> None:
        content = read_container(self._path)
        has_base = content.header.get("base") is not None
        model = kf.load(self._path, base=self._base if has_base else None)
        for variable, record in zip(model.variables, content.header["variables"], strict=True):
            values = keras.ops.convert_to_numpy(variable)
            if zlib.crc32(values.tobytes()) != record["crc32"]:
                raise RuntimeError(f"{record['path']} was loaded with other values")


def write_input(path: Path, data: bytes) -> bool:
    """Writes the file that an input stands for; False for one that stands for none."""
    if data[:1] != _SECTIONS:
        path.write_bytes(data[1:])
        return True
    try:
        text, *others = split(data)
        write_container(path, json.loads(text), *others)
    except (struct.error, ValueError, RecursionError):
        return False
    return True


def split(data: bytes) -> list[bytes]:
    """The sections of an input, the first as JSON."""
    lengths = _LENGTHS.unpack_from(data, 1)
    rest = data[1 + _LENGTHS.size :]
    sections = []
    for length in lengths:
        sections.append(rest[:length])
        rest = rest[length:]
    return [*sections, rest]


def join(sections: list[bytes]) -> bytes:
    """An input of sections."""
    return _SECTIONS + _LENGTHS.pack(*map(len, sections[:3])) + b"".join(sections)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Changes an input: as bytes, or inside the JSON of its header."""
    generator = random.Random(seed)
    try:
        if data[:1] != _SECTIONS:
            raise ValueError("a file as it is")
        sections = split(data)
        chosen = generator.choice([0, 0, 0, 1, 2, 3])
        if chosen == 0:
            sections[0] = mutate_header(sections[0], generator)
        else:
            sections[chosen] = atheris.Mutate(sections[chosen], len(sections[chosen]) + 16)
        return join(sections)[:max_size]
    except (struct.error, ValueError, RecursionError):
        return atheris.Mutate(data, max_size)


def mutate_header(text: bytes, generator: random.Random) -> bytes:
    """Puts something else at one place of a JSON object, or takes it away."""
    header = json.loads(text)
    found = list(places(header))
    if not found:
        raise ValueError("there is nothing to change")
    # Most of a header is the model's configuration, which only Keras reads.
    outer, key = generator.choice(found if generator.random() < 0.2 else found[-200:])
    other, other_key = generator.choice(found)
    change = generator.choice(["odd", "odd", "other", "near", "remove", "repeat"])
    if change == "odd":
        outer[key] = generator.choice(_ODD)
    elif change == "other":
        outer[key] = json.loads(json.dumps(other[other_key]))
    elif change == "near" and isinstance(outer[key], (int, float)):
        outer[key] += generator.choice([-1, 1])
    elif change == "repeat" and isinstance(outer, list):
        outer.insert(key, outer[key])
    else:
        del outer[key]
    return json.dumps(header).encode()


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """The containers inside a value, each with its keys or indices."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys):
        yield value, key
        yield from places(value[key])


def make_model(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(3),
        ]
    )


def train(model: keras.Model, **arguments: Any) -> keras.Model:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 6)), rng.normal(size=(32, 3))
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(kf.FreezeOptimizer(inner, freeze_rate=0.75, **arguments), "mse")
    kf.freeze(model, x, y)
    model.fit(x, y, verbose=0)
    return model


def write_files(folder: Path, base: keras.Model) -> None:
    """Writes files of every kind, to begin with."""
    seeded = make_model(0)
    kf.reinitialize(seeded, seed=0)
    kf.save(train(seeded), folder / "seeded")
    kf.save(seeded, folder / "rounded", values="float16")
    kf.save(train(make_model(0)), folder / "keras", include_optimizer=True)
    pruned = train(make_model(1), frozen_weights="zero")
    kf.save(pruned, folder / "pruned")
    decayed = make_model(0)
    kf.reinitialize(decayed, seed=0)
    kf.save(train(decayed, frozen_weights="decay", l2=0.05), folder / "decayed")
    delta = make_model(0)
    delta.set_weights(base.get_weights())
    kf.save(train(delta), folder / "delta", base=base)


def write_corpus(folder: Path, base: keras.Model) -> None:
    """Writes the inputs that fuzzing begins with: each file as it is, and its sections."""
    write_files(folder, base)
    for path in list(folder.iterdir()):
        content = read_container(path)
        text = json.dumps(content.header).encode()
        sections = [text, content.mask, content.exponents, content.mantissas]
        path.with_name(f"{path.name}.sections").write_bytes(join(sections))
        path.write_bytes(_FILE + path.read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=100_000, help="how many inputs")
    parser.add_argument("--load", action="store_true", help="go through all of `load`")
    arguments = parser.parse_args()
    # A small machine: what announces more is to be refused rather than to be allocated.
    headers._physical_memory = lambda: 1 << 26
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        base = make_model(0)
        write_corpus(corpus, base)
        flags = [f"-runs={arguments.runs}", "-max_len=32768", "-timeout=60", "-rss_limit_mb=4096"]
        atheris.Setup(
            [sys.argv[0], str(corpus), "-print_final_stats=1", *flags],
            Reader(Path(folder), base, arguments.load),
            custom_mutator=mutate,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
