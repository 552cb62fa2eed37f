"""What the tests of loops, backends and devices share; nothing here belongs to one backend."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np

ROOT = Path(__file__).parents[2]


def run_python(code, *arguments, backend=None, **environment):
    """What a program prints in a process of its own, with the current backend or another one."""
    path = os.pathsep.join([str(ROOT / "tests" / "core"), *filter(None, sys.path)])
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend or keras.backend.backend(),
        "PYTHONPATH": path,
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


class DenseByHand:
    """A stack of Dense layers, ReLU but for the last, trained by SGD with momentum in NumPy.

    Args:
        values: kernels and biases in turn, of each layer.
        learning_rate, momentum: of SGD.
    """

    def __init__(self, values, learning_rate, momentum):
        self.values = [value.astype("float64") for value in values]
        self.masks = [np.ones(value.shape, bool) for value in values]
        self._velocities = [np.zeros(value.shape) for value in values]
        self._rate, self._momentum = learning_rate, momentum

    def gradients(self, x, y):
        """Of the mean cross-entropy of a batch, by the variables."""
        inputs, hidden = [], x.reshape(len(x), -1).astype("float64")
        for kernel, bias in zip(self.values[::2], self.values[1::2], strict=True):
            inputs.append(hidden)
            outputs = hidden @ kernel + bias
            hidden = np.maximum(outputs, 0.0)
        shifted = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        back = shifted / shifted.sum(axis=1, keepdims=True)
        back[np.arange(len(y)), y] -= 1.0
        back /= len(y)
        found = []
        for layer in reversed(range(len(inputs))):
            found[:0] = [inputs[layer].T @ back, back.sum(axis=0)]
            back = (back @ self.values[2 * layer].T) * (inputs[layer] > 0.0)
        return found

    def freeze(self, x, y, freeze_rate):
        """Equation 1 and algorithm 1 by sorting; returns how far apart the threshold's scores are.

        Relative to these; without the rule of at least one weight a layer.
        """
        gradients = self.gradients(x, y)[::2]
        scores = [np.abs(w * g) for w, g in zip(self.values[::2], gradients, strict=True)]
        flat = np.sort(np.concatenate([s.ravel() for s in scores]))[::-1]
        num_trained = round((1.0 - freeze_rate) * flat.size)
        first, last = flat[num_trained - 1 : num_trained + 1]
        self.masks[::2] = [s > (first + last) / 2.0 for s in scores]
        return (first - last) / first

    def step(self, x, y):
        """One step that leaves what is not trained as it is."""
        for i, gradient in enumerate(self.gradients(x, y)):
            self._velocities[i] = self._momentum * self._velocities[i] - self._rate * gradient
            self.values[i] = self.values[i] + np.where(self.masks[i], self._velocities[i], 0.0)
