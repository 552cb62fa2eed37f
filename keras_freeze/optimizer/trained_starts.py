"""What trained weights were before training, for callbacks that freeze them again."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from keras_freeze import backend
from keras_freeze._utils.bits import as_bits, little_endian
from keras_freeze.initializers.of_layers import drawn_like
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.parameters import Parameter

if TYPE_CHECKING:
    from keras_freeze.optimizer.masked_optimizer import MaskedOptimizer


@dataclass(frozen=True)
class TrainedStarts:
    """What is known of the trained weights before training, as a FreezeOptimizer's state has it.

    Attributes:
        digest: CRC-32 of them when `freeze` set the mask; None where something else did.
        values: them, by position, in the order of flat indices; empty unless callbacks change the
            mask and need them.
        last_steps: after which step each kind of callback has changed the mask last.
    """

    digest: int | None = None
    values: Mapping[int, np.ndarray] = field(default_factory=dict)
    last_steps: Mapping[str, int] = field(default_factory=dict)

    def fit(self, mask: FreezeMask) -> bool:
        """Return whether there are as many values, or none, as a mask trains."""
        counts = {e.position: int(np.count_nonzero(e.trained)) for e in weights_in(mask)}
        found = {position: values.size for position, values in self.values.items()}
        return not found or found == counts


def weights_in(mask: FreezeMask) -> list[MaskEntry]:
    """Return the entries of a mask that callbacks may change: not those of biases."""
    return [entry for entry in mask.entries if entry.is_weight]


def digest_of_trained(parameters: Sequence[Parameter], mask: FreezeMask) -> int:
    """Return CRC-32 of the trained weights."""
    digest = 0
    for entry in weights_in(mask):
        values = backend.to_numpy(parameters[entry.position].variable)
        digest = zlib.crc32(little_endian(as_bits(values[entry.trained])), digest)
    return digest


def know_trained_starts(
    optimizer: "MaskedOptimizer", snapshot: Mapping[int, np.ndarray] | None = None
) -> bool:
    """Find out what trained weights were before training, and let the optimizer's state have it.

    Args:
        optimizer: a FreezeOptimizer that is built and has a mask.
        snapshot: the variables before the first step, by position; None if this comes later.

    Returns:
        Whether that is known. Otherwise nothing has changed.
    """
    mask, known = optimizer.mask, optimizer.trained_starts
    assert mask is not None
    if known.values:
        return True
    # Nothing is drawn again where nothing has been trained or set since `freeze`.
    if snapshot is None and known.digest == digest_of_trained(optimizer.parameters, mask):
        snapshot = {e.position: _now(optimizer, e) for e in weights_in(mask)}
    values = _values(optimizer, mask, snapshot)
    if values is None:
        return False
    optimizer.set_trained_starts(replace(known, values=values))
    return True


def _values(
    optimizer: "MaskedOptimizer", mask: FreezeMask, snapshot: Mapping[int, np.ndarray] | None
) -> dict[int, np.ndarray] | None:
    """Return trained weights of the snapshot, or as they were drawn; None if they do not fit."""
    values = {}
    for entry in weights_in(mask):
        now = _now(optimizer, entry)
        if snapshot is not None:
            found: np.ndarray | None = snapshot[entry.position]
        else:
            start = optimizer.starts.get(entry.position)
            found = None if start is None else drawn_like(start.source, now)
        if found is None or not np.array_equal(
            as_bits(found[~entry.trained]), as_bits(now[~entry.trained])
        ):
            return None
        values[entry.position] = found[entry.trained]
    return values


def _now(optimizer: "MaskedOptimizer", entry: MaskEntry) -> np.ndarray:
    return backend.to_numpy(optimizer.parameters[entry.position].variable)


def is_pruned(optimizer: "MaskedOptimizer", mask: FreezeMask) -> bool:
    """Return whether all frozen weights are zero, and there are some."""
    frozen = [_now(optimizer, entry)[~entry.trained] for entry in weights_in(mask)]
    return any(part.size for part in frozen) and not any(part.any() for part in frozen)
