"""What a FreezeOptimizer puts into a checkpoint besides its inner optimizer: the mask above all."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_freeze.mask import FreezeMask, MaskEntry
from keras_freeze.parameters import Parameter, same_path

_VERSION = 1


@dataclass(frozen=True)
class State:
    """What a FreezeOptimizer is besides its inner optimizer.

    Attributes:
        mask: which weights are trained; None if that is not decided yet.
        compact: whether the inner optimizer only sees these.
        decay_scale: FreezeNet-WD's scalar.
        found: whether the first batch decided. A step is then traced so that it could, which
            rounds a little differently: training on is to be the same to the last bit.
    """

    mask: FreezeMask | None
    compact: bool
    decay_scale: Any = None
    found: bool = False


def write_state(store: Any, state: State) -> None:
    """Puts the state into what Keras hands to `save_own_variables`."""
    entries = () if state.mask is None else state.mask.entries
    header = {
        "version": _VERSION,
        "compact": state.compact,
        "decided": state.mask is not None,
        "found": state.found,
        "num_rescued": 0 if state.mask is None else state.mask.num_rescued,
        "entries": [[e.position, e.path, list(e.trained.shape), e.is_weight] for e in entries],
    }
    store["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    if entries:
        store["mask"] = np.packbits(np.concatenate([e.trained.reshape(-1) for e in entries]))
    if state.decay_scale is not None:
        store["decay_scale"] = state.decay_scale


def read_state(store: Any) -> State:
    """Gets the state that `write_state` put there.

    Raises:
        ValueError: for a state of another version.
    """
    header = json.loads(np.asarray(store["header"]).tobytes())
    if header["version"] != _VERSION:
        raise ValueError(
            f"This FreezeOptimizer reads state of version {_VERSION}. "
            f"Received: version {header['version']}; update keras_freeze."
        )
    mask = None
    if header["decided"]:
        sizes = [int(np.prod(shape, dtype=np.int64)) for _, _, shape, _ in header["entries"]]
        packed = np.asarray(store["mask"]) if header["entries"] else np.zeros(0, np.uint8)
        arrays = np.split(np.unpackbits(packed, count=sum(sizes)).astype(bool), np.cumsum(sizes))
        entries = [
            MaskEntry(position, path, array.reshape(shape), is_weight)
            for (position, path, shape, is_weight), array in zip(
                header["entries"], arrays, strict=False
            )
        ]
        mask = FreezeMask(entries, num_rescued=header["num_rescued"])
    has_scale = "decay_scale" in store.keys()  # noqa: SIM118 - stores are no mappings
    scale = np.asarray(store["decay_scale"]) if has_scale else None
    return State(mask, header["compact"], scale, header.get("found", False))


def relabel(mask: FreezeMask, parameters: Sequence[Parameter]) -> FreezeMask:
    """The mask under these variables' paths.

    Raises:
        ValueError: if a variable has another shape or, but for the model's name and automatic
            numbers, another path.
    """
    for entry in mask.entries:
        _check_fits(entry, parameters)
    chosen = [parameters[entry.position] for entry in mask.entries]
    entries = [
        MaskEntry(p.position, p.path, entry.trained, entry.is_weight)
        for p, entry in zip(chosen, mask.entries, strict=True)
    ]
    return FreezeMask(entries, [p.variable for p in chosen], mask.num_rescued)


def _check_fits(entry: MaskEntry, parameters: Sequence[Parameter]) -> None:
    found = "no variable"
    if entry.position < len(parameters):
        parameter = parameters[entry.position]
        shape = tuple(parameter.variable.shape)
        if shape == entry.trained.shape and same_path(parameter.path, entry.path):
            return
        found = f"{parameter.path!r} of shape {shape}"
    raise ValueError(
        f"The mask that is loaded has {entry.path!r} of shape {entry.trained.shape} as variable "
        f"{entry.position}, and this network has {found} there: the mask belongs to another "
        "network, or its layers come in another order."
    )
