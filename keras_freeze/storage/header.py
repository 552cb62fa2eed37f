"""What the header of a `.freeze` file says: the model, and where the values of each variable are.

Read from JSON with every field checked, so that what follows need not doubt it.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any

from keras_freeze._utils.bits import WIDTHS
from keras_freeze.starts import BASE, SEED, Source
from keras_freeze.storage.budget import check_announced
from keras_freeze.storage.errors import FreezeFileError

_MOST_AXES = 32


@dataclass(frozen=True)
class Entry:
    """The place of a variable in the freezing mask: `MaskEntry` without its array.

    Attributes:
        position, is_weight: as of `MaskEntry`.
        settings: the number of the header's settings that decided it.
    """

    position: int
    is_weight: bool
    settings: int = 0


@dataclass(frozen=True)
class Record:
    """One variable of the model.

    Attributes:
        path, shape, dtype: as in the model that was saved.
        source: of the values that are not in the file; None if all are.
        entry: its place in the mask; None for a variable outside of it.
        stored_dtype: the dtype of the values in the file, where it is not the variable's.
        trainable: whether it is a parameter; statistics and random states are not.
        checksum: CRC-32 of all its values, little-endian, as they are once loaded.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    source: Source | None
    entry: Entry | None
    stored_dtype: str
    trainable: bool
    checksum: int

    @property
    def size(self) -> int:
        """How many values the variable has."""
        return math.prod(self.shape)

    def num_stored(self, num_trained: int) -> int:
        """How many of them are in the file, if its mask, if any, has `num_trained` entries."""
        if self.source is None:
            return self.size
        return 0 if self.entry is None else num_trained

    def to_json(self) -> dict[str, Any]:
        """The record without what is as usual."""
        described: dict[str, Any] = {"path": self.path, "shape": list(self.shape)}
        if self.dtype != "float32":
            described["dtype"] = self.dtype
        if self.source is not None:
            described["source"] = self.source.to_json()
        if self.entry is not None:
            described["mask"] = [self.entry.position, int(self.entry.is_weight)]
            if self.entry.settings:
                described["mask"].append(self.entry.settings)
        if self.stored_dtype != self.dtype:
            described["stored_dtype"] = self.stored_dtype
        if not self.trainable:
            described["trainable"] = False
        return {**described, "crc32": self.checksum}

    @classmethod
    def from_json(cls, value: Any) -> "Record":
        """The record that `to_json` described."""
        described = _check(value, dict, "variable")
        shape = _shape(described["shape"])
        dtype = _dtype(described.get("dtype", "float32"))
        entry = None
        if "mask" in described:
            position, is_weight, *rest = _check(described["mask"], list, "mask")
            (settings,) = rest or [0]
            entry = Entry(
                _whole(position, 2**31, "position"),
                bool(_whole(is_weight, 2, "mask")),
                _whole(settings, 2**16, "settings"),
            )
        return cls(
            path=_check(described["path"], str, "path"),
            shape=shape,
            dtype=dtype,
            source=Source.from_json(described["source"]) if "source" in described else None,
            entry=entry,
            stored_dtype=_dtype(described.get("stored_dtype", dtype)),
            trainable=_check(described.get("trainable", True), bool, "trainable"),
            checksum=_whole(described["crc32"], 2**32, "crc32"),
        )


@dataclass(frozen=True)
class Slot:
    """One variable of the optimizer, whose values are in the file after those of the model."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @classmethod
    def from_json(cls, value: Any) -> "Slot":
        """The slot that a header describes."""
        path, lengths, dtype = _check(value, list, "optimizer variable")
        return cls(_check(path, str, "path"), _shape(lengths), _dtype(dtype))


@dataclass(frozen=True)
class OptimizerState:
    """How the optimizer was when it was saved.

    Attributes:
        compact: whether it only saw what is trained.
        found: whether its first batch decided the mask.
        slots: its variables.
    """

    compact: bool
    found: bool
    slots: tuple[Slot, ...]


@dataclass(frozen=True)
class Vocabulary:
    """What a lookup layer of Keras knows besides its configuration.

    Attributes:
        tokens: texts or whole numbers, by index, with those for masks and unknown tokens; None for
            one of these that the layer has no token for.
        idf_weights: of `output_mode="tf_idf"`, one for each output.
    """

    tokens: tuple[str | int | None, ...]
    idf_weights: tuple[float, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """The vocabulary as a JSON object."""
        described: dict[str, Any] = {"tokens": list(self.tokens)}
        if self.idf_weights is not None:
            described["idf_weights"] = list(self.idf_weights)
        return described

    @classmethod
    def from_json(cls, value: Any) -> "Vocabulary":
        """The vocabulary that `to_json` described."""
        described = _check(value, dict, "vocabulary")
        tokens = _check(described["tokens"], list, "tokens")
        if not all(token is None or type(token) in (str, int) for token in tokens):
            raise FreezeFileError("a vocabulary has tokens that are neither texts nor numbers")
        weights = described.get("idf_weights")
        if weights is not None:
            weights = tuple(_finite(w, "idf_weight") for w in _check(weights, list, "idf_weights"))
        return cls(tuple(tokens), weights)


@dataclass(frozen=True)
class Header:
    """All of it.

    Attributes:
        versions: of keras_freeze, Keras and its backend, by name.
        generator: which generator the seeds belong to.
        model: the model as Keras serializes it, with its compile configuration.
        records: the model's variables, in order.
        settings: what the mask's entries were decided by; none in files of earlier versions.
        num_rescued: of the mask.
        decay_scale: what frozen weights of the mask that are not constant are multiplied by
            (FreezeNet-WD); None for other methods.
        base: SHA-256 of the base in hexadecimal, None without one.
        optimizer: the optimizer's state, None if it was left out.
        vocabularies: of the model's lookup layers, in the order of its layers, None for one that
            follows from the model's configuration or is not set; empty if all are None.
    """

    versions: Mapping[str, str]
    generator: str
    model: Mapping[str, Any]
    records: tuple[Record, ...]
    settings: tuple[Settings, ...]
    num_rescued: int
    decay_scale: float | None
    base: str | None
    optimizer: OptimizerState | None
    vocabularies: tuple[Vocabulary | None, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The header as a JSON object, without what is as usual."""
        described: dict[str, Any] = {"versions": dict(self.versions), "model": self.model}
        if any(r.source is not None and r.source.kind == SEED for r in self.records):
            described["generator"] = self.generator
        described["variables"] = [record.to_json() for record in self.records]
        if self.settings:
            described["settings"] = [list(astuple(settings)) for settings in self.settings]
        if self.num_rescued:
            described["num_rescued"] = self.num_rescued
        if self.decay_scale is not None:
            described["decay_scale"] = self.decay_scale
        if self.base is not None:
            described["base"] = self.base
        if self.optimizer is not None:
            slots = [list(asdict(slot).values()) for slot in self.optimizer.slots]
            described["optimizer"] = {
                "compact": self.optimizer.compact,
                "found": self.optimizer.found,
                "variables": slots,
            }
        if self.vocabularies:
            described["vocabularies"] = [v and v.to_json() for v in self.vocabularies]
        return described

    @classmethod
    def from_json(cls, described: Mapping[str, Any], max_bytes: int | None = None) -> "Header":
        """The header of a file.

        Args:
            described: its JSON object.
            max_bytes: what its variables may take; None for a quarter of the free memory.

        Raises:
            FreezeFileError: for one that cannot be, or announces too much.
        """
        try:
            header = cls._from_json(described)
            header._check()
        except (ArithmeticError, LookupError, MemoryError, RecursionError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise FreezeFileError(f"The header makes no sense: {what}.") from error
        except (TypeError, ValueError) as error:
            raise FreezeFileError(f"The header makes no sense: {error}.") from error
        check_announced(header.num_bytes, max_bytes)
        return header

    @classmethod
    def _from_json(cls, described: Mapping[str, Any]) -> "Header":
        versions = _check(described["versions"], dict, "versions")
        scale = described.get("decay_scale")
        base = described.get("base")
        optimizer = None
        if "optimizer" in described:
            state = _check(described["optimizer"], dict, "optimizer")
            slots = _check(state["variables"], list, "optimizer variables")
            optimizer = OptimizerState(
                _check(state["compact"], bool, "compact"),
                _check(state["found"], bool, "found"),
                tuple(map(Slot.from_json, slots)),
            )
        records = _check(described["variables"], list, "variables")
        return cls(
            versions={str(name): str(version) for name, version in versions.items()},
            generator=_check(described.get("generator", ""), str, "generator"),
            model=_check(described["model"], dict, "model"),
            records=tuple(map(Record.from_json, records)),
            settings=tuple(map(_settings, _check(described.get("settings", []), list, "settings"))),
            num_rescued=_whole(described.get("num_rescued", 0), 2**48, "num_rescued"),
            decay_scale=None if scale is None else _finite(scale, "decay_scale"),
            base=None if base is None else _check(base, str, "base"),
            optimizer=optimizer,
            vocabularies=tuple(
                None if value is None else Vocabulary.from_json(value)
                for value in _check(described.get("vocabularies", []), list, "vocabularies")
            ),
        )

    def _check(self) -> None:
        positions = [r.entry.position for r in self.records if r.entry is not None]
        if len(set(positions)) < len(positions):
            raise FreezeFileError("two variables have the same position in the mask")
        for record in self.records:
            if self.settings and record.entry and record.entry.settings >= len(self.settings):
                raise FreezeFileError(f"{record.path!r} has settings that are not there")
            source = record.source
            if source is not None and source.pattern >> 8 * WIDTHS[record.dtype]:
                raise FreezeFileError(f"{record.path!r} has a constant of too many bits")
            if source is not None and source.kind == BASE and self.base is None:
                raise FreezeFileError(f"{record.path!r} comes from a base, and there is none")
            rounded = record.dtype == "float32" and record.stored_dtype in ("float16", "bfloat16")
            if record.stored_dtype != record.dtype and not rounded:
                raise FreezeFileError(f"{record.path!r} is stored as {record.stored_dtype}")

    @property
    def num_bytes(self) -> int:
        """What all its variables, masks and optimizer variables take."""
        needed = sum(_extent(r.shape) * (WIDTHS[r.dtype] + 1) for r in self.records)
        if self.optimizer is not None:
            needed += sum(_extent(s.shape) * WIDTHS[s.dtype] for s in self.optimizer.slots)
        return needed


def _settings(value: Any) -> Settings:
    freeze_rate, criterion, frozen_weights, seed = _check(value, list, "settings")
    rate = _finite(freeze_rate, "freeze_rate")
    if not 0.0 <= rate <= 1.0:
        raise FreezeFileError(f"freeze_rate is {rate}")
    return Settings(
        rate,
        _check(criterion, str, "criterion"),
        _check(frozen_weights, str, "frozen_weights"),
        _whole(seed, 2**32, "seed"),
    )


def _extent(shape: tuple[int, ...]) -> int:
    """An array's size; not 0 for one without values, whose other axes may be decoded."""
    return math.prod(max(length, 1) for length in shape)


def _check(value: Any, kind: type | tuple[type, ...], what: str) -> Any:
    if not isinstance(value, kind):
        raise FreezeFileError(f"{what} is {value!r:.100}")
    return value


def _whole(value: Any, end: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
        raise FreezeFileError(f"{what} is {value!r:.100}")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    lengths = tuple(_whole(length, 2**48, "shape") for length in _check(value, list, "shape"))
    if len(lengths) > _MOST_AXES or _extent(lengths) >= 2**48:
        raise FreezeFileError(f"no variable has the shape {value!r:.100}")
    return lengths


def _finite(value: Any, what: str) -> float:
    number = float(_check(value, (int, float), what))
    if not math.isfinite(number):
        raise FreezeFileError(f"{what} is {value!r:.100}")
    return number


def _dtype(value: Any) -> str:
    if not isinstance(value, str) or value not in WIDTHS:
        raise FreezeFileError(f"there is no dtype {value!r:.100}")
    return value
