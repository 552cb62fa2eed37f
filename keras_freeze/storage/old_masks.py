"""Read the mask files that keras_freeze 0.1.0 wrote before masks became `.freeze` files.

To be removed in version 0.2. Such a file is a line with its name and version, the length of a JSON
header (64 bits, little-endian), the header, the bits of each entry packed eight to a byte, and the
SHA-256 of all that.
"""

import hashlib
import json
import math
import os
from typing import Any

import numpy as np

from keras_freeze._utils.validation import check_json_int
from keras_freeze.storage.errors import FreezeFileError, invalid_header
from keras_freeze.storage.fields import MaskPart, PlainEntry, check_positions, check_shape

_MAGIC = b"keras_freeze mask 1\n"
_LENGTH_BYTES = 8
_DIGEST_BYTES = hashlib.sha256().digest_size


def is_old_mask(path: str | os.PathLike[str]) -> bool:
    """Return whether a file begins as these mask files do."""
    with open(path, "rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def read_old_mask(path: str | os.PathLike[str]) -> tuple[list[PlainEntry], int]:
    """Return the entries of a mask file, and how many weights it rescued."""
    with open(path, "rb") as file:
        content = file.read()
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        raise FreezeFileError("The mask file is damaged or cut short: its checksum does not match.")
    with invalid_header():
        return _decode(body[len(_MAGIC) :])


def _decode(body: bytes) -> tuple[list[PlainEntry], int]:
    end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    header = json.loads(body[_LENGTH_BYTES:end])
    bits = np.frombuffer(body, np.uint8)[end:]
    parts = list(map(_mask_part, header["entries"]))
    check_positions(parts)
    num_bytes = [(math.prod(part.shape) + 7) // 8 for part in parts]
    if sum(num_bytes) != bits.size:  # before anything of these sizes is allocated
        raise ValueError(f"{bits.size} bytes of mask where {sum(num_bytes)} are announced")
    entries = []
    for (position, path, shape, is_weight, _), length in zip(parts, num_bytes, strict=True):
        trained = np.unpackbits(bits[:length], count=math.prod(shape)).view(bool).reshape(shape)
        bits = bits[length:]
        entries.append((position, path, trained, is_weight))
    return entries, check_json_int("num_rescued", header["num_rescued"], 2**63)


def _mask_part(described: Any) -> MaskPart:
    return MaskPart(
        check_json_int("position", described["position"], 2**63),
        str(described["path"]),
        check_shape(described["shape"]),
        bool(described["is_weight"]),
    )
