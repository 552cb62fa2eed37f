"""A Wasserstein GAN with gradient penalty: two optimizers, and a `compile` of its own."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import keras_freeze as kf

NOISE = 16


def make_data(num=96, seed=0):
    """Images of 8 x 8 pixels with a bright bar."""
    rng = np.random.default_rng(seed)
    images = rng.uniform(0, 0.1, (num, 8, 8, 1))
    images[np.arange(num), rng.integers(0, 8, num)] += 0.9
    return images.astype("float32")


def make_generator():
    convolution = {"kernel_size": 4, "strides": 2, "padding": "same", "use_bias": False}
    return keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(2 * 2 * 32, use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(0.2),
            layers.Reshape((2, 2, 32)),
            layers.Conv2DTranspose(32, **convolution),
            layers.BatchNormalization(),
            layers.LeakyReLU(0.2),
            layers.Conv2DTranspose(1, **convolution, activation="sigmoid"),
        ],
        name="generator",
    )


def make_discriminator():
    convolution = {"kernel_size": 3, "strides": 2, "padding": "same"}
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, **convolution),
            layers.LeakyReLU(0.2),
            layers.Conv2D(32, **convolution),
            layers.LeakyReLU(0.2),
            layers.Flatten(),
            layers.Dense(1),
        ],
        name="discriminator",
    )


class WGAN(keras.Model):
    def __init__(self, discriminator, generator, steps=2, penalty_weight=10.0):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.steps, self.penalty_weight = steps, penalty_weight

    def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_loss_fn, self.g_loss_fn = d_loss_fn, g_loss_fn

    def gradient_penalty(self, real, fake):
        """How far the gradient between real and made images is from length 1."""
        share = keras.random.uniform((ops.shape(real)[0], 1, 1, 1))
        between = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = self.discriminator(between, training=True)
        gradient = tape.gradient(score, between)
        norm = ops.sqrt(ops.sum(ops.square(gradient), axis=[1, 2, 3]) + 1e-12)
        return ops.mean((norm - 1.0) ** 2)

    def train_step(self, real):
        size = ops.shape(real)[0]
        for _ in range(self.steps):
            noise = keras.random.normal((size, NOISE))
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                fake_score = self.discriminator(fake, training=True)
                real_score = self.discriminator(real, training=True)
                penalty = self.gradient_penalty(real, fake)
                d_loss = self.d_loss_fn(real_score, fake_score) + self.penalty_weight * penalty
            weights = self.discriminator.trainable_variables
            self.d_optimizer.apply_gradients(
                zip(tape.gradient(d_loss, weights), weights, strict=True)
            )
        noise = keras.random.normal((size, NOISE))
        with tf.GradientTape() as tape:
            score = self.discriminator(self.generator(noise, training=True), training=True)
            g_loss = self.g_loss_fn(score)
        weights = self.generator.trainable_variables
        self.g_optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return {"d_loss": d_loss, "g_loss": g_loss}


def make_model():
    return WGAN(make_discriminator(), make_generator())


def compile_model(wgan):
    wgan.compile(
        d_optimizer=kf.FreezeOptimizer(keras.optimizers.Adam(0.002, 0.5), freeze_rate=0.8),
        g_optimizer=kf.FreezeOptimizer(keras.optimizers.Adam(0.002, 0.5), freeze_rate=0.95),
        d_loss_fn=lambda real, fake: ops.mean(fake) - ops.mean(real),
        g_loss_fn=lambda fake: -ops.mean(fake),
    )


def freeze_model(wgan):
    kf.freeze(wgan, make_data())


def train(wgan):
    history = wgan.fit(make_data(), epochs=3, batch_size=32, verbose=0)
    return history.history["d_loss"]


def networks(wgan):
    """Those whose weights are trained, with their optimizer."""
    return [(wgan.discriminator, wgan.d_optimizer), (wgan.generator, wgan.g_optimizer)]


def keep(wgan):
    """What one keeps of the training, and an input for it."""
    return wgan.generator, np.random.default_rng(1).normal(size=(5, NOISE)).astype("float32")
