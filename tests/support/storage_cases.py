"""Networks that are trained, saved and loaded again, in the tests' process and in a fresh one.

    python tests/storage_cases.py FOLDER

loads every case of the folder and writes beside it what the loaded network gives and, if the
optimizer was saved, what it becomes when it is trained on.
"""

import sys
from pathlib import Path

import keras
import numpy as np
from keras import layers

import keras_freeze as kf

SEQUENCE, OUTPUTS = (8, 6), 3


@keras.saving.register_keras_serializable(package="storage_cases")
class TwoBranches(keras.Model):
    """A subclassed model with a layer inside a list, and Dropout with a state of its own."""

    def __init__(self, units=7, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.branches = [layers.Dense(units, activation="relu"), layers.Dense(units)]
        self.norm = layers.BatchNormalization()
        self.dropout = layers.Dropout(0.2, seed=4)
        self.head = layers.Dense(OUTPUTS)

    def call(self, inputs, training=None):
        x = keras.ops.mean(inputs, axis=1)
        x = sum(branch(x) for branch in self.branches)
        return self.head(self.dropout(self.norm(x, training=training), training=training))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def _sequential(*between):
    return keras.Sequential([keras.Input(SEQUENCE), *between, layers.Dense(OUTPUTS)])


def _mlp(policy="float32"):
    default = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        return _sequential(
            layers.Flatten(), layers.Dense(20, activation="relu"), layers.BatchNormalization()
        )
    finally:
        keras.config.set_dtype_policy(default)


def _attention():
    inputs = keras.Input(SEQUENCE)
    x = layers.MultiHeadAttention(2, 4)(inputs, inputs)
    x = layers.LayerNormalization()(layers.Add()([inputs, x]))
    return keras.Model(inputs, layers.Dense(OUTPUTS)(layers.GlobalAveragePooling1D()(x)))


def _shared():
    shared = layers.Dense(6, activation="tanh")
    inputs = keras.Input(SEQUENCE)
    x = layers.Flatten()(shared(shared(inputs)))
    return keras.Model(inputs, layers.Dense(OUTPUTS)(x))


def _nested():
    inner = keras.Sequential([keras.Input((6,)), layers.Dense(6), layers.Dense(6)], name="inner")
    inputs = keras.Input(SEQUENCE)
    x = layers.Flatten()(layers.TimeDistributed(inner)(inputs))
    return keras.Model(inputs, layers.Dense(OUTPUTS)(x))


def _normalized():
    normalization = layers.Normalization()
    normalization.adapt(np.random.default_rng(1).normal(2.0, 3.0, (50, *SEQUENCE)))
    return _sequential(normalization, layers.Flatten(), layers.Dense(12, activation="relu"))


def _with_lora():
    model = _sequential(layers.Flatten(), layers.Dense(20, activation="relu"))
    model.layers[1].enable_lora(2)
    return model


def _partly_trainable():
    model = _sequential(layers.Flatten(), layers.Dense(20), layers.Dense(10))
    model.layers[1].trainable = False
    return model


def _subclassed():
    model = TwoBranches()
    model(np.zeros((1, *SEQUENCE), "float32"))
    return model


MODELS = {
    "mlp": _mlp,
    "mixed_float16": lambda: _mlp("mixed_float16"),
    "mixed_bfloat16": lambda: _mlp("mixed_bfloat16"),
    "bfloat16": lambda: _mlp("bfloat16"),
    "float64": lambda: _mlp("float64"),
    "lstm": lambda: _sequential(layers.LSTM(12)),
    # With a seed: without one, Keras's dropout draws from PyTorch's global generator.
    "bidirectional": lambda: _sequential(
        layers.Bidirectional(layers.GRU(8)), layers.Dropout(0.3, seed=4)
    ),
    "attention": _attention,
    "shared": _shared,
    "nested": _nested,
    "normalized": _normalized,
    "lora": _with_lora,
    "partly_trainable": _partly_trainable,
    "subclassed": _subclassed,
    "convolutional": lambda: _sequential(
        layers.Conv1D(8, 3), layers.SeparableConv1D(6, 3), layers.GlobalMaxPooling1D()
    ),
    "embedding": lambda: keras.Sequential(
        [
            keras.Input((8,), dtype="int32"),
            layers.Embedding(30, 6),
            layers.Flatten(),
            layers.Dense(3),
        ]
    ),
}


def data_for(model):
    """Inputs and targets of a model."""
    rng = np.random.default_rng(0)
    shape = model.input_shape[1:] if hasattr(model, "input_shape") else SEQUENCE
    if shape == (8,):
        x = rng.integers(0, 30, (24, 8))
    else:
        x = rng.normal(size=(24, *shape)).astype("float32")
    num_outputs = getattr(model, "output_shape", (None, OUTPUTS))[-1]
    return x, rng.normal(size=(24, num_outputs)).astype("float32")


def train_on(model, x, y):
    model.fit(x, y, epochs=2, batch_size=8, shuffle=False, verbose=0)


def bytes_of(model):
    """The bytes of each variable, one after the other."""
    values = [keras.ops.convert_to_numpy(v) for v in model.variables]
    return [np.frombuffer(value.tobytes(), np.uint8) for value in values]


def outputs_of(model, x):
    outputs = keras.ops.convert_to_numpy(model(x, training=False))
    return np.frombuffer(outputs.tobytes(), np.uint8)


def main(folder):
    keras.utils.set_random_seed(987_654)  # the seed of the process is not to matter
    for path in sorted(Path(folder).glob("*.freeze")):
        model = kf.load(path)
        x, y = data_for(model)
        found = {"outputs": outputs_of(model, x)}
        if "optimizer" in path.stem:
            train_on(model, x, y)
            found |= {f"variable_{i}": value for i, value in enumerate(bytes_of(model))}
        np.savez(path.with_suffix(".npz"), **found)


if __name__ == "__main__":
    main(sys.argv[1])
