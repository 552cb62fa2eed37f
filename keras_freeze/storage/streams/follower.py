"""The side of a stream that reads it."""

import contextlib
import dataclasses
import os
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import keras
import numpy as np

from keras_freeze._utils.validation import check_number
from keras_freeze.parameters import path_of
from keras_freeze.storage.checks.memory import limit_of
from keras_freeze.storage.container import Container, parse_container
from keras_freeze.storage.deltas import delta_values
from keras_freeze.storage.errors import FreezeFileError, naming, refusing
from keras_freeze.storage.header import Header
from keras_freeze.storage.keras_model import Snapshot, check_built, variables_of
from keras_freeze.storage.patches import Patch, all_or, apply_all, patches_to
from keras_freeze.storage.stream_record import StreamRecord
from keras_freeze.storage.streams.folder import FULL, UPDATE, Folder, file_name, open_folder
from keras_freeze.storage.streams.parts import Part, State, parts_of, read_parts
from keras_freeze.storage.streams.updates import Update, decode_update

_MOST_OF_HEADER = 1 << 20  # bytes of an update beside its values


@dataclass(frozen=True)
class _Move:
    """What a model is to become.

    Attributes:
        stream: the place of the complete file that it began with.
        parts, state: the parts of the state, and what they are to be.
        base: the base; not needed where only parts of the model change.
        values: the values of all variables once the complete file is loaded, as bit patterns; None
            where only parts of the model change.
    """

    stream: StreamRecord
    parts: list[Part]
    state: State
    base: Sequence[Snapshot] = ()
    values: list[np.ndarray] | None = None


class Follower:
    """A model that follows a stream; `follow` makes it.

    Attributes:
        number: The number of the file that the model corresponds to; None before the first.
        lock: A lock (`threading.RLock`) that `update` holds while it replaces values. Threads that
            compute with the model hold it, too.
        error: What stopped the last update in the background; None if nothing did.
    """

    def __init__(self, model: keras.Model, folder: Folder) -> None:
        self.number: int | None = None
        self.lock = threading.RLock()
        self.error: Exception | None = None
        self._known_model = weakref.ref(model)  # models that nobody needs are not kept
        self._folder = folder
        self._stream: StreamRecord | None = None
        self._parts: list[Part] = []
        self._state: State | None = None
        self._replaced: list[Patch] = []  # from the base to the last complete file
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    @property
    def _model(self) -> keras.Model:
        model = self._known_model()
        if model is None:
            raise RuntimeError("The model that followed the stream does not exist any more.")
        return model

    def update(self) -> bool:
        """Bring the model up to date, whole or not at all, and return whether it has changed.

        Raises:
            FileNotFoundError: If there is no complete file to begin with.
            OSError: If a file cannot be read.
            FreezeFileError: If a file is missing, damaged or of another stream, or if the model is
                not the base. The model is then as it was.
            ValueError: If values that the stream changes have been changed by something else.
        """
        with self.lock:
            full, updates = self._plan()
            if full is None and not updates:
                return False
            if full is not None:
                move = self._read_full(full)
            else:
                assert self._state is not None
                assert self._stream is not None
                move = _Move(self._stream, self._parts, self._state)
            for number in updates:
                move = dataclasses.replace(move, state=self._read_update(number, move))
            self._apply(move)
            self.number = updates[-1] if updates else full
            return True

    def _plan(self) -> tuple[int | None, list[int]]:
        """Return the complete file to begin with (None: what is here), and the updates to read."""
        numbers = self._folder.numbers()
        last = max(numbers[FULL] | numbers[UPDATE], default=-1)
        newer = [n for n in numbers[FULL] if self.number is None or n > self.number]
        if not newer and self.number is None:
            raise FileNotFoundError(
                f"The folder {str(self._folder)!r} has no complete file of a stream yet."
            )
        if self.number is not None and last < self.number:
            raise FreezeFileError(
                f"The folder {str(self._folder)!r} has no files from number {self.number} on any "
                "more, which the model corresponds to: its stream was deleted or begun anew. "
                "Follow the new one with a model that is loaded again."
            )
        full = max(newer, default=None)
        first = self.number if full is None else full
        assert first is not None
        updates = list(range(first + 1, last + 1))
        missing = [number for number in updates if number not in numbers[UPDATE]]
        if missing:
            raise FreezeFileError(
                f"The file {file_name(missing[0], UPDATE)!r} is missing from "
                f"{str(self._folder)!r}, which has files after it. Put it back, or let the trainer "
                "write a complete file."
            )
        return full, updates

    def _read_full(self, number: int) -> _Move:
        name = file_name(number, FULL)
        container = self._read(name, limit_of(None))
        with naming(name):
            header = Header.from_json(container.header)
            stream = header.stream
            if stream is None:
                raise FreezeFileError("It belongs to no stream.")
            self._check_place(stream.name, stream.number, number)
            base = self._base()
            values = delta_values(self._model, header, container, base)
            with refusing():
                parts = parts_of(header, values.mask, base, stream.dtypes, stream.steps)
                state = State([part.of(values.bits[part.index]) for part in parts])
            if state.digest != stream.state:
                raise FreezeFileError("Its values do not give the state that it names.")
            return _Move(stream, parts, state, base, values.bits)

    def _read_update(self, number: int, move: _Move) -> State:
        name = file_name(number, UPDATE)
        most = _MOST_OF_HEADER + 2 * sum(part.starts.nbytes + 64 for part in move.parts)
        container = self._read(name, most)
        with naming(name):
            update = Update.from_json(container.header)
            if update.stream != move.stream.name:
                raise FreezeFileError(
                    f"It belongs to the stream {update.stream}, not to {move.stream.name}."
                )
            self._check_place(update.stream, update.number, number)
            return decode_update(update, container, move.parts, move.state)

    def _read(self, name: str, most: int) -> Container:
        return parse_container(self._folder.read(name, most), name)

    def _check_place(self, stream: str, found: int, number: int) -> None:
        if found != number:
            raise FreezeFileError(
                f"It holds the file number {found} of its stream: files have been renamed."
            )
        if self._stream is not None and stream != self._stream.name:
            raise FreezeFileError(
                f"It belongs to the stream {stream}, not to {self._stream.name}, which the model "
                "has followed so far."
            )

    def _base(self) -> list[Snapshot]:
        """Return the base, which the model was before the first file."""
        snapshots = [Snapshot.of(variable) for variable in variables_of(self._model)]
        for patch in self._replaced:
            snapshots[patch.index].bits[all_or(patch.places)] = patch.before
        for part in self._parts:
            snapshots[part.index].bits[all_or(part.places)] = part.starts
        return snapshots

    def _apply(self, move: _Move) -> None:
        """Replace the values of the model, if it is what it was after the last update."""
        variables = variables_of(self._model)
        if self._state is not None:
            self._check_unchanged(variables, self._state)
        if move.values is not None:
            for part, bits in zip(move.parts, move.state.bits, strict=True):
                move.values[part.index][all_or(part.places)] = bits
            patches = patches_to(variables, move.values)
            replaced = patches_to(move.base, move.values)
        else:
            assert self._state is not None
            changes = zip(move.parts, self._state.bits, move.state.bits, strict=True)
            patches = [part.patch(old, new) for part, old, new in changes if old is not new]
            replaced = self._replaced
        apply_all(self._model, variables, patches)
        self._stream, self._parts, self._state = move.stream, move.parts, move.state
        self._replaced = replaced

    def _check_unchanged(self, variables: Sequence[Any], state: State) -> None:
        for part, bits, found in zip(
            self._parts, state.bits, read_parts(self._parts, variables), strict=True
        ):
            if not np.array_equal(bits, found):
                raise ValueError(
                    f"The variable {path_of(variables[part.index])!r} has changed since the last "
                    "update, so that this model follows no stream any more: load the base again, "
                    "as a new model."
                )

    def start(self, every: float) -> None:
        """Call `update` every so many seconds in a thread, until `close`."""
        if self._thread is not None:
            raise ValueError(
                "This model is brought up to date in the background already: call `close` first."
            )
        self._stopped.clear()
        arguments = (self._model, every)  # the thread keeps the model
        self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop updates in the background, after the one that is under way."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __enter__(self) -> "Follower":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, model: keras.Model, every: float) -> None:
        while not self._stopped.is_set():
            try:
                self.update()
                self.error = None
            except Exception as error:  # the next file may put it right
                is_empty = self.number is None and isinstance(error, FileNotFoundError)
                if not is_empty:  # else the trainer has not begun
                    self._tell(error, every)
            self._stopped.wait(min(every, threading.TIMEOUT_MAX))

    def _tell(self, error: Exception, every: float) -> None:
        is_new, self.error = str(error) != str(self.error), error
        if is_new:
            with contextlib.suppress(Warning):  # where warnings are errors
                warnings.warn(
                    "A model could not be brought up to date and stays as it is; the next try is "
                    f"in {every:g} seconds: {error}",
                    stacklevel=1,
                )


_followers: weakref.WeakKeyDictionary[keras.Model, dict[str, Follower]] = (
    weakref.WeakKeyDictionary()
)


def follow(
    model: keras.Model, folder: str | os.PathLike[str], *, every: float | None = None
) -> Follower:
    """Bring a model up to date with a stream that `callbacks.PublishDeltas` writes, in place.

    The first call needs the base of the stream, and reads the last complete file and all updates
    after it. Later calls with the same model and folder read what has been added since. All values
    are read and checked before the first is replaced, so that the model changes as a whole or not
    at all; after it, it equals what the trainer published, bit for bit.

    Args:
        model: The base, or a model that follows the stream already.
        folder: A path, or a URL for fsspec such as "s3://bucket/run".
        every: To go on in the background: how often to look for new files, in seconds. The folder
            may then be empty at first. Hold `lock` of the result while computing with the model,
            and end it with `close`, or use it in a `with` block. Defaults to `None`.

    Returns:
        A `Follower` with `number`, the number of the last file; `update()`, which does what another
        call does and returns whether anything was new; `lock`, `error` and `close()`.

    Raises:
        FileNotFoundError: If there is no complete file of a stream yet.
        OSError: If a file cannot be read.
        ImportError: If `folder` is a URL and fsspec is missing.
        FreezeFileError: If a file is missing, damaged, renamed or of another stream or base. The
            model is then as it was.
        ValueError: If the model is not built, if values that the stream changes were changed by
            something else, or if the model is followed in the background already.
        TypeError: If an argument has a wrong type.

    Example:

    ```python
    model = keras.models.load_model("base.keras")
    keras_freeze.follow(model, "stream")  # again, whenever it is to be brought up to date
    with keras_freeze.follow(model, "stream", every=1.0) as follower:
        with follower.lock:
            model.predict(x)
    ```
    """
    check_built(model, "model")
    if every is not None:
        every = check_number("every", every, positive=True)
    opened = open_folder(folder)
    follower = _followers.setdefault(model, {}).get(str(opened))
    if follower is None:
        follower = Follower(model, opened)
    if every is None:
        follower.update()
    else:
        follower.start(every)
    _followers[model][str(opened)] = follower
    return follower
