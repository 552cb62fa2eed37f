"""FreezeNet in NumPy: gradients, masks and steps by hand, which all tiers compare with."""

import numpy as np


class SGDByHand:
    """The recurrence of SGD, for one array."""

    def __init__(self, momentum=0.0, nesterov=False):
        self._momentum, self._nesterov, self._velocity = momentum, nesterov, 0.0

    def change(self, gradient, learning_rate):
        """What the next step adds to the array."""
        downhill = -learning_rate * np.asarray(gradient, "float64")
        self._velocity = self._momentum * self._velocity + downhill
        return self._momentum * self._velocity + downhill if self._nesterov else self._velocity


class AdamByHand:
    """The recurrence of Adam with Keras's defaults, for one array."""

    def __init__(self):
        self._num_steps, self._mean, self._square = 0, 0.0, 0.0

    def change(self, gradient, learning_rate):
        """What the next step adds to the array."""
        gradient = np.asarray(gradient, "float64")
        self._num_steps += 1
        self._mean = 0.9 * self._mean + 0.1 * gradient
        self._square = 0.999 * self._square + 0.001 * gradient**2
        correction = np.sqrt(1 - 0.999**self._num_steps) / (1 - 0.9**self._num_steps)
        return -learning_rate * correction * self._mean / (np.sqrt(self._square) + 1e-7)


class DenseByHand:
    """A stack of Dense layers, ReLU but for the last, trained by SGD with momentum in NumPy.

    Args:
        values: kernels and biases in turn, of each layer.
        learning_rate, momentum: of SGD.
        l2: the coupled weight decay of what is trained.
    """

    def __init__(self, values, learning_rate=0.1, momentum=0.9, l2=0.0):
        self.values = [value.astype("float64") for value in values]
        self.masks = [np.ones(value.shape, bool) for value in values]
        self._recurrences = [SGDByHand(momentum) for _ in values]
        self._rate, self._l2 = learning_rate, l2

    def _forward(self, x):
        """What each layer is given, and the logarithms of the probabilities."""
        inputs, hidden = [], x.reshape(len(x), -1).astype("float64")
        for kernel, bias in zip(self.values[::2], self.values[1::2], strict=True):
            inputs.append(hidden)
            outputs = hidden @ kernel + bias
            hidden = np.maximum(outputs, 0.0)
        shifted = outputs - outputs.max(axis=1, keepdims=True)
        return inputs, shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))

    def loss(self, x, y):
        """The mean cross-entropy of a batch."""
        return -self._forward(x)[1][np.arange(len(y)), y].mean()

    def gradients(self, x, y):
        """Of the mean cross-entropy of a batch, by the variables."""
        inputs, log_probabilities = self._forward(x)
        back = np.exp(log_probabilities)
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
        self.apply(g + self._l2 * w for g, w in zip(self.gradients(x, y), self.values, strict=True))

    def apply(self, gradients):
        """Do what a step does with its gradients, decay included."""
        for i, gradient in enumerate(gradients):
            change = self._recurrences[i].change(gradient, self._rate)
            self.values[i] = self.values[i] + np.where(self.masks[i], change, 0.0)


def brute_force_mask(scores, k):
    """The k largest of all scores, ties to the lower position, by a stable sort of everything."""
    flat = np.concatenate([s.reshape(-1) for s in scores])
    chosen = np.zeros(flat.size, bool)
    chosen[np.argsort(-flat, kind="stable")[:k]] = True
    ends = np.cumsum([s.size for s in scores])
    return [m.reshape(s.shape) for m, s in zip(np.split(chosen, ends[:-1]), scores, strict=True)]
