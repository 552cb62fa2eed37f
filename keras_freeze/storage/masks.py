"""The freezing mask in a `.freeze` file as plain arrays; needs neither Keras nor `FreezeMask`."""

import os
from collections.abc import Sequence

import numpy as np

from keras_freeze._version import __version__
from keras_freeze.storage.coding.masks import count_masks, decode_masks, encode_masks
from keras_freeze.storage.container import Container, read_container, write_container
from keras_freeze.storage.errors import FreezeFileError, check_path, naming, refusing
from keras_freeze.storage.header import Header
from keras_freeze.storage.mask_header import MaskHeader, is_mask_only
from keras_freeze.storage.old_masks import is_old_mask, read_old_mask

PlainEntry = tuple[int, str, np.ndarray, bool]
"""Position, path and boolean array of an entry, and whether it is a weight: as in `MaskEntry`."""


def write_mask(
    path: str | os.PathLike[str], entries: Sequence[PlainEntry], num_rescued: int
) -> None:
    """Write a file that holds a mask only.

    Raises:
        ValueError: If a position, a shape or `num_rescued` is too large for a file.
    """
    check_path(path)
    parts = [(position, name, trained.shape, weight) for position, name, trained, weight in entries]
    header = MaskHeader({"keras_freeze": __version__}, parts, num_rescued)
    described = header.to_json()
    try:  # whether it can be read again
        MaskHeader.from_json(described, max_bytes=header.num_bytes)
    except FreezeFileError as error:
        raise ValueError(f"The mask does not fit into a `.freeze` file. {error}") from error
    masks = encode_masks([trained for _, _, trained, _ in entries])
    write_container(path, described, masks, b"", b"")


def read_mask(path: str | os.PathLike[str]) -> tuple[list[PlainEntry], int]:
    """Return the entries of the mask in a file, and how many weights it rescued.

    Args:
        path: A file that holds a mask only, or a complete `.freeze` file.

    Raises:
        OSError: If the file cannot be read.
        FreezeFileError: If it is damaged, or has no mask.
    """
    with naming(path):
        if is_old_mask(path):
            return read_old_mask(path)
        container = read_container(path)
        header = read_header(container)
        if isinstance(header, Header) and not header.mask_parts:
            raise FreezeFileError("The file holds a model without a freezing mask.")
        return decode_entries(header, container), header.num_rescued


def read_header(container: Container) -> Header | MaskHeader:
    """Return the header of a file that holds a model, or a mask only.

    Raises:
        FreezeFileError: If the header is not valid.
    """
    if not is_mask_only(container.header):
        return Header.from_json(container.header)
    if container.exponents or container.mantissas:
        raise FreezeFileError("The file has values, although its header describes a mask only.")
    return MaskHeader.from_json(container.header)


def decode_entries(header: Header | MaskHeader, container: Container) -> list[PlainEntry]:
    """Return the entries of a file's mask; an empty list if the file has no mask."""
    parts = header.mask_parts
    with refusing():
        masks = decode_masks(container.mask, [shape for _, _, shape, _ in parts])
    return [
        (position, path, trained, is_weight)
        for (position, path, _, is_weight), trained in zip(parts, masks, strict=True)
    ]


def trained_counts(
    header: Header | MaskHeader, container: Container, most: int
) -> list[int] | None:
    """Return how many entries each mask of a file trains, in the order of `mask_parts`.

    Args:
        header, container: The file.
        most: The largest number of entries that are decoded, one variable after the other.

    Returns:
        The counts; None if more than `most` entries would have to be decoded.
    """
    return count_masks(container.mask, [shape for _, _, shape, _ in header.mask_parts], most)
