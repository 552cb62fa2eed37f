"""The side of a stream that writes it."""

import dataclasses
import itertools
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_freeze._utils.bits import checksum
from keras_freeze._utils.validation import check_int, value_error
from keras_freeze.grids import STORED_DTYPES, Grid
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.model_state import ModelOptimizers, get_mask
from keras_freeze.parameters import path_of
from keras_freeze.placements import may_be_rounded, placements_of
from keras_freeze.storage.checks.memory import limit_of
from keras_freeze.storage.container import container_bytes, parse_container
from keras_freeze.storage.errors import FreezeFileError, naming
from keras_freeze.storage.header import Header
from keras_freeze.storage.keras_model import (
    COMPILED,
    Snapshot,
    bits_of,
    check_built,
    config_of,
    dtype_of,
    fingerprint,
    is_random_state,
    shared_with_base,
    variables_of,
)
from keras_freeze.storage.loading import open_base
from keras_freeze.storage.patches import bits_at
from keras_freeze.storage.saving import check_loads_again, described, encode
from keras_freeze.storage.stream_record import StreamRecord
from keras_freeze.storage.streams.folder import FULL, UPDATE, file_name, open_folder
from keras_freeze.storage.streams.parts import Part, State, parts_of, read_parts
from keras_freeze.storage.streams.updates import encode_update


class DeltaPublisher:
    """Writes to a folder what a model is while it is trained, for models that follow it.

    The first file is a delta on the base, with the mask; those after it hold nothing but the values
    that have changed, coded as differences where this is shorter, since the positions stay. Every
    `full_every` updates, and where the mask changes or a trainer starts again, a complete delta
    follows, with which a follower can begin. `follow` reads all this; each complete file can also
    be loaded with `load` and `apply_delta`.

    No file is ever changed. Older files than the last complete one may be deleted. A folder is
    written by one trainer at a time.

    In `fit`, use `callbacks.PublishDeltas`.

    Args:
        model: The built `keras.Model` that is trained.
        folder: A path, or a URL for fsspec such as "s3://bucket/run". It is created when needed.
        base: What followers have: a `keras.Model` that stays as it is, or the path of a `.keras` or
            `.freeze` file. Defaults to `None`, the model as it is now. Values of the base are kept
            in main memory.
        values: As in `save`: "float32" (exact), "bfloat16", "float16", or a `storage.Grid`, to
            which the values in the files are rounded. Values of a model that is trained on a grid
            stay exact, as integers. Defaults to "float32".
        full_every: After how many updates the next file is a complete one. Defaults to 100.

    Attributes:
        number: The number of the last file; None before the first.

    Raises:
        ImportError: If `folder` is a URL and fsspec is missing.
        TypeError: If an argument has a wrong type.
        ValueError: If the model is not built, an argument is out of range, or the folder has a
            stream on another base.
        FreezeFileError: If the last complete file of a stream that is continued is damaged.

    Example:

    ```python
    publisher = keras_freeze.DeltaPublisher(model, "stream", base="base.keras")
    for step, (x, y) in enumerate(data):
        model.train_on_batch(x, y)
        if step % 100 == 0:
            publisher.publish()
    ```
    """

    def __init__(
        self,
        model: keras.Model,
        folder: str | os.PathLike[str],
        *,
        base: keras.Model | str | os.PathLike[str] | None = None,
        values: str | Grid = "float32",
        full_every: int = 100,
    ) -> None:
        check_built(model, "model")
        _check_no_decay(model)
        if not isinstance(values, Grid) and values not in STORED_DTYPES:
            accepted = (
                f"one of {', '.join(map(repr, STORED_DTYPES))}, or a `keras_freeze.storage.Grid`"
            )
            raise value_error("values", values, accepted)
        self._full_every = check_int("full_every", full_every, minimum=1)
        self._folder = open_folder(folder)
        self._model = model
        self._values = values
        source = model if base is None else open_base(base)
        self._base = [Snapshot.of(variable) for variable in variables_of(source)]
        _check_architecture(variables_of(model), self._base)
        self._base_config = config_of(source)
        self._stream, self.number = self._found(base)
        self._mask: FreezeMask | None = None
        self._parts: list[Part] = []
        self._state: State | None = None
        self._rest: list[int] = []
        self._num_updates = 0

    def publish(self) -> int:
        """Write what the model is now, and return the number of the file.

        Raises:
            OSError: If the file cannot be written, or is there already. The next file is then a
                complete one.
            ValueError: If the model cannot be saved as a delta on the base, as for `save`, or if it
                has `frozen_weights="decay"`.
        """
        _check_architecture(variables_of(self._model), self._base)
        mask = get_mask(self._model)
        number = 0 if self.number is None else self.number + 1
        is_due = self._num_updates >= self._full_every
        if self._state is None or is_due or mask != self._mask or self._rest != self._read_rest():
            self._publish_full(number, mask)
        else:
            self._publish_update(number, self._state)
        return number

    def _write(self, number: int, kind: str, content: bytes, state: State) -> None:
        for name in (file_name(number, FULL), file_name(number, UPDATE)):
            if self._folder.exists(name):
                raise FileExistsError(
                    f"{name!r} is in the folder {str(self._folder)!r} already: another trainer "
                    "writes to it. Give each a folder of its own."
                )
        # If this fails, the file may be there or not: a complete one with another number follows.
        self.number, self._state = number, None
        self._folder.write(file_name(number, kind), content)
        self._state = state

    def _publish_update(self, number: int, before: State) -> None:
        wanted = read_parts(self._parts, variables_of(self._model))
        if isinstance(self._values, Grid):
            pairs = zip(self._parts, wanted, strict=True)
            wanted = [part.on_grid(bits) if part.grid else bits for part, bits in pairs]
        content, state = encode_update(self._stream, number, self._parts, before, wanted)
        self._write(number, UPDATE, content, state)
        self._num_updates += 1

    def _publish_full(self, number: int, mask: FreezeMask | None) -> None:
        _check_no_decay(self._model)  # which makes complete files necessary: frozen weights change
        variables = variables_of(self._model)
        # Weights that are frozen since another mask trained them are in no source.
        header, saved = described(self._model, self._base, self._values, include_frozen=True)
        header = dataclasses.replace(header, model={**header.model, COMPILED: None})
        if not self._parts:
            check_loads_again(self._model, header)
        config: Mapping[str, Any] = header.model
        if not header.vocabularies:
            config = shared_with_base(config, self._base_config)
        parts = self._parts_of(header, mask, variables)
        state = State([part.of(saved[part.index].loaded_bits()) for part in parts])
        stream = StreamRecord(
            self._stream,
            number,
            state.digest,
            tuple(part.stored_dtype for part in parts),
            tuple(0.0 if part.grid is None else part.grid.step for part in parts),
        )
        header = dataclasses.replace(header, model=config, stream=stream)
        content = container_bytes(header.to_json(), *encode(saved), header.version)
        self._write(number, FULL, content, state)
        self._mask, self._parts, self._num_updates = mask, parts, 0
        self._rest = self._read_rest()

    def _read_rest(self) -> list[int]:
        """Return checksums of what no update holds: the frozen weights."""
        variables = variables_of(self._model)
        rest = []
        for part in self._parts:
            if part.places is not None:
                bits = bits_of(variables[part.index])
                bits[part.places] = 0
                rest.append(checksum(bits))
        return rest

    def _parts_of(
        self, header: Header, mask: FreezeMask | None, variables: Sequence[Any]
    ) -> list[Part]:
        """Return the parts of the state, with the dtypes and grids of their values in updates."""
        parts = parts_of(header, mask, self._base)
        trainable = {id(variable) for variable in self._model.trainable_variables}
        return [
            self._rounded(part, variables[part.index])
            if id(variables[part.index]) in trainable
            else part
            for part in parts
        ]

    def _rounded(self, part: Part, variable: Any) -> Part:
        """Return a part of trained values as updates hold it."""
        if isinstance(self._values, str) and part.dtype == "float32":
            part = dataclasses.replace(part, stored_dtype=self._values)
        if not may_be_rounded(variable):
            return part
        for placement in placements_of(variable):
            gridded = dataclasses.replace(part, grid=placement.grid)
            if gridded.exact_integers(bits_at(variable, part.places)) is not None:
                return gridded
        if isinstance(self._values, Grid):
            return dataclasses.replace(part, grid=self._values)
        return part

    def _found(self, base: Any) -> tuple[str, int | None]:
        """Return the name of the stream in the folder, and its last number; a new name for none."""
        numbers = self._folder.numbers()
        if not numbers[FULL]:
            if numbers[UPDATE]:
                raise ValueError(
                    f"The folder {str(self._folder)!r} has updates of a stream and no complete "
                    "file: choose another folder, or delete them."
                )
            return secrets.token_hex(8), None
        name = file_name(max(numbers[FULL]), FULL)
        container = parse_container(self._folder.read(name, limit_of(None)), name)
        with naming(name):
            header = Header.from_json(container.header)
            if header.stream is None:
                raise FreezeFileError("It belongs to no stream.")
        if header.base != fingerprint(self._base):
            what = "Argument `base` must be that of the stream in the folder"
            if base is None:
                what = "Argument `base` must be given where a stream is continued"
            raise ValueError(
                f"{what}, the model with the fingerprint {(header.base or '')[:16]}... For a new "
                f"stream, choose another folder. Received: base={base!r:.200}, "
                f"folder={str(self._folder)!r}"
            )
        return header.stream.name, max(numbers[FULL] | numbers[UPDATE])


def _check_no_decay(model: keras.Model) -> None:
    if any(one.frozen_weights == "decay" for one in ModelOptimizers(model).all):
        raise ValueError(
            'A model with frozen_weights="decay" cannot be published: its frozen weights change in '
            "every step, too."
        )


def _check_architecture(variables: Sequence[Any], base: Sequence[Snapshot]) -> None:
    """Refuse a base of another architecture than the model, which nobody could follow in place."""
    own = [_label(v) for v in variables if not is_random_state(v)]
    given = [_label(v) for v in base if not is_random_state(v)]
    if own == given and len(variables) == len(base):
        return
    pairs = itertools.zip_longest(own, given, fillvalue="none")
    mine, other = next((pair for pair in pairs if pair[0] != pair[1]), ("others", "others"))
    raise ValueError(
        "Argument `base` must have the architecture of the model, new heads included, and the "
        "model must keep it: `enable_lora` and the like add variables that followers do not have. "
        f"Received: a base with {other} where the model has {mine}"
    )


def _label(variable: Any) -> str:
    name = path_of(variable).rpartition("/")[2]
    return f"{name!r} of shape {tuple(variable.shape)} and {dtype_of(variable)}"
