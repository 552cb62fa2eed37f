"""The axes of the contract suite: what people combine with a FreezeOptimizer.

Nothing here belongs to one backend: the suite runs on the one that KERAS_BACKEND names.
"""

import keras
import numpy as np
from keras import layers as kl
from keras import optimizers as ko
from pairwise import pairwise

BACKEND = keras.backend.backend()
NUM_CLASSES = 3
NUM_SAMPLES = 24


def _multi():
    return ko.MultiOptimizer(ko.OptimizerMap(ko.SGD(0.05), {".*head/.*": ko.Adam(0.01)}))


OPTIMIZERS = {
    "sgd": lambda: ko.SGD(0.05),
    "momentum": lambda: ko.SGD(0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda: ko.SGD(0.05, momentum=0.9, nesterov=True, global_clipnorm=1.0),
    "accumulating": lambda: ko.SGD(0.05, gradient_accumulation_steps=2),
    "averaging": lambda: ko.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "adam": lambda: ko.Adam(0.01, clipnorm=1.0),
    "amsgrad": lambda: ko.Adam(0.01, amsgrad=True, clipvalue=0.5),
    "adamw": lambda: ko.AdamW(0.01, weight_decay=0.1),
    "rmsprop": lambda: ko.RMSprop(0.01, momentum=0.9, centered=True),
    "adagrad": lambda: ko.Adagrad(0.05),
    "adadelta": lambda: ko.Adadelta(1.0),
    "adamax": lambda: ko.Adamax(0.01),
    "nadam": lambda: ko.Nadam(0.01),
    "ftrl": lambda: ko.Ftrl(0.05, l1_regularization_strength=0.01),
    "lion": lambda: ko.Lion(0.01, weight_decay=0.1),
    "lamb": lambda: ko.Lamb(0.01, weight_decay=0.1),
    "adafactor": lambda: ko.Adafactor(0.01),
    "muon": lambda: ko.Muon(0.01),
    "schedule_free": lambda: ko.ScheduleFreeAdamW(0.05, weight_decay=0.1),
    "multi": _multi,
}


class Subclassed(keras.Model):
    """Has no input shape before its first call."""

    def __init__(self):
        super().__init__()
        self.body = kl.Dense(8, activation="tanh")
        self.norm = kl.BatchNormalization()
        self.head = kl.Dense(NUM_CLASSES, name="head")

    def call(self, x, training=False):
        return self.head(self.norm(self.body(x), training=training))


def _chain(shape, *layers, dtype="float32"):
    end = [kl.Flatten(), kl.Dense(NUM_CLASSES, name="head")]
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers, *end])


def _attention():
    x = keras.Input((4, 6))
    mixed = kl.LayerNormalization()(x + kl.MultiHeadAttention(2, 3)(x, x))
    return keras.Model(x, kl.Dense(NUM_CLASSES, name="head")(kl.Flatten()(mixed)))


def _shared():
    x, dense = keras.Input((6,)), kl.Dense(6, activation="tanh")
    return keras.Model(x, kl.Dense(NUM_CLASSES, name="head")(dense(dense(x))))


def _nested():
    body = keras.Sequential([keras.Input((6,)), kl.Dense(8), kl.PReLU()], name="inner")
    return _chain((6,), body, kl.Dense(8, activation="relu"))


def _several_outputs():
    x = keras.Input((6,))
    body = kl.Dense(8, activation="tanh")(x)
    heads = [kl.Dense(NUM_CLASSES, name=f"head{i}")(body) for i in range(2)]
    return keras.Model(x, kl.Average()(heads))


def _with_lora():
    model = _chain((6,), kl.Dense(8, name="adapted"), kl.Dense(8, activation="tanh"))
    model.get_layer("adapted").enable_lora(2)
    return model


def _quantized():
    short = kl.Dense(8, name="short", dtype="float32")  # int8 goes with no half precision
    model = _chain((6,), short, kl.Dense(8, activation="tanh"))
    short.quantize("int8")
    return model


def _tokens():
    return _chain((5,), kl.Embedding(7, 4), dtype="int32")


LAYERS = {
    "dense": lambda: _chain((6,), kl.Dense(8, activation="tanh"), kl.BatchNormalization()),
    "einsum_dense": lambda: _chain((4, 6), kl.EinsumDense("abc,cd->abd", (4, 5), bias_axes="d")),
    "conv1d": lambda: _chain((8, 3), kl.Conv1D(4, 3), kl.BatchNormalization()),
    "conv2d": lambda: _chain((6, 6, 2), kl.Conv2D(4, 3), kl.GroupNormalization(2)),
    "conv3d": lambda: _chain((4, 4, 4, 2), kl.Conv3D(4, 2)),
    "conv1d_transpose": lambda: _chain((5, 3), kl.Conv1DTranspose(4, 3, strides=2)),
    "conv2d_transpose": lambda: _chain((4, 4, 2), kl.Conv2DTranspose(4, 3, strides=2)),
    "conv3d_transpose": lambda: _chain((3, 3, 3, 2), kl.Conv3DTranspose(3, 2)),
    "depthwise": lambda: _chain((6, 6, 2), kl.DepthwiseConv2D(3, depth_multiplier=2)),
    "separable": lambda: _chain((6, 6, 2), kl.SeparableConv2D(4, 3)),
    "lstm": lambda: _chain((4, 3), kl.LSTM(4)),
    "gru": lambda: _chain((4, 3), kl.GRU(4, return_sequences=True)),
    "attention": _attention,
    "embedding": _tokens,
    "shared": _shared,
    "nested": _nested,
    "several_outputs": _several_outputs,
    "subclassed": Subclassed,
    "lora": _with_lora,
    "quantized": _quantized,
}

DTYPES = ["float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16"]

LOOPS = ["fit", "jit", "eager", "steps_per_execution", "train_on_batch", "custom"]
if BACKEND == "torch":
    LOOPS.remove("jit")  # takes half a minute and a C++ compiler
    LOOPS.remove("steps_per_execution")  # is refused by Keras

WAYS = ["freeze", "first_batch"]

# Every pair of values of two axes; the first twenty show every value. Backends begin elsewhere.
_SHIFT = 7 * ["tensorflow", "jax", "torch"].index(BACKEND)
_LAYERS = [*LAYERS][_SHIFT:] + [*LAYERS][:_SHIFT]
COMBINATIONS = pairwise([OPTIMIZERS, _LAYERS, DTYPES, LOOPS, WAYS])


def build(layer, dtype):
    """The network around a kind of layer in some precision, with inputs and labels for it."""
    keras.utils.set_random_seed(0)
    default = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        model = LAYERS[layer]()
    finally:
        keras.config.set_dtype_policy(default)
    rng = np.random.default_rng(0)
    y = np.arange(NUM_SAMPLES) % NUM_CLASSES
    shape = (6,) if layer == "subclassed" else model.input_shape[1:]
    if layer == "embedding":
        return model, rng.integers(7, size=(NUM_SAMPLES, *shape)).astype("int32"), y
    x = rng.normal(size=(NUM_SAMPLES, *shape)) + rng.normal(size=(NUM_CLASSES, *shape))[y]
    return model, x.astype("float32"), y
