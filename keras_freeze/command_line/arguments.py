"""The arguments of the command line, and checks of the files that they name."""

import argparse
import os
from typing import Any

from keras_freeze._utils.files import check_replaceable, is_same_file
from keras_freeze._version import __version__
from keras_freeze.grids import STORED_DTYPES

_SUFFIXES = (".keras", ".freeze")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands.

    What it parses lists in `inputs` and `outputs` which of the arguments are files.
    """
    made = argparse.ArgumentParser(
        prog="python -m keras_freeze",
        description="Inspect and verify files; make, apply and remove deltas.",
    )
    made.add_argument("--version", action="version", version=f"keras_freeze {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_inspect(commands)
    _add_diff(commands)
    _add_apply(commands)
    _add_remove(commands)
    _add_verify(commands)
    return made


def _add_inspect(commands: Any) -> None:
    command = _add(commands, "inspect", "describe the content of a .freeze file")
    command.add_argument("file", metavar="FILE", help="the file")
    command.set_defaults(inputs=("file",), outputs=())


def _add_diff(commands: Any) -> None:
    command = _add(commands, "diff", "write what differs between a base and a model as a delta")
    command.add_argument("base", metavar="BASE", help="the base, a .keras or .freeze file")
    command.add_argument("model", metavar="MODEL", help="the model, a .keras or .freeze file")
    _add_output(command, "DELTA", "the delta to write, a .freeze file", str)
    command.add_argument(
        "--values",
        choices=STORED_DTYPES,
        default="float32",
        help="the dtype that float32 values are rounded to; float32, which is exact, by default",
    )
    _add_import(command)
    command.set_defaults(inputs=("base", "model"), outputs=("output",))


def _add_apply(commands: Any) -> None:
    command = _add(commands, "apply", "write the model that a delta gives on its base")
    command.add_argument("base", metavar="BASE", help="the base, a .keras or .freeze file")
    command.add_argument("delta", metavar="DELTA", help="a delta on this base")
    _add_output(command, "MODEL", "the model to write, a .keras or .freeze file", _model_file)
    command.add_argument(
        "--keep-undo",
        metavar="UNDO",
        help="also write the delta that turns the model back into the base, for `remove`",
    )
    _add_import(command)
    command.set_defaults(inputs=("base", "delta"), outputs=("output", "keep_undo"))


def _add_remove(commands: Any) -> None:
    command = _add(commands, "remove", "write the base again, from a model and its undo file")
    command.add_argument("model", metavar="MODEL", help="what `apply` wrote")
    command.add_argument("undo", metavar="UNDO", help="what `apply --keep-undo` wrote")
    _add_output(command, "BASE", "the base to write, a .keras or .freeze file", _model_file)
    _add_import(command)
    command.set_defaults(inputs=("model", "undo"), outputs=("output",))


def _add_verify(commands: Any) -> None:
    command = _add(commands, "verify", "load a file and compare all its checksums")
    command.add_argument("file", metavar="FILE", help="a .freeze or .keras file")
    command.add_argument("--base", metavar="BASE", help="the base, for a file that is a delta")
    _add_import(command)
    command.set_defaults(inputs=("file", "base"), outputs=())


def _add(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    description = f"{text[0].upper()}{text[1:]}."
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=description)
    command.add_argument("--json", action="store_true", help="print one JSON object")
    return command


def _add_output(command: argparse.ArgumentParser, metavar: str, text: str, kind: Any) -> None:
    command.add_argument("-o", "--output", metavar=metavar, required=True, help=text, type=kind)


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--import",
        metavar="MODULE",
        action="append",
        default=[],
        dest="modules",
        help="import a module that registers custom classes; may be given several times",
    )


def _model_file(path: str) -> str:
    if not path.endswith(_SUFFIXES):
        raise argparse.ArgumentTypeError(f"{path!r} must end in .keras or .freeze")
    return path


def check_files(arguments: argparse.Namespace) -> None:
    """Check that inputs are files, and that outputs can be written without losing an input.

    Raises:
        OSError: If an input does not exist, a file is a folder, or an output has no folder.
        ValueError: If an output is another of the files, or is a device.
    """
    inputs = _files(arguments, arguments.inputs)
    outputs = _files(arguments, arguments.outputs)
    for path in [*inputs, *outputs]:
        if os.path.isdir(path):
            raise IsADirectoryError(f"{path!r} is a folder: name a file.")
    for path in inputs:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"There is no file {path!r}.")
    for number, path in enumerate(outputs):
        _check_output(path, [*inputs, *outputs[:number]])


def _files(arguments: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
    values = [getattr(arguments, name) for name in names]
    return [value for value in values if value is not None]


def _check_output(path: str, others: list[str]) -> None:
    if not os.path.isdir(os.path.dirname(os.path.realpath(path))):
        raise FileNotFoundError(f"The folder of {path!r} does not exist.")
    for other in others:
        if is_same_file(path, other) or os.path.realpath(path) == os.path.realpath(other):
            raise ValueError(f"The output {path!r} and {other!r} are one file: name another one.")
    check_replaceable(path)
