"""Denoising diffusion without `call`: a network learns the noise, a copy of it is its average."""

import keras
import numpy as np
from keras import layers, ops

import keras_freeze as kf

EMA = 0.9


def make_data(num=96, seed=0):
    """Images of 8 x 8 pixels with stripes of some phase."""
    rng = np.random.default_rng(seed)
    phase, axis = rng.uniform(0, 2 * np.pi, (num, 1, 1, 1)), np.arange(8).reshape(1, 8, 1, 1)
    images = 0.5 + 0.4 * np.sin(axis + phase) + rng.normal(0, 0.02, (num, 8, 8, 1))
    return images.astype("float32")


def make_network():
    images, variances = keras.Input((8, 8, 1)), keras.Input((1, 1, 1))
    level = layers.UpSampling2D(8, interpolation="nearest")(variances)
    x = layers.Concatenate()([layers.Conv2D(16, 1)(images), level])
    skip = layers.Conv2D(16, 3, padding="same", activation="swish")(x)
    x = layers.AveragePooling2D(2)(skip)
    x = layers.Conv2D(32, 3, padding="same", activation="swish")(x)
    x = layers.Conv2D(32, 3, padding="same", activation="swish")(x)
    x = layers.Concatenate()([layers.UpSampling2D()(x), skip])
    x = layers.Conv2D(16, 3, padding="same", activation="swish")(x)
    outputs = layers.Conv2D(1, 1, kernel_initializer="zeros")(x)
    return keras.Model([images, variances], outputs, name="network")


class DiffusionModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.normalizer = layers.Normalization()
        self.network = make_network()
        self.ema_network = keras.models.clone_model(self.network)
        self.ema_network.set_weights(self.network.get_weights())
        self.seed_generator = keras.random.SeedGenerator(11)
        self.built = keras.backend.backend() == "torch"  # whose `fit` would call the model

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")
        self.image_loss_tracker = keras.metrics.Mean(name="i_loss")

    @property
    def metrics(self):
        return [self.noise_loss_tracker, self.image_loss_tracker]

    def corrupt(self, images):
        """Images with noise, how much, and the noise."""
        images = self.normalizer(images, training=True)
        noises = keras.random.normal(ops.shape(images), seed=self.seed_generator)
        shape = (ops.shape(images)[0], 1, 1, 1)
        angles = 0.1 + 1.4 * keras.random.uniform(shape, seed=self.seed_generator)
        noise_rates, signal_rates = ops.sin(angles), ops.cos(angles)
        return images, signal_rates * images + noise_rates * noises, noise_rates, noises

    def compute_losses(self, images):
        images, noisy, noise_rates, noises = self.corrupt(images)
        predicted = self.network([noisy, noise_rates**2], training=True)
        signal_rates = ops.sqrt(1 - noise_rates**2)
        predicted_images = (noisy - noise_rates * predicted) / signal_rates
        noise_loss = ops.mean(ops.abs(noises - predicted))
        return noise_loss, ops.mean(ops.abs(images - predicted_images))

    def train_step(self, images):
        weights = self.network.trainable_weights
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                noise_loss, image_loss = self.compute_losses(images)
            gradients = tape.gradient(noise_loss, weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        else:
            import torch

            self.zero_grad()
            noise_loss, image_loss = self.compute_losses(images)
            noise_loss.backward()
            with torch.no_grad():
                self.optimizer.apply([weight.value.grad for weight in weights], weights)
        self.noise_loss_tracker.update_state(ops.stop_gradient(noise_loss))
        self.image_loss_tracker.update_state(ops.stop_gradient(image_loss))
        # Written so, the average of what does not move is exactly that.
        pairs = zip(self.network.weights, self.ema_network.weights, strict=True)
        for weight, average in pairs:
            average.assign(average + (1 - EMA) * (ops.stop_gradient(weight.value) - average))
        return {metric.name: metric.result() for metric in self.metrics}


def make_model():
    model = DiffusionModel()
    model.normalizer.adapt(make_data())
    return model


def compile_model(model):
    model.compile(
        optimizer=kf.FreezeOptimizer(keras.optimizers.AdamW(0.01, 0.0001), freeze_rate=0.9)
    )


def freeze_model(model):
    kf.freeze(model, make_data())


def train(model):
    history = model.fit(make_data(), epochs=3, batch_size=32, verbose=0)
    return history.history["n_loss"]


def networks(model):
    """Those whose weights are trained, with their optimizer."""
    return [(model.network, model.optimizer)]


def keep(model):
    """What one keeps of the training, and an input for it: the averages."""
    model.network.set_weights(model.ema_network.get_weights())
    return model.network, [make_data(5), np.full((5, 1, 1, 1), 0.3, "float32")]
