"""The freezing mask in a `.freeze` file as plain arrays.

Needs neither `FreezeMask` nor, unless a mask follows from weights that are drawn, Keras.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_freeze._utils.bits import from_bits
from keras_freeze._version import __version__
from keras_freeze.masks.drawn import Draw
from keras_freeze.masks.ranked import Ranked
from keras_freeze.starts import SEED
from keras_freeze.storage.checks.memory import check_announced
from keras_freeze.storage.coding.masks import (
    CodedMask,
    Key,
    decode_masks,
    encode_masks,
    tile_of,
)
from keras_freeze.storage.container import Container, read_container, write_container
from keras_freeze.storage.errors import (
    FreezeFileError,
    check_path,
    invalid_header,
    naming,
    refusing,
)
from keras_freeze.storage.fields import (
    MASK_ONLY,
    MaskPart,
    PlainEntry,
    check_positions,
    check_shape,
    check_type,
    extent,
    is_mask_only,
    num_rescued_of,
    versions_of,
)
from keras_freeze.storage.header import Header
from keras_freeze.storage.old_masks import is_old_mask, read_old_mask
from keras_freeze.storage.records import EntryRecord, VariableRecord, check_tile


@dataclass(frozen=True)
class MaskHeader:
    """The header of a file that holds a mask only; its attributes are as in `Header`."""

    versions: Mapping[str, str]
    mask_parts: list[MaskPart]
    num_rescued: int

    @property
    def changed(self) -> list[VariableRecord]:
        """As in `Header`: none, in a file without values."""
        return []

    def to_json(self) -> dict[str, Any]:
        """Return the header as a JSON object."""
        described: dict[str, Any] = {"versions": dict(self.versions), "content": MASK_ONLY}
        described["variables"] = [
            {
                "path": part.path,
                "shape": list(part.shape),
                **EntryRecord(part.position, part.is_weight, key=part.key).to_json(),
            }
            for part in self.mask_parts
        ]
        if self.num_rescued:
            described["num_rescued"] = self.num_rescued
        return described

    @classmethod
    def from_json(cls, described: Mapping[str, Any], max_bytes: int | None = None) -> "MaskHeader":
        """Read what `to_json` writes; arguments and errors are as in `Header.from_json`."""
        with invalid_header():
            variables = check_type("variables", described["variables"], list)
            parts = list(map(_mask_part, variables))
            header = cls(versions_of(described), parts, num_rescued_of(described))
            check_positions(parts)
        check_announced(header.num_bytes, max_bytes)
        return header

    @property
    def num_bytes(self) -> int:
        """The size in bytes of all masks, one byte for each entry."""
        return sum(extent(part.shape) for part in self.mask_parts)


def write_mask(
    path: str | os.PathLike[str], entries: Sequence[PlainEntry], num_rescued: int
) -> None:
    """Write a file that holds a mask only.

    Raises:
        ValueError: If a position, a shape or `num_rescued` is too large for a file.
    """
    check_path(path)
    tiles = [tile_of(trained) for _, _, trained, _ in entries]
    parts = [
        MaskPart(number, name, array.shape, weight, tile)
        for (number, name, array, weight), tile in zip(entries, tiles, strict=True)
    ]
    header = MaskHeader({"keras_freeze": __version__}, parts, num_rescued)
    described = header.to_json()
    try:  # whether it can be read again
        MaskHeader.from_json(described, max_bytes=header.num_bytes)
    except FreezeFileError as error:
        raise ValueError(f"The mask does not fit into a `.freeze` file. {error}") from error
    masks = [
        trained if tile is None else tile.tiles(trained)
        for (_, _, trained, _), tile in zip(entries, tiles, strict=True)
    ]
    version = 2 if any(tiles) else 1
    write_container(path, described, encode_masks(masks), b"", b"", version)


def read_mask(path: str | os.PathLike[str]) -> tuple[list[PlainEntry], int]:
    """Return the entries of the mask in a file, and how many weights it rescued.

    Args:
        path: A file that holds a mask only, or a complete `.freeze` file.

    Raises:
        OSError: If the file cannot be read.
        FreezeFileError: If it is damaged, or has no mask.
    """
    with naming(path):
        if is_old_mask(path):
            return read_old_mask(path)
        container = read_container(path)
        header = read_header(container)
        if isinstance(header, Header) and not header.mask_parts:
            raise FreezeFileError("The file holds a model without a freezing mask.")
        coded = decode_coded(header, container)
        coded = coded[: len(header.mask_parts)]
        entries, _ = entries_of(header, coded, _starts_from_seeds(header))
        return entries, header.num_rescued


def read_header(container: Container) -> Header | MaskHeader:
    """Return the header of a file that holds a model, or a mask only."""
    if not is_mask_only(container.header):
        return Header.from_json(container.header)
    if container.exponents or container.mantissas:
        raise FreezeFileError("The file has values, although its header describes a mask only.")
    return MaskHeader.from_json(container.header)


def decode_coded(header: Header | MaskHeader, container: Container) -> list[CodedMask]:
    """Return the masks of a file as they are coded: of `header.mask_parts`, then `changed`."""
    with refusing():
        return decode_masks(container.mask, *shapes_and_keys(header))


def shapes_and_keys(header: Header | MaskHeader) -> tuple[list[tuple[int, ...]], list[Key]]:
    """Return the shapes and keys of all masks of a file, in the order in which it holds them."""
    parts, changed = header.mask_parts, header.changed
    shapes = [part.shape for part in parts] + [record.shape for record in changed]
    return shapes, [*(part.key for part in parts), *(None for _ in changed)]


def entries_of(
    header: Header | MaskHeader,
    coded: Sequence[CodedMask],
    starts: Callable[[int], np.ndarray],
) -> tuple[list[PlainEntry], dict[int, Draw]]:
    """Return the entries of a file's mask, and what some are drawn by, by position.

    Args:
        header: The header of the file.
        coded: What `decode_coded` returned.
        starts: Returns what the variable at a position of the mask started from.

    Raises:
        FreezeFileError: If the masks do not exist.
    """
    entries: list[PlainEntry] = []
    draws = {}
    with refusing():
        for part, mask in zip(header.mask_parts, coded, strict=True):
            if isinstance(mask, Draw):
                draws[part.position] = mask
                mask = mask.mask(part.shape)
            elif isinstance(mask, Ranked):
                needs_start = mask.ranking.key is None
                mask = mask.mask(part.shape, starts(part.position) if needs_start else None)
            entries.append((part.position, part.path, mask, part.is_weight))
    return entries, draws


def _starts_from_seeds(header: Header | MaskHeader) -> Callable[[int], np.ndarray]:
    """Return a function as for `entries_of`, which draws from seeds alone."""
    records = [] if isinstance(header, MaskHeader) else header.records
    by_position = {r.entry.position: r for r in records if r.entry is not None}

    def start(position: int) -> np.ndarray:
        from keras_freeze.storage.origin import check_generator, regenerate  # which need Keras

        record = by_position[position]
        if record.source is None or record.source.kind != SEED:
            raise FreezeFileError(
                f"The mask of {record.path!r} follows from the weights of a base: load the model "
                "by `keras_freeze.load(path, base=...)`, and use `keras_freeze.get_mask(model)`."
            )
        assert isinstance(header, Header)
        check_generator(header)
        (bits,) = regenerate([(record.source, record.shape, record.dtype)], None)
        return from_bits(bits, record.dtype)

    return start


def _mask_part(value: Any) -> MaskPart:
    described = check_type("variable", value, dict)
    if "drawn" in described or "ranked" in described:
        raise FreezeFileError("a file with a mask only holds its entries")
    shape, entry = check_shape(described["shape"]), EntryRecord.from_json(described)
    if entry is None or entry.settings or entry.to_json()["mask"] != described["mask"]:
        raise FreezeFileError(f"mask is {described.get('mask')!r:.100}")
    check_tile(entry, shape)
    path = check_type("path", described["path"], str)
    return MaskPart(entry.position, path, shape, entry.is_weight, entry.key)
