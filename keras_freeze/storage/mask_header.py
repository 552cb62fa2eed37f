"""The header of a `.freeze` file that holds a mask only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_freeze.storage.checks.memory import check_announced
from keras_freeze.storage.errors import invalid_header
from keras_freeze.storage.fields import (
    MaskPart,
    check_positions,
    check_type,
    extent,
    integer,
    shape_of,
    versions_of,
)

_MASK_ONLY = "mask"


def is_mask_only(described: Mapping[str, Any]) -> bool:
    """Return whether a header is that of a file that holds a mask only."""
    return described.get("content") == _MASK_ONLY


@dataclass(frozen=True)
class MaskHeader:
    """The header of a file that holds a mask only.

    Attributes:
        versions: The version of keras_freeze, by name.
        mask_parts: The entries of the mask, in the order in which the file holds them.
        num_rescued: The number of rescued weights, as in `FreezeMask`.
    """

    versions: Mapping[str, str]
    mask_parts: list[MaskPart]
    num_rescued: int

    def to_json(self) -> dict[str, Any]:
        """Return the header as a JSON object."""
        described: dict[str, Any] = {"versions": dict(self.versions), "content": _MASK_ONLY}
        described["variables"] = [
            {"path": path, "shape": list(shape), "mask": [position, int(is_weight)]}
            for position, path, shape, is_weight in self.mask_parts
        ]
        if self.num_rescued:
            described["num_rescued"] = self.num_rescued
        return described

    @classmethod
    def from_json(cls, described: Mapping[str, Any], max_bytes: int | None = None) -> "MaskHeader":
        """Read what `to_json` writes.

        Args:
            described: The JSON object.
            max_bytes: The largest size of the masks in bytes; None for a quarter of the free
                memory.

        Raises:
            FreezeFileError: If a field is missing or not valid, or if the masks are larger than
                `max_bytes`.
        """
        with invalid_header():
            variables = check_type(described["variables"], list, "variables")
            header = cls(
                versions_of(described["versions"]),
                list(map(_mask_part, variables)),
                integer(described.get("num_rescued", 0), 2**48, "num_rescued"),
            )
            check_positions(header.mask_parts)
        check_announced(header.num_bytes, max_bytes)
        return header

    @property
    def num_bytes(self) -> int:
        """The size in bytes of all masks, one byte for each entry."""
        return sum(extent(shape) for _, _, shape, _ in self.mask_parts)


def _mask_part(value: Any) -> MaskPart:
    described = check_type(value, dict, "variable")
    position, is_weight = check_type(described["mask"], list, "mask")
    return (
        integer(position, 2**31, "position"),
        check_type(described["path"], str, "path"),
        shape_of(described["shape"]),
        bool(integer(is_weight, 2, "mask")),
    )
