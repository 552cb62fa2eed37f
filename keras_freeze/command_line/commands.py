"""The commands that load models."""

import argparse
import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_freeze._utils.text import printable
from keras_freeze.command_line.answer import Answer
from keras_freeze.command_line.model_files import open_model, verify_keras_file, write_model
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.storage.container import is_container, read_container
from keras_freeze.storage.deltas import apply_delta
from keras_freeze.storage.errors import FreezeFileError
from keras_freeze.storage.keras_model import bits_of, is_random_state, variables_of
from keras_freeze.storage.loading import load
from keras_freeze.storage.masks import MaskHeader, read_header
from keras_freeze.storage.saving import save
from keras_freeze.storage.sources import align

_LONGEST_PATH = 300  # characters that are printed


def diff(arguments: argparse.Namespace) -> Answer:
    """Write what differs between a base and a model."""
    base = open_model(arguments.base)
    model = open_model(arguments.model, compile=True)
    save(model, arguments.output, base=base, values=arguments.values)
    sizes = {name: _size(getattr(arguments, name)) for name in ("base", "model", "output")}
    counts = _compare(model, base)
    lines = [
        f"{_shown(arguments.output)}: {sizes['output']:,} bytes",
        f"base: {sizes['base']:,} bytes, model: {sizes['model']:,} bytes",
        f"{counts['num_differing']:,} of {counts['num_values']:,} values differ from the base",
    ]
    if counts["num_new"]:
        lines[-1] += f", of these {counts['num_new']:,} in variables that the base does not have"
    fields = {
        "delta": arguments.output,
        "delta_bytes": sizes["output"],
        "base_bytes": sizes["base"],
        "model_bytes": sizes["model"],
        **counts,
    }
    return Answer("\n".join(lines), fields)


def apply(arguments: argparse.Namespace) -> Answer:
    """Write the model that a delta gives on its base."""
    base = open_model(arguments.base)
    model = load(arguments.delta, base=base)
    if arguments.keep_undo is not None:
        _write_undo(base, arguments.delta, arguments.keep_undo)
    write_model(model, arguments.output)
    written = {"model": arguments.output}
    if arguments.keep_undo is not None:
        written["undo"] = arguments.keep_undo
    return _written(written)


def remove(arguments: argparse.Namespace) -> Answer:
    """Write the base again."""
    model = open_model(arguments.model)
    write_model(load(arguments.undo, base=model), arguments.output)
    return _written({"base": arguments.output})


def verify(arguments: argparse.Namespace) -> Answer:
    """Load a file, and compare everything with its checksums."""
    fields: dict[str, Any] = {"file": arguments.file, "valid": False, "error": None}
    # A base that cannot be loaded says nothing about the file.
    base = None if arguments.base is None else open_model(arguments.base)
    try:
        kind, num_values = _verified(arguments.file, base)
    except ValueError as error:
        return Answer("", {**fields, "error": str(error)}, str(error))
    fields |= {"valid": True, "kind": kind, "num_values": num_values}
    return Answer(f"{_shown(arguments.file)}: valid, {kind}, {num_values:,} values", fields)


COMMANDS: dict[str, Callable[[argparse.Namespace], Answer]] = {
    "diff": diff,
    "apply": apply,
    "remove": remove,
    "verify": verify,
}
"""All commands of this module by name."""


def _verified(path: str, base: keras.Model | None) -> tuple[str, int]:
    """Return what kind of file it is, and the number of values in it; ValueError if damaged."""
    if not is_container(path):
        if base is not None:
            raise ValueError(f"{path!r} is no `.freeze` file, and has no base: leave --base out.")
        return "a .keras file", _num_values(verify_keras_file(path))
    header = read_header(read_container(path))
    if not isinstance(header, MaskHeader):
        kind = "a model" if header.base is None else "a delta"
        return kind, _num_values(load(path, base=base))
    if base is not None:
        raise ValueError(f"{path!r} holds a mask only, and has no base: leave --base out.")
    return "a mask", sum(entry.trained.size for entry in FreezeMask.load(path).entries)


def _write_undo(base: keras.Model, delta: str, path: str) -> None:
    try:
        apply_delta(base, delta, keep_undo=path)
    except FreezeFileError as error:  # though `load` could read it
        raise ValueError(
            f"{delta!r} gives a model of another architecture than that of the base, for which no "
            "undo file can be written: leave --keep-undo out."
        ) from error


def _compare(model: keras.Model, base: keras.Model) -> dict[str, int]:
    """Return how many values a model has, and how many of them its base does not have."""
    ours, theirs = _values_of(model), _values_of(base)
    found = align(ours, theirs)
    num_new = sum(_length(v) for number, v in enumerate(ours) if number not in found)
    num_changed = sum(
        int(np.count_nonzero(bits_of(ours[number]) != bits_of(theirs[other])))
        for number, other in found.items()
    )
    num_values = sum(map(_length, ours))
    return {"num_values": num_values, "num_differing": num_changed + num_new, "num_new": num_new}


def _num_values(model: keras.Model) -> int:
    return sum(map(_length, _values_of(model)))


def _values_of(model: keras.Model) -> list[Any]:
    """Return the variables of a model but for random states, which belong to no delta."""
    return [v for v in variables_of(model) if not is_random_state(v)]


def _length(variable: Any) -> int:
    return int(np.prod(tuple(variable.shape), dtype=np.int64))


def _size(path: str) -> int:
    return os.stat(path).st_size


def _shown(path: str) -> str:
    return printable(path, _LONGEST_PATH)


def _written(files: dict[str, str]) -> Answer:
    fields: dict[str, Any] = {}
    for name, path in files.items():
        fields |= {name: path, f"{name}_bytes": _size(path)}
    lines = [f"{_shown(path)}: {_size(path):,} bytes" for path in files.values()]
    return Answer("\n".join(lines), fields)
