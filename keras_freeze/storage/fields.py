"""Checks of single fields in the header of a `.freeze` file, which is JSON from a stranger."""

import math
from typing import Any

from keras_freeze._utils.bits import WIDTHS
from keras_freeze.storage.errors import FreezeFileError

_MOST_AXES = 32
_MOST_VALUES = 2**48  # of one variable


MaskPart = tuple[int, str, tuple[int, ...], bool]
"""Position, path and shape of one entry of a mask, and whether it is a weight."""


def check_type(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    """Return a value of the expected type, or refuse it."""
    if not isinstance(value, kind):
        raise FreezeFileError(f"{what} is {value!r:.100}")
    return value


def integer(value: Any, end: int, what: str) -> int:
    """Return an integer from 0 to `end - 1`, or refuse the value."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise FreezeFileError(f"{what} is {value!r:.100}")
    return value


def finite(value: Any, what: str) -> float:
    """Return a finite number, or refuse the value."""
    number = float(check_type(value, (int, float), what))
    if not math.isfinite(number):
        raise FreezeFileError(f"{what} is {value!r:.100}")
    return number


def shape_of(value: Any) -> tuple[int, ...]:
    """Return a shape that a variable can have, or refuse the value."""
    lengths = tuple(integer(n, _MOST_VALUES, "shape") for n in check_type(value, list, "shape"))
    if len(lengths) > _MOST_AXES or extent(lengths) >= _MOST_VALUES:
        raise FreezeFileError(f"shape is {value!r:.100}")
    return lengths


def dtype_of(value: Any) -> str:
    """Return the name of a dtype that a file can hold, or refuse the value."""
    if not isinstance(value, str) or value not in WIDTHS:
        raise FreezeFileError(f"dtype is {value!r:.100}")
    return value


def extent(shape: tuple[int, ...]) -> int:
    """Return the size of an array; not 0 for an empty one, whose other axes may be decoded."""
    return math.prod(max(length, 1) for length in shape)


def versions_of(value: Any) -> dict[str, str]:
    """Return versions of programs by name."""
    versions = check_type(value, dict, "versions")
    return {str(name): str(version) for name, version in versions.items()}


def check_positions(parts: list[MaskPart]) -> None:
    """Refuse a mask in which two variables have the same position."""
    if len({position for position, *_ in parts}) < len(parts):
        raise FreezeFileError("two variables have the same position in the mask")
