"""A vector-quantized autoencoder: a codebook updated by hand, and a loss by `add_loss`."""

import keras
import numpy as np
from keras import layers, ops

import keras_freeze as kf


def make_data(num=96, seed=0):
    """Images of 8 x 8 pixels with a rectangle."""
    rng = np.random.default_rng(seed)
    images, axis = np.zeros((num, 8, 8, 1), "float32"), np.arange(8)
    for image in images:
        top, left = rng.integers(0, 5, 2)
        rows, columns = ((axis >= start) & (axis < start + 4) for start in (top, left))
        image[rows[:, None] & columns] = 1.0
    return images


@keras.saving.register_keras_serializable(package="programs")
class VectorQuantizer(layers.Layer):
    """Takes each vector to the nearest code; codes follow the mean of what they stand for."""

    def __init__(self, num_codes, beta=0.25, decay=0.9, **kwargs):
        super().__init__(**kwargs)
        self.num_codes, self.beta, self.decay = num_codes, beta, decay

    def get_config(self):
        own = {"num_codes": self.num_codes, "beta": self.beta, "decay": self.decay}
        return {**super().get_config(), **own}

    def build(self, input_shape):
        self.codebook = self.add_weight(
            shape=(self.num_codes, input_shape[-1]),
            initializer=keras.initializers.RandomUniform(-1.0, 1.0),
            trainable=False,
            name="codebook",
        )

    def call(self, inputs, training=False):
        flat = ops.reshape(inputs, (-1, inputs.shape[-1]))
        codes = ops.convert_to_tensor(self.codebook)
        distances = ops.sum(ops.square(codes), axis=1) - 2 * ops.matmul(flat, ops.transpose(codes))
        nearest = ops.one_hot(ops.argmin(distances, axis=1), self.num_codes)
        quantized = ops.reshape(ops.matmul(nearest, codes), ops.shape(inputs))
        self.add_loss(self.beta * ops.mean(ops.square(ops.stop_gradient(quantized) - inputs)))
        if training:
            self.update_codebook(ops.stop_gradient(flat), nearest)
        return inputs + ops.stop_gradient(quantized - inputs)

    def update_codebook(self, flat, nearest):
        counts = ops.sum(nearest, axis=0)[:, None]
        means = ops.matmul(ops.transpose(nearest), flat) / ops.maximum(counts, 1.0)
        codes = ops.convert_to_tensor(self.codebook)
        moved = self.decay * codes + (1 - self.decay) * means
        self.codebook.assign(ops.where(counts > 0, moved, codes))


def make_encoder():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu", strides=2, padding="same"),
            layers.Conv2D(64, 3, activation="relu", strides=2, padding="same"),
            layers.Conv2D(8, 1),
        ],
        name="encoder",
    )


def make_decoder():
    return keras.Sequential(
        [
            keras.Input((2, 2, 8)),
            layers.Conv2DTranspose(64, 3, activation="relu", strides=2, padding="same"),
            layers.Conv2DTranspose(32, 3, activation="relu", strides=2, padding="same"),
            layers.Conv2DTranspose(1, 3, padding="same"),
        ],
        name="decoder",
    )


def make_model():
    inputs = keras.Input((8, 8, 1))
    quantized = VectorQuantizer(16, name="quantizer")(make_encoder()(inputs))
    return keras.Model(inputs, make_decoder()(quantized), name="vqvae")


def compile_model(vqvae):
    vqvae.compile(
        optimizer=kf.FreezeOptimizer(keras.optimizers.Adam(0.005), freeze_rate=0.95), loss="mse"
    )


def freeze_model(vqvae):
    kf.freeze(vqvae, make_data(), make_data())


def train(vqvae):
    images = make_data()
    history = vqvae.fit(images, images, epochs=3, batch_size=32, verbose=0)
    return history.history["loss"]


def networks(vqvae):
    """Those whose weights are trained, with their optimizer."""
    return [(vqvae, vqvae.optimizer)]


def keep(vqvae):
    """What one keeps of the training, and an input for it."""
    return vqvae, make_data(5)
