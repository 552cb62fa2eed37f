"""Models with a training step of their own, and masks that follow from it by hand."""

import keras
from helpers import (
    blobs,
    crossentropy,
    equals_by_hand,
    is_weight,
    mask_by_hand,
    same_bits,
    sgd,
    value_of,
    values_of,
)
from keras import ops
from own_steps import BACKEND, OwnStep

import keras_freeze as kf

RATE = 0.75


def freezing(**arguments):
    return kf.FreezeOptimizer(sgd(momentum=0.9), freeze_rate=RATE, **arguments)


def dense(*units, inputs=6, name=None, **arguments):
    layers = [keras.layers.Dense(n, activation="tanh", **arguments) for n in units]
    return keras.Sequential([keras.Input((inputs,)), *layers], name=name)


class AutoEncoder(OwnStep):
    """A variational autoencoder as in Keras's guide: an outer model that is never called."""

    def __init__(self):
        super().__init__()
        self.encoder = dense(8, 4, name="encoder")
        self.decoder = dense(8, 6, inputs=2, name="decoder")
        self.seed_generator = keras.random.SeedGenerator(3)

    def loss_of(self, data):
        x = data[0] if isinstance(data, (tuple, list)) else data
        mean, log_variance = ops.split(self.encoder(x), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator)
        decoded = self.decoder(mean + ops.exp(0.5 * log_variance) * noise)
        divergence = ops.square(mean) + ops.exp(log_variance) - log_variance - 1.0
        return ops.mean(ops.square(decoded - x)) + 0.1 * ops.mean(divergence)


class Flow(OwnStep):
    """Like a normalizing flow: a loss in `train_step`, and kernel regularizers."""

    def __init__(self):
        super().__init__()
        self.scale = dense(8, 6, kernel_regularizer=keras.regularizers.L2(0.5))
        self.shift = dense(8, 6, kernel_regularizer=keras.regularizers.L2(0.5))

    def call(self, x):
        return x * ops.exp(self.scale(x)) + self.shift(x), self.scale(x)

    def loss_of(self, data):
        x = data[0] if isinstance(data, (tuple, list)) else data
        y, log_determinant = self(x)
        return ops.mean(ops.square(y)) - ops.mean(log_determinant)


class DictBatches(OwnStep):
    """Trains on dicts that only the step understands."""

    def __init__(self):
        super().__init__()
        self.network = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5, seed=1),
                keras.layers.Dense(3),
            ]
        )

    def call(self, x, training=False):
        return self.network(x, training=training)

    def loss_of(self, data):
        return crossentropy()(data["label"], self(data["image"], training=True))


class Distiller(OwnStep):
    def __init__(self):
        super().__init__()
        self.teacher = dense(20, 3, name="teacher")
        self.student = dense(8, 3, name="student")

    def trained_variables(self):
        return self.student.trainable_variables

    def loss_of(self, data):
        x, y = data
        target = ops.stop_gradient(self.teacher(x))
        return ops.mean(ops.square(self.student(x) - target)) + crossentropy()(y, self.student(x))


def assert_mask_by_hand(mask, variables, gradients, rate=RATE):
    """The mask is equation 1 over these variables, and over no others."""
    pairs = [(v, g) for v, g in zip(variables, gradients, strict=True) if is_weight(v)]
    expected = mask_by_hand([value_of(v) for v, _ in pairs], [g for _, g in pairs], rate)
    assert len(mask.entries) == len(pairs)
    for (variable, _), by_hand in zip(pairs, expected, strict=True):
        assert equals_by_hand(mask[variable], by_hand)


def tensors(data):
    return keras.tree.map_structure(ops.convert_to_tensor, data)


def compiled(make, optimizer=None):
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(optimizer or freezing())
    return model


def every_value(model):
    return values_of([*model.trainable_variables, *model.non_trainable_variables])


def assert_same_values(first, second):
    assert len(first) == len(second)
    assert all(same_bits(a, b) for a, b in zip(first, second, strict=True))


CASES = {
    "vae": (AutoEncoder, lambda x, y: x),
    "flow": (Flow, lambda x, y: (x, y)),
    "dict": (DictBatches, lambda x, y: {"image": x, "label": y}),
    "distiller": (Distiller, lambda x, y: (x, y)),
}


def teacher_is_fixed(model):
    """On JAX the gradients of a step are those of all trainable variables."""
    if isinstance(model, Distiller) and BACKEND == "jax":
        model.teacher.trainable = False
    return model


def made(case, optimizer=None):
    make, pack = CASES[case]
    model = teacher_is_fixed(compiled(make, optimizer))
    if BACKEND != "tensorflow":
        model.built = True  # else `fit` calls the outer model
    if not all(one.built for one in model._flatten_layers(include_self=False)):
        model(blobs()[0])
    data = pack(*blobs())
    arguments = data if isinstance(data, tuple) else (data,)
    return model, data, arguments
