"""Sequence to sequence: dict batches from `tf.data` or a `PyDataset`, padding that is masked."""

import keras
import numpy as np
from keras import layers, ops

import keras_freeze as kf

TOKENS, LENGTH, BATCH = 12, 6, 32
PAD, START = 0, 1


def make_batch(seed):
    """Sequences of 3 to 6 tokens and the same backwards, after a start token."""
    rng = np.random.default_rng(seed)
    source = rng.integers(2, TOKENS, (BATCH, LENGTH))
    lengths = rng.integers(3, LENGTH + 1, BATCH)
    source[np.arange(LENGTH) >= lengths[:, None]] = PAD
    target = np.full((BATCH, LENGTH + 1), PAD)
    target[:, 0] = START
    for row, of_source, length in zip(target, source, lengths, strict=True):
        row[1 : length + 1] = of_source[:length][::-1]
    return {"source": source.astype("int32"), "target": target.astype("int32")}


class Sequences(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return (make_batch(index),)


def make_data():
    if keras.backend.backend() != "tensorflow":
        return Sequences()
    import tensorflow as tf

    batches = [make_batch(index) for index in range(3)]
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    return tf.data.Dataset.from_tensor_slices(joined).batch(BATCH)


@keras.saving.register_keras_serializable(package="programs")
class Seq2Seq(keras.Model):
    def __init__(self, units=48, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.source_embedding = layers.Embedding(TOKENS, units, mask_zero=True)
        self.target_embedding = layers.Embedding(TOKENS, units, mask_zero=True)
        self.encoder = layers.GRU(units, return_state=True)
        self.decoder = layers.GRU(units, return_sequences=True)
        self.head = layers.Dense(TOKENS)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def get_config(self):
        return {**super().get_config(), "units": self.units}

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, batch, training=False):
        _, state = self.encoder(self.source_embedding(batch["source"]), training=training)
        target = self.target_embedding(batch["target"][:, :-1])
        return self.head(self.decoder(target, initial_state=state, training=training))

    def masked_loss(self, batch, logits):
        labels = batch["target"][:, 1:]
        losses = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        mask = ops.cast(labels != PAD, losses.dtype)
        return ops.sum(losses * mask) / ops.sum(mask)

    def train_step(self, *args):
        return getattr(self, f"_{keras.backend.backend()}_train_step")(*args)

    def _tensorflow_train_step(self, batch):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.masked_loss(batch, self(batch, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}

    def _torch_train_step(self, data):
        import torch

        (batch,) = data
        self.zero_grad()
        loss = self.masked_loss(batch, self(batch, training=True))
        loss.backward()
        with torch.no_grad():
            gradients = [v.value.grad for v in self.trainable_variables]
            self.optimizer.apply(gradients, self.trainable_variables)
        self.loss_tracker.update_state(loss.detach())
        return {"loss": self.loss_tracker.result()}

    def _jax_train_step(self, state, data):
        import jax

        (batch,) = data
        trainable, non_trainable, optimizer_variables, metrics = state

        def compute_loss(trainable):
            logits, updates = self.stateless_call(trainable, non_trainable, batch, training=True)
            return self.masked_loss(batch, logits), updates

        (loss, non_trainable), gradients = jax.value_and_grad(compute_loss, has_aux=True)(trainable)
        trainable, optimizer_variables = self.optimizer.stateless_apply(
            optimizer_variables, gradients, trainable
        )
        metrics = self.loss_tracker.stateless_update_state(metrics, loss)
        logs = {"loss": self.loss_tracker.stateless_result(metrics)}
        return logs, (trainable, non_trainable, optimizer_variables, metrics)


def make_model():
    return Seq2Seq()


def compile_model(model):
    model.compile(optimizer=kf.FreezeOptimizer(keras.optimizers.Adam(0.01), freeze_rate=0.9))


def freeze_model(model):
    kf.freeze(model, make_data(), steps=2)


def train(model):
    history = model.fit(make_data(), epochs=4, verbose=0)
    return history.history["loss"]


def networks(model):
    """Those whose weights are trained, with their optimizer."""
    return [(model, model.optimizer)]


def keep(model):
    """What one keeps of the training, and an input for it."""
    return model, make_batch(9)
