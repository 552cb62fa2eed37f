"""A normalizing flow (real NVP) with kernel regularizers, whose likelihood is in `train_step`."""

import keras
import numpy as np
from keras import layers, ops, regularizers

import keras_freeze as kf


def make_data(num=128, seed=0):
    """Points on two half circles, normalized."""
    rng = np.random.default_rng(seed)
    angles, side = rng.uniform(0, np.pi, num), rng.integers(0, 2, num)
    points = np.stack([np.cos(angles) + side, np.sin(angles) * (1 - 2 * side) + side / 2], axis=1)
    points += rng.normal(0, 0.05, points.shape)
    return ((points - points.mean(axis=0)) / points.std(axis=0)).astype("float32")


def make_coupling(units=64):
    """Scale and translation of a coordinate, from the other one."""

    def dense(size, activation):
        return layers.Dense(size, activation, kernel_regularizer=regularizers.L2(0.01))

    inputs = keras.Input((2,))
    scale = dense(2, "tanh")(dense(units, "relu")(dense(units, "relu")(inputs)))
    shift = dense(2, "linear")(dense(units, "relu")(dense(units, "relu")(inputs)))
    return keras.Model(inputs, [scale, shift])


class RealNVP(keras.Model):
    def __init__(self, num_couplings=2):
        super().__init__()
        self.masks = np.array([[0, 1], [1, 0]] * (num_couplings // 2), "float32")
        self.couplings = [make_coupling() for _ in range(num_couplings)]
        self.loss_tracker = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x, training=True):
        log_determinant = 0.0
        direction = -1 if training else 1
        for i in range(len(self.couplings))[::direction]:
            mask = ops.convert_to_tensor(self.masks[i])
            kept = x * mask
            scale, shift = self.couplings[i](kept)
            scale, shift = scale * (1 - mask), shift * (1 - mask)
            gate = (direction - 1) / 2
            moved = x * ops.exp(direction * scale) + direction * shift * ops.exp(gate * scale)
            x = (1 - mask) * moved + kept
            log_determinant += gate * ops.sum(scale, axis=1)
        return x, log_determinant

    def log_loss(self, outputs):
        latent, log_determinant = outputs
        log_normal = -0.5 * ops.sum(ops.square(latent), axis=1) - np.log(2 * np.pi)
        return -ops.mean(log_normal + log_determinant)

    def train_step(self, *args):
        return getattr(self, f"_{keras.backend.backend()}_train_step")(*args)

    def _tensorflow_train_step(self, data):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.log_loss(self(data, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def _torch_train_step(self, data):
        self.zero_grad()
        loss = self.log_loss(self(data, training=True))
        loss.backward()
        gradients = [v.value.grad for v in self.trainable_weights]
        self.optimizer.apply(gradients, self.trainable_weights)
        self.loss_tracker.update_state(loss.detach())
        return {"loss": self.loss_tracker.result()}

    def _jax_train_step(self, state, data):
        import jax

        trainable, non_trainable, optimizer_variables, metrics = state

        def compute_loss(trainable, non_trainable):
            outputs, non_trainable = self.stateless_call(
                trainable, non_trainable, data, training=True
            )
            return self.log_loss(outputs), non_trainable

        gradient_of = jax.value_and_grad(compute_loss, has_aux=True)
        (loss, non_trainable), gradients = gradient_of(trainable, non_trainable)
        trainable, optimizer_variables = self.optimizer.stateless_apply(
            optimizer_variables, gradients, trainable
        )
        metrics = self.loss_tracker.stateless_update_state(metrics, loss)
        logs = {"loss": self.loss_tracker.stateless_result(metrics)}
        return logs, (trainable, non_trainable, optimizer_variables, metrics)


def make_model():
    return RealNVP()


def compile_model(flow):
    flow.compile(optimizer=kf.FreezeOptimizer(keras.optimizers.Adam(0.005), freeze_rate=0.9))


def freeze_model(flow):
    kf.freeze(flow, make_data())


def train(flow):
    history = flow.fit(make_data(), epochs=3, batch_size=64, verbose=0)
    return history.history["loss"]


def networks(flow):
    """Those whose weights are trained, with their optimizer."""
    return [(coupling, flow.optimizer) for coupling in flow.couplings]


def keep(flow):
    """What one keeps of the training, and an input for it."""
    return flow.couplings[0], make_data(5)
