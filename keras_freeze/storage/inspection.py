"""What is in a `.freeze` file, without building its model."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keras_freeze._utils.text import printable
from keras_freeze.starts import BASE, CONSTANT, INITIALIZER, SEED, Source
from keras_freeze._utils.bits import from_bits
from keras_freeze.storage.container import read_container
from keras_freeze.storage.errors import naming
from keras_freeze._utils.bits import WIDTHS
from keras_freeze.storage.header import Header, Record
from keras_freeze.storage.masks import trained_counts

_MOST_DECODED = 1 << 29  # entries of masks; few bytes may stand for many
_MOST_ROWS = 1_000
_LONGEST_NAME = 100
_LONGEST_TEXT = 300


@dataclass(frozen=True)
class Row:
    """One variable: its path, shape and dtype, how many values are in the file (None: unknown, the
    masks are too large to count), and the source of the others."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    num_stored: int | None
    source: str


@dataclass(frozen=True)
class Inspection:
    """What `inspect` finds; prints as a table of limited size, in which names are safe to print.

    Attributes:
        path: the file.
        num_bytes: its size by part.
        model: the name of the network.
        versions: what it was saved with.
        rows: its variables.
        freeze_rate: q; None without a mask, or with masks that are too large to count.
        real_freeze_rate: q_beta, with the parameters that are not weights; None as above.
        dense_bytes: what all its variables take.
        base: the fingerprint of its base; None without one.
        has_optimizer: whether the optimizer's state is in it.
        num_tokens: of the vocabularies that are not in the configuration.
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
    num_tokens: int
    digest: str

    @property
    def total_bytes(self) -> int:
        """The size of the file."""
        return sum(self.num_bytes.values())

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        factor = self.dense_bytes / self.total_bytes
        model = printable(self.model, _LONGEST_NAME)
        lines = [
            f"{printable(self.path, _LONGEST_TEXT)}: {model}, saved with "
            f"{printable(versions, _LONGEST_TEXT)}",
            f"{self.total_bytes:,} bytes, {factor:.1f} times smaller than its variables:",
            *(f"  {name:<10} {count:>12,}" for name, count in self.num_bytes.items()),
        ]
        if self.freeze_rate is not None:
            lines.append(f"q = {self.freeze_rate:.6g}, q_beta = {self.real_freeze_rate:.6g}")
        if any(row.num_stored is None for row in self.rows):
            lines.append(f"masks of more than {_MOST_DECODED:,} entries: not counted")
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
            count = "?" if row.num_stored is None else f"{row.num_stored:,}"
            source = printable(row.source, _LONGEST_TEXT)
            lines.append(
                f"  {name:<{width}}  {shape:>20} {row.dtype:<8} {count:>12} stored"
                f"  {source}".rstrip()
            )
        if len(self.rows) > len(rows):
            lines.append(f"  ... and {len(self.rows) - len(rows):,} more variables")
        return lines


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
        counts = trained_counts(header, container, _MOST_DECODED)
    freeze_rate, real_freeze_rate = _freeze_rates(header, counts)
    config = header.model.get("config")
    name = config.get("name") if isinstance(config, Mapping) else None
    return Inspection(
        path=os.fspath(path),
        num_bytes=container.num_bytes,
        model=str(name or header.model.get("class_name")),
        versions=header.versions,
        rows=tuple(_rows(header, counts)),
        freeze_rate=freeze_rate,
        real_freeze_rate=real_freeze_rate,
        dense_bytes=sum(r.size * WIDTHS[r.dtype] for r in header.records),
        base=header.base,
        has_optimizer=header.optimizer is not None,
        num_tokens=sum(len(vocabulary.tokens) for vocabulary in header.vocabularies if vocabulary),
        digest=container.digest.hex(),
    )


def _rows(header: Header, counts: Sequence[int] | None) -> Iterator[Row]:
    for i, record in enumerate(header.records):
        is_known = counts is not None or record.entry is None or record.source is None
        num_stored = record.num_stored(counts[i] if counts else 0) if is_known else None
        yield Row(record.path, record.shape, record.dtype, num_stored, _describe(record))


def _describe(record: Record) -> str:
    """Where the values come from that are not stored, in words."""
    source = record.source
    rounded = "" if record.stored_dtype == record.dtype else f"rounded to {record.stored_dtype}"
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


def _freeze_rates(
    header: Header, counts: Sequence[int] | None
) -> tuple[float, float] | tuple[None, None]:
    """q, of the weights that have a mask, and q_beta, of all parameters."""
    if counts is None or all(record.entry is None for record in header.records):
        return None, None
    weights = frozen_weights = parameters = frozen_parameters = 0
    for record, num_trained in zip(header.records, counts, strict=True):
        frozen = 0 if record.entry is None else record.size - num_trained
        if record.entry is not None and record.entry.is_weight:
            weights += record.size
            frozen_weights += frozen
        if record.trainable:
            parameters += record.size
            frozen_parameters += frozen
    return frozen_weights / max(weights, 1), frozen_parameters / max(parameters, 1)
