"""Times a training step of `fit` beside plain Keras on TensorFlow, JAX and PyTorch.

    python benchmarks/backends.py
    python benchmarks/backends.py --backends=jax --networks=mlp_4096 --rates=0.999
    python benchmarks/backends.py --results=backends.jsonl --plot=backends.png

Each backend runs in a process of its own. There, plain Keras, the FreezeOptimizer after `freeze`,
the same with ordinary gradients, and the FreezeOptimizer whose first batch decides take turns, in
a new order each round, with the same initial weights and batches. A run is one call of `fit` for
some steps. Printed are the fastest runs and their ratio to plain Keras; medians in parentheses.
With `--results`, the seconds of each step are kept in a file, and what is there is not measured
again.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_list("backends", ["tensorflow", "jax", "torch"], "Backends of Keras.")
flags.DEFINE_list("networks", None, "Some of the networks; all by default.")
flags.DEFINE_list("rates", None, "Freezing rates instead of each network's own.")
flags.DEFINE_integer("runs", 8, "Runs of each variant.", lower_bound=1)
flags.DEFINE_string("results", None, "The file for the times, one line of JSON for each network.")
flags.DEFINE_string("plot", None, "The picture to draw of what is in `--results`.")
flags.DEFINE_bool("child", False, "Whether this process measures; set by the script itself.")

# By name: steps of a run, freezing rates, optimizer.
NETWORKS = {
    "lenet_300_100": (100, (0.99,), "momentum"),
    "mlp_4096": (10, (0.99, 0.999), "momentum"),
    "transformer": (3, (0.99,), "momentum"),
    "dense_64_x_40": (50, (0.95,), "adam"),
    "vgg16_d": (2, (0.995,), "momentum"),
    "separable": (3, (0.99, 0.999), "momentum"),
}

TITLES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
COLORS = ("#D55E00", "#0072B2", "#009E73")
LABELS = {
    "lenet_300_100": "LeNet-300-100",
    "mlp_4096": "784-4096-4096-10",
    "transformer": "transformer, 4 blocks",
    "dense_64_x_40": "40 Dense(64), Adam",
    "vgg16_d": "VGG16-D",
    "separable": "separable convolutions",
}


def main(_):
    if FLAGS.child:
        measure()
        return
    if FLAGS.plot and not FLAGS.results:
        raise app.UsageError("--plot draws what is in --results, which is missing.")
    print(
        "| backend | network | q | plain, ms | FreezeOptimizer | ordinary gradients | first batch |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for backend in FLAGS.backends:
        command = [sys.executable, *sys.argv, "--child"]
        environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        subprocess.run(command, env=environment, check=True)
    if FLAGS.plot:
        draw(measured())


def measure():
    import keras

    backend = keras.backend.backend()
    known = {key_of(row): row for row in measured()}
    for name in FLAGS.networks or NETWORKS:
        steps, rates, optimizer = NETWORKS[name]
        for rate in map(float, FLAGS.rates or rates):
            row = {"backend": backend, "network": name, "rate": rate}
            if key_of(row) not in known:
                row["times"] = times_of(name, steps, rate, optimizer)
                keep(row)
            print_row(known.get(key_of(row), row))


def key_of(row):
    return row["backend"], row["network"], row["rate"]


def measured():
    """What is in the file of results."""
    path = Path(FLAGS.results or "")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def keep(row):
    if FLAGS.results:
        with open(FLAGS.results, "a") as file:
            file.write(json.dumps(row) + "\n")


def print_row(row):
    times = row["times"]
    cells = [row["backend"], row["network"], str(row["rate"]), f"{1e3 * min(times['plain']):.2f}"]
    for variant in ("frozen", "ordinary", "first batch"):
        ratios = [of(times[variant]) / of(times["plain"]) for of in (min, statistics.median)]
        cells.append("{:.2f} ({:.2f})".format(*ratios))
    print(f"| {' | '.join(cells)} |", flush=True)


def times_of(name, steps, rate, optimizer):
    """The seconds of a step in each run, by variant."""
    x, y = data_of(name, steps)
    batch_size = len(x) // steps
    models = {v: compiled(v, name, rate, optimizer, x, y, batch_size) for v in VARIANTS}
    times = {variant: [] for variant in VARIANTS}
    for run in range(FLAGS.runs + 1):
        for variant in random.Random(run).sample(list(VARIANTS), len(VARIANTS)):
            start = time.perf_counter()
            models[variant].fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
            if run:  # the first one compiles
                times[variant].append((time.perf_counter() - start) / steps)
    return times


VARIANTS = ("plain", "frozen", "ordinary", "first batch")


def compiled(variant, name, rate, optimizer, x, y, batch_size):
    import keras

    import keras_freeze as kf

    keras.utils.set_random_seed(0)
    model = network(name)
    kinds = {
        "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(0.001),
    }
    inner = kinds[optimizer]()
    chosen = inner if variant == "plain" else kf.FreezeOptimizer(inner, freeze_rate=rate)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(chosen, loss, jit_compile="auto" if keras.backend.backend() != "torch" else False)
    if variant in ("frozen", "ordinary"):
        kf.freeze(model, x[:batch_size], y[:batch_size])
    if variant == "ordinary":
        kf.restore_gradients(model)
    return model


def network(name):
    import keras
    from keras import layers

    from keras_freeze.paper import models

    if name == "mlp_4096":
        hidden = [layers.Dense(4096, "relu"), layers.Dense(4096, "relu")]
        return keras.Sequential([keras.Input((784,)), *hidden, layers.Dense(10)])
    if name == "dense_64_x_40":
        hidden = [layers.Dense(64, "relu") for _ in range(39)]
        return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(10)])
    if name == "transformer":
        return transformer()
    if name == "separable":
        return separable()
    if name == "vgg16_d":
        return models.vgg16_d(10, (32, 32, 3), seed=0)
    return models.lenet_300_100(seed=0)


def transformer(width=512, blocks=4, length=128):
    """Pre-norm blocks of attention and two Dense layers, and the mean over time."""
    import keras
    from keras import layers

    inputs = keras.Input((length, width))
    x = inputs
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(8, width // 8)(y, y)
        y = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(y)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def separable():
    """Separable convolutions with batch normalization, as small mobile networks have them."""
    import keras
    from keras import layers

    x = inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(32, 3, padding="same", use_bias=False)(x)
    for filters, strides in (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1):
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.SeparableConv2D(filters, 3, strides=strides, padding="same", use_bias=False)(x)
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(layers.BatchNormalization()(x)))
    return keras.Model(inputs, layers.Dense(10)(x))


def data_of(name, steps):
    import numpy as np

    shape, batch_size = {
        "lenet_300_100": ((28, 28, 1), 100),
        "mlp_4096": ((784,), 128),
        "transformer": ((128, 512), 16),
        "dense_64_x_40": ((64,), 128),
        "vgg16_d": ((32, 32, 3), 128),
        "separable": ((32, 32, 3), 32),
    }[name]
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, steps * batch_size)
    x = rng.normal(size=(len(y), *shape))
    if name in ("mlp_4096", "lenet_300_100"):  # as in images of digits, most pixels are 0
        x *= rng.random(shape) < 0.3
    return x.astype("float32"), y


def draw(rows):
    """Draws the fastest steps relative to plain Keras, a group of bars for each network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ratios = {key_of(r): min(r["times"]["frozen"]) / min(r["times"]["plain"]) for r in rows}
    groups = [
        (name, rate)
        for name, (_, rates, _) in NETWORKS.items()
        for rate in rates
        if any((backend, name, rate) in ratios for backend in TITLES)
    ]
    figure, axes = pyplot.subplots(figsize=(8, 0.6 + 0.6 * len(groups)), layout="constrained")
    for shift, (backend, color) in enumerate(zip(TITLES, COLORS, strict=True)):
        bars = {
            place + 0.27 * (shift - 1): ratios[backend, name, rate]
            for place, (name, rate) in enumerate(groups)
            if (backend, name, rate) in ratios
        }
        drawn = axes.barh([*bars], [*bars.values()], 0.25, color=color, label=TITLES[backend])
        axes.bar_label(drawn, fmt="%.2f", padding=2, fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    labels = [f"{LABELS[name]}, q = {rate}" for name, rate in groups]
    axes.set_yticks(range(len(groups)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("Time of a step in fit, relative to plain Keras on the same backend")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=3, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FLAGS.plot, dpi=150)


if __name__ == "__main__":
    app.run(main)
