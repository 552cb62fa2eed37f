"""An update: what has changed in the state since the file before, and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from keras_freeze._utils.bits import WIDTHS
from keras_freeze._utils.validation import check_json_int
from keras_freeze.grids import DTYPES, LARGEST
from keras_freeze.storage.coding.differences import differences, values_at
from keras_freeze.storage.coding.integers import Integers
from keras_freeze.storage.coding.masks import decode_masks, encode_masks, num_bits_of_places
from keras_freeze.storage.coding.values import (
    INTEGERS,
    decode_values,
    encode_values,
    num_bits_of_patterns,
)
from keras_freeze.storage.container import Container, container_bytes
from keras_freeze.storage.errors import FreezeFileError, invalid_header, refusing
from keras_freeze.storage.fields import check_type
from keras_freeze.storage.saved_variable import check_not_too_large
from keras_freeze.storage.stream_record import LAST_NUMBER, UPDATE_CONTENT, check_hex
from keras_freeze.storage.streams.parts import Part, State

_VERSION = 2  # of the format

# How a part is coded, one letter each: not at all; as values; as differences to those before in
# units in the last place; only the values that have changed, either way; as points of its grid; as
# differences of these to the points before.
SAME, VALUES, DIFFERENCES, CHANGED_VALUES, CHANGED_DIFFERENCES, POINTS, STEPS = "svdcept"

_OF_CHANGED = (CHANGED_VALUES, CHANGED_DIFFERENCES)
_OF_PATTERNS = (VALUES, CHANGED_VALUES)

# Of more changed values, saying which they are is hardly worth it.
_LARGEST_SHARE = 0.5


@dataclass(frozen=True)
class Update:
    """The header of an update.

    Attributes:
        stream: the name of the stream.
        number: the number of the file.
        before, state: the digests of the state before and after it.
        modes: how each part is coded.
    """

    stream: str
    number: int
    before: str
    state: str
    modes: str

    def to_json(self) -> dict[str, Any]:
        """Return the header as a JSON object."""
        fields = [self.stream, self.number, self.before, self.state, self.modes]
        return {"content": UPDATE_CONTENT, "update": fields}

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> "Update":
        """Read what `to_json` writes.

        Raises:
            FreezeFileError: If a field is missing or not valid.
        """
        with invalid_header():
            if described.get("content") != UPDATE_CONTENT:
                raise FreezeFileError("it is not that of an update")
            stream, number, before, state, modes = check_type("update", described["update"], list)
            check_type("modes", modes, str)
            if not set(modes) <= {SAME, VALUES, DIFFERENCES, *_OF_CHANGED, POINTS, STEPS}:
                raise FreezeFileError(f"modes are {modes!r:.100}")
            return cls(
                check_hex("stream", stream, 16),
                check_json_int("number", number, LAST_NUMBER + 1),
                check_hex("state", before, 32),
                check_hex("state", state, 32),
                modes,
            )


def encode_update(
    stream: str,
    number: int,
    parts: Sequence[Part],
    before: State,
    wanted: Sequence[np.ndarray],
) -> tuple[bytes, State]:
    """Return the content of an update, and the state that it leads to.

    Args:
        stream, number: As in `Update`.
        parts: The parts of the state.
        before: The state before.
        wanted: The values of the model as bit patterns; those of the new state are rounded to the
            dtypes of the stream.
    """
    coded = [_cheapest(*one) for one in zip(parts, before.bits, wanted, strict=True)]
    state = State([one.after for one in coded])
    header = Update(stream, number, before.digest, state.digest, "".join(one.mode for one in coded))
    places = [one.places for one in coded if one.places is not None]
    mask = encode_masks(places) if places else b""
    exponents, mantissas = encode_values([one.values for one in coded if one.values is not None])
    return container_bytes(header.to_json(), mask, exponents, mantissas, _VERSION), state


def decode_update(
    update: Update, container: Container, parts: Sequence[Part], before: State
) -> State:
    """Return the state that an update leads to.

    Raises:
        FreezeFileError: If it does not belong to this state, or its values cannot be decoded.
    """
    if update.before != before.digest:
        raise FreezeFileError("It does not continue the file before it in the stream.")
    if len(update.modes) != len(parts):
        raise FreezeFileError("It does not belong to the mask of its stream.")
    with refusing():
        places = _decoded_places(update, container, parts)
        kinds = [
            (
                part.starts.size if chosen is None else int(np.count_nonzero(chosen)),
                WIDTHS[part.stored_dtype] if mode in _OF_PATTERNS else INTEGERS,
            )
            for mode, part, chosen in zip(update.modes, parts, places, strict=True)
            if mode != SAME
        ]
        decoded = decode_values(container.exponents, container.mantissas, kinds)
        state = State(
            [
                bits if mode == SAME else _decoded(mode, next(decoded), part, bits, chosen)
                for mode, part, bits, chosen in zip(
                    update.modes, parts, before.bits, places, strict=True
                )
            ]
        )
        for _ in decoded:  # checks that nothing is left over
            pass
    if state.digest != update.state:
        raise FreezeFileError("Its values do not give the state that it names.")
    return state


def _decoded_places(
    update: Update, container: Container, parts: Sequence[Part]
) -> list[np.ndarray | None]:
    """Return which values of each part an update holds; None where it holds all or none."""
    modes = zip(update.modes, parts, strict=True)
    shapes = [part.shape for mode, part in modes if mode in _OF_CHANGED]
    if not shapes and container.mask:
        raise FreezeFileError("It has places of values that have not changed.")
    masks = (np.asarray(mask).reshape(-1) for mask in decode_masks(container.mask, shapes))
    return [next(masks) if mode in _OF_CHANGED else None for mode in update.modes]


class _Coded(NamedTuple):
    """A part in an update: how it is coded, what of it, and what a follower makes of it."""

    mode: str
    after: np.ndarray
    values: np.ndarray | Integers | None = None
    places: np.ndarray | None = None


def _cheapest(part: Part, before: np.ndarray, wanted: np.ndarray) -> _Coded:
    if np.array_equal(wanted, before):
        return _Coded(SAME, before)
    points = part.exact_integers(wanted)
    if points is not None:
        earlier = part.integers(before)
        whole = Integers(points)
        steps = None if earlier is None else Integers(points - earlier)
        if steps is not None and _is_shorter(steps, whole):
            return _Coded(STEPS, wanted, steps)
        return _Coded(POINTS, wanted, whole)
    stored, old = part.stored(wanted), part.stored(before)
    if part.stored_dtype == "float16" and part.dtype != "float16":
        check_not_too_large(wanted, stored, part.path)
    after = part.loaded(stored)
    if np.array_equal(after, before):
        return _Coded(SAME, before)
    mode, values, cost = _as_patterns(part, stored, old)
    places = stored != old
    if np.count_nonzero(places) < _LARGEST_SHARE * places.size:
        few_mode, few_values, few_cost = _as_patterns(part, stored[places], old[places])
        if few_cost + num_bits_of_places(places) < cost:
            few_mode = CHANGED_VALUES if few_mode == VALUES else CHANGED_DIFFERENCES
            after = np.where(places, after, before)
            return _Coded(few_mode, after, few_values, places.reshape(part.shape))
    return _Coded(mode, after, values)


def _as_patterns(
    part: Part, stored: np.ndarray, before: np.ndarray
) -> tuple[str, np.ndarray | Integers, float]:
    """Return the shorter of values and their differences to those before, and its bits."""
    plain = num_bits_of_patterns(stored)
    moved = differences(stored, before) if part.stored_dtype in DTYPES else None
    if moved is not None:
        steps = Integers(moved)
        if steps.num_bits < plain:
            return DIFFERENCES, steps, steps.num_bits
    return VALUES, stored, plain


def _is_shorter(steps: Integers, points: Integers) -> bool:
    largest = np.abs(steps.values).max(initial=0)
    return bool(largest <= LARGEST) and steps.num_bits < points.num_bits


def _decoded(
    mode: str, values: np.ndarray, part: Part, before: np.ndarray, places: np.ndarray | None
) -> np.ndarray:
    if places is not None:
        after = before.copy()
        whole = VALUES if mode == CHANGED_VALUES else DIFFERENCES
        after[places] = _decoded(whole, values, part, before[places], None)
        return after
    if mode == VALUES:
        return part.loaded(values)
    if mode == DIFFERENCES:
        return part.loaded(values_at(part.stored(before), values))
    if mode == STEPS:
        earlier = part.integers(before)
        if earlier is None:
            raise FreezeFileError("The state before is not on a grid.")
        values = values + earlier
    return part.at(values)
