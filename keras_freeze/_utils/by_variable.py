"""Values by variable, which live no longer than their variables."""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class ByVariable(Generic[_T]):
    """A mapping from variables, by identity and weakly, to values."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[Any, _T]] = {}

    def set(self, variable: Any, value: _T) -> None:
        """Set the value of a variable."""
        key = id(variable)
        reference = weakref.ref(variable, functools.partial(self._remove, key))
        self._entries[key] = reference, value

    def get(self, variable: Any) -> _T | None:
        """Return the value of a variable; None if it has none."""
        reference, value = self._entries.get(id(variable), (None, None))
        return value if reference is not None and reference() is variable else None

    def change(self, function: Callable[[_T], _T]) -> None:
        """Replace each value by what the function makes of it."""
        for key, (reference, value) in list(self._entries.items()):
            self._entries[key] = reference, function(value)

    def _remove(self, key: int, dead: Any) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry[0] is dead:  # not that of a new object with this id
            del self._entries[key]
