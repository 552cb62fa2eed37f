"""What a command has to say."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Answer:
    """What a command prints.

    Attributes:
        text: For people.
        fields: For programs: what `--json` prints as an object.
        error: What is wrong with the file that was verified; None if nothing is.
    """

    text: str
    fields: Mapping[str, Any]
    error: str | None = None
