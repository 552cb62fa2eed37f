"""Criteria in steps, a network for them, its masks and its scores, and SynFlow in NumPy."""

import keras
import numpy as np
from helpers import compiled, is_weight, sgd
from keras import layers

import keras_freeze as kf
from keras_freeze.criteria import FORCE, IterativeSNIP, SynFlow

CRITERIA = [IterativeSNIP(5), FORCE(5), SynFlow(7)]


def relu_model(criterion, frozen_weights="zero", rate=0.9, biases=False, **arguments):
    """A network of 6 * 16 + 16 * 3 weights."""
    keras.utils.set_random_seed(1)
    start = "normal" if biases else "zeros"
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, "relu", bias_initializer=start, name="body"),
            layers.Dense(3, bias_initializer=start, name="head"),
        ]
    )
    optimizer = kf.FreezeOptimizer(
        sgd(), rate, criterion=criterion, frozen_weights=frozen_weights, **arguments
    )
    return compiled(model, optimizer)


def kernels_of(model):
    return [v for v in model.trainable_variables if is_weight(v)]


def masks_of(model):
    mask = kf.get_mask(model)
    return [mask[kernel] for kernel in kernels_of(model)]


def equal(found, expected):
    return all(np.array_equal(f, e) for f, e in zip(found, expected, strict=True))


def scores_of(model, *data, criterion="synflow"):
    return list(kf.compute_saliency(model, *data, criterion=criterion).values())


def synflow_by_hand(values):
    """The gradients of R over two kernels, with biases."""
    first, bias, second, _ = [np.abs(v.astype("float64")) for v in values]
    hidden = first.sum(0) + bias
    signs = np.where(np.signbit(values[0]), 1.0, 1.0), np.ones(second.shape)
    return [signs[0] * second.sum(1), signs[1] * hidden[:, None]]


def normalized_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu", bias_initializer="normal"),
            layers.BatchNormalization(gamma_initializer="normal", beta_initializer="normal"),
            layers.Dropout(0.5),
            layers.Dense(3),
        ]
    )
    norm = model.layers[1]
    norm.moving_mean.assign(np.linspace(-0.1, 0.1, 8))
    norm.moving_variance.assign(np.linspace(0.5, 2.0, 8))
    optimizer = kf.FreezeOptimizer(sgd(), 0.5, criterion=SynFlow(4), frozen_weights="zero")
    return compiled(model, optimizer)
