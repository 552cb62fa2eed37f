"""The folder of a stream: local, or anything that fsspec opens."""

import os
import re
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from keras_freeze._utils.files import remove_leftovers, replacing
from keras_freeze.storage.errors import FreezeFileError, check_path

FULL, UPDATE = "full", "update"

_NAME = re.compile(rf"(\d{{12}})-({FULL}|{UPDATE})\.freeze")
_LOCAL = ("file://", "local://")
# File systems that show a file when all of it is there. Elsewhere, it is renamed when it is.
_WHOLE_FILES = {"memory", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"}


def file_name(number: int, kind: str) -> str:
    """Return the name of a file of a stream, which nothing but its number and kind decides."""
    return f"{number:012d}-{kind}.freeze"


class Folder(Protocol):
    """The files of a stream."""

    def numbers(self) -> dict[str, set[int]]:
        """Return the numbers of all files by kind; none if the folder does not exist."""

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""

    def read(self, name: str, most: int) -> bytes:
        """Return the content of a file of at most so many bytes."""

    def write(self, name: str, content: bytes) -> None:
        """Write a file that nobody sees before all of it is there."""


def open_folder(folder: str | os.PathLike[str]) -> Folder:
    """Return the folder at a path or a URL, which need not exist.

    Raises:
        TypeError: If it is neither a string nor a path object.
        ValueError: If it is empty.
        ImportError: If it is a URL and fsspec, or what fsspec needs for it, is not installed.
        NotADirectoryError: If it is a file.
    """
    check_path(folder, "folder")
    path = os.fspath(folder)
    for prefix in _LOCAL:
        if isinstance(path, str):
            path = path.removeprefix(prefix)
    if isinstance(path, str) and "://" in path:
        return _RemoteFolder(path)
    return _LocalFolder(Path(path))


def _numbers(names: Iterable[str]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {FULL: set(), UPDATE: set()}
    for name in names:
        match = _NAME.fullmatch(name)
        if match:
            found[match[2]].add(int(match[1]))
    return found


def _check_size(name: str, size: int, most: int) -> None:
    if size > most:
        raise FreezeFileError(f"{name!r} has {size:,} bytes, more than the limit of {most:,}.")


class _LocalFolder:
    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"Argument `folder` must be a folder. Received: {str(path)!r}")
        self._path = Path(os.path.realpath(path))

    def __str__(self) -> str:
        return str(self._path)

    def exists(self, name: str) -> bool:
        return (self._path / name).exists()

    def numbers(self) -> dict[str, set[int]]:
        return _numbers(os.listdir(self._path) if self._path.exists() else ())

    def read(self, name: str, most: int) -> bytes:
        with open(self._path / name, "rb") as file:
            _check_size(name, os.fstat(file.fileno()).st_size, most)
            return file.read(most + 1)

    def write(self, name: str, content: bytes) -> None:
        self._path.mkdir(parents=True, exist_ok=True)
        if FULL in name:  # a trainer that starts again: the one before may have died at an update
            remove_leftovers(self._path / name.replace(FULL, UPDATE))
        with replacing(self._path / name) as temporary:
            temporary.write_bytes(content)


class _RemoteFolder:
    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ImportError(
                "Folders at a URL need fsspec: `pip install fsspec`, and the package for this kind "
                f"of file system, such as s3fs or gcsfs. Received: folder={url!r}"
            ) from error
        self._url = url.rstrip("/")
        self._system: Any
        self._system, self._path = fsspec.core.url_to_fs(url)
        self._is_whole = url.partition("://")[0] in _WHOLE_FILES

    def __str__(self) -> str:
        return self._url

    def exists(self, name: str) -> bool:
        return bool(self._system.exists(self._at(name)))

    def numbers(self) -> dict[str, set[int]]:
        self._system.invalidate_cache()
        try:
            paths = self._system.ls(self._path, detail=False)
        except FileNotFoundError:
            paths = []
        return _numbers(path.rstrip("/").rpartition("/")[2] for path in paths)

    def read(self, name: str, most: int) -> bytes:
        content: bytes = self._system.cat_file(self._at(name), start=0, end=most + 1)
        _check_size(name, len(content), most)
        return content

    def write(self, name: str, content: bytes) -> None:
        self._system.makedirs(self._path, exist_ok=True)
        if self._is_whole:
            self._system.pipe_file(self._at(name), content)
            return
        temporary = self._at(f".{uuid.uuid4().hex}")
        try:
            self._system.pipe_file(temporary, content)
            self._system.mv(temporary, self._at(name))
        except BaseException:
            if self._system.exists(temporary):
                self._system.rm_file(temporary)
            raise

    def _at(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"
