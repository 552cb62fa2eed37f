"""Describe the content of a `.freeze` file without building its model."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_freeze._utils.bits import WIDTHS, from_bits
from keras_freeze._utils.text import printable
from keras_freeze.starts import BASE, CONSTANT, INITIALIZER, SEED, Source
from keras_freeze.storage.coding.masks import Key, count_masks
from keras_freeze.storage.coding.tiles import Tile
from keras_freeze.storage.container import read_container
from keras_freeze.storage.errors import naming
from keras_freeze.storage.header import Header
from keras_freeze.storage.masks import MaskHeader, read_header, shapes_and_keys
from keras_freeze.storage.records import VariableRecord

_MOST_DECODED = 1 << 29  # entries of masks; few bytes may stand for many
_MOST_ROWS = 1_000
_LONGEST_NAME = 100
_LONGEST_TEXT = 300


@dataclass(frozen=True)
class Row:
    """One variable of a file.

    Attributes:
        path, shape, dtype: As in the model. The dtype is that of the mask in a file that holds a
            mask only.
        num_stored: The number of values in the file; None if its mask is too large to count.
        source: Where the other values come from, in words.
        num_trained: The number of trained entries in its mask; None without a mask, or if it is too
            large to count.
        tile: Height and width of the tiles that its mask consists of; None for single entries.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    num_stored: int | None
    source: str
    num_trained: int | None = None
    tile: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The description of a file that `inspect` returns.

    It prints as a table of limited size, in which names are safe to print.

    Attributes:
        path: The file.
        num_bytes: The sizes of its parts in bytes.
        model: The name of the model, or that it is as the base; None for a file with a mask only.
        versions: The versions of the programs that wrote it.
        rows: Its variables.
        freeze_rate: The freezing rate q; None without a mask, or if masks are too large to count.
        real_freeze_rate: The real freezing rate q_beta of all parameters; None as above, and for a
            file that holds a mask only.
        dense_bytes: The size of all its variables in bytes.
        base: The fingerprint of its base; None without a base.
        has_optimizer: Whether it holds the state of the optimizer.
        num_tokens: The number of tokens in vocabularies that are not in the configuration.
        digest: SHA-256 of the file except its last 32 bytes, which are this digest.
    """

    path: str
    num_bytes: Mapping[str, int]
    model: str | None = None
    versions: Mapping[str, str]
    rows: tuple[Row, ...]
    freeze_rate: float | None
    real_freeze_rate: float | None = None
    dense_bytes: int
    base: str | None = None
    has_optimizer: bool = False
    num_tokens: int = 0
    digest: str

    @property
    def total_bytes(self) -> int:
        """The size of the file in bytes."""
        return sum(self.num_bytes.values())

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        what = "a mask only" if self.model is None else printable(self.model, _LONGEST_NAME)
        size = f"{self.total_bytes:,} bytes"
        if self.model is not None:
            factor = self.dense_bytes / self.total_bytes
            size += f", {factor:.1f} times smaller than its variables"
        lines = [
            f"{printable(self.path, _LONGEST_TEXT)}: {what}, saved with "
            f"{printable(versions, _LONGEST_TEXT)}",
            f"{size}:",
            *(f"  {name:<10} {count:>12,}" for name, count in self.num_bytes.items()),
        ]
        if self.freeze_rate is not None:
            lines.append(f"q = {self.freeze_rate:.6g}")
            if self.real_freeze_rate is not None:
                lines[-1] += f", q_beta = {self.real_freeze_rate:.6g}"
        if any(row.num_stored is None for row in self.rows):
            lines.append(f"masks of more than {_MOST_DECODED:,} entries: not counted")
        if self.model is not None:
            lines.append(f"base: {printable(self.base or 'none', _LONGEST_NAME)}")
            lines.append(f"optimizer state: {'included' if self.has_optimizer else 'not included'}")
        if self.num_tokens:
            lines.append(f"vocabularies: {self.num_tokens:,} tokens")
        lines.append(f"fingerprint of the file: {self.digest}")
        return "\n".join(lines + self._table())

    def _table(self) -> list[str]:
        rows = self.rows[:_MOST_ROWS]
        names = [printable(row.path, _LONGEST_NAME) for row in rows]
        width = max(map(len, names), default=0)
        lines = []
        for name, row in zip(names, rows, strict=True):
            shape = printable(" x ".join(map(str, row.shape)) or "scalar", _LONGEST_NAME)
            known = row.num_trained if self.model is None else row.num_stored
            count = "?" if known is None else f"{known:,}"
            tile = None if row.tile is None else "mask of {} x {} tiles".format(*row.tile)
            source = printable(", ".join(filter(None, (row.source, tile))), _LONGEST_TEXT)
            kind = "trained" if self.model is None else "stored"
            lines.append(
                f"  {name:<{width}}  {shape:>20} {row.dtype:<8} {count:>12} {kind}"
                f"  {source}".rstrip()
            )
        if len(self.rows) > len(rows):
            lines.append(f"  ... and {len(self.rows) - len(rows):,} more variables")
        return lines


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Describe the content of a `.freeze` file without building its model, and check the file.

    Args:
        path: Path of a file that `save` or `FreezeMask.save` wrote.

    Returns:
        An `Inspection`, which prints as a table.

    Raises:
        OSError: If the file cannot be read.
        FreezeFileError: If it is damaged. A subclass of `ValueError`.
        TypeError: If `path` is not a path.

    Example:

    ```python
    print(keras_freeze.storage.inspect("digits.freeze"))
    ```
    """
    with naming(path):
        container = read_container(path)
        header = read_header(container)
        parts = header.mask_parts
        shapes, keys = shapes_and_keys(header)
        counts = count_masks(container.mask, shapes, _MOST_DECODED, keys)
    known: Sequence[int | None] = [None] * len(shapes) if counts is None else counts
    known, changed = known[: len(parts)], known[len(parts) :]
    q = None
    if counts is not None:
        weights = [(p.size, n) for p, n in zip(parts, counts, strict=False) if p.is_weight]
        q = _frozen_share(weights)
    shared: dict[str, Any] = {
        "path": os.fspath(path),
        "num_bytes": container.num_bytes,
        "versions": header.versions,
        "digest": container.digest.hex(),
    }
    if isinstance(header, MaskHeader):
        rows = tuple(
            Row(part.path, part.shape, "bool", None if n is None else 0, "", n, _tile(part.key))
            for part, n in zip(parts, known, strict=True)
        )
        dense_bytes = sum(part.size for part in parts)
        return Inspection(**shared, rows=rows, freeze_rate=q, dense_bytes=dense_bytes)
    rows = tuple(_rows(header, known, changed))
    parameters = [
        (record.size, record.size if row.num_trained is None else row.num_trained)
        for record, row in zip(header.records, rows, strict=True)
        if record.trainable
    ]
    config = header.model.get("config")
    name = config.get("name") if isinstance(config, Mapping) else None
    return Inspection(
        **shared,
        model=str(name or header.model.get("class_name") or "the architecture of the base"),
        rows=rows,
        freeze_rate=q if parts else None,
        real_freeze_rate=_frozen_share(parameters) if counts else None,
        dense_bytes=sum(record.size * WIDTHS[record.dtype] for record in header.records),
        base=header.base,
        has_optimizer=header.optimizer is not None,
        num_tokens=sum(len(vocabulary.tokens) for vocabulary in header.vocabularies if vocabulary),
    )


def _rows(
    header: Header, trained: Sequence[int | None], changed: Sequence[int | None]
) -> Iterator[Row]:
    """Yield a row for each variable; the counts are of all masks, and of all that are changed."""
    trained_counts, changed_counts = iter(trained), iter(changed)
    for record in header.records:
        num_trained = None if record.entry is None else next(trained_counts)
        num_chosen = next(changed_counts) if record.is_changed else num_trained
        has_mask = record.entry is not None or record.is_changed
        is_known = num_chosen is not None or not has_mask or record.source is None
        num_stored = record.num_stored(num_chosen or 0) if is_known else None
        yield Row(
            record.path,
            record.shape,
            record.dtype,
            num_stored,
            _describe(record),
            num_trained,
            None if record.entry is None else _tile(record.entry.key),
        )


def _tile(key: Key) -> tuple[int, int] | None:
    return (key.height, key.width) if isinstance(key, Tile) else None


def _describe(record: VariableRecord) -> str:
    """Return where the values come from that are not stored, in words."""
    source = record.source
    rounded = "" if record.stored_dtype == record.dtype else f"rounded to {record.stored_dtype}"
    if record.grid is not None:
        rounded = f"on a grid of {record.grid.step:.6g}"
    if source is None:
        return rounded
    config = source.config or {}
    described = {
        CONSTANT: f"rest {_constant(source.pattern, record.dtype)}",
        SEED: f"rest {_drawn(source)}, seed {source.seed}, stream {source.stream}",
        INITIALIZER: f"rest Keras's {config.get('class_name')} {config.get('config')}",
        BASE: f"rest from variable {source.index} of the base",
    }[source.kind]
    return ", ".join(part for part in (described, rounded) if part)


def _drawn(source: Source) -> str:
    parameters = ", ".join(f"{name}={value!r}" for name, value in source.parameters.items())
    return f"{source.distribution}({parameters})" if parameters else source.distribution


def _constant(pattern: int, dtype: str) -> str:
    if pattern == 0:
        return "zero"
    bits = np.array([pattern], f"u{WIDTHS[dtype]}")
    return f"constant {from_bits(bits, dtype)[0]}"


def _frozen_share(variables: Sequence[tuple[int, int]]) -> float:
    """Return the share that is frozen of variables of these sizes and trained entries."""
    total = sum(size for size, _ in variables)
    return (total - sum(num_trained for _, num_trained in variables)) / max(total, 1)
