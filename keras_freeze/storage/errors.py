"""What goes wrong with `.freeze` files."""

import contextlib
import os
from collections.abc import Iterator

from keras_freeze._utils.text import printable, printable_cause

_LONGEST_MESSAGE = 2_000


class FreezeFileError(ValueError):
    """A `.freeze` file that cannot be used: damaged, cut short, of another version or base.

    A ValueError. The message says which file, what is wrong and where. What it quotes from the file
    can be printed safely: control characters and the like are escaped, long text is shortened.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message, _LONGEST_MESSAGE))


def check_path(path: object) -> None:
    """Refuses what is no path.

    Raises:
        TypeError: for anything but a string or a path object.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            "Argument `path` must be a string or a path object. "
            f"Received: path={path!r} of type {type(path).__name__}"
        )


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Makes a FreezeFileError of whatever goes wrong with what a file says, no memory included."""
    try:
        yield
    except FreezeFileError:
        raise
    except Exception as error:
        raise FreezeFileError(
            f"It does not fit together ({type(error).__name__}): {first_reason(error)}"
        ) from printable_cause(error)


def first_reason(error: BaseException) -> str:
    """What was wrong in the first place, shortened."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the file's name before what is wrong with it."""
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
