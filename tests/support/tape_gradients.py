"""Gradients of restricted layers as TensorFlow's tape gives them, and ways to train with them."""

import tensorflow as tf
from helpers import value_of
from restricted import normal

from keras_freeze import backend


def numpy_of(tensor):
    return None if tensor is None else value_of(tf.convert_to_tensor(tensor))


def differentiate(model, x, traced=False, training=True):
    """Outputs, and gradients of their product with fixed numbers: of variables, then of inputs."""
    upstream = normal(*model(x).shape, seed=9, dtype="float64")
    found = {}

    def run(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = model(x, training=training)
            loss = tf.reduce_sum(tf.cast(outputs, "float64") * upstream)
        sources = [*(v.value for v in model.trainable_variables), x]
        gradients = tape.gradient(loss, sources)
        found["compact"] = [isinstance(g, backend.CompactGradient) for g in gradients]
        return outputs, [None if g is None else tf.convert_to_tensor(g) for g in gradients]

    outputs, gradients = (tf.function(run) if traced else run)(tf.constant(x))
    return numpy_of(outputs), [numpy_of(g) for g in gradients], found["compact"]


LOOPS = {
    "default": {},
    "jit": {"jit_compile": True},
    "eager": {"run_eagerly": True},
    "steps_per_execution": {"steps_per_execution": 3},
}


def gradients_of_mse(model, x, y):
    """In training mode, as they come from the tape."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    return tape.gradient(loss, [v.value for v in model.trainable_variables])
