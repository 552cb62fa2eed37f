"""What goes wrong with `.freeze` files."""

import contextlib
import os
from collections.abc import Iterator


class FreezeFileError(ValueError):
    """A `.freeze` file that cannot be used: damaged, cut short, of another version or base.

    A ValueError. The message says which file, what is wrong and where.
    """


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Puts the file's name before what is wrong with it."""
    name = repr(os.fspath(path))
    try:
        yield
    except FreezeFileError as error:
        if str(error).startswith(name):
            raise
        raise FreezeFileError(f"{name}: {error}") from error
