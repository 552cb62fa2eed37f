"""Describe the content of a `.freeze` file without building its model."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keras_freeze._utils.bits import WIDTHS, from_bits
from keras_freeze._utils.text import printable
from keras_freeze.starts import BASE, CONSTANT, INITIALIZER, SEED, Source
from keras_freeze.storage.container import Container, read_container
from keras_freeze.storage.errors import naming
from keras_freeze.storage.header import Header, VariableRecord
from keras_freeze.storage.mask_header import MaskHeader
from keras_freeze.storage.masks import read_header, trained_counts

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
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    num_stored: int | None
    source: str
    num_trained: int | None = None


@dataclass(frozen=True)
class Inspection:
    """The description of a file that `inspect` returns.

    It prints as a table of limited size, in which names are safe to print.

    Attributes:
        path: The file.
        num_bytes: The sizes of its parts in bytes.
        model: The name of the model; None for a file that holds a mask only.
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
    model: str | None
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
            source = printable(row.source, _LONGEST_TEXT)
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
        counts = trained_counts(header, container, _MOST_DECODED)
    if isinstance(header, MaskHeader):
        return _of_mask(os.fspath(path), header, container, counts)
    return _of_model(os.fspath(path), header, container, counts)


def _of_mask(
    path: str, header: MaskHeader, container: Container, counts: Sequence[int] | None
) -> Inspection:
    sizes = [math.prod(shape) for _, _, shape, _ in header.mask_parts]
    known: Sequence[int | None] = [None] * len(sizes) if counts is None else counts
    freeze_rate = None
    if counts is not None:
        parts = zip(sizes, counts, header.mask_parts, strict=True)
        weights = [(size, count) for size, count, (*_, is_weight) in parts if is_weight]
        num_weights = sum(size for size, _ in weights)
        freeze_rate = (num_weights - sum(count for _, count in weights)) / max(num_weights, 1)
    return Inspection(
        path=path,
        num_bytes=container.num_bytes,
        model=None,
        versions=header.versions,
        rows=tuple(
            Row(name, shape, "bool", None if count is None else 0, "", count)
            for (_, name, shape, _), count in zip(header.mask_parts, known, strict=True)
        ),
        freeze_rate=freeze_rate,
        real_freeze_rate=None,
        dense_bytes=sum(sizes),
        base=None,
        has_optimizer=False,
        num_tokens=0,
        digest=container.digest.hex(),
    )


def _of_model(
    path: str, header: Header, container: Container, counts: Sequence[int] | None
) -> Inspection:
    rows = tuple(_rows(header, counts))
    freeze_rate, real_freeze_rate = _freeze_rates(header, rows) if counts else (None, None)
    config = header.model.get("config")
    name = config.get("name") if isinstance(config, Mapping) else None
    return Inspection(
        path=path,
        num_bytes=container.num_bytes,
        model=str(name or header.model.get("class_name")),
        versions=header.versions,
        rows=rows,
        freeze_rate=freeze_rate,
        real_freeze_rate=real_freeze_rate,
        dense_bytes=sum(r.size * WIDTHS[r.dtype] for r in header.records),
        base=header.base,
        has_optimizer=header.optimizer is not None,
        num_tokens=sum(len(vocabulary.tokens) for vocabulary in header.vocabularies if vocabulary),
        digest=container.digest.hex(),
    )


def _rows(header: Header, counts: Sequence[int] | None) -> Iterator[Row]:
    remaining = None if counts is None else iter(counts)
    for record in header.records:
        num_trained = None
        if record.entry is not None and remaining is not None:
            num_trained = next(remaining)
        is_known = remaining is not None or record.entry is None or record.source is None
        num_stored = record.num_stored(num_trained or 0) if is_known else None
        yield Row(
            record.path, record.shape, record.dtype, num_stored, _describe(record), num_trained
        )


def _describe(record: VariableRecord) -> str:
    """Return where the values come from that are not stored, in words."""
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


def _freeze_rates(header: Header, rows: Sequence[Row]) -> tuple[float, float]:
    """Return q, of the weights that have a mask, and q_beta, of all parameters."""
    weights = frozen_weights = parameters = frozen_parameters = 0
    for record, row in zip(header.records, rows, strict=True):
        frozen = 0 if row.num_trained is None else record.size - row.num_trained
        if record.entry is not None and record.entry.is_weight:
            weights += record.size
            frozen_weights += frozen
        if record.trainable:
            parameters += record.size
            frozen_parameters += frozen
    return frozen_weights / max(weights, 1), frozen_parameters / max(parameters, 1)
