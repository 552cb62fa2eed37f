"""What a file says of its place in a stream."""

import string
from dataclasses import dataclass
from typing import Any

from keras_freeze._utils.validation import check_json_int
from keras_freeze.storage.errors import FreezeFileError
from keras_freeze.storage.fields import check_dtype, check_finite, check_type

UPDATE_CONTENT = "update"
"""The `content` of a file that holds an update of a stream."""

LAST_NUMBER = 10**12 - 1


@dataclass(frozen=True)
class StreamRecord:
    """The place of a complete file in a stream, and what its updates need to be read.

    Attributes:
        name: the stream's name, 16 hexadecimal digits that are drawn when it begins.
        number: the number of the file.
        state: the digest of the trained values once the file is loaded.
        dtypes: for each part of the state, the dtype in which updates hold its values.
        steps: for each part, the step of its grid in updates; 0 for none.
    """

    name: str
    number: int
    state: str
    dtypes: tuple[str, ...]
    steps: tuple[float, ...]

    def to_json(self) -> list[Any]:
        """Return the record as a list; of equal neighbors, one stands for all."""
        parts = list(zip(self.dtypes, self.steps, strict=True))
        runs: list[list[Any]] = []
        for part in parts:
            if runs and tuple(runs[-1][1:]) == part:
                runs[-1][0] += 1
            else:
                runs.append([1, *part])
        return [self.name, self.number, self.state, runs]

    @classmethod
    def from_json(cls, value: Any) -> "StreamRecord":
        """Read what `to_json` writes."""
        name, number, state, runs = check_type("stream", value, list)
        dtypes: list[str] = []
        steps: list[float] = []
        for run in check_type("stream", runs, list):
            count, dtype, step = check_type("stream", run, list)
            count = check_json_int("number of parts", count, 2**20)
            if len(dtypes) + count > 2**20 or check_finite("step", step) < 0.0:
                raise FreezeFileError(f"a stream has parts {run!r:.100}")
            dtypes += [check_dtype(dtype)] * count
            steps += [float(step)] * count
        return cls(
            check_hex("stream", name, 16),
            check_json_int("number", number, LAST_NUMBER + 1),
            check_hex("state", state, 32),
            tuple(dtypes),
            tuple(steps),
        )


def check_hex(name: str, value: Any, length: int) -> str:
    """Return a string of so many hexadecimal digits, or refuse the value."""
    text = check_type(name, value, str)
    if len(text) != length or not set(text) <= set(string.hexdigits.lower()):
        raise FreezeFileError(f"{name} is {value!r:.100}")
    return text
