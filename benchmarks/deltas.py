"""Measures deltas beside other ways to send what training has changed: bytes and times.

    KERAS_BACKEND=torch python benchmarks/deltas.py
    KERAS_BACKEND=torch python benchmarks/deltas.py --parts=diff,stream,switch

`diff`: a transformer in bfloat16 that a few steps of SGD have fine-tuned, all of it; its delta
beside int32 positions and bfloat16 values of what has changed, these with zstd, and zstd of the
whole. `stream`: LeNet-300-100 with q = 0.99 on 5,000 digits, published every 100 steps: bytes for
each trained value, beside positions and values sent each time; and what publishing takes of the
time of training, for this network and for VGG16-D. `switch`: the time that a `DeltaSet` takes to
switch between deltas of VGG16-D, q = 0.99, for the first time and later, beside loading weights.
Medians; prints tables.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import zstandard
from absl import app, flags

import keras_freeze as kf
from keras_freeze import backend
from keras_freeze._utils.bits import as_bits

FLAGS = flags.FLAGS
flags.DEFINE_list("parts", ["diff", "stream", "switch"], "What to measure.")
flags.DEFINE_integer("repeats", 15, "Switches that are timed.", lower_bound=1)
flags.DEFINE_integer("vgg_steps", 20, "Steps of VGG16-D between updates.", lower_bound=1)


def main(_):
    with tempfile.TemporaryDirectory() as folder:
        for part in FLAGS.parts:
            PARTS[part](Path(folder))


def copy_of(model):
    copied = keras.models.clone_model(model)
    copied.set_weights(model.get_weights())
    return copied


def bits_of(model):
    return [as_bits(backend.to_numpy(variable)) for variable in model.variables]


def with_zstd(content):
    return len(zstandard.ZstdCompressor(level=19).compress(content))


def table(title, header, rows):
    print(f"\n**{title}**\n")
    for cells in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(map(str, cells))} |")
    sys.stdout.flush()


# A model that was fine-tuned whole, in bfloat16.


def transformer(width=256, num_blocks=4, vocabulary=4000):
    inputs = keras.Input((32,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width)(inputs)
    for _ in range(num_blocks):
        attended = keras.layers.MultiHeadAttention(4, width // 4)(x, x, use_causal_mask=True)
        x = keras.layers.LayerNormalization()(x + attended)
        hidden = keras.layers.Dense(4 * width, "gelu")(x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dense(width)(hidden))
    return keras.Model(inputs, keras.layers.Dense(vocabulary)(x))


def measure_diff(folder):
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("bfloat16")
    model = transformer()
    rng = np.random.default_rng(0)
    tokens = rng.zipf(1.3, size=(512, 33)).clip(max=3999)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rows = []
    for rate in (3e-3, 3e-2):
        tuned = copy_of(model)
        tuned.compile(keras.optimizers.SGD(rate), loss)
        tuned.fit(tokens[:, :-1], tokens[:, 1:], batch_size=16, epochs=1, verbose=0)
        rows.append([f"{rate:g}", *diff_row(folder, model, tuned)])
    keras.config.set_dtype_policy("float32")
    header = [
        "learning rate",
        "changed",
        "whole",
        "whole, zstd",
        "int32 + bfloat16",
        "the same, zstd",
    ]
    table(
        f"Bytes of a fine-tuned transformer, {model.count_params():,} parameters in bfloat16",
        [*header, "gaps + bfloat16, zstd", "delta", "bytes a changed value"],
        rows,
    )


def diff_row(folder, base, tuned):
    before, after = np.concatenate(bits_of(base)), np.concatenate(bits_of(tuned))
    changed = np.flatnonzero(before != after)
    positions, values = changed.astype("<i4").tobytes(), after[changed].tobytes()
    gaps = np.diff(changed, prepend=0).astype("<u2").tobytes()
    path = folder / "tuned.freeze"
    kf.save(tuned, path, base=base, include_compile=False)
    loaded = kf.load(path, base=base)
    assert all(map(np.array_equal, bits_of(loaded), bits_of(tuned)))
    size = path.stat().st_size
    sizes = [
        after.nbytes,
        with_zstd(after.tobytes()),
        len(positions) + len(values),
        with_zstd(positions) + with_zstd(values),
        with_zstd(gaps) + with_zstd(values),
        size,
    ]
    share = f"{changed.size / after.size:.2%}"
    return [share, *(f"{n:,}" for n in sizes), f"{size / max(changed.size, 1):.2f}"]


# A stream of updates.


def digits():
    return kf.datasets.load_arrays("mnist_5k", "train", seed=0)


def frozen(network, rate, x, y, optimizer):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(kf.FreezeOptimizer(optimizer, rate), loss)
    kf.freeze(network, x[:100], y[:100])
    return network


def measure_stream(folder):
    x, y = digits()
    rows = []
    for number, values in enumerate(("float32", "bfloat16", kf.storage.Grid(0.02))):
        network = frozen(kf.models.lenet_300_100(seed=0), 0.99, x, y, keras.optimizers.Adam(0.002))
        stream = folder / f"stream{number}"
        publish = kf.callbacks.PublishDeltas(stream, every=100, values=values)
        network.fit(x, y, batch_size=50, epochs=12, callbacks=[publish], verbose=0)
        follower = kf.models.lenet_300_100(seed=0)
        kf.follow(follower, stream)
        if values == "float32":
            assert all(map(np.array_equal, bits_of(follower), bits_of(network)))
        rows.append(stream_row(values, stream, kf.report(network).num_trained_parameters))
    table(
        "LeNet-300-100, q = 0.99, an update every 100 steps",
        ["values", "first file", "median update", "bytes a trained value",
         "positions and values each time", "the same, zstd"],
        rows,
    )  # fmt: skip
    measure_publishing(folder)


def stream_row(values, folder, num_trained):
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    updates = [size for name, size in sizes.items() if "update" in name]
    first = next(size for name, size in sizes.items() if "full" in name)
    width = 4 if values == "float32" else 2
    rng = np.random.default_rng(0)
    positions = np.sort(rng.choice(266_610, num_trained, replace=False)).astype("<i4")
    whole = num_trained * (4 + width)
    zipped = with_zstd(np.diff(positions, prepend=0).astype("<u2").tobytes()) + num_trained * width
    update = statistics.median(updates)
    cells = [f"{n:,.0f}" for n in (first, update)]
    return [values, *cells, f"{update / num_trained:.2f}", f"{whole:,}", f"{zipped:,}"]


def measure_publishing(folder):
    """What it takes of the time between two updates to publish one."""
    x, y = digits()
    rows = []
    for name, every in (("lenet_300_100", 100), ("vgg16_d", FLAGS.vgg_steps)):
        if name == "vgg16_d":
            x, y = np.random.default_rng(0).normal(size=(32, 32, 32, 3)), np.arange(32) % 10
        network = frozen(kf.models.MODELS[name](seed=0), 0.99, x, y, keras.optimizers.SGD(0.01))
        publisher = kf.DeltaPublisher(network, folder / name, values="bfloat16")
        start = time.perf_counter()
        publisher.publish()
        first = time.perf_counter() - start
        steps, updates = [], []
        for _ in range(5):
            start = time.perf_counter()
            for step in range(every):
                batch = slice(32 * step % max(len(x) - 31, 1), None)
                network.train_on_batch(x[batch][:32], y[batch][:32])
            steps.append(time.perf_counter() - start)
            start = time.perf_counter()
            publisher.publish()
            updates.append(time.perf_counter() - start)
        between, update = statistics.median(steps), statistics.median(updates)
        share = update / (between * 100 / every)
        cells = [f"{1000 * seconds:,.1f}" for seconds in (first, between / every, update)]
        rows.append([name, *cells, f"{share:.2%}"])
    table(
        f"Publishing in bfloat16, {keras.backend.backend()}, milliseconds",
        ["network", "first file", "training step of 32", "update", "share of 100 steps"],
        rows,
    )


# Switching between deltas.

_DELTAS = 6


def measure_switch(folder):
    base = kf.models.vgg16_d(seed=0)
    x, y = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype("float32"), np.arange(8)
    deltas = kf.DeltaSet(base)
    for number in range(_DELTAS):
        network = copy_of(base)
        optimizer = keras.optimizers.SGD(0.1)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        freeze = kf.FreezeOptimizer(optimizer, 0.99, criterion="random", seed=number)
        network.compile(freeze, loss)
        kf.freeze(network, x, y)
        network.train_on_batch(x, y)
        kf.save(network, folder / f"{number}.freeze", base=base)
        network.save_weights(folder / f"{number}.weights.h5")
        deltas.add(str(number), folder / f"{number}.freeze")
    first = timed(lambda i: deltas.switch(str(i)), _DELTAS - 2)  # each delta once
    between = timed(lambda i: deltas.switch(str(i % 2)))
    to_base = timed(lambda i: deltas.switch(("0", None)[i % 2]))
    deltas.switch(None)
    whole = timed(lambda i: base.load_weights(folder / f"{i % 2}.weights.h5"), 5)
    rows = [
        ["between two deltas for the first time", first],
        ["between two deltas", between],
        ["between a delta and the base", to_base],
        ["`load_weights`, all of them", whole],
    ]
    table(
        f"Switching VGG16-D, q = 0.99, {keras.backend.backend()}; "
        f"{deltas.num_bytes / _DELTAS:,.0f} bytes of memory a delta",
        ["switch", "milliseconds"],
        [[name, f"{1000 * seconds:.1f}"] for name, seconds in rows],
    )


def timed(function, repeats=None):
    seconds = []
    for number in range(2 + (repeats or FLAGS.repeats)):
        start = time.perf_counter()
        function(number)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


PARTS = {"diff": measure_diff, "stream": measure_stream, "switch": measure_switch}

if __name__ == "__main__":
    app.run(main)
