"""The freezing mask: which weights are trained, chosen exactly, and read-only.

The mask m of the paper has a 1 for every weight that is trained and a 0 for every weight that
stays at its random initial value. This module needs NumPy only, and the same scores give the same
mask on every platform.
"""

import hashlib
import operator
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_freeze._utils.validation import type_error
from keras_freeze.masks.distributions import Group, check_distribution, groups_of, select_groups
from keras_freeze.masks.selection import as_float32, check_freeze_rate
from keras_freeze.masks.settings import GLOBAL
from keras_freeze.masks.structure import Structure, check_structure
from keras_freeze.storage.masks import read_mask, write_mask


@dataclass(frozen=True, eq=False)
class MaskEntry:
    """The mask of one variable.

    Attributes:
        position: The variable's position among those the optimizer is built with.
        path: The variable's path, which is a label only.
        trained: A read-only boolean array of the variable's shape, copied; True = trained.
        is_weight: Whether the entry counts as one of the weights |W|. False for a bias in a custom
            mask.
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
            raise ValueError(
                f"Argument `position` must be at least 0. Received: position={position}"
            )
        copy = given.copy()
        copy.setflags(write=False)
        object.__setattr__(self, "position", position)
        object.__setattr__(self, "trained", copy)

    def __reduce__(self) -> tuple[Any, ...]:
        # Through the constructor: arrays would otherwise be writable in a copy.
        return MaskEntry, (self.position, self.path, self.trained, self.is_weight)


class FreezeMask:
    """The freezing mask of a model: which weights are trained and which stay frozen; read-only.

    `mask[path]` and `mask[variable]` return the boolean array of one variable, True = trained. A
    path may leave out the model's name where that is unambiguous. Masks are equal when positions,
    shapes and bits are equal; paths are labels, which change when a model is loaded.

    Args:
        entries: `MaskEntry` objects with different positions, in any order.
        variables: The variables of the entries, in the same order, for `mask[variable]`. The mask
            keeps weak references to them, which are neither copied, pickled nor saved.
        num_rescued: The number of weights that are trained only because their layer would have
            none otherwise.

    Raises:
        TypeError: If `entries` is not a sequence of `MaskEntry`.
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
        given = _checked_entries(entries)
        self._entries = tuple(sorted(given, key=lambda entry: entry.position))
        positions = [entry.position for entry in self._entries]
        if len(set(positions)) != len(positions):
            raise ValueError(
                "Argument `entries` must have different positions. "
                f"Received entries with positions={positions}"
            )
        if variables is not None and len(variables) != len(given):
            raise ValueError(
                "Argument `variables` must have one variable for each entry. "
                f"Received: {len(variables)} variables for {len(given)} entries"
            )
        self._num_rescued = operator.index(num_rescued)
        # A new object may get the id of a dead variable, so `find` checks the reference.
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
        distribution: str | Mapping[str, float] = GLOBAL,
        structure: str | tuple[int, int] | Structure | None = None,
    ) -> "FreezeMask":
        """Compute the mask that trains the weights with the largest scores.

        Exactly `floor((1 - q) |W|)` weights are trained (the paper's algorithm 1), the largest of
        all variables or, with another `distribution`, of each; of equal scores, the one that comes
        first. In addition, a variable without a trained weight gets one (the
        at-least-one rule), drawn from `seed` and its position, unless the rate is 1; `num_rescued`
        counts these.

        Args:
            scores: One array for each weight variable, of the variable's shape, converted to
                float32. The largest scores are trained: pass absolute values where the sign does
                not matter.
            freeze_rate: The freezing rate q in [0, 1].
            seed: An integer that decides which weights the at-least-one rule trains.
            positions: The variables' positions. Defaults to 0, 1, 2, ...
            paths: The variables' paths. Defaults to the positions as strings.
            variables: The variables, for `mask[variable]`.
            distribution: Where the rate applies: `"global"`, `"uniform"`, `"erk"` or a mapping from
                patterns of paths to rates, as for a `FreezeOptimizer`. Defaults to `"global"`.
            structure: What is trained together, as for a `FreezeOptimizer`: `"column"`, `"row"`, a
                pair of ints for blocks, `"n:m"`, or a `keras_freeze.masks.Structure`. As many
                weights are then trained as fit into the number above. None: single weights.

        Returns:
            A `FreezeMask`.

        Raises:
            TypeError: If `freeze_rate` is not a number, or `distribution` or `structure` of another
                type.
            ValueError: If a rate is outside [0, 1], if the distribution or structure is unknown, if
                a pattern matches no path, if a score is NaN or infinite (the message names the
                variable), or if lengths differ.

        Example:
            >>> mask = FreezeMask.from_scores([np.array([4.0, 1.0]), np.array([2.0, 3.0])], 0.5)
            >>> mask["0"], mask["1"]
            (array([ True, False]), array([False,  True]))
        """
        rate, checked = check_freeze_rate(freeze_rate), check_distribution(distribution)
        units = check_structure(structure)
        arrays = as_float32(scores)
        positions = list(range(len(arrays)) if positions is None else positions)
        paths = [str(position) for position in positions] if paths is None else list(paths)
        for name, given in (("positions", positions), ("paths", paths)):
            if len(given) != len(arrays):
                raise ValueError(
                    f"Argument `{name}` must have one element for each array of scores. "
                    f"Received: {len(given)} {name} for {len(arrays)} arrays"
                )
        groups = groups_of(checked, rate, [array.shape for array in arrays], paths)
        places: dict[str, Any] = {"positions": positions, "paths": paths, "variables": variables}
        return mask_of_groups(arrays, groups, seed=seed, structure=units, **places)

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
        """The number |W| of weights that the mask decides about, trained or not."""
        return sum(entry.trained.size for entry in self._entries if entry.is_weight)

    @property
    def num_trained(self) -> int:
        """The number ||m||_0 of trained weights, including rescued ones."""
        return sum(
            int(np.count_nonzero(entry.trained)) for entry in self._entries if entry.is_weight
        )

    @property
    def freeze_rate(self) -> float:
        """The resulting freezing rate q = 1 - ||m||_0 / |W|; 0.0 without weights."""
        num_weights = self.num_weights
        return (num_weights - self.num_trained) / num_weights if num_weights else 0.0

    @property
    def num_rescued(self) -> int:
        """The number of weights that the at-least-one rule trains."""
        return self._num_rescued

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hexadecimal, by which machines tell whether their masks are equal.

        It is taken over what `==` compares: positions, shapes and bits, not paths.
        """
        digest = hashlib.sha256()
        for entry in self._entries:
            digest.update(f"{entry.position} {entry.trained.shape}\n".encode())
            digest.update(np.packbits(entry.trained).data)
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __getitem__(self, key: Any) -> np.ndarray:
        return self.entry(key).trained

    def entry(self, key: Any) -> MaskEntry:
        """Return the entry of a variable; `mask[key]` returns its array.

        Args:
            key: A path, with or without the model's name, or a variable that the mask was created
                with.

        Returns:
            A `MaskEntry`.

        Raises:
            KeyError: If there is no such entry.
            ValueError: If a path matches several entries.
        """
        if not isinstance(key, str):
            entry = self.find(key)
            if entry is not None:
                return entry
            raise KeyError(
                "The mask has no entry for this object: use a path, or one of the variables that "
                f"the mask was created with. Received: {getattr(key, 'path', key)!r}"
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
                f"The path is ambiguous: it matches {listed}. Use a longer path, the variable "
                f"itself, or `entries`. Received: {key!r}"
            )
        return matches[0]

    def find(self, variable: Any) -> MaskEntry | None:
        """Return the entry of a variable that the mask was created with, or None."""
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
        # Weak references can neither be copied nor pickled, and would point to the old variables.
        return FreezeMask, (self._entries, None, self._num_rescued)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the mask without a model to a `.freeze` file.

        The mask is entropy-coded and takes far less than one bit for each weight at high freezing
        rates. The write is atomic: an interrupted save leaves an older file as it was.

        Args:
            path: Path of the file. An existing file is replaced.

        Raises:
            TypeError: If `path` is not a path.
            ValueError: If a position is 2^31 or larger, or if an array has more than 32 axes.

        Example:

        ```python
        mask.save("mask.freeze")
        mask = keras_freeze.FreezeMask.load("mask.freeze")
        ```
        """
        entries = [(e.position, e.path, e.trained, e.is_weight) for e in self._entries]
        write_mask(path, entries, self._num_rescued)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "FreezeMask":
        """Load a mask that `save` wrote, or the mask of a model that `keras_freeze.save` wrote.

        Args:
            path: Path of the file.

        Returns:
            An equal mask, with its paths and `num_rescued`, but without variables.

        Raises:
            FileNotFoundError: If there is no such file.
            FreezeFileError: If the file holds no mask, is of another version, cut short or
                damaged, or if the mask follows from the weights of a base. A subclass of
                `ValueError`.
            TypeError: If `path` is not a path.

        Example:

        ```python
        mask = keras_freeze.FreezeMask.load("digits.freeze")
        ```
        """
        entries, num_rescued = read_mask(path)
        return cls([MaskEntry(*entry) for entry in entries], num_rescued=num_rescued)


def mask_of_groups(
    scores: Sequence[Any],
    groups: Sequence[Group],
    *,
    seed: int,
    positions: Sequence[int],
    paths: Sequence[str],
    variables: Sequence[Any] | None = None,
    structure: Structure | None = None,
) -> FreezeMask:
    """Compute the mask that trains the weights with the largest scores of each group.

    `groups` are what `groups_of` returns for the scores; the other arguments are those of
    `FreezeMask.from_scores`.

    Raises:
        ValueError: If a score is NaN or infinite; the message names the variable.
    """
    arrays = as_float32(scores)
    for array, path in zip(arrays, paths, strict=True):
        if not np.isfinite(array).all():
            raise ValueError(
                f"The saliency scores of {path!r} are not finite: no mask can be computed. "
                f"Received: {np.count_nonzero(~np.isfinite(array))} NaN or infinite scores "
                f"of {array.size}"
            )
    selected, num_rescued = select_groups(arrays, groups, seed, positions, structure)
    entries = [MaskEntry(*parts) for parts in zip(positions, paths, selected, strict=True)]
    return FreezeMask(entries, variables, num_rescued)


def _checked_entries(entries: Any) -> list[MaskEntry]:
    is_iterable = isinstance(entries, Iterable) and not isinstance(entries, str)
    given = list(entries) if is_iterable else [entries]
    if not is_iterable or not all(isinstance(entry, MaskEntry) for entry in given):
        raise type_error("entries", entries, "a sequence of MaskEntry")
    return given
