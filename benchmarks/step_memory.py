"""Measures the peak memory of training beside plain Keras on TensorFlow, JAX and PyTorch (Linux).

    python benchmarks/step_memory.py
    python benchmarks/step_memory.py --backends=jax --networks=mlp_8192 --rate=0.999

Every number is the median of fresh processes, each of which builds a network and trains it with
Adam for some steps of `fit`: the largest resident memory, less what was resident before the network
was built. The mask is SNIP's, which another process has computed, so that `freeze` itself, which
needs all gradients once, does not count. Printed are megabytes, and their ratio to plain Keras.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import app, flags
from backends import transformer

FLAGS = flags.FLAGS
flags.DEFINE_float("rate", 0.99, "The freezing rate.", 0, 1)
flags.DEFINE_integer("steps", 4, "Steps of training.", 1)
flags.DEFINE_string("mask_file", None, "Of a process: the mask; set by the script itself.")
flags.DEFINE_string("variant", None, "What a process measures; set by the script itself.")
flags.DEFINE_string("network", None, "The network of a process; set by the script itself.")

NETWORKS = ("mlp_8192", "transformer_50m")
VARIANTS = ("plain", "ordinary", "frozen")


def main(_):
    if FLAGS.variant is not None:
        print(json.dumps(measure()))
        return
    print("| backend | network | weights, MB | plain, MB | ordinary gradients | FreezeOptimizer |")
    print("|---|---|---|---|---|---|", flush=True)
    for backend in FLAGS.backends:
        for name in FLAGS.networks or NETWORKS:
            print_row(backend, name)


def print_row(backend, name):
    with tempfile.TemporaryDirectory() as folder:
        mask_file = Path(folder) / "mask.freeze"
        in_process(backend, name, "mask", mask_file)
        found = {
            variant: [in_process(backend, name, variant, mask_file) for _ in range(FLAGS.runs)]
            for variant in VARIANTS
        }
    peaks = {v: statistics.median(r["peak"] for r in runs) for v, runs in found.items()}
    cells = [backend, name, f"{found['plain'][0]['weights']:.0f}", f"{peaks['plain']:.0f}"]
    for variant in VARIANTS[1:]:
        cells.append(f"{peaks[variant]:.0f} ({peaks[variant] / peaks['plain']:.2f})")
    print(f"| {' | '.join(cells)} |", flush=True)


def in_process(backend, name, variant, mask_file):
    flagged = [f"--network={name}", f"--variant={variant}", f"--mask_file={mask_file}"]
    flagged += [f"--rate={FLAGS.rate}", f"--steps={FLAGS.steps}"]
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    finished = subprocess.run(
        [sys.executable, __file__, *flagged],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(finished.stdout.splitlines()[-1])


def measure():
    import keras
    import numpy as np

    import keras_freeze as kf

    keras.utils.set_random_seed(0)
    shape, batch_size = ((784,), 128) if FLAGS.network == "mlp_8192" else ((128, 512), 16)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(FLAGS.steps * batch_size, *shape)).astype("float32")
    y = rng.integers(0, 10, len(x))
    warm_up(keras, x[:batch_size], y[:batch_size], batch_size)
    start = resident("VmRSS")
    model = network(keras)
    optimizer = keras.optimizers.Adam(1e-4)
    if FLAGS.variant != "plain":
        optimizer = kf.FreezeOptimizer(optimizer, FLAGS.rate)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    jit_compile = False if keras.backend.backend() == "torch" else "auto"
    model.compile(optimizer, loss, jit_compile=jit_compile)
    if FLAGS.variant == "mask":
        kf.freeze(model, x[:batch_size], y[:batch_size]).save(FLAGS.mask_file)
        return {}
    if FLAGS.variant != "plain":
        kf.freeze(model, mask=kf.FreezeMask.load(FLAGS.mask_file))
    if FLAGS.variant == "ordinary":
        kf.restore_gradients(model)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak until now
    model.fit(x, y, batch_size=batch_size, verbose=0)
    weights = 4 * model.count_params() / 1e6
    return {"peak": resident("VmHWM") - start, "weights": weights}


def warm_up(keras, x, y, batch_size):
    """Trains something small, which loads what every training needs."""
    inputs = keras.Input(x.shape[1:])
    pooled = keras.layers.Dense(4)(keras.layers.Flatten()(inputs))
    small = keras.Model(inputs, keras.layers.Dense(10)(pooled))
    small.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    small.fit(x, y, batch_size=batch_size, verbose=0)


def network(keras):
    if FLAGS.network == "transformer_50m":
        return transformer(width=512, blocks=16)
    hidden = [keras.layers.Dense(8192, "relu") for _ in range(2)]
    return keras.Sequential([keras.Input((784,)), *hidden, keras.layers.Dense(10)])


def resident(name):
    """Megabytes of this process, now (VmRSS) or at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1e3
    raise OSError(f"/proc/self/status has no {name}")


if __name__ == "__main__":
    FLAGS.set_default("runs", 3)
    app.run(main)
