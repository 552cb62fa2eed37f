"""Files that are replaced as a whole or not at all."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path`, of the same ending, that takes its place when the block ends.

    What was at `path` stays there if the block raises or the process dies in it.

    Example:

    ```python
    with replacing("curves.png") as path:
        figure.savefig(path)
    ```
    """
    target = Path(path)
    temporary = target.with_name(f".{uuid.uuid4().hex}.{target.name}")
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
