"""The error that a `.freeze` file raises, and how its message names the file."""

import contextlib
import os
from collections.abc import Iterator

from keras_freeze._utils.text import printable, printable_cause
from keras_freeze._utils.validation import type_error, value_error

_LONGEST_MESSAGE = 2_000


class FreezeFileError(ValueError):
    """A `.freeze` file that cannot be used: damaged, cut short, or of another version or base.

    A subclass of `ValueError`. The message says which file it is, what is wrong with it, and what
    to do. What the message quotes from the file is safe to print: control characters and the like
    are escaped, and long text is shortened.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, _LONGEST_MESSAGE))


def check_path(path: object, name: str = "path") -> None:
    """Check an argument that is to be a path.

    Raises:
        TypeError: If it is neither a string nor a path object.
        ValueError: If it is what no file can be called.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise type_error(name, path, "a string or a path object")
    if not os.fspath(path) or b"\0" in os.fsencode(path):
        raise value_error(name, path, "a path that is not empty and has no null character")


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Turn any error about the content of a file, `MemoryError` included, into FreezeFileError."""
    try:
        yield
    except FreezeFileError:
        raise
    except Exception as error:
        raise FreezeFileError(
            f"The parts of the file do not match ({type(error).__name__}): {first_reason(error)}"
        ) from printable_cause(error)


@contextlib.contextmanager
def invalid_header() -> Iterator[None]:
    """Turn any error about the fields of a header into FreezeFileError."""
    try:
        yield
    except (ArithmeticError, LookupError, MemoryError, RecursionError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise FreezeFileError(f"The header of the file is not valid: {what}.") from error
    except (TypeError, ValueError) as error:
        raise FreezeFileError(f"The header of the file is not valid: {error}.") from error


def first_reason(error: BaseException) -> str:
    """Return the message of the error that came first, shortened."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Put the name of the file before the message of a FreezeFileError."""
    check_path(path)
    name = repr(os.fspath(path))
    try:
        yield
    except FreezeFileError as error:
        cause = printable_cause(error)
        if str(error).startswith(name):
            if cause is None:
                error.__cause__ = None
            raise
        raise FreezeFileError(f"{name}: {error}") from cause
