"""Run a command, and print what it has to say or what went wrong."""

import argparse
import contextlib
import dataclasses
import importlib
import io
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import keras_freeze
from keras_freeze._utils.text import jsonable, printable
from keras_freeze.command_line.answer import Answer
from keras_freeze.command_line.arguments import check_files, parser
from keras_freeze.storage.inspection import inspect

_LONGEST_MESSAGE = 2_000
# What bad input leads to; other errors are bugs, and show where they are.
_ERRORS = (ImportError, MemoryError, NotImplementedError, OSError, ValueError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: The arguments. Defaults to `None`, which takes those of the process.

    Returns:
        The exit status: 0, or 1 after an error, which is printed in one line.

    Raises:
        SystemExit: If the arguments are not understood, with status 2, or ask for help or version.
    """
    arguments = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # whose encoding may lack characters of a name
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _warnings_in_one_line():
            answer = _run(arguments)
        _print(answer, arguments.json)
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's last flush
        return 0
    except _ERRORS as error:
        _complain("error", str(error) or type(error).__name__)
        return 1
    if answer.error is not None:
        _complain("error", answer.error)
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> Answer:
    check_files(arguments)
    if arguments.command == "inspect":
        return _inspected(arguments.file)
    _import_package()
    for name in arguments.modules:
        _import_module(name)
    commands = importlib.import_module("keras_freeze.command_line.commands")
    answer: Answer = commands.COMMANDS[arguments.command](arguments)
    return answer


def _inspected(path: str) -> Answer:
    found = inspect(path)
    fields = dataclasses.asdict(found)
    return Answer(str(found), {**fields, "total_bytes": found.total_bytes})


def _import_package() -> None:
    """Import what `import keras_freeze` does, which `python -m keras_freeze` has left out.

    It registers classes of this package with Keras, and modules of the user may use it.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # warnings and errors of TensorFlow alone
    if "FreezeOptimizer" not in vars(keras_freeze):
        importlib.reload(keras_freeze)  # sys.argv is no longer that of the start


def _import_module(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception as error:
        raise ImportError(
            f"The module {name!r} cannot be imported ({type(error).__name__}): {error}"
        ) from error


def _print(answer: Answer, as_json: bool) -> None:
    text = answer.text
    if as_json:
        text = json.dumps(jsonable(answer.fields))
    if text:
        print(text, flush=True)


def _complain(kind: str, message: str) -> None:
    message = printable(" ".join(message.split()), _LONGEST_MESSAGE)
    print(f"keras_freeze: {kind}: {message}", file=sys.stderr)


@contextlib.contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        _complain("warning", str(message))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
