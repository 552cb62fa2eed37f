"""The ways to train a model by which the contract suite goes."""

import keras
from helpers import crossentropy

BATCH = 8
EPOCHS = 2


def _compiled(optimizer, **arguments):
    def train(model, x, y):
        model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0)

    def prepare(model):
        model.compile(optimizer, crossentropy(), **arguments)

    return prepare, train


def _on_batches(optimizer):
    def train(model, x, y):
        for _ in range(EPOCHS):
            for batch in batches(x, y):
                model.train_on_batch(*batch)

    return lambda model: model.compile(optimizer, crossentropy()), train


def batches(x, y):
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]


def _custom(optimizer):
    step_of = {"tensorflow": _tensorflow_step, "jax": _jax_step, "torch": _torch_step}

    def train(model, x, y):
        if not model.built:
            model(x[:1])
        step = step_of[keras.backend.backend()](model, optimizer)
        for _ in range(EPOCHS):
            for batch in batches(x, y):
                step(*batch)

    return lambda model: None, train


def _tensorflow_step(model, optimizer):
    import tensorflow as tf

    loss_function = crossentropy()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            value = optimizer.scale_loss(loss_function(y, model(x, training=True)))
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(value, variables), variables)

    return step


def _jax_step(model, optimizer):
    import jax

    loss_function = crossentropy()
    optimizer.build(model.trainable_variables)

    def loss_of(trainable, others, state, x, y):
        outputs, others = model.stateless_call(trainable, others, x, training=True)
        with keras.StatelessScope(list(zip(optimizer.variables, state, strict=True))):
            return optimizer.scale_loss(loss_function(y, outputs)), others

    @jax.jit
    def compute(trainable, others, state, x, y):
        grads, others = jax.grad(loss_of, has_aux=True)(trainable, others, state, x, y)
        trainable, state = optimizer.stateless_apply(state, grads, trainable)
        return trainable, others, state

    def step(x, y):
        groups = model.trainable_variables, model.non_trainable_variables, optimizer.variables
        values = compute(*([v.value for v in group] for group in groups), x, y)
        for group, new in zip(groups, values, strict=True):
            for variable, value in zip(group, new, strict=True):
                variable.assign(value)

    return step


def _torch_step(model, optimizer):
    import torch

    loss_function = crossentropy()

    def step(x, y):
        model.zero_grad()
        value = loss_function(keras.ops.convert_to_tensor(y), model(x, training=True))
        optimizer.scale_loss(value).backward()
        variables = model.trainable_variables
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in variables], variables)

    return step


_LOOPS = {
    "fit": _compiled,
    "jit": lambda optimizer: _compiled(optimizer, jit_compile=True),
    "eager": lambda optimizer: _compiled(optimizer, run_eagerly=True),
    "steps_per_execution": lambda optimizer: _compiled(optimizer, steps_per_execution=3),
    "train_on_batch": _on_batches,
    "custom": _custom,
}


def loop(name, optimizer):
    """Two functions: one that prepares a model for training, and one that trains it on x and y."""
    return _LOOPS[name](optimizer)
