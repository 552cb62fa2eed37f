"""Checks of single fields in the header of a `.freeze` file, which is JSON from a stranger."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_freeze._utils.bits import WIDTHS
from keras_freeze._utils.validation import check_json_int
from keras_freeze.storage.coding.masks import Key
from keras_freeze.storage.errors import FreezeFileError

_MOST_AXES = 32
_MOST_VALUES = 2**48  # of one variable

MASK_ONLY = "mask"
"""The `content` of a file that holds a mask only."""


PlainEntry = tuple[int, str, np.ndarray, bool]
"""Position, path and boolean array of an entry, and whether it is a weight: as in `MaskEntry`."""


class MaskPart(NamedTuple):
    """What the header says of one entry of a mask: `MaskEntry` without its array.

    Attributes:
        key: What the header says of a mask that is not coded entry by entry; None for others.
    """

    position: int
    path: str
    shape: tuple[int, ...]
    is_weight: bool
    key: Key = None

    @property
    def size(self) -> int:
        """The number of entries."""
        return math.prod(self.shape)


def check_type(name: str, value: Any, kind: type | tuple[type, ...]) -> Any:
    """Return a value of the expected type, or refuse it."""
    if not isinstance(value, kind):
        raise _refusal(name, value)
    return value


def check_finite(name: str, value: Any) -> float:
    """Return a finite number, or refuse the value."""
    number = float(check_type(name, value, (int, float)))
    if not math.isfinite(number):
        raise _refusal(name, value)
    return number


def check_shape(value: Any) -> tuple[int, ...]:
    """Return a shape that a variable can have, or refuse the value."""
    lengths = check_type("shape", value, list)
    shape = tuple(check_json_int("shape", length, _MOST_VALUES) for length in lengths)
    if len(shape) > _MOST_AXES or extent(shape) >= _MOST_VALUES:
        raise _refusal("shape", value)
    return shape


def check_dtype(value: Any) -> str:
    """Return the name of a dtype that a file can hold, or refuse the value."""
    if not isinstance(value, str) or value not in WIDTHS:
        raise _refusal("dtype", value)
    return value


def check_positions(parts: Sequence[MaskPart]) -> None:
    """Refuse a mask in which two variables have the same position."""
    if len({part.position for part in parts}) < len(parts):
        raise FreezeFileError("two variables have the same position in the mask")


def extent(shape: tuple[int, ...]) -> int:
    """Return the size of an array; not 0 for an empty one, whose other axes may be decoded."""
    return math.prod(max(length, 1) for length in shape)


def is_mask_only(described: Mapping[str, Any]) -> bool:
    """Return whether a header is that of a file that holds a mask only."""
    return described.get("content") == MASK_ONLY


def versions_of(described: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of the programs that wrote a file, by name."""
    versions = check_type("versions", described["versions"], dict)
    return {str(name): str(version) for name, version in versions.items()}


def num_rescued_of(described: Mapping[str, Any]) -> int:
    """Return how many weights the mask of a file rescued."""
    return check_json_int("num_rescued", described.get("num_rescued", 0), 2**48)


def _refusal(name: str, value: Any) -> FreezeFileError:
    return FreezeFileError(f"{name} is {value!r:.100}")
