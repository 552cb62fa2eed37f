"""An update: what has changed in the state since the file before, and nothing else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_freeze._utils.bits import WIDTHS
from keras_freeze._utils.validation import check_json_int
from keras_freeze.grids import DTYPES, LARGEST
from keras_freeze.storage.coding.differences import differences, values_at
from keras_freeze.storage.coding.integers import num_bits
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
from keras_freeze.storage.stream_record import LAST_NUMBER, UPDATE, check_hex
from keras_freeze.storage.streams.parts import Part, State

_VERSION = 2  # of the format

# How a part is coded, one letter each: not at all; as values; as differences to those before in
# units in the last place; as points of its grid; as differences of these to the points before.
SAME, VALUES, DIFFERENCES, POINTS, STEPS = "svdpt"


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
        return {"content": UPDATE, "update": fields}

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> "Update":
        """Read what `to_json` writes.

        Raises:
            FreezeFileError: If a field is missing or not valid.
        """
        with invalid_header():
            if described.get("content") != UPDATE:
                raise FreezeFileError("it is not that of an update")
            stream, number, before, state, modes = check_type("update", described["update"], list)
            check_type("modes", modes, str)
            if not set(modes) <= {SAME, VALUES, DIFFERENCES, POINTS, STEPS}:
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
    state = State([bits for _, _, bits in coded])
    modes = "".join(mode for mode, _, _ in coded)
    header = Update(stream, number, before.digest, state.digest, modes)
    exponents, mantissas = encode_values([values for _, values, _ in coded if values is not None])
    return container_bytes(header.to_json(), b"", exponents, mantissas, _VERSION), state


def decode_update(
    update: Update, container: Container, parts: Sequence[Part], before: State
) -> State:
    """Return the state that an update leads to.

    Raises:
        FreezeFileError: If it does not belong to this state, or its values cannot be decoded.
    """
    if update.before != before.digest:
        raise FreezeFileError("It does not continue the file before it in the stream.")
    if len(update.modes) != len(parts) or container.mask:
        raise FreezeFileError("It does not belong to the mask of its stream.")
    with refusing():
        kinds = [
            (len(bits), WIDTHS[part.stored_dtype] if mode == VALUES else INTEGERS)
            for mode, part, bits in zip(update.modes, parts, before.bits, strict=True)
            if mode != SAME
        ]
        decoded = decode_values(container.exponents, container.mantissas, kinds)
        state = State(
            [
                bits if mode == SAME else _decoded(mode, next(decoded), part, bits)
                for mode, part, bits in zip(update.modes, parts, before.bits, strict=True)
            ]
        )
        for _ in decoded:  # checks that nothing is left over
            pass
    if state.digest != update.state:
        raise FreezeFileError("Its values do not give the state that it names.")
    return state


def _cheapest(
    part: Part, before: np.ndarray, wanted: np.ndarray
) -> tuple[str, np.ndarray | None, np.ndarray]:
    """Return how to code a part, the values to code, and what a follower makes of them."""
    if np.array_equal(wanted, before):
        return SAME, None, before
    points = part.exact_integers(wanted)
    if points is not None:
        earlier = part.integers(before)
        if earlier is not None and _is_shorter(points - earlier, points):
            return STEPS, points - earlier, wanted
        return POINTS, points, wanted
    stored = part.stored(wanted)
    if part.stored_dtype == "float16" and part.dtype != "float16":
        check_not_too_large(wanted, stored, part.path)
    after = part.loaded(stored)
    if np.array_equal(after, before):
        return SAME, None, before
    moved = None
    if part.stored_dtype in DTYPES:
        moved = differences(stored, part.stored(before))
    if moved is not None and num_bits(moved) < num_bits_of_patterns(stored):
        return DIFFERENCES, moved, after
    return VALUES, stored, after


def _is_shorter(steps: np.ndarray, points: np.ndarray) -> bool:
    return np.abs(steps).max(initial=0) <= LARGEST and num_bits(steps) < num_bits(points)


def _decoded(mode: str, values: np.ndarray, part: Part, before: np.ndarray) -> np.ndarray:
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
