"""Folders with the files of a stream, and what followers say of them."""

import os
import shutil
import uuid

import pytest
from stream_cases import digest, frozen, network, train

import keras_freeze as kf
from keras_freeze.storage import DeltaPublisher


def names(folder):
    return sorted(os.listdir(folder))


def stream_of(folder, num_updates=4, full_every=100, **arguments):
    """A stream of so many files, and the digests of the trainer's states."""
    model = frozen(network())
    publisher = DeltaPublisher(model, folder, full_every=full_every, **arguments)
    states = []
    for number in range(num_updates + 1):
        assert publisher.publish() == number
        states.append(digest(model))
        train(model, number)
    return states


def long_stream(folder):
    """A folder with a complete file, five updates, another complete file and one update."""
    return folder, stream_of(folder, num_updates=7, full_every=5)


def refused(folder, model, **arguments):
    """What `follow` says; the model must be as it was."""
    before = digest(model)
    with pytest.raises((kf.FreezeFileError, FileNotFoundError)) as caught:
        kf.follow(model, folder, **arguments)
    assert digest(model) == before
    return str(caught.value)


def copied(stream, tmp_path, chosen=None):
    folder = tmp_path / uuid.uuid4().hex
    folder.mkdir()
    for name in names(stream[0]):
        if chosen is None or name in chosen:
            shutil.copy(stream[0] / name, folder / name)
    return folder


def full(number):
    return f"{number:012d}-full.freeze"


def update(number):
    return f"{number:012d}-update.freeze"
