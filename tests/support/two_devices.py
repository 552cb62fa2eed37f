"""One model on several devices through tf.distribute, and how it compares with one device."""

import contextlib
import functools

import keras
import numpy as np
import tensorflow as tf
from helpers import blobs, crossentropy, is_weight, same_bits, sgd, value_of, values_of

import keras_freeze as kf

BATCH = 12


@functools.cache  # TensorFlow mixes up the collective operations of two such strategies
def mirrored():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def mirrored_without_collectives(number):
    reduction = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(number)], reduction)


def scope_of(strategy):
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def network(constraint=None, regularizer=None):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(
                8,
                activation="tanh",
                kernel_constraint=constraint,
                kernel_regularizer=regularizer,
                name="body",
            ),
            keras.layers.Dense(3, name="head"),
        ]
    )


def compiled(strategy, make_model=network, inner=sgd, outer=lambda o: o, eager=False, **arguments):
    with scope_of(strategy):
        model = make_model()
        optimizer = outer(kf.FreezeOptimizer(inner(), freeze_rate=0.75, **arguments))
        model.compile(optimizer, crossentropy(), run_eagerly=eager)
    return model


def fit(model, x=None, y=None, epochs=2, callback=None):
    """Batches of which each device gets a half; two of them are an epoch."""
    x, y = blobs(2 * BATCH) if x is None else (x, y)
    callbacks = [] if callback is None else [callback(x, y)]
    model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)


def first_batch():
    return tuple(array[:BATCH] for array in blobs(2 * BATCH))


def train(strategy, way, data=(), callback=None, **arguments):
    """A model after four steps, and its weights before."""
    model = compiled(strategy, **arguments)
    x, y = data or blobs(2 * BATCH)
    start = values_of(model.trainable_variables)
    if way == "freeze":
        kf.freeze(model, x[:BATCH], y[:BATCH])
    fit(model, x, y, callback=callback)
    return model, start


def difference(model, other):
    pairs = zip(model.get_weights(), other.get_weights(), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def copies_are_equal(model):
    """Whether all devices have the same bits in every variable, the optimizer's included."""
    copies = [variable.value.values for variable in [*model.weights, *model.optimizer.variables]]
    return all(
        len(each) > 1 and all(same_bits(each[0].numpy(), c.numpy()) for c in each)
        for each in copies
    )


def frozen_bits_are_kept(model, start):
    """Whether frozen weights are as at the start and trained ones are not, on every device."""
    mask, kept, moved = kf.get_mask(model), [], []
    for variable, old in zip(model.trainable_variables, start, strict=True):
        for copy in variable.value.values if is_weight(variable) else ():
            kept.append(same_bits(copy.numpy()[~mask[variable]], old[~mask[variable]]))
            moved.append((copy.numpy() != old)[mask[variable]].all())
    return all(kept) and all(moved)


def compare(way, **arguments):
    """Two devices against one."""
    (model, start), (other, _) = (train(s, way, **arguments) for s in (mirrored(), None))
    return {
        "difference": difference(model, other),
        "same mask": kf.get_mask(model) == kf.get_mask(other),
        "copies equal": copies_are_equal(model),
        "frozen kept": bool(frozen_bits_are_kept(model, start)),
        "frozen zero": not any(
            value_of(v)[~kf.get_mask(model)[v]].any()
            for v in model.trainable_variables
            if is_weight(v)
        ),
        "iterations": int(model.optimizer.iterations.numpy()),
    }
