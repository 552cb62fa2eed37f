"""Times restricted weight gradients beside ordinary ones, and the rule that chooses between them.

    KERAS_BACKEND=jax python benchmarks/gradient_rule.py

For layers as LeNet, VGG16-D and a wide network have them, and several shares of active channels,
both gradients are computed in turns, from the same inputs, up to the trained entries' gradient.
Printed are the medians, their ratio, and what `cost_model.cheapest_block` decides. Below the
table stand its constants as least squares find them in these times: the costs are those of
`restricted`, in multiplications of the ordinary product for one example.
"""

import statistics
import time

import keras
import numpy as np
from absl import app, flags

from keras_freeze import backend
from keras_freeze.restricted import cost_model, layers
from keras_freeze.restricted.block import Block

FLAGS = flags.FLAGS
flags.DEFINE_integer("batch_size", 128, "Examples in a batch.", lower_bound=1)
flags.DEFINE_integer("runs", 15, "Runs of each gradient.", lower_bound=1)
flags.DEFINE_list("shares", ["0.1", "0.3", "0.5", "0.7", "1.0"], "Shares of active channels.")
flags.DEFINE_bool("jit_compile", False, "Whether XLA compiles the gradients, on TensorFlow.")

# What `cheapest_block` decides, in words.
WORDS = {
    None: "ordinary",
    (True, False): "rows",
    (False, True): "columns",
    (True, True): "rows and columns",
}

# In one call of a function, whose own cost is of no interest here.
GRADIENTS = 8

# Inputs' shape and outputs' channels; a number in front stands for a Dense layer.
LAYERS = (
    ((784,), 300),
    ((800,), 500),
    ((784,), 4096),
    ((4096,), 4096),
    ((12, 12, 20), 50),
    ((32, 32, 64), 64),
    ((16, 16, 128), 128),
    ((8, 8, 256), 256),
    ((4, 4, 512), 512),
    ((2, 2, 512), 512),
)


def main(_):
    print(f"Batches of {FLAGS.batch_size}, milliseconds.\n")
    print("| layer | active | ordinary | restricted | ratio | expected | rule |")
    print("|---|---|---|---|---|---|---|")
    shares = list(map(float, FLAGS.shares))
    kinds = {"product": backend.PRODUCT_COSTS, "convolution": backend.CONVOLUTION_COSTS}
    for (kind, used), is_dense in zip(kinds.items(), (True, False), strict=True):
        chosen = [layer for layer in LAYERS if (len(layer[0]) == 1) == is_dense]
        rows = [measured(*layer, share) for layer in chosen for share in shares]
        print_costs(kind, rows, used)


def measured(shape, channels, share):
    """Times one layer, prints the times, and returns what the constants are fitted to."""
    rng = np.random.default_rng(0)
    layer = build_layer(shape, channels)
    ((_, operation),) = layers._operations_of(layer)
    trained = random_mask(rng, tuple(layer.kernel.shape), share)
    indices = keras.Variable(np.flatnonzero(trained), dtype="int32", trainable=False)
    block = Block(operation, layer.kernel, trained, True, True)
    inputs = [random_tensor(rng, (FLAGS.batch_size, *shape)) for _ in range(GRADIENTS)]
    output_shape = operation.apply(inputs[0], layer.kernel.value).shape
    upstreams = [random_tensor(rng, output_shape) for _ in range(GRADIENTS)]

    def ordinary(inputs, upstream):
        if len(shape) == 1:
            gradient = keras.ops.matmul(keras.ops.transpose(inputs), upstream)
        else:
            gradient = backend.convolution_gradient(operation, inputs, trained.shape, upstream)
        return backend.gather(gradient, indices)

    def restricted(inputs, upstream):
        return entries_of(block.gradient(inputs, upstream))

    times = in_turns([ordinary, restricted], inputs, upstreams)
    matrices = operation.matrices(trained)
    places = operation.places((None, *shape))
    work = cost_model.works(matrices, places)[True, True]
    expected = np.dot(work, operation.costs) / (places[1] * trained.size)
    way = cost_model.cheapest_block(matrices, places, operation.ways, operation.costs)
    print(
        f"| {' x '.join(map(str, shape))} -> {channels} | {share:.0%} | {times[0]:.2f} "
        f"| {times[1]:.2f} | {times[1] / times[0]:.2f} | {expected:.2f} "
        f"| {WORDS[way]} |",
        flush=True,
    )
    return [*work, times[1] / times[0] * places[1] * trained.size]


def build_layer(shape, channels):
    layer = (
        keras.layers.Dense(channels)
        if len(shape) == 1
        else keras.layers.Conv2D(channels, 3 if shape[0] != 12 else 5, padding="same")
    )
    layer.build((None, *shape))
    return layer


def random_mask(rng, shape, share):
    """A mask with one trained entry in each active row, and in each active column."""
    rows, columns = (
        rng.choice(size, max(1, round(share * size)), replace=False) for size in shape[-2:]
    )
    number = max(len(rows), len(columns))
    trained = np.zeros(shape, bool)
    trained[..., np.resize(rows, number), np.resize(columns, number)] = True
    return trained


def random_tensor(rng, shape):
    return keras.ops.convert_to_tensor(rng.normal(size=shape).astype("float32"))


def entries_of(gradient):
    """The gradient of the trained entries, of a compact gradient of any backend."""
    of_backend = {
        "tensorflow": lambda: gradient.values,
        "jax": lambda: gradient,
        "torch": lambda: gradient.entries.values,
    }
    return of_backend[keras.backend.backend()]()


def in_turns(gradients, inputs, upstreams):
    """The median time of each gradient in milliseconds."""
    compiled = [all_at_once(gradient) for gradient in gradients]
    times = [[] for _ in gradients]
    for run in range(FLAGS.runs + 1):
        for function, own in zip(compiled, times, strict=True):
            start = time.perf_counter()
            float(function(inputs, upstreams))
            if run:  # the first one traces
                own.append((time.perf_counter() - start) / GRADIENTS * 1e3)
    return [statistics.median(own) for own in times]


def all_at_once(gradient):
    """A function that computes several gradients one after the other, as a training step does."""

    def compute(inputs, upstreams):
        total = keras.ops.zeros(())
        for one, upstream in zip(inputs, upstreams, strict=True):
            total = total + gradient(after(total, one), upstream)[0]
        return total

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(compute, jit_compile=FLAGS.jit_compile, autograph=False)
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(compute)
    return compute


def after(number, tensor):
    """The tensor, which is not used before the number is there."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.control_dependencies([number]):
            return tf.identity(tensor)
    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.optimization_barrier((tensor, number))[0]
    return tensor


def print_costs(kind, rows, used):
    table = np.array(rows, float)
    weights = 1 / table[:, -1:]  # relative errors
    found, *_ = np.linalg.lstsq(table[:, :-1] * weights, np.ones(len(table)), rcond=None)
    found, used = (" / ".join(f"{cost:,.1f}" for cost in costs) for costs in (found, used))
    print(
        f"\nIn a {kind}, a multiplication / a collected number / a layer cost {found}. "
        f"Used: {used}.\n"
    )


if __name__ == "__main__":
    app.run(main)
