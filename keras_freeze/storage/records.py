"""What the header of a `.freeze` file says of one variable of the model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_freeze._utils.bits import WIDTHS
from keras_freeze._utils.validation import check_json_int
from keras_freeze.grids import DTYPES, Grid, default_origin
from keras_freeze.masks.ranked import Ranking
from keras_freeze.starts import BASE, INITIALIZER, SEED, Source
from keras_freeze.storage.coding.masks import Key
from keras_freeze.storage.coding.tiles import Tile
from keras_freeze.storage.errors import FreezeFileError
from keras_freeze.storage.fields import check_dtype, check_finite, check_shape, check_type


@dataclass(frozen=True)
class EntryRecord:
    """The place of a variable in the freezing mask.

    Attributes:
        position: The variable's position, as in `MaskEntry`.
        is_weight: Whether the entry counts as a weight, as in `MaskEntry`.
        settings: The index of the settings in the header that decided the entry.
        key: Seed and stream of a mask that is drawn, its ranking, or its tiles; None for others.
    """

    position: int
    is_weight: bool
    settings: int = 0
    key: Key = None

    @property
    def is_computed(self) -> bool:
        """Whether the mask is drawn or ranked."""
        return self.key is not None and not isinstance(self.key, Tile)

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a variable that describe its mask."""
        mask: list[Any] = [self.position, int(self.is_weight)]
        described: dict[str, Any] = {"mask": mask}
        if self.settings or isinstance(self.key, Tile):
            mask.append(self.settings)
        if isinstance(self.key, Tile):
            mask.append(list(self.key))
        elif isinstance(self.key, Ranking):
            described["ranked"] = list(self.key.key or ())
        elif self.key is not None:
            described["drawn"] = list(self.key)
        return described

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> "EntryRecord | None":
        """Read what `to_json` writes, if the variable has a mask."""
        if "mask" not in described:
            if "drawn" in described or "ranked" in described:
                raise FreezeFileError("a variable without a mask has a drawn or ranked one")
            return None
        position, is_weight, *rest = check_type("mask", described["mask"], list)
        settings, *tiles = rest or [0]
        keys: list[Key] = [_tile(tile) for tile in tiles]
        if "drawn" in described:
            keys.append(_generator_key("drawn", described["drawn"]))
        if "ranked" in described:
            ranked = check_type("ranked", described["ranked"], list)
            keys.append(Ranking(_generator_key("ranked", ranked) if ranked else None))
        if len(keys) > 1:
            raise FreezeFileError("a mask is more than one of drawn, ranked and of tiles")
        (key,) = keys or [None]
        return cls(
            check_json_int("position", position, 2**31),
            bool(check_json_int("mask", is_weight, 2)),
            check_json_int("settings", settings, 2**16),
            key,
        )


@dataclass(frozen=True)
class VariableRecord:
    """One variable of the model.

    Attributes:
        path, shape, dtype: As in the model that was saved.
        source: Where the values come from that are not in the file; None if all are in the file.
        entry: The variable's place in the mask; None for a variable without a mask.
        stored_dtype: The dtype of the values in the file.
        trainable: Whether the variable is a parameter; statistics and random states are not.
        checksum: CRC-32 of all values, little-endian, as they are once loaded.
        grid: The grid that the values in the file are on, as integers; None for values as they are.
        origin: Where the starts of these come from; None for `source`, and 0 without a source.
        is_changed: Whether the file says which values it holds beside those of a base.
        has_differences: Whether the values in the file are differences to those of the base, in
            units in the last place.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    source: Source | None
    entry: EntryRecord | None
    stored_dtype: str
    trainable: bool
    checksum: int
    grid: Grid | None = None
    origin: Source | None = None
    is_changed: bool = False
    has_differences: bool = False

    @property
    def size(self) -> int:
        """The number of values of the variable."""
        return math.prod(self.shape)

    @property
    def sources(self) -> list[Source]:
        """The sources that give all values of the variable: `source` and `origin`."""
        return [source for source in (self.source, self.origin) if source is not None]

    @property
    def starts_from(self) -> Source:
        """Where the starts of values on a grid come from."""
        return default_origin(self.source) if self.origin is None else self.origin

    @property
    def are_integers(self) -> bool:
        """Whether the values in the file are integers: on a grid, or differences."""
        return self.grid is not None or self.has_differences

    def num_stored(self, num_chosen: int) -> int:
        """Return the number of values in the file.

        `num_chosen` is how many are changed, or how many its mask trains if none are.
        """
        if self.source is None:
            return self.size
        return num_chosen if self.is_changed or self.entry is not None else 0

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object without the fields that have their defaults."""
        described: dict[str, Any] = {"path": self.path, "shape": list(self.shape)}
        if self.dtype != "float32":
            described["dtype"] = self.dtype
        if self.source is not None:
            described["source"] = self.source.to_json()
        if self.entry is not None:
            described.update(self.entry.to_json())
        if self.stored_dtype != self.dtype:
            described["stored_dtype"] = self.stored_dtype
        if self.grid is not None:
            described["grid"] = self.grid.step
        if self.origin is not None:
            described["origin"] = self.origin.to_json()
        if self.is_changed:
            described["changed"] = True
        if self.has_differences:
            described["differences"] = True
        if not self.trainable:
            described["trainable"] = False
        return {**described, "crc32": self.checksum}

    @classmethod
    def from_json(cls, value: Any) -> "VariableRecord":
        """Read what `to_json` writes."""
        described = check_type("variable", value, dict)
        dtype = check_dtype(described.get("dtype", "float32"))
        return cls(
            path=check_type("path", described["path"], str),
            shape=check_shape(described["shape"]),
            dtype=dtype,
            source=Source.from_json(described["source"]) if "source" in described else None,
            entry=EntryRecord.from_json(described),
            stored_dtype=check_dtype(described.get("stored_dtype", dtype)),
            trainable=check_type("trainable", described.get("trainable", True), bool),
            checksum=check_json_int("crc32", described["crc32"], 2**32),
            grid=Grid(check_finite("grid", described["grid"])) if "grid" in described else None,
            origin=Source.from_json(described["origin"]) if "origin" in described else None,
            is_changed=check_type("changed", described.get("changed", False), bool),
            has_differences=check_type("differences", described.get("differences", False), bool),
        )

    def check(self) -> None:
        """Raise FreezeFileError if fields contradict each other."""
        for source in self.sources:
            if source.pattern >> 8 * WIDTHS[self.dtype]:
                raise FreezeFileError(f"{self.path!r} has a constant of too many bits")
        _check_grid(self)
        _check_ranking(self)
        _check_differences(self)
        if self.entry is not None:
            check_tile(self.entry, self.shape)
        rounded = self.dtype == "float32" and self.stored_dtype in ("float16", "bfloat16")
        if self.stored_dtype != self.dtype and not rounded:
            raise FreezeFileError(f"{self.path!r} is stored as {self.stored_dtype}")


def check_tile(entry: EntryRecord, shape: tuple[int, ...]) -> None:
    """Refuse tiles that a variable of this shape does not have."""
    if isinstance(entry.key, Tile):
        entry.key.check(shape)


def _tile(value: Any) -> Tile:
    height, width = check_type("tile", value, list)
    return Tile(check_json_int("height", height, 2**48), check_json_int("width", width, 2**48))


def _generator_key(name: str, value: Any) -> tuple[int, int]:
    seed, stream = check_type(name, value, list)
    return check_json_int("seed", seed, 2**64), check_json_int("stream", stream, 2**64)


def _check_differences(record: VariableRecord) -> None:
    """Refuse differences to values that the file does not give."""
    if not record.is_changed and not record.has_differences:
        return
    if record.source is None or record.source.kind != BASE or record.grid is not None:
        raise FreezeFileError(f"{record.path!r} differs from no base")
    if record.has_differences and record.dtype not in DTYPES:
        raise FreezeFileError(f"{record.path!r} of dtype {record.dtype} has differences")
    if record.has_differences and record.entry is None and not record.is_changed:
        raise FreezeFileError(f"{record.path!r} has differences and no stored values")


def _check_grid(record: VariableRecord) -> None:
    """Refuse integers where a file has none."""
    if record.grid is None:
        if record.origin is not None:
            raise FreezeFileError(f"{record.path!r} has an origin without a grid")
        return
    if record.dtype not in DTYPES or record.stored_dtype != record.dtype:
        raise FreezeFileError(f"{record.path!r} of dtype {record.dtype} has a grid")
    if record.source is not None and record.entry is None:
        raise FreezeFileError(f"{record.path!r} has a grid and no stored values")
    if record.origin is not None and record.origin.kind == INITIALIZER:
        raise FreezeFileError(f"{record.path!r} has an initializer of Keras as its origin")


def _check_ranking(record: VariableRecord) -> None:
    """Refuse a mask that is to follow from starts that the file does not give."""
    if record.entry is None or record.entry.key != Ranking(None):
        return
    source = record.source
    if source is None or source.kind not in (SEED, BASE) or record.dtype not in DTYPES:
        raise FreezeFileError(f"{record.path!r} has a ranked mask and no starts")
