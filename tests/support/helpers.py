"""What the tests of training share: tiny data and models, comparing bits, and masks by hand."""

import keras
import numpy as np
from oracle import brute_force_mask

import keras_freeze as kf

# The variables that FreezeNet may freeze, by the last component of their path.
WEIGHT_NAMES = {
    "kernel",
    "recurrent_kernel",
    "depthwise_kernel",
    "pointwise_kernel",
    "embeddings",
}


def bits(array):
    """The bit pattern of a float array, which tells -0.0 from 0.0 and one NaN from another."""
    array = np.ascontiguousarray(array)
    return array.view(f"uint{8 * array.dtype.itemsize}")


def same_bits(first, second):
    return np.array_equal(bits(first), bits(second))


def value_of(variable):
    return np.array(keras.ops.convert_to_numpy(variable))


def values_of(variables):
    return [value_of(v) for v in variables]


def is_weight(variable):
    return variable.path.split("/")[-1] in WEIGHT_NAMES


def blobs(num=48, features=6, classes=3, seed=0):
    """A batch of inputs and integer labels that a linear network can tell apart."""
    rng = np.random.default_rng(seed)
    y = np.arange(num) % classes
    x = rng.normal(size=(num, features)) + 2.0 * rng.normal(size=(classes, features))[y]
    return x.astype("float32"), y


def dense_model(seed=0, dtype="float32"):
    """A network with two each of kernels, biases and normalisation parameters, in any precision."""
    keras.utils.set_random_seed(seed)
    default = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh", name="body"),
                keras.layers.BatchNormalization(name="norm"),
                keras.layers.Dense(3, name="head"),
            ]
        )
    finally:
        keras.config.set_dtype_policy(default)


def two_dense_layers(seed=0, name=None):
    """Kernels of 6 x 8 and 8 x 3, biases of 8 and 3."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", name="body"),
            keras.layers.Dense(3, name="head"),
        ],
        name=name,
    )


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sgd(learning_rate=0.1, **arguments):
    return keras.optimizers.SGD(learning_rate, **arguments)


def compiled(model, optimizer=None, **arguments):
    """The model, compiled with a FreezeOptimizer that freezes three quarters."""
    if optimizer is None:
        optimizer = kf.FreezeOptimizer(sgd(momentum=0.9), freeze_rate=0.75)
    arguments = {"loss": crossentropy(), **arguments}
    model.compile(optimizer=optimizer, **arguments)
    return model


def fit(model, x, y=None, **arguments):
    arguments = {"epochs": 1, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(x, y, **arguments)


def mask_by_hand(weights, gradients, freeze_rate):
    """Equation 1 and algorithm 1 by sorting; without the rule of at least one weight a layer."""
    scores = [np.abs(w * g) for w, g in zip(weights, gradients, strict=True)]
    num_trained = int((1 - freeze_rate) * sum(s.size for s in scores))  # exact for quarters
    return brute_force_mask(scores, num_trained)


def equals_by_hand(found, expected):
    """Whether a layer's mask is the one by hand, where a layer left empty is given one weight."""
    return np.array_equal(found, expected) if expected.any() else found.sum() == 1


def gradients_by_autodiff(model, x, y, loss=None):
    """The backend's own gradients of a loss at the model's present values, its state kept."""
    of_backend = {"tensorflow": _tensorflow_gradients, "jax": _jax_gradients}
    loss = crossentropy() if loss is None else loss
    state = [(v, value_of(v)) for v in model.non_trainable_variables]
    gradients = of_backend.get(keras.backend.backend(), _torch_gradients)(model, x, y, loss)
    for variable, before in state:
        variable.assign(before)
    return [
        np.zeros(v.shape, "float32") if g is None else value_of(g)
        for g, v in zip(gradients, model.trainable_variables, strict=True)
    ]


def _tensorflow_gradients(model, x, y, loss):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True))
    gradients = tape.gradient(value, [v.value for v in model.trainable_variables])
    return [None if g is None else tf.convert_to_tensor(g) for g in gradients]


def _jax_gradients(model, x, y, loss):
    import jax

    def loss_of(trained, others):
        outputs, _ = model.stateless_call(trained, others, x, training=True)
        return loss(y, outputs)

    groups = model.trainable_variables, model.non_trainable_variables
    return jax.grad(loss_of)(*([v.value for v in group] for group in groups))


def _torch_gradients(model, x, y, loss):
    import torch

    value = loss(keras.ops.convert_to_tensor(y), model(x, training=True))
    variables = [v.value for v in model.trainable_variables]
    return torch.autograd.grad(value, variables, allow_unused=True)


def training_step(model, optimizer, loss, jit_compile):
    """A step of a loop of one's own, in a `tf.function`."""
    import tensorflow as tf

    @tf.function(jit_compile=jit_compile)
    def step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True))

    return step


def assert_frozen_bits_kept(variables, mask, before):
    """Every entry that the mask freezes has the bits it had; at least one entry is frozen."""
    num_frozen = 0
    for variable, old in zip(variables, before, strict=True):
        if not is_weight(variable):
            continue
        frozen = ~mask[variable]
        num_frozen += frozen.sum()
        assert same_bits(value_of(variable)[frozen], old[frozen]), variable.path
    assert num_frozen


def assert_trained_moved(variables, mask, before):
    """Something that is trained has moved, in the weights and in everything else."""
    for of_weights in (True, False):
        pairs = [
            (value_of(v), old, mask[v] if of_weights else np.ones(old.shape, bool))
            for v, old in zip(variables, before, strict=True)
            if is_weight(v) == of_weights
        ]
        assert any((new != old)[trained].any() for new, old, trained in pairs)


# What a run measures that has no finite number from its first step on.
WITHOUT_FINITE_NUMBERS = {
    "history": {"accuracy": [None], "val_accuracy": [None]},
    "best_epoch": 0,
    "validation_accuracy": None,
    "test_accuracy": None,
    "gradient_flow": None,
    "flow": {"epoch": [0], "gradient_flow": [None], "gradient_flow_deviation": [None]},
}
