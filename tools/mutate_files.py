"""Load files whose content is wrong and whose checksums are right.

    python tools/mutate_files.py --count=30000

Each file is one that `save` wrote, of which the JSON of the header or a section has been changed in
one place or several: other values and types, other sizes, names of other classes, deeper nesting,
parts that are missing, repeated or from elsewhere. Loading it has to succeed or to be a
FreezeFileError that names the file; nothing that only Keras's other uses need may be looked up, no
file opened for writing, no process started, no connection made, and no more memory taken than a
small network needs. tests/unit/test_mutated_files.py runs some, and 30,000 in `make test-all`.
"""

import argparse
import contextlib
import copy
import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_freeze as kf
from keras_freeze.storage.container import Container, read_container, write_container

MAX_BYTES = 1 << 24  # of a file's variables: those of the networks below are far smaller

_SECTIONS = ("mask", "exponents", "mantissas")
_ODD = (
    *(None, True, False, -1, 0, 1, 2, 7, 64, 0.5, -2.5, float("nan"), float("inf"), 10**400),
    *(2**16, 2**31 - 1, 2**31, 2**32, 2**47, 2**63, 2**64, -(2**31), 20_000, 10**6),
    *("", "x", "\0", "\ud800", "../x", "/etc/passwd", "http://localhost/x", "relu", "zeros", "mse"),
    *("float16", "bfloat16", "bool", "float64", "string", "int4", "zero", "seed", "base"),
    *(
        [],
        [0],
        [[0]],
        ["constant"],
        ["base", 0],
        ["seed", "pm_sigma", 0, 0],
        [0, 1],
        {},
        [None] * 9,
    ),
)
_NAMES = (
    *(("keras.config", "set_max_epochs"), ("keras.datasets.cifar10", "load_data")),
    *(("keras.utils", "get_file"), ("keras.models", "load_model"), ("keras.ops", "map")),
    *(("keras.layers", "TFSMLayer"), ("keras.layers", "Lambda"), ("keras.layers", "Dense")),
    *(("keras.initializers", "Constant"), ("keras.optimizers", "Adam"), ("os", "system")),
    *(("keras.src.ops.core", "Switch"), ("keras.src.ops.numpy", "Add"), ("builtins", "exec")),
    *(("keras.random", "SeedGenerator"), ("keras.losses", "Huber"), ("keras", "Sequential")),
    *(("keras.callbacks", "BackupAndRestore"), ("keras.tree", "map_structure")),
)
_SPECIAL = (
    {"class_name": "__lambda__", "config": {"value": ["4wAAAA==", None, None]}},
    {"class_name": "__numpy__", "config": {"value": [[1.0, 2.0]], "dtype": "float32"}},
    {"class_name": "__numpy__", "config": {"value": ["x"], "dtype": "U1000000000"}},
    {"class_name": "__tensor__", "config": {"value": 1, "dtype": "int64"}},
    {"class_name": "__slice__", "config": {"start": 0, "stop": 10**9, "step": None}},
    {"class_name": "__ellipsis__", "config": {}},
    {
        "class_name": "__keras_tensor__",
        "config": {"shape": [None, 6], "dtype": "float32", "keras_history": ["inputs", 0, 0]},
    },
)


@dataclass(frozen=True)
class Original:
    """The content of a valid file, and the model that it is a delta on."""

    content: Container
    base: keras.Model | None = None


def write_originals(folder: Path) -> list[Original]:
    """Write files of several kinds, and return their contents."""
    makers: list[Callable[[Path], keras.Model | None]] = [_seeded, _decayed, _pruned, _delta]
    makers += [_changed, _on_a_grid_and_drawn, _mask_only, _in_tiles, _mask_in_tiles]
    originals = []
    for maker in [*makers, _with_operations, _recurrent]:
        path = folder / f"{maker.__name__}.freeze"
        base = maker(path)
        originals.append(Original(read_container(path), base))
    return originals


def _dense(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(3, kernel_constraint="max_norm"),
        ]
    )


def _trained(
    model: keras.Model, inner: Any = None, drawn: bool = False, **arguments: Any
) -> keras.Model:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, *model.input_shape[1:]))
    y = rng.normal(size=(16, *model.output_shape[1:]))
    inner = inner or keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(kf.FreezeOptimizer(inner, 0.75, **arguments), "mse", metrics=["mae"])
    kf.freeze(model, x, y, drawn=drawn)
    model.fit(x, y, verbose=0)
    return model


def _seeded(path: Path) -> None:
    model = _dense(0)
    kf.reinitialize(model, "xavier_normal", seed=0)
    kf.save(_trained(model), path, values="float16")


def _decayed(path: Path) -> None:
    model = _dense(1)
    kf.reinitialize(model, "xavier_normal", seed=1)
    kf.save(_trained(model, frozen_weights="decay", l2=0.05), path, include_optimizer=True)


def _pruned(path: Path) -> None:
    rate = keras.optimizers.schedules.CosineDecay(0.01, 10)
    model = _trained(_dense(2), keras.optimizers.Adam(rate), frozen_weights="zero")
    kf.save(model, path, include_optimizer=True)


def _delta(path: Path) -> keras.Model:
    base, model = _dense(3), _dense(4)
    model.set_weights(base.get_weights())
    kf.save(_trained(model), path, base=base)
    return base


def _changed(path: Path) -> keras.Model:
    base, model = _dense(7), _dense(8)
    model.set_weights(base.get_weights())
    kernel = np.array(base.trainable_variables[0])
    kernel[0] *= 1.01
    model.trainable_variables[0].assign(kernel)
    kf.save(model, path, base=base)
    return base


def _on_a_grid_and_drawn(path: Path) -> None:
    model = _trained(_dense(6), drawn=True)
    kf.quantize(model, step=0.02)
    kf.save(model, path)


def _mask_only(path: Path) -> None:
    kf.get_mask(_trained(_dense(5))).save(path)


def _in_tiles(path: Path) -> None:
    kf.save(_trained(_blocks(9), structure=(4, 8)), path)


def _mask_in_tiles(path: Path) -> None:
    kf.get_mask(_trained(_blocks(10), structure=(5, 4))).save(path)


def _blocks(seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(60), keras.layers.Dense(40)])


def _with_operations(path: Path) -> None:
    inputs = keras.Input((4, 6), name="inputs")
    x = keras.layers.MultiHeadAttention(2, 3)(inputs, inputs)
    x = keras.ops.concatenate([x, 2.0 * keras.ops.abs(inputs)], axis=-1)[:, 1:]
    x = keras.layers.Flatten()(keras.layers.LayerNormalization()(x))
    model = keras.Model(inputs, keras.layers.Dense(2, activation="relu")(x))
    kf.save(_trained(model), path, include_frozen=True)


def _recurrent(path: Path) -> None:
    layer = keras.layers.Bidirectional(keras.layers.GRU(3, return_sequences=True))
    heads = keras.layers.TimeDistributed(keras.layers.Dense(2))
    kf.save(_trained(keras.Sequential([keras.Input((4, 6)), layer, heads])), path)


def mutated(original: Original, others: list[Original], rng: random.Random) -> dict[str, Any]:
    """Return header and sections of a file with changes in one place or several."""
    content = original.content
    parts = {"header": copy.deepcopy(content.header)}
    parts |= {name: getattr(content, name) for name in _SECTIONS}
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        if rng.random() < 0.8:
            _change_header(parts["header"], rng.choice(others).content.header, rng)
        else:
            name = rng.choice(_SECTIONS)
            other = getattr(rng.choice(others).content, rng.choice(_SECTIONS))
            parts[name] = _changed_bytes(parts[name], other, rng)
    return parts


def _change_header(header: dict[str, Any], other: dict[str, Any], rng: random.Random) -> None:
    found = list(places(header))
    if not found:
        return
    # Most places are in the configuration of the model: half of the changes are elsewhere.
    if rng.random() < 0.5:
        found = list(places({key: value for key, value in header.items() if key != "model"}))
        found = [place for place in found if place[0] is not header] or list(places(header))
    holder, key = rng.choice(found)
    value = holder[key]
    change = rng.choice(_CHANGES)
    new = change(value, other, rng)
    if new is _REMOVED:
        del holder[key]
    elif new is _REPEATED:
        if isinstance(holder, list):
            holder[key : key + 1] = [value] * rng.choice([2, 3, 300])
    elif new is _RENAMED:
        if isinstance(holder, dict):
            holder[rng.choice(["config", "class_name", "module", "x"])] = holder.pop(key)
    else:
        holder[key] = new


_REMOVED, _REPEATED, _RENAMED = object(), object(), object()


def _odd(value: Any, other: Any, rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(_ODD))


def _near(value: Any, other: Any, rng: random.Random) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _odd(value, other, rng)
    return rng.choice([value + 1, value - 1, -value, 2 * value, value * 1000, float(value)])


def _named(value: Any, other: Any, rng: random.Random) -> Any:
    module, name = rng.choice(_NAMES)
    if rng.random() < 0.5:
        inner = {"module": rng.choice([module, "builtins"]), "config": name}
        return {**inner, "class_name": "function", "registered_name": name}
    config = value if isinstance(value, dict) and rng.random() < 0.5 else {}
    return {"module": module, "class_name": name, "config": config, "registered_name": None}


def _renamed(value: Any, other: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict) or "class_name" not in value:
        return _from_elsewhere(value, other, rng)
    module, name = rng.choice(_NAMES)
    return {**value, "module": module, "class_name": name}


def _special(value: Any, other: Any, rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(_SPECIAL))


def _nested(value: Any, other: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice([1, 2, 20, 150, 400])):
        value = {"config": value} if rng.random() < 0.5 else [value]
    return value


def _from_elsewhere(value: Any, other: Any, rng: random.Random) -> Any:
    holder, key = rng.choice(list(places(other)))
    return copy.deepcopy(holder[key])


def _removed(value: Any, other: Any, rng: random.Random) -> Any:
    return _REMOVED


def _repeated(value: Any, other: Any, rng: random.Random) -> Any:
    return _REPEATED


def _moved(value: Any, other: Any, rng: random.Random) -> Any:
    return _RENAMED


def _shuffled(value: Any, other: Any, rng: random.Random) -> Any:
    if not isinstance(value, list):
        return _odd(value, other, rng)
    return rng.sample(value, len(value))


_CHANGES = (
    *(_odd, _odd, _near, _near, _named, _renamed, _special, _nested, _from_elsewhere),
    *(_removed, _repeated, _moved, _shuffled),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """The containers inside a value, each with its keys or indices."""
    if isinstance(value, dict):
        keys = list(value)
    else:
        keys = list(range(len(value))) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from places(value[key])


def _changed_bytes(section: bytes, other: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(5)
    if kind == 0:
        return other
    if kind == 1:
        return section[: rng.randrange(len(section) + 1)]
    if kind == 2:
        return section + rng.randbytes(4 * rng.randrange(1, 5))
    if kind == 3 or not section:
        return rng.randbytes(4 * rng.randrange(20))
    damaged = bytearray(section)
    for _ in range(rng.randrange(1, 5)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


class Watch:
    """What a file may not cause: recorded while it is on.

    Attributes:
        found: descriptions of what happened.
    """

    _EVENTS = ("os.system", "subprocess.Popen", "os.exec", "os.fork", "os.remove", "os.mkdir")

    def __init__(self) -> None:
        self.found: list[str] = []
        self._is_on = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        is_write = event == "open" and any(c in str(arguments[1] or "r") for c in "wax+")
        is_bad = event in self._EVENTS or event.startswith(("socket.", "urllib.", "marshal.loads"))
        if (is_write or is_bad) and not _is_import(sys._getframe(1)):
            self.found.append(f"{event} {arguments!r:.200}")

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False


def _is_import(frame: FrameType) -> bool:
    """Return whether this is Python's own import, which unmarshals a module that is used first."""
    return frame.f_code.co_filename.startswith("<frozen importlib")


def read(path: Path, original: Original) -> bool:
    """Read a file with every function that reads files, and return whether it could be loaded.

    Raises:
        Exception: Any error except a FreezeFileError that names the file.
    """
    readers: list[Callable[[], Any]] = [
        lambda: str(kf.storage.inspect(path)),
        lambda: kf.FreezeMask.load(path),
        lambda: kf.load(path, base=original.base, max_bytes=MAX_BYTES),
    ]
    if original.base is not None:
        readers.append(lambda: kf.apply_delta(original.base, path))
    was_loaded = False
    for index, reader in enumerate(readers):
        try:
            reader()
            was_loaded |= index >= 2
            if index == 3:
                kf.remove_delta(original.base, path)
        except kf.FreezeFileError as error:
            if str(path) not in str(error):
                raise
    return was_loaded


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Read `count` changed files.

    Returns:
        The number of files, and the number of those that could be loaded.

    Raises:
        Exception: Any error of a reader except a FreezeFileError; the file is then kept.
        RuntimeError: If a file had an effect that it must not have.
    """
    originals = write_originals(folder)
    rng = random.Random(seed)
    watch, path = Watch(), folder / "changed.freeze"
    num_loaded = made = 0
    while made < count:
        # The last two have the layers that take longest to build.
        (original,) = rng.choices(originals, [4] * (len(originals) - 2) + [1, 1])
        parts = mutated(original, originals, rng)
        try:
            write_container(path, **parts)
        except (ValueError, RecursionError):  # not JSON, or not UTF-8
            continue
        made += 1
        with watch.on(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            num_loaded += read(path, original)
        if watch.found:
            raise RuntimeError(f"{path} caused {watch.found[0]}")
        if made % 50 == 0:
            keras.utils.clear_session(free_memory=False)
    return {"files": made, "loaded": num_loaded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=1_000, help="how many files")
    parser.add_argument("--seed", type=int, default=0, help="of the changes")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mutated-files-"))
    print(f"Files in {folder}")
    print(json.dumps(run(arguments.count, arguments.seed, folder)))


if __name__ == "__main__":
    main()
