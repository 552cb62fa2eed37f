"""A siamese network: one tower embeds anchor, positive and negative; the loss is of distances."""

import keras
import numpy as np
from keras import layers, ops

import keras_freeze as kf

FEATURES = 20


def make_data(num=96, seed=0):
    """Triplets: two noisy views of one thing and one view of another."""
    rng = np.random.default_rng(seed)
    things = rng.normal(size=(num, FEATURES))

    def view(of):
        return (of + rng.normal(0, 1.0, of.shape)).astype("float32")

    return view(things), view(things), view(np.roll(things, 1, axis=0))


def make_tower():
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(128, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(128, activation="relu"),
            layers.Dense(16),
        ],
        name="tower",
    )


class Distances(layers.Layer):
    """Squared distances of the anchor from the positive and from the negative."""

    def call(self, anchor, positive, negative):
        return (
            ops.sum(ops.square(anchor - positive), axis=-1),
            ops.sum(ops.square(anchor - negative), axis=-1),
        )


def make_siamese_network(tower):
    inputs = [keras.Input((FEATURES,), name=name) for name in ("anchor", "positive", "negative")]
    return keras.Model(inputs, Distances()(*(tower(one) for one in inputs)))


class SiameseModel(keras.Model):
    def __init__(self, siamese_network, margin=1.0):
        super().__init__()
        self.siamese_network, self.margin = siamese_network, margin
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, inputs, training=False):
        return self.siamese_network(inputs, training=training)

    def triplet_loss(self, distances):
        to_positive, to_negative = distances
        return ops.mean(ops.maximum(to_positive - to_negative + self.margin, 0.0))

    if keras.backend.backend() == "jax":

        def train_step(self, state, data):
            import jax

            (inputs,) = data
            trainable, non_trainable, optimizer_variables, metrics_variables = state

            def compute_loss(trainable, non_trainable):
                distances, non_trainable = self.stateless_call(
                    trainable, non_trainable, inputs, training=True
                )
                return self.triplet_loss(distances), non_trainable

            gradient_of = jax.value_and_grad(compute_loss, has_aux=True)
            (loss, non_trainable), gradients = gradient_of(trainable, non_trainable)
            trainable, optimizer_variables = self.optimizer.stateless_apply(
                optimizer_variables, gradients, trainable
            )
            metrics = self.loss_tracker.stateless_update_state(metrics_variables, loss)
            logs = {"loss": self.loss_tracker.stateless_result(metrics)}
            return logs, (trainable, non_trainable, optimizer_variables, metrics)

    else:

        def train_step(self, data):
            import tensorflow as tf

            (inputs,) = data
            with tf.GradientTape() as tape:
                loss = self.triplet_loss(self.siamese_network(inputs, training=True))
            weights = self.siamese_network.trainable_weights
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            self.loss_tracker.update_state(loss)
            return {"loss": self.loss_tracker.result()}


def make_model():
    return SiameseModel(make_siamese_network(make_tower()))


def compile_model(model):
    model.compile(optimizer=kf.FreezeOptimizer(keras.optimizers.Adam(0.003), freeze_rate=0.95))


def freeze_model(model):
    kf.freeze(model, make_data())


def train(model):
    history = model.fit(make_data(), epochs=3, batch_size=32, verbose=0)
    return history.history["loss"]


def networks(model):
    """Those whose weights are trained, with their optimizer."""
    return [(model.siamese_network.get_layer("tower"), model.optimizer)]


def keep(model):
    """What one keeps of the training, and an input for it."""
    return model.siamese_network.get_layer("tower"), make_data(5)[0]
