"""What is in a `.freeze` file, without building its model."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keras_freeze.mask import FreezeMask
from keras_freeze.storage.container import read_container
from keras_freeze.storage.errors import naming
from keras_freeze.storage.header import BASE, CONSTANT, INITIALIZER, SEED, WIDTHS, Header, Record
from keras_freeze.storage.loading import mask_of
from keras_freeze.storage.network import from_bits


@dataclass(frozen=True)
class Row:
    """One variable: its path, shape and dtype, how many values are in the file, and the source of
    the others."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    num_stored: int
    source: str


@dataclass(frozen=True)
class Inspection:
    """What `inspect` finds; prints as a table.

    Attributes:
        path: the file.
        num_bytes: its size by part.
        model: the name of the network.
        versions: what it was saved with.
        rows: its variables.
        freeze_rate: q; None without a mask.
        real_freeze_rate: q_beta, with the parameters that are not weights; None without a mask.
        dense_bytes: what all its variables take.
        base: the fingerprint of its base; None without one.
        has_optimizer: whether the optimizer's state is in it.
        digest: SHA-256 of the file but for its last 32 bytes, which are this digest.
    """

    path: str
    num_bytes: Mapping[str, int]
    model: str
    versions: Mapping[str, str]
    rows: tuple[Row, ...]
    freeze_rate: float | None
    real_freeze_rate: float | None
    dense_bytes: int
    base: str | None
    has_optimizer: bool
    digest: str

    @property
    def total_bytes(self) -> int:
        """The size of the file."""
        return sum(self.num_bytes.values())

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        factor = self.dense_bytes / self.total_bytes
        lines = [
            f"{self.path}: {self.model}, saved with {versions}",
            f"{self.total_bytes:,} bytes, {factor:.1f} times smaller than its variables:",
            *(f"  {name:<10} {count:>12,}" for name, count in self.num_bytes.items()),
        ]
        if self.freeze_rate is not None:
            lines.append(f"q = {self.freeze_rate:.6g}, q_beta = {self.real_freeze_rate:.6g}")
        lines.append(f"base: {self.base or 'none'}")
        lines.append(f"optimizer state: {'included' if self.has_optimizer else 'not included'}")
        lines.append(f"fingerprint of the file: {self.digest}")
        width = max(len(row.path) for row in self.rows) if self.rows else 0
        for row in self.rows:
            shape = " x ".join(map(str, row.shape)) or "scalar"
            lines.append(
                f"  {row.path:<{width}}  {shape:>20} {row.dtype:<8} {row.num_stored:>12,} stored"
                f"  {row.source}".rstrip()
            )
        return "\n".join(lines)


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Reads what a file says about its network, and checks the file, without building the model.

    Raises:
        OSError: if the file cannot be read.
        FreezeFileError: if it is damaged.

    Example:

    ```python
    print(keras_freeze.storage.inspect("digits.freeze"))
    ```
    """
    with naming(path):
        container = read_container(path)
        header = Header.from_json(container.header)
        mask = mask_of(header, container)
    counts = _trained_counts(header, mask)
    config = header.model.get("config")
    name = config.get("name") if isinstance(config, Mapping) else None
    return Inspection(
        path=os.fspath(path),
        num_bytes=container.num_bytes,
        model=str(name or header.model.get("class_name")),
        versions=header.versions,
        rows=tuple(_row(*pair) for pair in zip(header.records, counts, strict=True)),
        freeze_rate=None if mask is None else mask.freeze_rate,
        real_freeze_rate=None if mask is None else _real_freeze_rate(header, counts),
        dense_bytes=sum(r.size * WIDTHS[r.dtype] for r in header.records),
        base=header.base,
        has_optimizer=header.optimizer is not None,
        digest=container.digest.hex(),
    )


def _row(record: Record, num_trained: int) -> Row:
    num_stored = record.num_stored(num_trained)
    return Row(record.path, record.shape, record.dtype, num_stored, _describe(record))


def _trained_counts(header: Header, mask: FreezeMask | None) -> list[int]:
    """How many entries of each variable its mask trains; 0 if it has none."""
    entries = () if mask is None else mask.entries
    by_position = {entry.position: int(np.count_nonzero(entry.trained)) for entry in entries}
    return [0 if r.entry is None else by_position[r.entry.position] for r in header.records]


def _describe(record: Record) -> str:
    """Where the values come from that are not stored, in words."""
    source = record.source
    rounded = "" if record.stored_dtype == record.dtype else f"rounded to {record.stored_dtype}"
    if source is None:
        return rounded
    config = source.config or {}
    described = {
        CONSTANT: f"rest {_constant(source.pattern, record.dtype)}",
        SEED: f"rest {source.distribution}, seed {source.seed}, stream {source.stream}",
        INITIALIZER: f"rest Keras's {config.get('class_name')} {config.get('config')}",
        BASE: f"rest from variable {source.index} of the base",
    }[source.kind]
    return ", ".join(part for part in (described, rounded) if part)


def _constant(pattern: int, dtype: str) -> str:
    if pattern == 0:
        return "zero"
    bits = np.array([pattern], f"u{WIDTHS[dtype]}")
    return f"constant {from_bits(bits, dtype)[0]}"


def _real_freeze_rate(header: Header, counts: Sequence[int]) -> float:
    total = sum(record.size for record in header.records if record.trainable)
    frozen = sum(
        record.size - num_trained
        for record, num_trained in zip(header.records, counts, strict=True)
        if record.trainable and record.entry is not None
    )
    return frozen / total if total else 0.0
