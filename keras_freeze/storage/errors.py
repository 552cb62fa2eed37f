"""What goes wrong with `.freeze` files."""

import contextlib
import os
from collections.abc import Iterator


class FreezeFileError(ValueError):
    """A `.freeze` file that cannot be used: damaged, cut short, of another version or base.

    A ValueError. The message says which file, what is wrong and where.
    """


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
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the file's name before what is wrong with it."""
    check_path(path)
    name = repr(os.fspath(path))
    try:
        yield
    except FreezeFileError as error:
        if str(error).startswith(name):
            raise
        raise FreezeFileError(f"{name}: {error}") from error
