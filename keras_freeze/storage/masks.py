"""The freezing mask in a `.freeze` file, as arrays; needs no Keras."""

import os

import numpy as np

from keras_freeze.storage.coding.masks import count_masks, decode_masks
from keras_freeze.storage.container import Container, read_container
from keras_freeze.storage.errors import FreezeFileError, naming, refusing
from keras_freeze.storage.header import Entry, Header

DecodedEntry = tuple[int, str, np.ndarray, bool]
"""Position, path, mask and whether it is one of a weight: the arguments of `MaskEntry`."""


def read_entries(path: str | os.PathLike[str]) -> tuple[list[DecodedEntry], int]:
    """The entries of the mask in a file, and how many weights it rescued.

    Raises:
        OSError: if the file cannot be read.
        FreezeFileError: if it is damaged, or has no mask.
    """
    with naming(path):
        container = read_container(path)
        header = Header.from_json(container.header)
        entries = decode_entries(header, container)
        if not entries:
            raise FreezeFileError("It holds a network without a freezing mask.")
    return entries, header.num_rescued


def decode_entries(header: Header, container: Container) -> list[DecodedEntry]:
    """The entries of a file's mask, none if it has no mask."""
    entries = _entries(header)
    with refusing():
        masks = decode_masks(container.mask, [shape for _, _, shape in entries])
    return [
        (entry.position, path, trained, entry.is_weight)
        for (entry, path, _), trained in zip(entries, masks, strict=True)
    ]


def trained_counts(header: Header, container: Container, most: int) -> list[int] | None:
    """How many entries of each variable its mask trains, 0 if it has none.

    Args:
        header, container: the file.
        most: so many entries are decoded at the most, one variable after the other.

    Returns:
        The counts; None if more than `most` entries would have to be decoded.
    """
    counts = count_masks(container.mask, [shape for _, _, shape in _entries(header)], most)
    if counts is None:
        return None
    found = iter(counts)
    return [0 if record.entry is None else next(found) for record in header.records]


def _entries(header: Header) -> list[tuple[Entry, str, tuple[int, ...]]]:
    return [(r.entry, r.path, r.shape) for r in header.records if r.entry is not None]
