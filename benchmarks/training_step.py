"""Times a training step of FreezeOptimizer beside the plain optimizer and a masked gradient.

The variants take turns in one process, so that the machine's drift reaches all of them alike;
the fastest and the median of many short runs are printed, and their ratio to the plain optimizer.

    python benchmarks/training_step.py --model=lenet_300_100 --rates=0.9,0.99
"""

import statistics
import time

import keras
import numpy as np
from absl import app, flags

import keras_freeze as kf
from keras_freeze import models

FLAGS = flags.FLAGS
flags.DEFINE_enum("model", "lenet_300_100", ["mlp_4096", *models.MODELS], "The network.")
flags.DEFINE_list("rates", ["0.9", "0.99", "0.999"], "Freezing rates.")
flags.DEFINE_integer("batch_size", 100, "Images in a step.", lower_bound=1)
flags.DEFINE_integer("steps", 100, "Steps in a run.", lower_bound=1)
flags.DEFINE_integer("runs", 9, "Runs of each variant.", lower_bound=1)
flags.DEFINE_bool("jit_compile", False, "Whether XLA compiles the step.")


class MaskedGradients(keras.optimizers.SGD):
    """What people do by hand: the gradient times a mask, and nothing restored."""

    def __init__(self, masks, **kwargs):
        super().__init__(**kwargs)
        self.masks = [keras.ops.convert_to_tensor(m) for m in masks]

    def apply(self, grads, trainable_variables=None):
        grads = [g * m for g, m in zip(grads, self.masks, strict=True)]
        super().apply(grads, trainable_variables)


def build_network():
    if FLAGS.model != "mlp_4096":
        return models.MODELS[FLAGS.model](seed=0)
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Flatten(),
            keras.layers.Dense(4096, activation="relu"),
            keras.layers.Dense(4096, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def sgd():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def compile_with(optimizer):
    model = build_network()
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=FLAGS.steps,
        jit_compile=FLAGS.jit_compile,
    )
    return model


def variants(rate, x, y):
    """Compiled models by name, ready to be trained."""
    frozen = compile_with(kf.FreezeOptimizer(sgd(), rate))
    mask = kf.freeze(frozen, x[: FLAGS.batch_size], y[: FLAGS.batch_size])
    weights = {entry.position: entry.trained for entry in mask.entries}
    masks = [
        weights.get(i, np.ones(v.shape)).astype("float32")
        for i, v in enumerate(frozen.trainable_variables)
    ]
    return {
        "plain SGD": compile_with(sgd()),
        "masked gradient": compile_with(MaskedGradients(masks, learning_rate=0.01, momentum=0.9)),
        "full shape (first batch)": compile_with(kf.FreezeOptimizer(sgd(), rate)),
        "compact (freeze)": frozen,
    }


def state_bytes(model):
    optimizer = model.optimizer
    return sum(int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in optimizer.variables)


def main(_):
    shape = (1, *build_network().input_shape[1:])
    rng = np.random.default_rng(0)
    size = FLAGS.batch_size * FLAGS.steps
    x = rng.normal(size=(size, *shape[1:])).astype("float32")
    y = rng.integers(0, 10, size)
    print(f"{FLAGS.model}, batches of {FLAGS.batch_size}, milliseconds a step")
    for rate in map(float, FLAGS.rates):
        models_by_name = variants(rate, x, y)
        times = {name: [] for name in models_by_name}
        for run in range(FLAGS.runs + 1):
            for name, model in models_by_name.items():
                start = time.perf_counter()
                model.fit(x, y, batch_size=FLAGS.batch_size, shuffle=False, verbose=0)
                if run:  # the first run traces and compiles
                    times[name].append((time.perf_counter() - start) / FLAGS.steps * 1e3)
        plain = times["plain SGD"]
        print(f"\nq = {rate}\n{'':26}{'fastest':>9}{'median':>9}{'ratio':>7}{'state, KiB':>12}")
        for name, values in times.items():
            ratio = statistics.median(values) / statistics.median(plain)
            print(
                f"{name:26}{min(values):9.2f}{statistics.median(values):9.2f}{ratio:7.2f}"
                f"{state_bytes(models_by_name[name]) / 1024:12.1f}"
            )


if __name__ == "__main__":
    app.run(main)
