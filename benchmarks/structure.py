"""Measures masks with a structure: bytes in a file, and the time of a training step.

    python benchmarks/structure.py

The network has two hidden layers of `--width` neurons on images of 28 x 28; its head has single
weights in all of them. Masks are those of SNIP's scores for one batch of random numbers, at the
same rates. Times are those of `fit` with all steps in one call of a function (TensorFlow). The
variants take turns, in a new order each round, and each is divided by the floor of its round, a
network of which all hidden kernels are frozen. Where other programs share the cores, the time of
the CPU tells more than that of the clock. Prints Markdown tables with medians.
"""

import random
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
from _common import compile_model, log, mlp, table
from absl import app, flags

import keras_freeze as kf

FLAGS = flags.FLAGS
flags.DEFINE_integer("width", 2048, "Neurons of each hidden layer.", lower_bound=1)
flags.DEFINE_list("rates", ["0.9", "0.99"], "Freezing rates, above 0, below 1.")
flags.DEFINE_integer("batch_size", 128, "Examples in a step.", lower_bound=1)
flags.DEFINE_integer("steps", 5, "Steps in a run.", lower_bound=1)
flags.DEFINE_integer("rounds", 7, "Runs of each variant.", lower_bound=1)
flags.DEFINE_bool("time", True, "Whether steps are timed.")

STRUCTURES = {
    "single weights": None,
    "2:4": "2:4",
    "blocks of 4 x 4": (4, 4),
    "blocks of 16 x 16": (16, 16),
    "rows": "row",
    "columns": "column",
}
TIMED = ("single weights", "blocks of 16 x 16", "rows", "columns")


def main(_):
    rng = np.random.default_rng(0)
    size = FLAGS.batch_size * FLAGS.steps
    x = rng.random((size, 28, 28, 1), np.float32)
    y = rng.integers(0, 10, size)
    scores = scores_of(x, y)
    for rate in map(float, FLAGS.rates):
        print_bytes(scores, rate)
        if FLAGS.time:
            print_times(x, y, rate)


def scores_of(x, y):
    model = compile_model(mlp(FLAGS.width), keras.optimizers.SGD(0.01))
    found = kf.compute_saliency(model, x[: FLAGS.batch_size], y[: FLAGS.batch_size])
    return {path: array for path, array in found.items() if "fc3" not in path}


def print_bytes(scores, rate):
    rows, num_columns = [], sum(array.shape[-1] for array in scores.values())
    for name, structure in STRUCTURES.items():
        mask = kf.FreezeMask.from_scores(
            list(scores.values()), rate, paths=list(scores), structure=structure
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "mask.freeze"
            start = time.perf_counter()
            mask.save(path)
            seconds = time.perf_counter() - start
            num_bytes = kf.storage.inspect(path).num_bytes["mask"]
        bits = 8 * num_bytes
        rows.append(
            [
                name,
                f"{mask.num_trained:,}",
                f"{num_bytes:,}",
                f"{bits / mask.num_trained:.4f}",
                f"{bits / num_columns:.2f}",
                f"{seconds:.2f}",
            ]
        )
    title = f"Bytes of the mask, q = {rate:g}, {num_columns:,} columns"
    header = ["trained together", "trained", "bytes", "bits a trained weight", "bits a column", "s"]
    table(title, header, rows)


def print_times(x, y, rate):
    variants = {"plain SGD": None, "all frozen (floor)": (1.0, None)}
    variants |= {name: (rate, STRUCTURES[name]) for name in TIMED}
    models = {name: prepared(x, y, settings) for name, settings in variants.items()}
    seconds = {name: [] for name in models}
    for number in range(FLAGS.rounds):
        for name in random.Random(number).sample(list(models), len(models)):
            before = np.array([time.perf_counter(), time.process_time()])
            run(models[name], x, y)
            after = np.array([time.perf_counter(), time.process_time()])
            seconds[name].append((after - before) / FLAGS.steps)
        log(f"round {number + 1} of {FLAGS.rounds}")
    rows = []
    for name, times in seconds.items():
        to_floor = np.array(times) / np.array(seconds["all frozen (floor)"])
        numbers = np.stack([1000 * np.median(times, 0), np.median(to_floor, 0)], 1).reshape(-1)
        rows.append([name, *(f"{number:.2f}" for number in numbers)])
    header = ["", "ms, clock", "to the floor", "ms, CPU", "to the floor"]
    table(f"A step, q = {rate:g}, batch {FLAGS.batch_size}", header, rows)


def prepared(x, y, settings):
    """A network that has been traced; `settings` are a rate and a structure, None for plain SGD."""
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if settings is not None:
        rate, structure = settings
        optimizer = kf.FreezeOptimizer(optimizer, rate, structure=structure, exclude="fc3")
    model = compile_model(mlp(FLAGS.width), optimizer, steps_per_execution=FLAGS.steps)
    if settings is not None:
        kf.freeze(model, x[: FLAGS.batch_size], y[: FLAGS.batch_size])
    run(model, x, y)
    return model


def run(model, x, y):
    model.fit(x, y, batch_size=FLAGS.batch_size, epochs=1, shuffle=False, verbose=0)


if __name__ == "__main__":
    app.run(main)
