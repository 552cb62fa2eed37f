"""The freezing mask: which weights are trained, chosen exactly, and kept read-only.

The mask m of the paper has a 1 for every weight that is trained and a 0 for every weight that
stays at its random start. This room needs NumPy and no framework; the same scores give the same
mask on every platform.
"""

import hashlib
import json
import math
import operator
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_freeze._utils.files import replacing
from keras_freeze._utils.text import printable, printable_cause
from keras_freeze.masks.selection import (
    _as_float32,
    check_freeze_rate,
    num_trained_weights,
    rescue_index,
    select_top,
)
from keras_freeze.storage.container import is_container
from keras_freeze.storage.errors import FreezeFileError
from keras_freeze.storage.masks import read_entries

_MAGIC = b"keras_freeze mask "
_VERSION = b"1\n"
_LENGTH_BYTES = 8
_DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True, eq=False)
class MaskEntry:
    """The mask of one variable.

    Attributes:
        position: The variable's position among those the optimizer is built with.
        path: The variable's path, a label.
        trained: A read-only boolean array of the variable's shape, copied; True = trained.
        is_weight: Whether the entry counts towards |W|. False for a bias in one's own mask.
    """

    position: int
    path: str
    trained: np.ndarray
    is_weight: bool = True

    def __post_init__(self) -> None:
        given = np.asarray(self.trained)
        if given.dtype != np.bool_:
            raise TypeError(
                f"The mask of {self.path!r} must be boolean, True where the weight is trained. "
                f"Received: dtype={given.dtype}"
            )
        position = operator.index(self.position)
        if position < 0:
            raise ValueError(f"`position` must be at least 0. Received: position={position}")
        copy = given.copy()
        copy.setflags(write=False)
        object.__setattr__(self, "position", position)
        object.__setattr__(self, "trained", copy)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor: copies of arrays would otherwise come out writable.
        return MaskEntry, (self.position, self.path, self.trained, self.is_weight)


class FreezeMask:
    """Which weights of a model are trained and which stay frozen; read-only.

    `mask[path]` and `mask[variable]` give the boolean array of one variable, True = trained. A
    path may leave out the model's name where that is unambiguous. Masks are equal when positions,
    shapes and bits are; paths are labels, which change when a model is loaded.

    Args:
        entries: `MaskEntry` objects with different positions, in any order.
        variables: The variables of the entries, in the same order, for `mask[variable]`. They are
            held weakly, and neither copied, pickled nor saved.
        num_rescued: How many weights are trained only because their layer would have none.

    Raises:
        ValueError: If two entries share a position, or `variables` has another length.

    Example:
        >>> mask = FreezeMask([MaskEntry(0, "model/fc/kernel", np.array([[True], [False]]))])
        >>> mask["fc/kernel"].ravel()
        array([ True, False])
        >>> mask
        FreezeMask(num_weights=2, num_trained=1, freeze_rate=0.5)
    """

    def __init__(
        self,
        entries: Iterable[MaskEntry],
        variables: Sequence[Any] | None = None,
        num_rescued: int = 0,
    ) -> None:
        given = list(entries)
        self._entries = tuple(sorted(given, key=lambda entry: entry.position))
        positions = [entry.position for entry in self._entries]
        if len(set(positions)) != len(positions):
            raise ValueError(f"Entries must have different positions. Received: {positions=}")
        if variables is not None and len(variables) != len(given):
            raise ValueError(
                "`variables` must have one variable for each entry. "
                f"Received: {len(variables)} variables for {len(given)} entries"
            )
        self._num_rescued = operator.index(num_rescued)
        # A dead variable's id may be given to a new object, so the reference is checked on use.
        self._by_identity = {
            id(variable): (weakref.ref(variable), entry)
            for variable, entry in zip(variables or (), given, strict=variables is not None)
        }

    @classmethod
    def from_scores(
        cls,
        scores: Sequence[Any],
        freeze_rate: float,
        *,
        seed: int = 0,
        positions: Sequence[int] | None = None,
        paths: Sequence[str] | None = None,
        variables: Sequence[Any] | None = None,
    ) -> "FreezeMask":
        """Trains the weights with the largest scores, over all variables at once.

        Exactly `floor((1 - q) |W|)` weights are trained (the paper's algorithm 1), ties broken by
        position. On top of them, a variable left without a trained weight gets one, drawn from
        `seed` and its position (`rescue_index`), unless the rate is 1; `num_rescued` counts these.

        Args:
            scores: One array for each weight variable, of its shape, taken as float32; the
                largest are trained. Pass magnitudes where the sign does not matter.
            freeze_rate: The freezing rate q in [0, 1].
            seed: Decides the weights of otherwise empty variables.
            positions: The variables' positions; by default 0, 1, 2, ...
            paths: The variables' paths; by default "0", "1", "2", ... from the positions.
            variables: The variables, for `mask[variable]`.

        Returns:
            The mask.

        Raises:
            TypeError: If `freeze_rate` is no number.
            ValueError: If the rate is outside [0, 1], if a score is NaN or infinite (the message
                names the variable), or if lengths differ.

        Example:
            >>> mask = FreezeMask.from_scores([np.array([4.0, 1.0]), np.array([2.0, 3.0])], 0.5)
            >>> mask["0"], mask["1"]
            (array([ True, False]), array([False,  True]))
        """
        rate = check_freeze_rate(freeze_rate)
        arrays = _as_float32(scores)
        positions = list(range(len(arrays)) if positions is None else positions)
        paths = [str(position) for position in positions] if paths is None else list(paths)
        for name, given in (("positions", positions), ("paths", paths)):
            if len(given) != len(arrays):
                raise ValueError(
                    f"`{name}` must have one element for each array of scores. "
                    f"Received: {len(given)} {name} for {len(arrays)} arrays"
                )
        for array, path in zip(arrays, paths, strict=True):
            if not np.isfinite(array).all():
                raise ValueError(
                    f"The saliency scores of {path!r} are not finite, so no mask can be chosen. "
                    f"Received: {np.count_nonzero(~np.isfinite(array))} NaN or infinite scores "
                    f"of {array.size}"
                )
        selected = select_top(arrays, num_trained_weights(rate, sum(a.size for a in arrays)))
        num_rescued = 0
        if rate < 1:
            for position, chosen in zip(positions, selected, strict=True):
                if chosen.size and not chosen.any():
                    chosen.reshape(-1)[rescue_index(seed, position, chosen.size)] = True
                    num_rescued += 1
        entries = [MaskEntry(*parts) for parts in zip(positions, paths, selected, strict=True)]
        return cls(entries, variables, num_rescued)

    @property
    def entries(self) -> tuple[MaskEntry, ...]:
        """The entries, by position."""
        return self._entries

    @property
    def paths(self) -> tuple[str, ...]:
        """The entries' paths, by position."""
        return tuple(entry.path for entry in self._entries)

    @property
    def num_weights(self) -> int:
        """|W|: the weights the mask decides about, trained or not."""
        return sum(entry.trained.size for entry in self._entries if entry.is_weight)

    @property
    def num_trained(self) -> int:
        """The paper's ||m||_0: how many weights are trained, rescued ones included."""
        return sum(
            int(np.count_nonzero(entry.trained)) for entry in self._entries if entry.is_weight
        )

    @property
    def freeze_rate(self) -> float:
        """The freezing rate that came out, q = 1 - ||m||_0 / |W|; 0.0 without weights."""
        num_weights = self.num_weights
        return (num_weights - self.num_trained) / num_weights if num_weights else 0.0

    @property
    def num_rescued(self) -> int:
        """How many weights are trained only because their layer would have none."""
        return self._num_rescued

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __getitem__(self, key: Any) -> np.ndarray:
        return self.entry(key).trained

    def entry(self, key: Any) -> MaskEntry:
        """Finds the entry of a variable, of which `mask[key]` gives the array.

        Args:
            key: A path, with or without the model's name, or a variable that the mask was made
                with.

        Returns:
            The entry.

        Raises:
            KeyError: If there is none.
            ValueError: If a path fits several entries.
        """
        if not isinstance(key, str):
            entry = self.find(key)
            if entry is not None:
                return entry
            raise KeyError(
                "The mask has no entry for this object; use a path, or one of the variables that "
                f"the mask was made with. Received: {getattr(key, 'path', key)!r}"
            )
        matches = [entry for entry in self._entries if entry.path == key]
        if not matches:
            matches = [entry for entry in self._entries if entry.path.endswith(f"/{key}")]
        if not matches:  # a layer's name, for its only weight
            matches = [entry for entry in self._entries if f"/{key}/" in f"/{entry.path}"]
        if not matches:
            shown = ", ".join(repr(path) for path in self.paths[:12]) or "none"
            more = f", ... ({len(self)} in all)" if len(self) > 12 else ""
            raise KeyError(f"The mask has no such path. It has {shown}{more}. Received: {key!r}")
        if len(matches) > 1:
            listed = ", ".join(f"{entry.path!r} at position {entry.position}" for entry in matches)
            raise ValueError(
                f"The path is ambiguous: it fits {listed}. Use a longer path, the variable itself, "
                f"or `entries`. Received: {key!r}"
            )
        return matches[0]

    def find(self, variable: Any) -> MaskEntry | None:
        """The entry of a variable that the mask was made with; None if it has none."""
        reference, entry = self._by_identity.get(id(variable), (lambda: None, None))
        return entry if reference() is variable else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FreezeMask):
            return NotImplemented
        return len(self) == len(other) and all(
            mine.position == theirs.position and np.array_equal(mine.trained, theirs.trained)
            for mine, theirs in zip(self._entries, other._entries, strict=True)
        )

    def __hash__(self) -> int:
        return hash(tuple((entry.position, entry.trained.shape) for entry in self._entries))

    def __repr__(self) -> str:
        return (
            f"FreezeMask(num_weights={self.num_weights}, num_trained={self.num_trained}, "
            f"freeze_rate={self.freeze_rate:.6g})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Weak references can neither be copied nor pickled, and would name the old variables.
        return FreezeMask, (self._entries, None, self._num_rescued)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the mask to a file of its own.

        The file holds a line with its name and version, the length of a JSON header as a 64-bit
        little-endian integer, the header (positions, paths, shapes), each entry's bits packed
        eight to a byte, and the SHA-256 of all that. It is written beside its place and renamed,
        so an interrupted save leaves an older file whole.

        Args:
            path: Where to write. An existing file is replaced.
        """
        header = {
            "entries": [
                {
                    "position": entry.position,
                    "path": entry.path,
                    "shape": list(entry.trained.shape),
                    "is_weight": bool(entry.is_weight),
                }
                for entry in self._entries
            ],
            "num_rescued": self._num_rescued,
        }
        encoded = json.dumps(header).encode()
        content = b"".join(
            [
                _MAGIC,
                _VERSION,
                len(encoded).to_bytes(_LENGTH_BYTES, "little"),
                encoded,
                *(np.packbits(entry.trained).tobytes() for entry in self._entries),
            ]
        )
        with replacing(path) as temporary:
            temporary.write_bytes(content + hashlib.sha256(content).digest())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "FreezeMask":
        """Reads a mask that `save` wrote, or the mask in a `.freeze` file.

        Args:
            path: The file.

        Returns:
            An equal mask, with its paths and `num_rescued`, but no variables.

        Raises:
            FileNotFoundError: If there is no such file.
            FreezeFileError: If the file is no mask, of another version, cut short or damaged. A
                ValueError.
        """
        if is_container(path):
            entries, num_rescued = read_entries(path)
            return cls([MaskEntry(*entry) for entry in entries], num_rescued=num_rescued)
        with open(path, "rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise FreezeFileError(
                    f"The file is not a saved FreezeMask. Received: path={os.fspath(path)!r}"
                )
            version = file.read(len(_VERSION))
            if version != _VERSION:
                raise FreezeFileError(
                    f"The mask file has version {version!r}; {_VERSION!r} can be read. "
                    f"Received: path={os.fspath(path)!r}"
                )
            rest = file.read()
        body, digest = rest[:-_DIGEST_BYTES], rest[-_DIGEST_BYTES:]
        if hashlib.sha256(_MAGIC + version + body).digest() != digest:
            raise FreezeFileError(
                "The mask file is damaged or cut short: its checksum does not match. "
                f"Received: path={os.fspath(path)!r}"
            )
        try:
            return cls._decode(body)
        except Exception as error:  # whatever else a header says, memory for its mask included
            raise FreezeFileError(
                f"The mask file's header makes no sense ({printable(str(error), 200)}). "
                f"Received: path={os.fspath(path)!r}"
            ) from printable_cause(error)

    @classmethod
    def _decode(cls, body: bytes) -> "FreezeMask":
        end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
        header = json.loads(body[_LENGTH_BYTES:end])
        bits = np.frombuffer(body, np.uint8)[end:]
        sizes = [_num_elements(described["shape"]) for described in header["entries"]]
        lengths = [(size + 7) // 8 for size in sizes]
        if sum(lengths) != bits.size:  # before anything of these sizes is allocated
            raise ValueError(f"{bits.size} bytes of mask where {sum(lengths)} are announced")
        entries = []
        for described, size, length in zip(header["entries"], sizes, lengths, strict=True):
            trained = np.unpackbits(bits[:length], count=size).view(bool)
            bits = bits[length:]
            trained = trained.reshape(described["shape"])
            position, path = described["position"], described["path"]
            entries.append(MaskEntry(position, str(path), trained, bool(described["is_weight"])))
        return cls(entries, num_rescued=header["num_rescued"])


def _num_elements(shape: list[int]) -> int:
    if not all(isinstance(length, int) and length >= 0 for length in shape):
        raise ValueError(f"shape {shape}")
    return math.prod(shape)
