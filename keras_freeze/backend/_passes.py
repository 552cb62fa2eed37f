"""Whether the pass in progress needs the gradients of frozen weights, too."""

import contextlib
import threading
from collections.abc import Iterator

_passes = threading.local()


@contextlib.contextmanager
def all_gradients() -> Iterator[None]:
    """Let layers compute every gradient, whatever is trained."""
    before = wants_all_gradients()
    _passes.want_all = True
    try:
        yield
    finally:
        _passes.want_all = before


def wants_all_gradients() -> bool:
    """Return whether layers are to compute every gradient."""
    return getattr(_passes, "want_all", False)
