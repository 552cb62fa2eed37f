"""Masks, steps and gradients of any network, for tests of numbers that go wrong quietly."""

import numpy as np
import tensorflow as tf
from helpers import is_weight


def quarter(variables):
    """A mask by path that trains every fourth entry of each weight."""
    return {
        v.path: (np.arange(v.value.shape.num_elements()) % 4 == 0).reshape(v.shape)
        for v in variables
        if is_weight(v)
    }


def step_of(optimizer, variables, mode="eager"):
    """A function that applies gradients eagerly, in a graph, or in one that XLA compiles."""

    def step(grads):
        optimizer.apply(grads, variables)

    return step if mode == "eager" else tf.function(step, jit_compile=mode == "jit")


def random_gradients(variables, seed=0):
    rng = np.random.default_rng(seed)
    return [tf.constant(rng.normal(size=v.shape), v.dtype) for v in variables]
