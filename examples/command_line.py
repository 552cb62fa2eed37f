"""What these scripts share: a quiet start, flags, tables, and errors in one line each."""

import contextlib
import inspect
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging


@contextlib.contextmanager
def _no_standard_error() -> Iterator[None]:
    """Discard what C++ code writes to file descriptor 2."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


# Without a GPU TensorFlow reports as an error that it finds none; and whatever the level, it greets
# with half a page when it is imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
with _no_standard_error():
    import tensorflow as tf  # noqa: F401

import keras  # noqa: E402

import keras_freeze as kf  # noqa: E402
from keras_freeze._utils.files import replacing  # noqa: E402

_DEFINE = {int: flags.DEFINE_integer, float: flags.DEFINE_float, str: flags.DEFINE_string}
_CHOICES = {
    "dataset": kf.datasets.NAMES,
    "model": kf.models.MODELS,
    "method": kf.training.METHODS,
}


# Flags defined here are those of the script that asks for them: --help shows them.
flags.disclaim_key_flags()


def define_settings(*names: str, **defaults: Any) -> Callable[[], dict[str, Any]]:
    """Define a flag for each of some settings of a `Run`, described as it describes them.

    Args:
        names: names of settings.
        defaults: their values where a flag is not given. None where there is no default.

    Returns:
        A function that returns the values of the flags by name.
    """
    kinds = typing.get_type_hints(kf.runs.Run)
    attributes = inspect.cleandoc(kf.runs.Run.__doc__).partition("Attributes:")[2]
    described = dict(re.findall(r"^    (\w+): (.*?)(?=^ {0,4}\S|\Z)", attributes, re.M | re.S))
    holders = {}
    for name in names:
        kind = next(k for k in _DEFINE if k in (kinds[name], *typing.get_args(kinds[name])))
        text = " ".join(described[name].split())
        if name in _CHOICES:
            text += f" One of: {', '.join(_CHOICES[name])}."
        holders[name] = _DEFINE[kind](name, defaults.get(name), text)
    return lambda: {name: holder.value for name, holder in holders.items()}


def numbers(flag: flags.FlagHolder, kind: type) -> list[Any]:
    """Return the different numbers in a list flag.

    Raises:
        ValueError: for anything but numbers, and for an empty list.
    """
    try:
        found = list(dict.fromkeys(kind(text) for text in flag.value))
        if not found:
            raise ValueError("there is none")
        return found
    except ValueError as error:
        raise ValueError(
            f"{flag.name} must be numbers with commas between them. "
            f"Received: --{flag.name}={','.join(flag.value)}"
        ) from error


def require_backend(*names: str) -> None:
    """Check that Keras runs on a backend that the script is for.

    Raises:
        ValueError: if it does not.
    """
    if keras.backend.backend() not in names:
        raise ValueError(
            f"KERAS_BACKEND must be {' or '.join(names)} for this script. "
            f"Received: {keras.backend.backend()}"
        )


def check_settings(path: Path, holders: Sequence[Any]) -> None:
    """Refuse a folder with networks of other settings; otherwise write down those of this run.

    Args:
        path: the file in the folder that holds the settings.
        holders: the flags that all networks in the folder have in common.

    Raises:
        ValueError: if the file holds others.
    """
    settings = {holder.name: holder.value for holder in holders}
    found = json.loads(path.read_text()) if path.exists() else settings
    if found != settings:
        raise ValueError(
            f"output_dir must be new, or hold networks of the same settings, which are {found} "
            f"there. Received: {settings}"
        )
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(settings, indent=2) + "\n")


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines of cells as a table in Markdown with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    )


def run(main: Callable[[], None]) -> NoReturn:
    """Parse the flags and run `main`; an error is one line and status 1."""

    def parse(arguments: list[str]) -> list[str]:
        try:
            return flags.FLAGS(arguments)
        except flags.Error as error:
            _fail(error)

    def guarded(arguments: list[str]) -> None:
        if arguments[1:]:
            _fail(f"flags look like --seed=1. Received: {arguments[1]}")
        # What TFDS warns of is said in its errors, too.
        logging.get_absl_logger().setLevel("ERROR")
        try:
            main()
        except (ValueError, OSError, ImportError, RuntimeError) as error:
            _fail(error)
        except KeyboardInterrupt:
            _fail("interrupted")

    app.run(guarded, flags_parser=parse)


def _fail(problem: object) -> NoReturn:
    text = " ".join(str(problem).split())
    sys.exit(f"{os.path.basename(sys.argv[0])}: error: {text}")
