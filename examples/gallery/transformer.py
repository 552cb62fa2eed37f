"""A transformer block that sorts digits, in custom layers.

python examples/gallery/transformer.py

Eight digits go in, the same digits come out in order: at each position the network names the digit
that belongs there. The two layers are registered with Keras, so that models with them can be loaded
wherever this module is imported.
"""

from pathlib import Path

import finish
import keras
import numpy as np
from absl import app, flags
from keras import layers, ops

import keras_freeze as kf

_EPOCHS = flags.DEFINE_integer("epochs", 6, "Passes over the training data.", lower_bound=1)
_SEQUENCES = flags.DEFINE_integer("sequences", 10000, "How many to train with; a tenth to test.")
_DENSE = flags.DEFINE_boolean("dense", True, "Train the dense network as well, to compare.")
_SEED = flags.DEFINE_integer("seed", 0, "Of sequences, weights and batches.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/gallery/transformer", "Where to write to.")

_FREEZE_RATE = 0.95
_LENGTH = 8
_WIDTH = 64


@keras.saving.register_keras_serializable(package="gallery")
class TokenAndPositionEmbedding(layers.Layer):
    """The sum of a vector for each token and one for its position."""

    def __init__(self, length: int, num_tokens: int, width: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.length, self.num_tokens, self.width = length, num_tokens, width
        self.tokens = layers.Embedding(num_tokens, width, name="tokens")
        self.positions = layers.Embedding(length, width, name="positions")

    def build(self, input_shape):
        self.tokens.build(input_shape)
        self.positions.build(input_shape)

    def call(self, inputs):
        return self.tokens(inputs) + self.positions(ops.arange(self.length))

    def get_config(self):
        own = {"length": self.length, "num_tokens": self.num_tokens, "width": self.width}
        return {**super().get_config(), **own}


@keras.saving.register_keras_serializable(package="gallery")
class TransformerBlock(layers.Layer):
    """Attention, then two dense layers; each normalized and added to its input."""

    def __init__(self, num_heads: int, width: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.num_heads, self.width = num_heads, width
        self.attention = layers.MultiHeadAttention(num_heads, width // num_heads)
        self.first_norm, self.second_norm = layers.LayerNormalization(), layers.LayerNormalization()
        self.widen = layers.Dense(4 * width, activation="gelu")
        self.narrow = layers.Dense(width)

    def build(self, input_shape):
        self.attention.build(input_shape, input_shape)
        for layer in (self.first_norm, self.second_norm, self.widen):
            layer.build(input_shape)
        self.narrow.build((*input_shape[:-1], 4 * self.width))

    def call(self, inputs):
        normalized = self.first_norm(inputs)
        attended = inputs + self.attention(normalized, normalized)
        return attended + self.narrow(self.widen(self.second_norm(attended)))

    def get_config(self):
        return {**super().get_config(), "num_heads": self.num_heads, "width": self.width}


def compile_model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(_SEED.value)  # the same start for both
    inputs = keras.Input((_LENGTH,), dtype="int32")
    embedded = TokenAndPositionEmbedding(_LENGTH, 10, _WIDTH)(inputs)
    outputs = layers.Dense(10)(TransformerBlock(4, _WIDTH)(embedded))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    return model


def main(_: list[str]) -> None:
    random = np.random.default_rng(_SEED.value)
    count = _SEQUENCES.value
    digits = random.integers(0, 10, (count + count // 10, _LENGTH), dtype="int32")
    in_order = np.sort(digits, axis=1)
    training, test = (digits[:count], in_order[:count]), (digits[count:], in_order[count:])

    freezing = kf.FreezeOptimizer(keras.optimizers.Adam(0.002), _FREEZE_RATE)
    model = compile_model(freezing)
    mask = kf.freeze(model, training[0][:500], training[1][:500])
    frozen = finish.frozen_values(model, mask)
    models = {"95 % frozen": model}
    if _DENSE.value:
        models["dense"] = compile_model(keras.optimizers.Adam(0.002))
    for trained in models.values():
        trained.fit(*training, batch_size=50, epochs=_EPOCHS.value, verbose=2)

    finish.save_load_export(model, frozen, test[0][:100], Path(_OUTPUT_DIR.value))
    usual = [np.bincount(column).argmax() for column in training[1].T]
    print(f"Digits in place, the usual one at each place: {np.mean(test[1] == usual):.1%}")
    for name, trained in models.items():
        found = trained.predict(test[0], verbose=0).argmax(-1) == test[1]
        print(f"Digits in place, {name}: {found.mean():.1%}; whole rows: {found.all(1).mean():.1%}")


if __name__ == "__main__":
    app.run(main)
