"""A variational autoencoder: two networks, no `call`, and a loss that only `train_step` knows."""

import keras
import numpy as np
from keras import layers, ops

import keras_freeze as kf

PIXELS, LATENT = 64, 2


def make_data(num=96, seed=0):
    """Images of 8 x 8 pixels with a soft blob somewhere."""
    rng = np.random.default_rng(seed)
    centers, axis = rng.uniform(1, 6, (num, 2, 1)), np.arange(8)
    rows, columns = np.moveaxis(np.exp(-((axis - centers) ** 2) / 3), 1, 0)
    return (rows[:, :, None] * columns[:, None, :]).reshape(num, PIXELS).astype("float32")


class Sampling(layers.Layer):
    """Draws a point of the latent space from its mean and the logarithm of its variance."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(1337)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        return mean + ops.exp(0.5 * log_variance) * noise


def make_encoder():
    inputs = keras.Input((PIXELS,))
    hidden = layers.Dense(96, activation="relu")(inputs)
    mean = layers.Dense(LATENT, name="mean")(hidden)
    log_variance = layers.Dense(LATENT, name="log_variance")(hidden)
    return keras.Model(inputs, [mean, log_variance, Sampling()([mean, log_variance])], name="enc")


def make_decoder():
    inputs = keras.Input((LATENT,))
    hidden = layers.Dense(96, activation="relu")(inputs)
    hidden = layers.Dense(96, activation="relu")(hidden)
    return keras.Model(inputs, layers.Dense(PIXELS, activation="sigmoid")(hidden), name="dec")


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.total_loss_tracker = keras.metrics.Mean(name="loss")
        self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
        self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")
        self.built = True  # PyTorch's `fit` would call the model otherwise

    @property
    def metrics(self):
        return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

    def compute_losses(self, data):
        mean, log_variance, latent = self.encoder(data, training=True)
        reconstruction = self.decoder(latent, training=True)
        crossentropy = keras.losses.binary_crossentropy(data, reconstruction)
        reconstruction_loss = PIXELS * ops.mean(crossentropy)
        kl_loss = -0.5 * (1 + log_variance - ops.square(mean) - ops.exp(log_variance))
        kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
        return reconstruction_loss + kl_loss, reconstruction_loss, kl_loss

    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        step = {"tensorflow": self._tensorflow_step, "torch": self._torch_step}
        losses = step[keras.backend.backend()](data)
        for tracker, loss in zip(self.metrics, losses, strict=True):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.metrics}

    def _tensorflow_step(self, data):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            losses = self.compute_losses(data)
        gradients = tape.gradient(losses[0], self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        return losses

    def _torch_step(self, data):
        import torch

        self.zero_grad()
        losses = self.compute_losses(data)
        losses[0].backward()
        weights = list(self.trainable_weights)
        with torch.no_grad():
            self.optimizer.apply([weight.value.grad for weight in weights], weights)
        return [loss.detach() for loss in losses]


def make_model():
    return VAE(make_encoder(), make_decoder())


def compile_model(vae):
    vae.compile(optimizer=kf.FreezeOptimizer(keras.optimizers.Adam(0.01), freeze_rate=0.9))


def freeze_model(vae):
    kf.freeze(vae, make_data())


def train(vae):
    history = vae.fit(make_data(), epochs=3, batch_size=32, verbose=0)
    return history.history["loss"]


def networks(vae):
    """Those whose weights are trained, with their optimizer."""
    return [(vae.encoder, vae.optimizer), (vae.decoder, vae.optimizer)]


def keep(vae):
    """What one keeps of the training, and an input for it."""
    return vae.decoder, np.random.default_rng(1).normal(size=(5, LATENT)).astype("float32")
