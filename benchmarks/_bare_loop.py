"""FreezeNet's training step written by hand for Dense layers, in one bare `tf.function`.

No Keras, no optimizer class, no tape: what the method costs where nothing stands around it. The
arithmetic is that of `FreezeOptimizer(SGD(momentum))` with a restricted gradient in the layers
where it pays.
"""

import functools
import time

import numpy as np
import tensorflow as tf

from keras_freeze.restricted.cost_model import cheapest_block


class BareLoop:
    """Trains a copy of a model of Dense layers; calling it does one run of `steps` steps.

    Args:
        model: a built model of Dense layers with ReLU between them.
        mask: which weights are trained.
        images, labels: as many batches as steps, stacked.
        learning_rate, momentum: of SGD.
        jit_compile: whether XLA compiles a step.
    """

    def __init__(self, model, mask, images, labels, learning_rate, momentum, jit_compile):
        kernels, biases = (
            [tf.Variable(v.value) for v in model.trainable_variables[i::2]] for i in (0, 1)
        )
        self._layers = [
            BareLayer(kernel, bias, entry.trained)
            for kernel, bias, entry in zip(kernels, biases, mask.entries, strict=True)
        ]
        self._steps = len(images)
        self._rate, self._momentum = learning_rate, momentum
        self._images = tf.reshape(tf.constant(images), [*images.shape[:2], -1])
        self._labels = tf.constant(labels)
        self._step = tf.function(self._step, jit_compile=jit_compile, autograph=False)
        self._run = tf.function(self._run)

    def __call__(self):
        """Wall and CPU seconds a step, and the last loss."""
        start, cpu_start = time.perf_counter(), time.process_time()
        loss = float(self._run())
        seconds = time.perf_counter() - start, time.process_time() - cpu_start
        return *(s / self._steps for s in seconds), loss

    def _run(self):
        loss = 0.0
        for i in tf.range(self._steps):
            loss = self._step(self._images[i], self._labels[i])
        return loss

    def _step(self, images, labels):
        inputs = [images]
        for layer in self._layers[:-1]:
            inputs.append(tf.nn.relu(layer.forward(inputs[-1])))
        logits = self._layers[-1].forward(inputs[-1])
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        upstream = tf.nn.softmax(logits) - tf.one_hot(labels, logits.shape[-1])
        upstream /= images.shape[0]
        updates = []
        for number in reversed(range(len(self._layers))):
            layer, x = self._layers[number], inputs[number]
            updates.append(functools.partial(layer.update, *layer.gradients(x, upstream)))
            if number:
                upstream = tf.matmul(upstream, layer.kernel, transpose_b=True)
                upstream = tf.where(x > 0, upstream, 0.0)
        for update in updates:
            update(self._rate, self._momentum)
        return loss


class BareLayer:
    """A kernel and its bias, and what is needed to train some entries of the kernel."""

    def __init__(self, kernel, bias, trained):
        self.kernel, self._bias = kernel, bias
        self._indices = np.flatnonzero(trained).astype("int32")
        takes = cheapest_block(trained[None], (1, 1)) or (False, False)
        active = [trained.any(1), trained.any(0)]
        self._rows, self._columns = (
            np.flatnonzero(channels).astype("int32") if take else None
            for take, channels in zip(takes, active, strict=True)
        )
        block = trained[self._rows] if takes[0] else trained
        block = block[:, self._columns] if takes[1] else block
        self._inside = np.flatnonzero(block).astype("int32")
        self._kernel_momentum = tf.Variable(tf.zeros(len(self._indices)))
        self._bias_momentum = tf.Variable(tf.zeros_like(bias))

    def forward(self, x):
        return tf.matmul(x, self.kernel) + self._bias

    def gradients(self, x, upstream):
        """Of the kernel's trained entries, and of the bias."""
        x = x if self._rows is None else tf.gather(x, self._rows, axis=1)
        dy = upstream if self._columns is None else tf.gather(upstream, self._columns, axis=1)
        product = tf.reshape(tf.matmul(x, dy, transpose_a=True), [-1])
        return tf.gather(product, self._inside), tf.reduce_sum(upstream, 0)

    def update(self, kernel_gradient, bias_gradient, rate, momentum):
        self._kernel_momentum.assign(momentum * self._kernel_momentum - rate * kernel_gradient)
        self._bias_momentum.assign(momentum * self._bias_momentum - rate * bias_gradient)
        flat = tf.reshape(self.kernel, [-1])
        values = tf.gather(flat, self._indices) + self._kernel_momentum
        flat = tf.tensor_scatter_nd_update(flat, self._indices[:, None], values)
        self.kernel.assign(tf.reshape(flat, self.kernel.shape))
        self._bias.assign_add(self._bias_momentum)
