"""The format of a FreezeOptimizer's state in checkpoints: writing, reading and comparing it."""

import io
import itertools
import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from keras_freeze import _keras_private
from keras_freeze._utils.bits import as_bits, from_bits
from keras_freeze.masks.distributions import check_distribution
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.masks.settings import GLOBAL, Settings
from keras_freeze.masks.structure import check_structure
from keras_freeze.optimizer.inner_optimizer import walk
from keras_freeze.optimizer.state import State
from keras_freeze.optimizer.trained_starts import TrainedStarts
from keras_freeze.parameters import Parameter, same_path
from keras_freeze.starts import Start

_VERSION = 1


def write_state(store: Any, state: State, parameters: Sequence[Parameter], inner: Any) -> None:
    """Write a state to a mapping from name to array.

    `parameters` are the variables that the optimizer was built with, none if it is not built, and
    `inner` the inner optimizer, whose variables Keras saves by number alone.
    """
    entries = () if state.mask is None else state.mask.entries
    header = {
        "version": _VERSION,
        "compact": state.compact,
        "decided": state.mask is not None,
        "found": state.by_first_batch,
        "num_rescued": 0 if state.mask is None else state.mask.num_rescued,
        "entries": [[e.position, e.path, list(e.trained.shape), e.is_weight] for e in entries],
        "variables": [[p.path, list(p.variable.shape)] for p in parameters],
        "inner": {
            "classes": _classes(inner),
            "variables": _names(inner),
            "built": inner.built,  # not after `load_weights` into a new model
        },
    }
    if state.settings is not None:
        header["settings"] = state.settings.to_json()
    if state.starts:
        header["starts"] = [[position, s.to_json()] for position, s in state.starts.items()]
    if state.grid:
        header["grid"] = [[position, v.dtype.name] for position, v in state.grid.items()]
        for position, values in state.grid.items():
            store[f"grid_{position}"] = as_bits(values)
    known = state.trained_starts
    if known != TrainedStarts():
        dtypes = [[position, v.dtype.name] for position, v in known.values.items()]
        header["trained_starts"] = [known.digest, dict(known.last_steps), dtypes]
        for position, array in known.values.items():
            store[f"trained_starts_{position}"] = as_bits(array)
    store["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    if entries:
        store["mask"] = np.packbits(np.concatenate([e.trained.reshape(-1) for e in entries]))
    if state.decay_scale is not None:
        store["decay_scale"] = state.decay_scale


def read_state(store: Any) -> State:
    """Read the state that `write_state` wrote.

    Raises:
        ValueError: for a state of another version.
    """
    header = _read_header(store)
    if header["version"] != _VERSION:
        raise ValueError(
            f"The state of a FreezeOptimizer must have version {_VERSION} for this version of "
            f"keras_freeze. Received: version {header['version']}"
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
    has_scale = "decay_scale" in store.keys()  # noqa: SIM118 - stores are not mappings
    scale = np.asarray(store["decay_scale"]) if has_scale else None
    starts = {position: Start.from_json(start) for position, start in header.get("starts", [])}
    settings = _settings(*header["settings"]) if "settings" in header else None
    grid = {
        position: from_bits(np.asarray(store[f"grid_{position}"]), dtype).reshape(2, -1)
        for position, dtype in header.get("grid", [])
    }
    return State(
        mask=mask,
        compact=header["compact"],
        decay_scale=scale,
        by_first_batch=header.get("found", False),
        starts=starts,
        settings=settings,
        grid=grid,
        trained_starts=_read_trained_starts(store, header, mask),
    )


def _read_trained_starts(
    store: Any, header: Mapping[str, Any], mask: FreezeMask | None
) -> TrainedStarts:
    if "trained_starts" not in header:
        return TrainedStarts()
    digest, last_steps, values = header["trained_starts"]
    starts = {
        position: from_bits(np.asarray(store[f"trained_starts_{position}"]), dtype)
        for position, dtype in values
    }
    found = TrainedStarts(digest, starts, last_steps)
    if mask is None or not found.fit(mask):
        raise ValueError(
            "The state of a FreezeOptimizer is damaged: it has other numbers of trained weights "
            "before training than its mask trains."
        )
    return found


def _settings(
    freeze_rate: float,
    criterion: str,
    frozen_weights: str,
    seed: int,
    distribution: Any = GLOBAL,
    structure: Any = None,
) -> Settings:
    checked = check_distribution(distribution), check_structure(structure)
    return Settings(freeze_rate, criterion, frozen_weights, seed, *checked)


def _read_header(store: Any) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(np.asarray(store["header"]).tobytes())
    return header


def to_bytes(store: dict[str, Any]) -> np.ndarray:
    """Return what `write_state` wrote as one vector of bytes."""
    file = io.BytesIO()
    np.savez(file, **store)
    return np.frombuffer(file.getvalue(), np.uint8)


def from_bytes(content: np.ndarray) -> dict[str, np.ndarray]:
    """Return the mapping that `to_bytes` got."""
    with np.load(io.BytesIO(content.tobytes())) as file:
        return dict(file)


def check_origin(
    store: Any, parameters: Sequence[Parameter], inner: Any, *, is_loaded: bool
) -> None:
    """Check that a state belongs to the optimizer that it is loaded into, before anything changes.

    Keras identifies the variables of an optimizer by their number alone: those of layers in another
    order, or of another optimizer, would be loaded into the wrong places. Files of earlier
    versions of this package do not contain what is compared here.

    The arguments are those of `write_state`; `is_loaded` tells whether the inner optimizer's
    variables are loaded from the same file. Into one that is not built, Keras loads them only if
    the number of variables happens to agree.

    Raises:
        ValueError: if the state belongs to a network with other variables or in another order,
            or if variables of another inner optimizer would be loaded.
    """
    header = _read_header(store)
    if header.get("variables") and parameters:
        _check_variables(header["variables"], parameters)
    described = header.get("inner")
    if described is None:
        return
    if described["classes"] != _classes(inner):
        if is_loaded or len(described["variables"]) == len(inner.variables):
            raise _other_optimizer(described, inner)
    # With other settings it has other kinds of variables. How many follows from the mask.
    elif (
        inner.built
        and described.get("built", True)
        and _kinds(described["variables"]) != _kinds(_names(inner))
    ):
        raise _other_optimizer(described, inner)


def has_these_variables(store: Any, parameters: Sequence[Parameter]) -> bool:
    """Return whether a state was saved with these variables, as far as it says so."""
    saved = _read_header(store).get("variables")
    return not saved or _first_difference(saved, parameters) is None


def fitting_state(store: Any, parameters: Sequence[Parameter]) -> tuple[State, list[str]]:
    """Return the part of a state about these variables, and the paths that are in no part of it.

    Variables are identified by path and shape, and left out where these are ambiguous.
    """
    state = read_state(store)
    if state.mask is None:
        return state, []
    entries, lost, positions = [], [], {}
    for entry in state.mask.entries:
        fitting = [
            p
            for p in parameters
            if same_path(p.path, entry.path) and tuple(p.variable.shape) == entry.trained.shape
        ]
        # Layers of equal parts, such as two of attention, differ in the component that may be the
        # model's name.
        fitting = [p for p in fitting if p.path == entry.path] or fitting
        if len(fitting) == 1:
            (p,) = fitting
            entries.append(MaskEntry(p.position, p.path, entry.trained, entry.is_weight))
            positions[entry.position] = p.position
        else:
            lost.append(entry.path)
    if len(set(positions.values())) < len(entries):
        nothing: dict[str, Any] = {"starts": {}, "grid": {}, "trained_starts": TrainedStarts()}
        return replace(state, mask=FreezeMask([]), **nothing), list(state.mask.paths)
    # Of variables that are trained whole nothing says which they are now.
    starts = {new: state.starts[old] for old, new in positions.items() if old in state.starts}
    grid = {new: state.grid[old] for old, new in positions.items() if old in state.grid}
    known = state.trained_starts.values
    known = {new: known[old] for old, new in positions.items() if old in known}
    return replace(
        state,
        mask=FreezeMask(entries),
        starts=starts,
        grid=grid,
        trained_starts=replace(state.trained_starts, digest=None, values=known),
    ), lost


def skip_loading_once(optimizer: Any) -> None:
    """Keep Keras from loading variables into an optimizer the next time it tries.

    It would identify them by their number alone.
    """
    vars(optimizer)["load_own_variables"] = lambda store: vars(optimizer).pop("load_own_variables")


def _first_difference(
    saved: Sequence[Any], parameters: Sequence[Parameter]
) -> tuple[int, list[str]] | None:
    """Return the first position with another variable than before, and what is there in words."""
    before = [(path, tuple(shape)) for path, shape in saved]
    after = [(p.path, tuple(p.variable.shape)) for p in parameters]
    fits = operator.eq if sorted(before) == sorted(after) else _may_be_same
    for position, pair in enumerate(itertools.zip_longest(before, after)):
        one, other = pair
        if one and other and fits(one, other):
            continue
        return position, [f"{v[0]!r} of shape {v[1]}" if v else "no variable" for v in pair]
    return None


def _may_be_same(one: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> bool:
    return one[1] == other[1] and same_path(one[0], other[0])


def _check_variables(saved: Sequence[Any], parameters: Sequence[Parameter]) -> None:
    difference = _first_difference(saved, parameters)
    if difference is None:
        return
    position, words = difference
    raise ValueError(
        f"The optimizer state that is loaded was saved with {words[0]} as variable {position}, and "
        f"this network has {words[1]} there: the state belongs to another network, or its layers "
        "come in another order. Build the model as it was when it was saved."
    )


def _other_optimizer(saved: dict[str, Any], inner: Any) -> ValueError:
    return ValueError(
        "The state that is loaded was saved with another inner optimizer, or with other settings "
        "of it, so that Keras would load its variables into the wrong places. Compile the model "
        "with the optimizer it was saved with. To continue with another one, use the weights and "
        "the mask alone: get the mask by `keras_freeze.get_mask` of the saved model, and set it "
        "by `keras_freeze.freeze(model, mask=...)`. "
        f"Saved: {_description(saved['classes'], saved['variables'])}. "
        f"Received: {_description(_classes(inner), _names(inner))}."
    )


def _description(classes: Sequence[str], names: Sequence[str]) -> str:
    kinds = ", ".join(sorted(_kinds(names)))
    return f"{' with '.join(classes)}, {len(names)} variables ({kinds})"


def _classes(inner: Any) -> list[str]:
    """Return the registered names of the classes of an optimizer and of those inside it."""
    classes = map(_keras_private.public_optimizer_class, walk(inner))
    return [keras.saving.get_registered_name(one) for one in classes]


def _names(inner: Any) -> list[str]:
    """Return what each of an optimizer's variables is, such as "momentum", without its owner."""
    owners = {
        str(getattr(variable, "path", variable.name)).replace("/", "_").replace(":", "_")
        for part in walk(inner)
        for variable in _keras_private.built_variables(part)
    }
    return [_without_owner(variable.name, owners) for variable in inner.variables]


def _kinds(names: Sequence[str]) -> set[str]:
    """Return names without their last number, which Keras counts up in each process."""
    return {re.sub(r"_\d+$", "", name) for name in names}


def _without_owner(name: str, owners: set[str]) -> str:
    ends = [end for end, letter in enumerate(name) if letter == "_" and name[:end] in owners]
    return name[ends[-1] + 1 :] if ends else name
