"""What a FreezeOptimizer puts into a checkpoint besides its inner optimizer: the mask above all."""

import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import keras
import numpy as np

from keras_freeze import backend
from keras_freeze.masks.mask import FreezeMask, MaskEntry
from keras_freeze.masks.settings import Settings
from keras_freeze.optimizer.inner_optimizer import with_parts
from keras_freeze.parameters import Parameter, same_path
from keras_freeze.starts import Start

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
        starts: what variables of the mask were drawn from, by their positions, where that is known.
        settings: of the optimizer that decided; None where a file does not say.
    """

    mask: FreezeMask | None
    compact: bool
    decay_scale: Any = None
    found: bool = False
    starts: Mapping[int, Start] = field(default_factory=dict)
    settings: Settings | None = None


def write_state(store: Any, state: State, parameters: Sequence[Parameter], inner: Any) -> None:
    """Puts the state into what Keras hands to `save_own_variables`.

    Args:
        store: what is written to, a mapping from name to array.
        state: the state.
        parameters: the variables that the optimizer was built with; none if it is not built.
        inner: the inner optimizer, whose variables Keras saves by number alone.
    """
    entries = () if state.mask is None else state.mask.entries
    header = {
        "version": _VERSION,
        "compact": state.compact,
        "decided": state.mask is not None,
        "found": state.found,
        "num_rescued": 0 if state.mask is None else state.mask.num_rescued,
        "entries": [[e.position, e.path, list(e.trained.shape), e.is_weight] for e in entries],
        "variables": [[p.path, list(p.variable.shape)] for p in parameters],
        "inner": {"classes": _classes(inner), "variables": _names(inner)},
    }
    if state.settings is not None:
        header["settings"] = astuple(state.settings)
    if state.starts:
        header["starts"] = [[position, s.to_json()] for position, s in state.starts.items()]
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
    header = _read_header(store)
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
    starts = {position: Start.from_json(start) for position, start in header.get("starts", [])}
    settings = Settings(*header["settings"]) if "settings" in header else None
    return State(mask, header["compact"], scale, header.get("found", False), starts, settings)


def _read_header(store: Any) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(np.asarray(store["header"]).tobytes())
    return header


def to_bytes(store: dict[str, Any]) -> np.ndarray:
    """A store in one vector of bytes, for checkpoints that are not written by Keras."""
    file = io.BytesIO()
    np.savez(file, **store)
    return np.frombuffer(file.getvalue(), np.uint8)


def from_bytes(content: np.ndarray) -> dict[str, np.ndarray]:
    """The store that `to_bytes` was given."""
    with np.load(io.BytesIO(content.tobytes())) as file:
        return dict(file)


def check_origin(
    store: Any, parameters: Sequence[Parameter], inner: Any, *, is_loaded: bool
) -> None:
    """Compares what a state was saved with to what it is loaded into, before anything changes.

    Keras tells the variables of an optimizer by their number alone: those of layers in another
    order, or of another optimizer, would be loaded into the wrong places. Files of earlier
    versions of this package do not say what they were saved with.

    Args:
        store: what Keras hands to `load_own_variables`.
        parameters: the variables that the optimizer was built with; none if it is not built.
        inner: the inner optimizer.
        is_loaded: whether the inner optimizer's variables are loaded from the same file. Of one
            that is not built, Keras loads them only where their numbers happen to agree.

    Raises:
        ValueError: if the state belongs to a network with other variables or in another order,
            or if variables of another inner optimizer would be loaded.
    """
    header = _read_header(store)
    saved = header.get("variables", [])
    if saved and parameters:
        for position in range(max(len(saved), len(parameters))):
            _check_variable(saved, parameters, position)
    described = header.get("inner")
    if described is None:
        return
    if described["classes"] != _classes(inner):
        if is_loaded or len(described["variables"]) == len(inner.variables):
            raise _other_optimizer(described, inner)
    # With other settings it has other kinds of variables. How many follows from the mask.
    elif inner.built and _kinds(described["variables"]) != _kinds(_names(inner)):
        raise _other_optimizer(described, inner)


def has_these_variables(store: Any, parameters: Sequence[Parameter]) -> bool:
    """Whether a state was saved with these variables, as far as it says so."""
    saved = _read_header(store).get("variables", [])
    return not saved or (
        len(saved) == len(parameters)
        and all(
            same_path(path, p.path) and tuple(shape) == tuple(p.variable.shape)
            for (path, shape), p in zip(saved, parameters, strict=True)
        )
    )


def fitting_state(store: Any, parameters: Sequence[Parameter]) -> tuple[State, list[str]]:
    """The part of a state that is about these variables, and the paths of what it is about besides.

    Variables are told by path and shape; where that is ambiguous, they are not taken over.
    """
    state = read_state(store)
    if state.mask is None:
        return state, []
    entries, lost, starts = [], [], {}
    for entry in state.mask.entries:
        fitting = [
            p
            for p in parameters
            if same_path(p.path, entry.path) and tuple(p.variable.shape) == entry.trained.shape
        ]
        if len(fitting) == 1:
            (p,) = fitting
            entries.append(MaskEntry(p.position, p.path, entry.trained, entry.is_weight))
            if entry.position in state.starts:
                starts[p.position] = state.starts[entry.position]
        else:
            lost.append(entry.path)
    if len({e.position for e in entries}) < len(entries):
        return replace(state, mask=FreezeMask([]), starts={}), list(state.mask.paths)
    return replace(state, mask=FreezeMask(entries), starts=starts), lost


def skip_loading_once(optimizer: Any) -> None:
    """Lets Keras load nothing into an optimizer when it next tries to.

    It would load as many variables as there are by their number alone.
    """
    vars(optimizer)["load_own_variables"] = lambda store: vars(optimizer).pop("load_own_variables")


def _check_variable(saved: Sequence[Any], parameters: Sequence[Parameter], position: int) -> None:
    before = after = None
    if position < len(saved):
        before = (saved[position][0], tuple(saved[position][1]))
    if position < len(parameters):
        parameter = parameters[position]
        after = (parameter.path, tuple(parameter.variable.shape))
    if before and after and before[1] == after[1] and same_path(before[0], after[0]):
        return
    told = ["no variable" if v is None else f"{v[0]!r} of shape {v[1]}" for v in (before, after)]
    raise ValueError(
        f"The optimizer state that is loaded was saved with {told[0]} as variable {position}, and "
        f"this network has {told[1]} there: the state belongs to another network, or its layers "
        "come in another order. Build the model as it was when it was saved."
    )


def _other_optimizer(saved: dict[str, Any], inner: Any) -> ValueError:
    return ValueError(
        "The state that is loaded was saved with another inner optimizer, or with other settings "
        "of it, so that Keras would put its variables into the wrong places. Compile the model "
        "with the optimizer it was saved with. To train on with another one, take over weights "
        "and mask alone: `keras_freeze.get_mask` of the model that was saved gives the mask, and "
        "`keras_freeze.freeze(model, mask=...)` takes it. "
        f"Saved: {_in_words(saved['classes'], saved['variables'])}. "
        f"Received: {_in_words(_classes(inner), _names(inner))}."
    )


def _in_words(classes: Sequence[str], names: Sequence[str]) -> str:
    kinds = ", ".join(sorted(_kinds(names)))
    return f"{' with '.join(classes)}, {len(names)} variables ({kinds})"


def _classes(inner: Any) -> list[str]:
    """The registered name of an optimizer's class and of its parts'."""
    parts = with_parts(inner)
    return [keras.saving.get_registered_name(backend.keras_class(part)) for part in parts]


def _names(inner: Any) -> list[str]:
    """What each of an optimizer's variables is, such as "momentum", without whose it is."""
    owners = {
        str(getattr(variable, "path", variable.name)).replace("/", "_").replace(":", "_")
        for part in with_parts(inner)
        for variable in part._trainable_variables
    }
    return [_without_owner(variable.name, owners) for variable in inner.variables]


def _kinds(names: Sequence[str]) -> set[str]:
    """Names without their last number: Keras counts variables without a name in each process."""
    return {re.sub(r"_\d+$", "", name) for name in names}


def _without_owner(name: str, owners: set[str]) -> str:
    ends = [end for end, letter in enumerate(name) if letter == "_" and name[:end] in owners]
    return name[ends[-1] + 1 :] if ends else name


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
