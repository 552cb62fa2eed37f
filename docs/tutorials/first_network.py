"""
Title: First network
Description: Freeze 95 percent of a network, look at the mask, and store the network in a few kilobytes.
"""

"""
## Setup

This tutorial needs Keras, one backend and `keras_freeze`; the data are made here.
"""

import os
import tempfile

import keras
import numpy as np

import keras_freeze as kf

EPOCHS = 10
NUM_EXAMPLES = 6000

"""
Ten classes: a random image for each, and noise on top of it. A fifth of the examples is for testing.
"""

rng = np.random.default_rng(0)
prototypes = rng.normal(size=(10, 28, 28, 1))
y = rng.integers(10, size=NUM_EXAMPLES)
x = (prototypes[y] + 4 * rng.normal(size=(NUM_EXAMPLES, 28, 28, 1))).astype("float32")
x_test, y_test = x[: NUM_EXAMPLES // 5], y[: NUM_EXAMPLES // 5]
x_train, y_train = x[NUM_EXAMPLES // 5 :], y[NUM_EXAMPLES // 5 :]

"""
## Build the model

Any Keras model will do. `reinitialize` draws its weights from a seed, each layer from its own
distribution, with numbers that are the same on every machine and backend. Frozen weights can then be
left out of the file: the seed gives them again.
"""

model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(300, activation="relu", name="fc1"),
        keras.layers.Dense(100, activation="relu", name="fc2"),
        keras.layers.Dense(10, name="fc3"),
    ]
)
kf.reinitialize(model, seed=0)

"""
## Freeze

`FreezeOptimizer` wraps a Keras optimizer. `freeze_rate=0.95` is the freezing rate *q*: 95 percent of the
weights will not be trained.
"""

model.compile(
    optimizer=kf.FreezeOptimizer(keras.optimizers.Adam(0.01), freeze_rate=0.95),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)

"""
`freeze` computes one gradient on the given batch, scores each weight by |gradient * weight|, and chooses
the largest scores of the whole network. It returns the mask.
"""

mask = kf.freeze(model, x_train[:500], y_train[:500])
print(f"{mask.num_trained:,} of {mask.num_weights:,} weights are trained.")

"""
The mask is boolean, True where a weight is trained. Layers differ: here the last layer keeps most of its
weights, the first one few.
"""

for layer in ("fc1", "fc2", "fc3"):
    print(f"{layer}: {mask[f'{layer}/kernel'].mean():.1%} trained")

"""
## Train

`fit` works as always. Afterwards every frozen weight equals its initial value bit for bit. The test accuracy
is about 94 %.
"""

kernel_before = keras.ops.convert_to_numpy(model.get_layer("fc1").kernel)
model.fit(x_train, y_train, batch_size=100, epochs=EPOCHS, verbose=0)
kernel_after = keras.ops.convert_to_numpy(model.get_layer("fc1").kernel)
frozen = ~mask["fc1/kernel"]
assert np.array_equal(kernel_before[frozen], kernel_after[frozen])
print(f"Test accuracy: {model.evaluate(x_test, y_test, verbose=0)[1]:.1%}")

"""
`report` counts what is trained. `q_beta` is the share of all trainable parameters that is frozen, biases
included.
"""

print(kf.report(model))

"""
## Save

A `.freeze` file holds the architecture, the seed, the mask and the trained values. `load` gives the same
network, bit for bit, in a fresh process, too. Here it takes about 50 KB, the `.keras` file 1.2 MB.
"""

folder = tempfile.mkdtemp()
kf.save(model, os.path.join(folder, "model.freeze"))
model.save(os.path.join(folder, "model.keras"))
for name in ("model.freeze", "model.keras"):
    print(f"{name}: {os.path.getsize(os.path.join(folder, name)):,} bytes")

loaded = kf.load(os.path.join(folder, "model.freeze"))
assert all(map(np.array_equal, loaded.get_weights(), model.get_weights()))

"""
## Next

- Choose the trained weights yourself: the guide *Choosing what is trained*.
- Adapt a pretrained network: the tutorial *Fine-tuning with a delta*.
"""
