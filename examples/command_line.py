"""What these scripts share: a quiet start, and one line on standard error for what goes wrong."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from absl import app, flags, logging


@contextlib.contextmanager
def _no_standard_error() -> Iterator[None]:
    """Sends what C++ code writes to file descriptor 2 nowhere."""
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


def numbers(flag: flags.FlagHolder, kind: type) -> list[Any]:
    """The different numbers in a list flag.

    Raises:
        ValueError: for what is no number, and for none.
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


def run(main: Callable[[], None]) -> NoReturn:
    """Parses the flags and runs `main`; what goes wrong is a line and status 1."""

    def parse(arguments: list[str]) -> list[str]:
        try:
            return flags.FLAGS(arguments)
        except flags.Error as error:
            _fail(error)

    def guarded(arguments: list[str]) -> None:
        if arguments[1:]:
            _fail(f"flags look like --seed=1. Received: {arguments[1]}")
        logging.set_verbosity(logging.ERROR)  # what TFDS warns of is said in its errors, too
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
