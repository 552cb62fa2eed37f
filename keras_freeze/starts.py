"""What the values of a variable were drawn from, as files and checkpoints describe it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from keras_freeze._utils.validation import check_json_int

CONSTANT, SEED, INITIALIZER, BASE = "constant", "seed", "initializer", "base"


@dataclass(frozen=True)
class Source:
    """Where the values of a variable that are not in a file come from.

    Attributes:
        kind: `CONSTANT`; `BASE`; `SEED`, one of our portable initializers; or `INITIALIZER`, one of
            Keras's, the same numbers only with the same versions on the same kind of machine.
        distribution, seed, stream: of `SEED`.
        parameters: of `SEED`, for distributions that have any.
        config: the initializer of `INITIALIZER` as Keras serializes it, its seed included.
        index: of `BASE`, which of the base's variables it is.
        pattern: of `CONSTANT`, the bits that each value has.
    """

    kind: str
    distribution: str = ""
    seed: int = 0
    stream: int = 0
    parameters: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    index: int = 0
    pattern: int = 0

    def to_json(self) -> list[Any]:
        """Return the source as a list that begins with its kind."""
        parameters = [dict(self.parameters)] if self.parameters else []
        described: dict[str, list[Any]] = {
            CONSTANT: [self.pattern],
            SEED: [self.distribution, self.seed, self.stream, *parameters],
            INITIALIZER: [self.config],
            BASE: [self.index],
        }
        return [self.kind, *described[self.kind]]

    @classmethod
    def from_json(cls, value: Any) -> "Source":
        """Return the source that `to_json` described; raise ValueError for anything else."""
        match value:
            case ["constant", pattern]:
                return cls(CONSTANT, pattern=check_json_int("constant", pattern, 2**64))
            case ["seed", str(distribution), seed, stream]:
                return cls(SEED, distribution, *_check_seed(seed, stream))
            case ["seed", str(distribution), seed, stream, dict(parameters)] if parameters:
                return cls(SEED, distribution, *_check_seed(seed, stream), parameters)
            case ["initializer", dict(config)]:
                return cls(INITIALIZER, config=config)
            case ["base", index]:
                return cls(BASE, index=check_json_int("index", index, 2**31))
        raise ValueError(f"there is no source {value!r:.200}")


@dataclass(frozen=True)
class Start:
    """What all values of a variable were drawn from before any of them was trained.

    Attributes:
        source: where they come from: `SEED` or `INITIALIZER`.
        checksum: CRC-32 of them, little-endian.
        drawn_with: the versions of Keras and its backend that have drawn them; an initializer of
            Keras may give other numbers with others.
    """

    source: Source
    checksum: int
    drawn_with: str = ""

    def to_json(self) -> list[Any]:
        """Return the start as a list."""
        return [self.source.to_json(), self.checksum, self.drawn_with]

    @classmethod
    def from_json(cls, value: Any) -> "Start":
        """Return the start that `to_json` described; raise ValueError for anything else."""
        source, checksum, drawn_with = value
        check_json_int("checksum", checksum, 2**32)
        return cls(Source.from_json(source), checksum, str(drawn_with))


def _check_seed(seed: Any, stream: Any) -> tuple[int, int]:
    return check_json_int("seed", seed, 2**32), check_json_int("stream", stream, 2**32)
