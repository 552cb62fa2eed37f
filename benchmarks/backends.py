"""Times a training step of `fit` beside plain Keras on TensorFlow, JAX and PyTorch.

    python benchmarks/backends.py
    python benchmarks/backends.py --backends=jax --networks=mlp_4096 --rates=0.999

Each backend runs in a process of its own. There, plain Keras, the FreezeOptimizer after `freeze`,
the same with ordinary gradients, and the FreezeOptimizer whose first batch decides take turns, in
a new order each round, with the same initial weights and batches. A run is one call of `fit` for
some steps. Printed are the fastest runs and their ratio to plain Keras; medians in parentheses.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_list("backends", ["tensorflow", "jax", "torch"], "Backends of Keras.")
flags.DEFINE_list("networks", None, "Some of the networks; all by default.")
flags.DEFINE_list("rates", None, "Freezing rates instead of each network's own.")
flags.DEFINE_integer("runs", 8, "Runs of each variant.", lower_bound=1)
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


def main(_):
    if FLAGS.child:
        measure()
        return
    print(
        "| backend | network | q | plain, ms | FreezeOptimizer | ordinary gradients | first batch |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    for backend in FLAGS.backends:
        command = [sys.executable, *sys.argv, "--child"]
        environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        subprocess.run(command, env=environment, check=True)


def measure():
    for name in FLAGS.networks or NETWORKS:
        steps, rates, optimizer = NETWORKS[name]
        for rate in map(float, FLAGS.rates or rates):
            print_row(name, rate, times_of(name, steps, rate, optimizer))


def print_row(name, rate, times):
    import keras

    plain = min(times["plain"]), statistics.median(times["plain"])
    cells = [keras.backend.backend(), name, str(rate), f"{1e3 * plain[0]:.2f}"]
    for variant in ("frozen", "ordinary", "first batch"):
        found = times[variant]
        ratios = min(found) / plain[0], statistics.median(found) / plain[1]
        cells.append(f"{ratios[0]:.2f} ({ratios[1]:.2f})")
    print(f"| {' | '.join(cells)} |", flush=True)
    print(json.dumps({"network": name, "rate": rate, "times": times}), file=sys.stderr, flush=True)


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


if __name__ == "__main__":
    app.run(main)
