"""The header of a `.freeze` file: the model, and where the values of each variable come from.

Every field is checked when it is read from JSON, so that later code can rely on it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keras_freeze._utils.bits import WIDTHS
from keras_freeze._utils.validation import check_json_int
from keras_freeze.masks.distributions import check_distribution
from keras_freeze.masks.settings import GLOBAL, Settings
from keras_freeze.masks.structure import check_structure
from keras_freeze.starts import BASE, SEED
from keras_freeze.storage.checks.memory import check_announced
from keras_freeze.storage.errors import FreezeFileError, invalid_header
from keras_freeze.storage.fields import (
    MaskPart,
    check_dtype,
    check_finite,
    check_positions,
    check_shape,
    check_type,
    extent,
    is_mask_only,
    num_rescued_of,
    versions_of,
)
from keras_freeze.storage.records import VariableRecord
from keras_freeze.storage.stream_record import UPDATE_CONTENT, StreamRecord

_BYTES_TO_DRAW = 32  # for each entry of a mask that is drawn or ranked
_BYTES_OF_ORTHOGONAL = 80  # for each entry of a weight that is drawn so


@dataclass(frozen=True)
class Slot:
    """One variable of the optimizer; its values follow those of the model in the file."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """The number of values of the variable."""
        return math.prod(self.shape)

    @classmethod
    def from_json(cls, value: Any) -> "Slot":
        """Read one of the optimizer's variables."""
        path, shape, dtype = check_type("optimizer variable", value, list)
        return cls(check_type("path", path, str), check_shape(shape), check_dtype(dtype))


@dataclass(frozen=True)
class OptimizerState:
    """The state of the optimizer when it was saved.

    Attributes:
        compact: Whether its update strategy was compact: the inner optimizer sees only what is
            trained.
        found: Whether its first batch decided the mask.
        slots: Its variables.
    """

    compact: bool
    found: bool
    slots: tuple[Slot, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON object."""
        slots = [[slot.path, list(slot.shape), slot.dtype] for slot in self.slots]
        return {"compact": self.compact, "found": self.found, "variables": slots}

    @classmethod
    def from_json(cls, value: Any) -> "OptimizerState":
        """Read what `to_json` writes."""
        described = check_type("optimizer", value, dict)
        slots = check_type("optimizer variables", described["variables"], list)
        return cls(
            check_type("compact", described["compact"], bool),
            check_type("found", described["found"], bool),
            tuple(map(Slot.from_json, slots)),
        )


@dataclass(frozen=True)
class Vocabulary:
    """The vocabulary of a lookup layer of Keras.

    Attributes:
        tokens: Strings or integers by index, including mask and out-of-vocabulary tokens; None
            where the layer has no token for one of these.
        idf_weights: One weight for each output, for `output_mode="tf_idf"`.
    """

    tokens: tuple[str | int | None, ...]
    idf_weights: tuple[float, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the vocabulary as a JSON object."""
        described: dict[str, Any] = {"tokens": list(self.tokens)}
        if self.idf_weights is not None:
            described["idf_weights"] = list(self.idf_weights)
        return described

    @classmethod
    def from_json(cls, value: Any) -> "Vocabulary":
        """Read what `to_json` writes."""
        described = check_type("vocabulary", value, dict)
        tokens = check_type("tokens", described["tokens"], list)
        if not all(token is None or type(token) in (str, int) for token in tokens):
            raise FreezeFileError("a vocabulary has tokens that are neither strings nor integers")
        weights = described.get("idf_weights")
        if weights is not None:
            weights = check_type("idf_weights", weights, list)
            weights = tuple(check_finite("idf_weight", weight) for weight in weights)
        return cls(tuple(tokens), weights)


@dataclass(frozen=True)
class Header:
    """The header of a file that holds a model.

    Attributes:
        versions: The versions of keras_freeze, Keras and its backend, by name.
        generator: The name of the generator that the seeds belong to.
        model: The model as Keras serializes it, including its compile configuration.
        records: The model's variables, in order.
        settings: What the entries of the mask were decided by; empty in files of earlier versions.
        num_rescued: The number of rescued weights, as in `FreezeMask`.
        decay_scale: The factor of the frozen weights that are not constant (FreezeNet-WD); None for
            other methods.
        base: SHA-256 of the base in hexadecimal; None without a base.
        optimizer: The state of the optimizer; None if it was left out.
        vocabularies: The vocabularies of the model's lookup layers, in the order of the layers.
            None for one that follows from the configuration or is not set; empty if all are None.
        stream: The place of the file in a stream; None for one that is in none.
    """

    versions: Mapping[str, str]
    generator: str
    model: Mapping[str, Any]
    records: tuple[VariableRecord, ...]
    settings: tuple[Settings, ...]
    num_rescued: int
    decay_scale: float | None
    base: str | None
    optimizer: OptimizerState | None
    vocabularies: tuple[Vocabulary | None, ...] = ()
    stream: StreamRecord | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the header as a JSON object without the fields that have their defaults."""
        described: dict[str, Any] = {"versions": dict(self.versions), "model": self.model}
        if any(source.kind == SEED for r in self.records for source in r.sources):
            described["generator"] = self.generator
        described["variables"] = [record.to_json() for record in self.records]
        if self.settings:
            described["settings"] = [settings.to_json() for settings in self.settings]
        if self.num_rescued:
            described["num_rescued"] = self.num_rescued
        if self.decay_scale is not None:
            described["decay_scale"] = self.decay_scale
        if self.base is not None:
            described["base"] = self.base
        if self.optimizer is not None:
            described["optimizer"] = self.optimizer.to_json()
        if self.vocabularies:
            described["vocabularies"] = [v and v.to_json() for v in self.vocabularies]
        if self.stream is not None:
            described["stream"] = self.stream.to_json()
        return described

    @classmethod
    def from_json(cls, described: Mapping[str, Any], max_bytes: int | None = None) -> "Header":
        """Read what `to_json` writes.

        Args:
            described: The JSON object.
            max_bytes: The largest size of the variables in bytes; None for a quarter of the free
                memory.

        Raises:
            FreezeFileError: If a field is missing or not valid, if the file holds a mask only, or
                if the variables are larger than `max_bytes`.
        """
        if is_mask_only(described):
            raise FreezeFileError(
                "The file holds a mask only, and no model: use `FreezeMask.load` to read it."
            )
        if described.get("content") == UPDATE_CONTENT:
            raise FreezeFileError(
                "The file holds an update of a stream, and no model: use `keras_freeze.follow` on "
                "its folder."
            )
        with invalid_header():
            if "content" in described:
                raise FreezeFileError(f"content is {described['content']!r:.100}")
            records = check_type("variables", described["variables"], list)
            settings = check_type("settings", described.get("settings", []), list)
            scale, base = described.get("decay_scale"), described.get("base")
            vocabularies = check_type("vocabularies", described.get("vocabularies", []), list)
            header = cls(
                versions=versions_of(described),
                generator=check_type("generator", described.get("generator", ""), str),
                model=check_type("model", described["model"], dict),
                records=tuple(map(VariableRecord.from_json, records)),
                settings=tuple(map(_settings, settings)),
                num_rescued=num_rescued_of(described),
                decay_scale=None if scale is None else check_finite("decay_scale", scale),
                base=None if base is None else check_type("base", base, str),
                optimizer=(
                    OptimizerState.from_json(described["optimizer"])
                    if "optimizer" in described
                    else None
                ),
                vocabularies=tuple(
                    None if value is None else Vocabulary.from_json(value) for value in vocabularies
                ),
                stream=(
                    StreamRecord.from_json(described["stream"]) if "stream" in described else None
                ),
            )
            header._check()
        check_announced(header.num_bytes, max_bytes)
        return header

    def _check(self) -> None:
        check_positions(self.mask_parts)
        if "base" in self.model and (self.base is None or type(self.model["base"]) is not str):
            raise FreezeFileError("the architecture is that of a base that is missing")
        for record in self.records:
            if self.settings and record.entry and record.entry.settings >= len(self.settings):
                raise FreezeFileError(f"{record.path!r} has settings that are missing")
            if self.base is None and any(source.kind == BASE for source in record.sources):
                raise FreezeFileError(f"{record.path!r} comes from a base that is missing")
            record.check()

    @property
    def num_bytes(self) -> int:
        """The size in bytes of all variables, masks and optimizer variables."""
        needed = sum(extent(r.shape) * (WIDTHS[r.dtype] + 1) for r in self.records)
        computed = [r for r in self.records if r.entry is not None and r.entry.is_computed]
        needed += sum(extent(r.shape) * _BYTES_TO_DRAW for r in computed)
        # The starts, and the integers and indices in 8 bytes each.
        gridded = [r for r in self.records if r.grid is not None or r.has_differences]
        needed += sum(extent(r.shape) * (WIDTHS[r.dtype] + 16) for r in gridded)
        drawn = [(r, source) for r in self.records for source in r.sources]
        orthogonal = [r for r, source in drawn if source.distribution == "orthogonal"]
        needed += sum(extent(r.shape) * _BYTES_OF_ORTHOGONAL for r in orthogonal)
        if self.optimizer is not None:
            needed += sum(extent(s.shape) * WIDTHS[s.dtype] for s in self.optimizer.slots)
        return needed

    @property
    def version(self) -> int:
        """The first version of the format that has all of this."""
        has_keys = any(part.key is not None for part in self.mask_parts)
        is_new = [r.grid is not None or r.is_changed or r.has_differences for r in self.records]
        is_new += ["base" in self.model, self.stream is not None]
        is_new += [len(settings.to_json()) > 4 for settings in self.settings]
        return 2 if has_keys or any(is_new) else 1

    @property
    def mask_parts(self) -> list[MaskPart]:
        """The entries of the mask, in the order in which the file holds them."""
        return [
            MaskPart(r.entry.position, r.path, r.shape, r.entry.is_weight, r.entry.key)
            for r in self.records
            if r.entry is not None
        ]

    @property
    def changed(self) -> list[VariableRecord]:
        """The variables of which the file says where they are changed, after the mask."""
        return [r for r in self.records if r.is_changed]


def _settings(value: Any) -> Settings:
    freeze_rate, criterion, frozen_weights, seed, *rest = check_type("settings", value, list)
    distribution, structures = (rest or [GLOBAL])[0], rest[1:]
    if len(structures) > 1:
        raise FreezeFileError(f"there are {len(structures)} structures")
    for structure in structures:
        _, score = check_type("structure", structure, list)
        check_type("score", score, str)
    rate = check_finite("freeze_rate", freeze_rate)
    if not 0.0 <= rate <= 1.0:
        raise FreezeFileError(f"freeze_rate is {rate}")
    return Settings(
        rate,
        check_type("criterion", criterion, str),
        check_type("frozen_weights", frozen_weights, str),
        check_json_int("seed", seed, 2**32),
        check_distribution(distribution),
        check_structure(structures[0] if structures else None),
    )
