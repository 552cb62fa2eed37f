"""The results of runs in a file, one line each."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from keras_freeze.paper.run import Run

_logger = logging.getLogger(__name__)


class Results:
    """The records of runs in a file, one JSON object per line, to which lines are only added.

    Several processes may append to one file at a time. A process that is killed while it writes
    leaves at most one broken line, which is ignored and damages no other.

    Args:
        path: path of the file; it and its folder are created when a record is first appended.

    Example:

    ```python
    results = Results("runs/results.jsonl")
    run = Run("mnist_5k", "lenet_300_100", "freezenet", 0.99, seed=0)
    if run not in results:
        results.append(run.execute())
    results[run]["result"]["test_accuracy"]
    ```
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._position, self._num_lines = 0, 0
        self._records: dict[Run, dict[str, Any]] = {}

    def __contains__(self, run: Run) -> bool:
        self._read()
        return run in self._records

    def __getitem__(self, run: Run) -> dict[str, Any]:
        self._read()
        return self._records[run]

    def __len__(self) -> int:
        self._read()
        return len(self._records)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append what `Run.execute` returned; it is on disk when this returns.

        Raises:
            TypeError, ValueError: for anything else.
        """
        Run.from_record(record)
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            _lock(file)
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> None:
        """Read the lines that were added, by whatever process, since the last time."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written, or cut off
                self._position += len(line)
                self._num_lines += 1
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            run = Run.from_record(record)
            _check_result(run, record["result"])
        except (ValueError, TypeError, KeyError) as error:
            self._leave_out(error)
        else:
            self._records[run] = record

    def _leave_out(self, error: Exception) -> None:
        place = f"{self.path}, line {self._num_lines}"
        if place not in _left_out:
            _left_out.add(place)
            _logger.warning("%s was left out, since it is not a record of a run: %s", place, error)


# Lines are reported once each, however often a file is read.
_left_out: set[str] = set()


def _check_result(run: Run, result: Mapping[str, Any]) -> None:
    """Raise an error for a result that tables and figures cannot be made of."""
    numbers = _NUMBERS.get(run.measure, ())
    missing = [name for name in ("report", *numbers) if name not in result]
    wrong = [n for n in numbers if not isinstance(result.get(n), (int, float, type(None)))]
    if missing or wrong or not isinstance(result["report"], Mapping):
        raise ValueError(f"its result lacks a number: {', '.join(missing + wrong) or 'report'}")


_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "training": ("test_accuracy", "validation_accuracy"),
    "gradient_flow": ("gradient_flow",),
    "gradient_flow_in_training": ("test_accuracy", "validation_accuracy"),
    "costs": ("gradient_flow", "file_bytes"),
}


def _lock(file: IO[bytes]) -> None:
    """Keep other processes from appending until the file is closed, where the system can."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)
