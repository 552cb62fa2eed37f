"""What the workers of a `tf.distribute` strategy train in tests."""

import os
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops import collective_ops

import keras_freeze as kf

BATCH, FREEZE_RATE = 120, 0.8


def digits(sizes=(BATCH,), rank=0):
    """The part of two batches that a worker trains on, which has so many rows of each."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2, BATCH, 20)).astype("float32")
    y = x[..., :4].argmax(axis=-1).astype("int32")
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    return x[:, rows], y[:, rows]


def network(normalized=False):
    """A small network, with BatchNormalization if asked for."""
    keras.utils.set_random_seed(5)
    between = [keras.layers.BatchNormalization()] if normalized else []
    return keras.Sequential(
        [
            keras.Input((20,)),
            keras.layers.Dense(32, activation="relu", name="first"),
            *between,
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dense(4),
        ]
    )


def compiled(strategy, averaged=False, normalized=False, **settings):
    """A network of a strategy with a FreezeOptimizer."""
    with strategy.scope():
        model = network(normalized)
        inner = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=averaged)
        model.compile(
            kf.FreezeOptimizer(inner, **{"freeze_rate": FREEZE_RATE, **settings}),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


def loop(model, strategy):
    """A function that takes one step with what each worker passes to it."""
    optimizer = model.optimizer
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def on_device(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(losses(y, model(x, training=True))) / BATCH
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    @tf.function(autograph=False)
    def step(x, y):
        strategy.run(on_device, args=(x, y))

    return step


def values(model, prefix="v"):
    """The values of the trainable variables, by names."""
    return {f"{prefix}{i}": v.numpy() for i, v in enumerate(model.trainable_variables)}


def masks(model):
    """The masks of the weights, by names."""
    return {f"m{entry.position}": entry.trained for entry in kf.get_mask(model).entries}


def listed_reductions():
    """A list to which the number of floats of each collective sum is added as it is traced."""
    found, reduce = [], collective_ops.all_reduce_v2

    def counted(tensor, *arguments, **keywords):
        if tensor.dtype.is_floating:
            found.append(int(np.prod(tensor.shape)))
        return reduce(tensor, *arguments, **keywords)

    collective_ops.all_reduce_v2 = counted
    return found


def collectives(step, x, y):
    """The kinds of the operations by which a step communicates, one for each of them."""
    graph = step.get_concrete_function(x, y).graph.as_graph_def()
    nodes = [*graph.node, *(node for part in graph.library.function for node in part.node_def)]
    return [node.op for node in nodes if node.op.startswith("Collective")]


def trained(strategy, rank, case, reductions):
    """What becomes of a network that is frozen, unless the first batch decides, and trained."""
    keras.config.set_dtype_policy(case.get("policy", "float32"))
    try:
        model = compiled(strategy, **case.get("settings", {}))
    finally:
        keras.config.set_dtype_policy("float32")
    start = values(model, "s")
    x, y = digits(case["sizes"], rank)
    if case.get("decides", "freeze") == "freeze":
        kf.freeze(model, x[0], y[0])
    step, early = loop(model, strategy), {}
    reductions.clear()
    for number in range(case["steps"]):
        step(x[number % 2], y[number % 2])
        if number == 9:
            early = values(model, "e")
    return {
        "reductions": list(reductions),
        "collectives": collectives(step, x[0], y[0]),
        "num_trained": kf.report(model).num_trained_parameters,
        "statistics": np.concatenate([v.numpy() for v in model.non_trainable_variables] or [[]]),
        **start,
        **early,
        **values(model),
        **masks(model),
    }


def refusal(function):
    """The name of the error that a function raises, and its message."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def leave(folder, count):
    """End this process once all workers have given their results.

    TensorFlow itself may take a minute to end after `fit`: it waits for the other workers.
    """
    while len(list(Path(folder).glob("*.npz"))) < count:
        time.sleep(0.1)
    os._exit(0)
