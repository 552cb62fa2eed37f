"""The bytes of a `.freeze` file: four sections, their lengths and their checksums.

The first 68 bytes hold all lengths, which are compared with the size of the file before anything
else is read. docs/file_format.md has the layout.
"""

import hashlib
import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_freeze._utils.files import replacing
from keras_freeze._version import __version__
from keras_freeze.storage.errors import FreezeFileError

MAGIC = b"\x89FREEZE\n"
VERSIONS = (1, 2)  # of the format, that can be read

SECTIONS = ("header", "mask", "exponents", "mantissas")
_PREAMBLE = struct.Struct("<8sIIQQQQIIII")
_CHECK = struct.Struct("<I")
_START = _PREAMBLE.size + _CHECK.size
_DIGEST_BYTES = hashlib.sha256().digest_size
_LARGEST_HEADER = 1 << 24  # of JSON text, unpacked
_MOST_CONTAINERS = 1 << 18  # lists and objects in it
_MOST_VALUES = 1 << 21
DICTIONARIES = {
    version: Path(__file__).with_name(name).read_bytes()
    for version, name in {1: "header_dictionary.txt", 2: "header_dictionary_2.txt"}.items()
}
"""Frequent text of headers, preset dictionaries for deflate (tools/make_header_dictionary.py)."""

_COPY_AGAIN = "Copy or download it again"


@dataclass(frozen=True)
class Container:
    """The content of a file.

    Attributes:
        header: The JSON object that describes the rest.
        mask, exponents, mantissas: Encoded bytes.
        digest: SHA-256 of everything before it in the file.
        num_bytes: The sizes of the parts of the file.
    """

    header: dict[str, Any]
    mask: bytes
    exponents: bytes
    mantissas: bytes
    digest: bytes
    num_bytes: dict[str, int]


def write_container(
    path: str | os.PathLike[str],
    header: dict[str, Any],
    mask: bytes,
    exponents: bytes,
    mantissas: bytes,
    version: int = 1,
) -> None:
    """Write a file atomically: an interrupted write leaves the older file as it was."""
    content = container_bytes(header, mask, exponents, mantissas, version)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def container_bytes(
    header: dict[str, Any], mask: bytes, exponents: bytes, mantissas: bytes, version: int
) -> bytes:
    """Return the content of a file.

    Raises:
        ValueError: If the header is too large for a file.
    """
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    # UTF-8 has no halves of surrogate pairs; JSON writes them as Python does.
    encoded = text.encode(errors="backslashreplace")
    if len(encoded) > _LARGEST_HEADER:
        raise ValueError(
            f"The header takes {len(encoded):,} bytes; a `.freeze` file allows at most "
            f"{_LARGEST_HEADER:,}."
        )
    _check_amount(encoded)
    packer = zlib.compressobj(9, zdict=DICTIONARIES[version])
    sections = (packer.compress(encoded) + packer.flush(), mask, exponents, mantissas)
    lengths = [len(section) for section in sections]
    checks = [zlib.crc32(section) for section in sections]
    preamble = _PREAMBLE.pack(MAGIC, version, len(encoded), *lengths, *checks)
    content = b"".join((preamble, _CHECK.pack(zlib.crc32(preamble)), *sections))
    return content + hashlib.sha256(content).digest()


def is_container(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins as a `.freeze` file does."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def read_container(path: str | os.PathLike[str]) -> Container:
    """Read a file and check every byte of it.

    Raises:
        OSError: If the file cannot be read.
        FreezeFileError: If it is not a `.freeze` file, of another version, cut short or damaged.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        preamble = file.read(_START)
        checked = _check_preamble(path, preamble, size)
        content = file.read(size - _START + 1)
    if len(content) != size - _START:
        raise _error(path, "its size changed while it was read. Read it again once it is written")
    return _read(path, preamble, content, *checked)


def parse_container(content: bytes, name: str) -> Container:
    """Do the same as `read_container` with the content of a file, of which errors tell the name."""
    preamble = content[:_START]
    checked = _check_preamble(name, preamble, len(content))
    return _read(name, preamble, content[_START:], *checked)


def _read(
    path: str | os.PathLike[str],
    preamble: bytes,
    content: bytes,
    version: int,
    text_length: int,
    lengths: tuple[int, ...],
    checks: tuple[int, ...],
) -> Container:
    sections, start = [], 0
    for name, length, check in zip(SECTIONS, lengths, checks, strict=True):
        section = content[start : start + length]
        if zlib.crc32(section) != check:
            where = f"bytes {_START + start} to {_START + start + length}"
            raise _error(path, f"its section {name!r} ({where}) is damaged. {_COPY_AGAIN}")
        sections.append(section)
        start += length
    digest = hashlib.sha256(preamble)
    digest.update(memoryview(content)[:start])
    if content[start:] != digest.digest():
        problem = f"its last {_DIGEST_BYTES} bytes are not the SHA-256 of the rest"
        raise _error(path, f"{problem}. {_COPY_AGAIN}")
    packed, mask, exponents, mantissas = sections
    header = _parse(path, packed, text_length, version)
    num_bytes = dict(zip(SECTIONS, lengths, strict=True))
    num_bytes["checksums"] = _START + _DIGEST_BYTES
    return Container(header, mask, exponents, mantissas, digest.digest(), num_bytes)


def _check_preamble(
    path: str | os.PathLike[str], start: bytes, size: int
) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Return version, length of the header's text, and lengths and checksums of the sections."""
    if start[: len(MAGIC)] != MAGIC:
        raise _error(
            path,
            "it does not begin as one. It is another kind of file, or it was transferred in text "
            "mode: transfer it in binary mode",
        )
    if len(start) < _START:
        problem = f"it has been cut short to {size} bytes; at least {_START} are needed"
        raise _error(path, f"{problem}. {_COPY_AGAIN}")
    _, version, text_length, *rest = _PREAMBLE.unpack_from(start)
    if version not in VERSIONS:
        raise _error(
            path,
            f"its format has version {version}, and keras_freeze {__version__} reads versions "
            f"{VERSIONS[0]} to {VERSIONS[-1]}: upgrade keras_freeze",
        )
    if _CHECK.unpack_from(start, _PREAMBLE.size)[0] != zlib.crc32(start[: _PREAMBLE.size]):
        raise _error(path, f"its first {_START} bytes are damaged. {_COPY_AGAIN}")
    lengths, checks = tuple(rest[:4]), tuple(rest[4:])
    expected = _START + sum(lengths) + _DIGEST_BYTES
    if size != expected:
        change = "cut short" if size < expected else "made longer"
        problem = f"it has been {change}: it has {size} bytes instead of {expected}"
        raise _error(path, f"{problem}. {_COPY_AGAIN}")
    if text_length > _LARGEST_HEADER:
        problem = f"its header has {text_length:,} bytes; at most {_LARGEST_HEADER:,} are allowed"
        raise _error(path, problem)
    return version, text_length, lengths, checks


def _parse(
    path: str | os.PathLike[str], packed: bytes, text_length: int, version: int
) -> dict[str, Any]:
    unpacker = zlib.decompressobj(zdict=DICTIONARIES[version])
    try:
        text = unpacker.decompress(packed, text_length + 1)
        if len(text) != text_length or not unpacker.eof or unpacker.unused_data:
            raise ValueError(f"its decompressed size is not {text_length:,} bytes")
        _check_amount(text)
        header = json.loads(text)
    except (zlib.error, ValueError, RecursionError, MemoryError) as error:
        raise _error(path, f"its header cannot be read. {error}") from error
    if not isinstance(header, dict):
        raise _error(path, "its header is not a JSON object")
    return header


def _check_amount(text: bytes) -> None:
    """Refuse JSON of which Python objects would be far larger than the text: `[],[],[]...`."""
    num_containers, num_values = text.count(b"[") + text.count(b"{"), text.count(b",")
    if num_containers > _MOST_CONTAINERS or num_values > _MOST_VALUES:
        raise ValueError(
            f"The header has {num_containers:,} lists and objects and {num_values:,} commas; a "
            f"`.freeze` file allows at most {_MOST_CONTAINERS:,} and {_MOST_VALUES:,}."
        )


def _error(path: str | os.PathLike[str], problem: str) -> FreezeFileError:
    problem = problem.removesuffix(".")
    return FreezeFileError(f"{os.fspath(path)!r} is not a valid `.freeze` file: {problem}.")
