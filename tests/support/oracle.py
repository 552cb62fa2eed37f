"""FreezeNet in NumPy: gradients, masks and steps by hand, which all tiers compare with."""

import numpy as np


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
        self._velocities = [np.zeros(value.shape) for value in values]
        self._rate, self._momentum, self._l2 = learning_rate, momentum, l2

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
        for i, gradient in enumerate(self.gradients(x, y)):
            gradient = gradient + self._l2 * self.values[i]
            self._velocities[i] = self._momentum * self._velocities[i] - self._rate * gradient
            self.values[i] = self.values[i] + np.where(self.masks[i], self._velocities[i], 0.0)


def brute_force_mask(scores, k):
    """The k largest of all scores, ties to the lower position, by a stable sort of everything."""
    flat = np.concatenate([s.reshape(-1) for s in scores])
    chosen = np.zeros(flat.size, bool)
    chosen[np.argsort(-flat, kind="stable")[:k]] = True
    ends = np.cumsum([s.size for s in scores])
    return [m.reshape(s.shape) for m, s in zip(np.split(chosen, ends[:-1]), scores, strict=True)]
