"""A network that changes as in training, in a stream; and programs that are killed in it.

    python tests/support/stream_cases.py

reads lines and forks a process for each, whose number it prints: "publish OUTPUT FOLDER SEED" goes
on forever and writes the digest of each state to OUTPUT before it is published, "follow OUTPUT
FOLDER" follows forever and writes the number and digest of each state that it was in.
"""

import hashlib
import os
import signal
import sys
import time

import keras
import numpy as np
from helpers import sgd, value_of
from keras import layers

import keras_freeze as kf

RATE = 0.9


def network(dtype="float32"):
    """A small network with every kind of variable, always the same."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, activation="relu", dtype=dtype, name="first"),
            layers.BatchNormalization(dtype=dtype, name="norm"),
            layers.Dropout(0.1, seed=3, name="dropout"),
            layers.Dense(5, dtype=dtype, name="last"),
        ]
    )
    kf.reinitialize(model, seed=5)
    return model


def frozen(model, rate=RATE, **arguments):
    """Compile a network with a FreezeOptimizer that has a mask."""
    model.compile(kf.FreezeOptimizer(sgd(0.05), rate, **arguments), loss="mse")
    rng = np.random.default_rng(0)
    kf.freeze(model, rng.normal(size=(8, 6)), rng.normal(size=(8, 5)))
    return model


def train(model, seed, scale=0.01):
    """Change what training would change, and nothing else."""
    rng = np.random.default_rng(seed)
    mask = kf.get_mask(model)
    for variable in weights(model):
        entry = None if mask is None else mask.find(variable)
        moved = rng.normal(size=variable.shape) * scale
        if entry is not None:
            moved = moved * entry.trained
        value = value_of(variable)
        variable.assign((value.astype("float64") + moved).astype(value.dtype))


def weights(model):
    return [v for v in model.variables if not v.path.endswith("seed_generator_state")]


def digest(model):
    """What identifies the values of a network."""
    found = hashlib.sha256()
    for variable in weights(model):
        found.update(value_of(variable).tobytes())
    return found.hexdigest()


def publish(folder, seed):
    model = network()
    base = keras.models.clone_model(model)
    base.set_weights(model.get_weights())
    frozen(model)
    publisher = kf.DeltaPublisher(model, folder, base=base, full_every=7)
    step = seed
    while True:
        train(model, step)
        print(digest(model), flush=True)  # before: the file may be there when this is killed
        publisher.publish()
        step += 1
        if step % 50 == 0:  # so that numbers stay small enough to be read again
            time.sleep(0.01)


def follow(folder):
    model = network()
    while True:
        try:
            follower = kf.follow(model, folder)
        except FileNotFoundError:
            time.sleep(0.01)
            continue
        print(follower.number, digest(model), flush=True)


def run(side, output, folder, seed="0"):
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    if side == "publish":
        publish(folder, int(seed))
    else:
        follow(folder)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that are killed
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            run(*line.split())
        print(child, flush=True)
