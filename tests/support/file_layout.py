"""The layout of docs/file_format.md, written down once more, for files made by hand."""

import hashlib
import struct
import zlib
from pathlib import Path

import keras_freeze as kf

PREAMBLE = struct.Struct("<8sIIQQQQIIII")
START, DIGEST_BYTES = PREAMBLE.size + 4, 32
LENGTHS = range(3, 7)  # the fields of the preamble that are lengths of sections
SECTIONS = ("header", "mask", "exponents", "mantissas")
DICTIONARIES = {
    version: Path(kf.storage.__file__).with_name(name).read_bytes()
    for version, name in {1: "header_dictionary.txt", 2: "header_dictionary_2.txt"}.items()
}


def pack(preamble):
    """The fields of a preamble as bytes, with the checksum over them."""
    packed = PREAMBLE.pack(*preamble)
    return packed + struct.pack("<I", zlib.crc32(packed))


def sealed(text, mask=b"", exponents=b"", mantissas=b"", announced=None, version=1):
    """A file with a header of this text, all checksums right."""
    packer = zlib.compressobj(zdict=DICTIONARIES[version])
    sections = (packer.compress(text) + packer.flush(), mask, exponents, mantissas)
    announced = len(text) if announced is None else announced
    preamble = [
        b"\x89FREEZE\n",
        version,
        announced,
        *map(len, sections),
        *map(zlib.crc32, sections),
    ]
    data = pack(preamble) + b"".join(sections)
    return data + hashlib.sha256(data).digest()
