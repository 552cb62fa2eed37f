"""Write the delta that turns a model back into what it was."""

import os
from collections.abc import Sequence

import keras
import numpy as np

from keras_freeze import initializers
from keras_freeze.initializers.of_layers import versions
from keras_freeze.storage.changes import set_changes
from keras_freeze.storage.header import Header
from keras_freeze.storage.keras_model import (
    COMPILED,
    config_of,
    fingerprint,
    shared_with_base,
    variables_of,
)
from keras_freeze.storage.saved_variable import saved_variables
from keras_freeze.storage.saving import write_model
from keras_freeze.storage.sources import find_sources
from keras_freeze.storage.vocabularies import vocabularies_of


def write_undo(
    path: str | os.PathLike[str], model: keras.Model, before: Sequence[np.ndarray]
) -> None:
    """Write a delta whose base is the model as it is, and which gives it the values of before.

    Args:
        path: Path of the file.
        model: The model.
        before: The values that its variables had, as bit patterns.
    """
    config = {**config_of(model), COMPILED: None}
    variables = variables_of(model)
    saved = saved_variables(model, {}, {}, "float32")
    for one, bits in zip(saved, before, strict=True):
        one.bits = bits
    find_sources(saved, None, variables, {}, portable_only=True)
    set_changes(saved, variables)
    header = Header(
        versions=versions(),
        generator=initializers.GENERATOR,
        model=shared_with_base(config, config),
        records=tuple(one.record() for one in saved),
        settings=(),
        num_rescued=0,
        decay_scale=None,
        base=fingerprint(variables),
        optimizer=None,
        vocabularies=vocabularies_of(model, all_of_them=True),
    )
    write_model(path, header, saved)
