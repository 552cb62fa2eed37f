"""Measures what a change of the mask in training takes, in training steps.

    python benchmarks/moving_masks.py

The network is 784-W-W-10; with the default width it has 15.1 million weights. A change of the mask
is timed in `fit`, between two steps, and divided by the median of the steps of the same run, for
RegrowTrained by gradients (one more pass over a batch) and at random, and for GradualFreezing.
Where other programs share the cores, the time of the CPU tells more than that of the clock. Prints
a Markdown table with medians.
"""

import time

import keras
import numpy as np
from _common import compile_model, log, mlp, table
from absl import app, flags

import keras_freeze as kf

FLAGS = flags.FLAGS
flags.DEFINE_integer("width", 3500, "Neurons of each hidden layer.", lower_bound=1)
flags.DEFINE_float("rate", 0.99, "The freezing rate.", lower_bound=0.0, upper_bound=1.0)
flags.DEFINE_integer("batch_size", 128, "Examples in a step.", lower_bound=1)
flags.DEFINE_integer("changes", 7, "Changes of the mask.", lower_bound=1)

_FREQUENCY = 4  # steps between two changes


class Times(keras.callbacks.Callback):
    """Takes the time of each step, and of what the callback in between does after it."""

    def __init__(self, changes):
        super().__init__()
        self.steps, self.changes = [], []
        self._change = changes

    def set_model(self, model):
        super().set_model(model)
        self._change.set_model(model)

    def set_params(self, params):
        super().set_params(params)
        self._change.set_params(params)

    def on_train_begin(self, logs=None):
        self._change.on_train_begin(logs)

    def on_epoch_begin(self, epoch, logs=None):
        self._change.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        self._start = now()

    def on_train_batch_end(self, batch, logs=None):
        if logs is not None:
            float(logs["loss"])  # waits for the step
        end = now()
        before = kf.get_mask(self.model).fingerprint
        start = now()
        self._change.on_train_batch_end(batch, logs)
        seconds = now() - start
        if kf.get_mask(self.model).fingerprint != before:
            self.changes.append(seconds)
        else:
            self.steps.append(end - self._start)


def main(_):
    rng = np.random.default_rng(0)
    num_steps = _FREQUENCY * (FLAGS.changes + 1)
    x = rng.random((FLAGS.batch_size * num_steps, 28, 28, 1), np.float32)
    y = rng.integers(0, 10, len(x))
    data = {"x": x, "y": y, "batch_size": FLAGS.batch_size}
    regrow, gradual = kf.callbacks.RegrowTrained, kf.callbacks.GradualFreezing
    schedules = {
        'RegrowTrained, "gradient"': (FLAGS.rate, regrow(0.3, _FREQUENCY, **data)),
        'RegrowTrained, "random"': (FLAGS.rate, regrow(0.3, _FREQUENCY, "random")),
        "GradualFreezing, from 0": (0.0, gradual(0.0, FLAGS.rate, 0, num_steps + 1, _FREQUENCY)),
    }
    rows = []
    for name, (rate, callback) in schedules.items():
        keras.utils.set_random_seed(0)
        optimizer = kf.FreezeOptimizer(keras.optimizers.SGD(0.01, momentum=0.9), FLAGS.rate)
        model = compile_model(mlp(FLAGS.width), optimizer)
        kf.freeze(model, x[: FLAGS.batch_size], y[: FLAGS.batch_size], freeze_rate=rate)
        times = Times(callback)
        fit = {"batch_size": FLAGS.batch_size, "shuffle": False, "verbose": 0}
        model.fit(x, y, callbacks=[times], **fit)
        step, change = np.median(times.steps, 0), np.median(times.changes, 0)
        numbers = np.stack([1000 * step, 1000 * change, change / step]).T.reshape(-1)
        rows.append([name, *(f"{number:.1f}" for number in numbers)])
        log(name)
        num_weights = kf.get_mask(model).num_weights
    title = f"{num_weights:,} weights, q = {FLAGS.rate:g}, {keras.backend.backend()}"
    of_each = ["ms a step", "ms a change", "steps a change"]
    header = [f"{name}, {clock}" for clock in ("clock", "CPU") for name in of_each]
    table(title, ["", *header], rows)


def now():
    """Seconds of the clock and of the CPU."""
    return np.array([time.perf_counter(), time.process_time()])


if __name__ == "__main__":
    app.run(main)
