"""Graph attention: layers with weights by `add_weight`; a batch is indices of nodes and labels."""

import keras
import numpy as np
from keras import layers, ops

import keras_freeze as kf

NODES, FEATURES, CLASSES = 60, 16, 3


def make_graph(seed=0):
    """Nodes of three communities: features, edges mostly within a community, labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(NODES) % CLASSES
    features = rng.normal(size=(NODES, FEATURES)) + rng.normal(size=(CLASSES, FEATURES))[labels]
    chance = np.where(labels[:, None] == labels, 0.2, 0.01)
    targets, sources = np.nonzero((rng.random((NODES, NODES)) < chance) | np.eye(NODES, dtype=bool))
    edges = np.stack([targets, sources], axis=1).astype("int32")
    return features.astype("float32"), edges, labels.astype("int32")


@keras.saving.register_keras_serializable(package="programs")
class GraphAttention(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.kernel_initializer = keras.initializers.GlorotUniform()

    def get_config(self):
        return {**super().get_config(), "units": self.units}

    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=(input_shape[0][-1], self.units),
            initializer=self.kernel_initializer,
            name="kernel",
        )
        self.kernel_attention = self.add_weight(
            shape=(2 * self.units, 1), initializer="glorot_uniform", name="kernel_attention"
        )

    def call(self, inputs):
        nodes, edges = inputs
        values = ops.matmul(nodes, self.kernel)
        pairs = ops.reshape(ops.take(values, edges, axis=0), (-1, 2 * self.units))
        scores = ops.leaky_relu(ops.matmul(pairs, self.kernel_attention))[:, 0]
        scores = ops.exp(ops.clip(scores, -2.0, 2.0))
        sums = ops.segment_sum(scores, edges[:, 0], num_segments=NODES)
        weights = scores / ops.take(sums, edges[:, 0], axis=0)
        neighbors = ops.take(values, edges[:, 1], axis=0) * weights[:, None]
        return ops.segment_sum(neighbors, edges[:, 0], num_segments=NODES)


@keras.saving.register_keras_serializable(package="programs")
class GraphAttentionNetwork(keras.Model):
    def __init__(self, units=48, num_heads=3, **kwargs):
        super().__init__(**kwargs)
        self.units, self.num_heads = units, num_heads
        self.preprocess = layers.Dense(units, activation="relu")
        self.heads = [GraphAttention(units) for _ in range(num_heads)]
        self.last = layers.Dense(CLASSES)

    def get_config(self):
        return {**super().get_config(), "units": self.units, "num_heads": self.num_heads}

    def compile(self, optimizer, loss_fn):
        super().compile(optimizer=optimizer)
        self.loss_fn = loss_fn

    def build(self, input_shape):  # from shapes alone Keras would take the edges for floats
        nodes, edges = input_shape
        self.preprocess.build(nodes)
        for head in self.heads:
            head.build([(nodes[0], self.units), edges])
        self.last.build((nodes[0], self.num_heads * self.units))

    def call(self, inputs):
        nodes, edges = inputs
        nodes = self.preprocess(nodes)
        heads = ops.concatenate([head([nodes, edges]) for head in self.heads], axis=1)
        return self.last(ops.relu(heads))

    def set_graph(self, features, edges):
        self.graph = ops.convert_to_tensor(features), ops.convert_to_tensor(edges)
        self(self.graph)  # builds it

    if keras.backend.backend() == "jax":

        def train_step(self, state, data):
            import jax

            indices, labels = data
            trainable, non_trainable, optimizer_variables, metrics = state

            def compute_loss(trainable):
                outputs, updates = self.stateless_call(trainable, non_trainable, self.graph)
                return self.loss_fn(labels, ops.take(outputs, indices, axis=0)), updates

            gradient_of = jax.value_and_grad(compute_loss, has_aux=True)
            (loss, non_trainable), gradients = gradient_of(trainable)
            trainable, optimizer_variables = self.optimizer.stateless_apply(
                optimizer_variables, gradients, trainable
            )
            return {"node_loss": loss}, (trainable, non_trainable, optimizer_variables, metrics)

    else:

        def train_step(self, data):
            import tensorflow as tf

            indices, labels = data
            with tf.GradientTape() as tape:
                outputs = self(self.graph)
                loss = self.loss_fn(labels, ops.take(outputs, indices, axis=0))
            gradients = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(gradients, self.trainable_weights)
            return {"node_loss": loss}


def make_model():
    model = GraphAttentionNetwork()
    model.set_graph(*make_graph()[:2])
    return model


def compile_model(model):
    model.compile(
        optimizer=kf.FreezeOptimizer(keras.optimizers.Adam(0.01), freeze_rate=0.95),
        loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )


def freeze_model(model):
    kf.freeze(model, np.arange(NODES), make_graph()[2])


def train(model):
    history = model.fit(np.arange(NODES), make_graph()[2], batch_size=20, epochs=3, verbose=0)
    return history.history["node_loss"]


def networks(model):
    """Those whose weights are trained, with their optimizer."""
    return [(model, model.optimizer)]


def keep(model):
    """What one keeps of the training, and an input for it."""
    return model, list(make_graph()[:2])
