"""Whole `.freeze` files of each kind, others made of them, and what reads them."""

import copy
import json
import tracemalloc
from dataclasses import dataclass

import keras
import pytest
from file_layout import PREAMBLE, SECTIONS, sealed
from helpers import blobs, compiled, dense_model, fit, sgd
from keras import layers

import keras_freeze as kf
from keras_freeze.storage import container

READERS = (kf.load, kf.FreezeMask.load, kf.storage.inspect)


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


def whole_files(folder):
    """A file of each kind, by name."""
    return {name: make(folder / f"{name}.freeze") for name, make in MAKERS.items()}


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


def flip_bits(rng, data, other):
    damaged = bytearray(data)
    for place in rng.integers(8 * len(data), size=rng.integers(1, 9)):
        damaged[place // 8] ^= 1 << place % 8
    return bytes(damaged)


MISSING, TWICE = object(), object()


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
