"""What the benchmarks of training share: the network of any width, masked gradients, tables."""

import sys

import keras
import tensorflow as tf

import keras_freeze as kf

# Okabe and Ito's colors, as in keras_freeze.plots.
BLUE, ORANGE, GREEN, GRAY = "#0072B2", "#D55E00", "#009E73", "#777777"


def mlp(width):
    """Two hidden layers of `width` ReLU neurons on images of 28 x 28, ten logits."""
    layers = [keras.Input((28, 28, 1)), keras.layers.Flatten()]
    for number, (units, activation) in enumerate(
        ((width, "relu"), (width, "relu"), (10, None)), start=1
    ):
        kernel = kf.initializers.get("xavier_normal", 0, number)
        layers.append(
            keras.layers.Dense(units, activation, kernel_initializer=kernel, name=f"fc{number}")
        )
    return keras.Sequential(layers, name=f"mlp_{width}")


def compile_model(model, optimizer, **settings):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **settings)
    return model


def masked(optimizer_class, mask, **settings):
    """What people do by hand: each gradient times its mask, once it is computed."""
    masks = {entry.position: tf.constant(entry.trained, tf.float32) for entry in mask.entries}

    class MaskedGradients(optimizer_class):
        def apply(self, grads, trainable_variables=None):
            grads = [g * masks[i] if i in masks else g for i, g in enumerate(grads)]
            super().apply(grads, trainable_variables)

    return MaskedGradients(**settings)


def num_bytes(variables):
    return sum(v.value.dtype.size * v.value.shape.num_elements() for v in variables)


def table(title, header, rows):
    print(f"\n**{title}**\n")
    for cells in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(cells)} |")
    sys.stdout.flush()


def log(line):
    print(line, file=sys.stderr, flush=True)
