"""What `speed.py` times: a function for each variant that does one run."""

import functools
import math
import time

import keras
import numpy as np
import tensorflow as tf
from _bare_loop import BareLoop
from _common import compile_model, masked, mlp

import keras_freeze as kf
from keras_freeze.paper import models

# Small rates: a NaN or a denormal number would change the times.
SGD = {"learning_rate": 0.01, "momentum": 0.9}
_ADAM = {"learning_rate": 1e-4}
_ROWS_IN_MEMORY = 20_000


@functools.lru_cache(maxsize=1)
def rows_in_memory(dataset, data_dir):
    images, labels = kf.datasets.load_arrays(dataset, data_dir=data_dir)
    return images[:_ROWS_IN_MEMORY].copy(), labels[:_ROWS_IN_MEMORY].copy()


def batches(case, data_dir):
    """The images and labels of a run, from the first again where the data set is too small."""
    images, labels = rows_in_memory(case.dataset, data_dir)
    chosen = np.arange(case.num_images) % len(images)
    return images[chosen], labels[chosen]


def build(case):
    if case.network.startswith("mlp_"):
        return mlp(int(case.network.removeprefix("mlp_")))
    facts = kf.datasets.info(case.dataset)
    return models.MODELS[case.network](facts.num_classes, facts.image_shape, seed=0)


def freeze_optimizer(inner, rate):
    return kf.FreezeOptimizer(sgd() if inner == "sgd" else adam(), rate)


def sgd():
    return keras.optimizers.SGD(**SGD)


def adam():
    return keras.optimizers.Adam(**_ADAM)


def work_left(model, mask):
    """The share of the weight gradients' products in rows and columns with a trained weight."""
    left = whole = 0
    for entry in mask.entries:
        layer = model.get_layer(entry.path.split("/")[-2])
        trained = entry.trained.reshape(-1, *entry.trained.shape[-2:])
        active = trained.any((0, 2)).mean() * trained.any((0, 1)).mean()
        products = entry.trained.size * math.prod(layer.output.shape[1:-1])
        left += active * products
        whole += products
    return left / whole


def runner(variant, case, images, labels, mask, worker, data_dir):
    """A function that does one run and gives wall and CPU seconds a step, and the last loss."""
    if variant.startswith("torch"):
        return functools.partial(worker.run, variant)
    if variant == "train":
        return train_runner(case, data_dir)
    shape = (case.steps, case.batch_size)
    images, labels = images.reshape(*shape, *images.shape[1:]), labels.reshape(shape)
    if variant == "bare":
        return BareLoop(build(case), mask, images, labels, jit_compile=case.jit_compile, **SGD)
    model = build_variant(variant, case, mask)
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    return functools.partial(fit, model, data.prefetch(tf.data.AUTOTUNE), case.steps, Stopwatch)


def build_variant(variant, case, mask):
    model = build(case)
    if variant == "floor":
        variables = model.trainable_variables
        for entry in mask.entries:
            variables[entry.position].trainable = False
    settings = {"steps_per_execution": case.steps, "jit_compile": case.jit_compile}
    compile_model(model, optimizer_of(variant, case.rate, mask), **settings)
    if variant.startswith("freeze"):
        kf.freeze(model, mask=mask)
    if variant.endswith("ordinary"):
        kf.restore_gradients(model)
    return model


def optimizer_of(variant, rate, mask):
    if variant.startswith("freeze"):
        return freeze_optimizer("adam" if "adam" in variant else "sgd", rate)
    if variant == "masked_sgd":
        return masked(keras.optimizers.SGD, mask, **SGD)
    return adam() if variant == "plain_adam" else sgd()


def train_runner(case, data_dir):
    setup = kf.training.prepare(
        case.dataset, case.network, "freezenet", case.rate, data_dir=data_dir
    )
    return functools.partial(
        fit, setup.network, setup.batches(), setup.steps_per_epoch, EpochStopwatch
    )


def fit(model, data, steps, make_watch):
    watch = make_watch()
    history = model.fit(data, shuffle=False, verbose=0, callbacks=[watch]).history
    return watch.seconds / steps, watch.cpu_seconds / steps, history["loss"][-1]


class Stopwatch(keras.callbacks.Callback):
    """Times the one call that does all steps, without what `fit` needs to start and to end."""

    def on_train_batch_begin(self, batch, logs=None):
        self.start()

    def on_train_batch_end(self, batch, logs=None):
        self.stop()

    def start(self):
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def stop(self):
        self.seconds = time.perf_counter() - self._start
        self.cpu_seconds = time.process_time() - self._cpu_start


class EpochStopwatch(Stopwatch):
    """Times a whole epoch: many calls, and the data set's start."""

    def on_train_batch_begin(self, batch, logs=None):
        pass

    def on_train_batch_end(self, batch, logs=None):
        pass

    def on_epoch_begin(self, epoch, logs=None):
        self.start()

    def on_epoch_end(self, epoch, logs=None):
        self.stop()
