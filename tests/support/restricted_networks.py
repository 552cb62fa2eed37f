"""Networks that use a Dense layer in many ways, for tests of restricted weight gradients."""

import functools

import keras
from keras import layers as kl
from restricted import small_mlp


def functional(connect, shape=(6,)):
    def make():
        keras.utils.set_random_seed(0)
        inputs = keras.Input(shape)
        return keras.Model(inputs, connect(inputs))

    return make


def shared(uses):
    def connect(x):
        layer = kl.Dense(6, activation="tanh")
        for _ in range(uses):
            x = layer(x)
        return kl.Dense(3)(x)

    return functional(connect)


def nested(x):
    inner = keras.Sequential([keras.Input((6,)), kl.Dense(5, activation="tanh")])
    return kl.Dense(3)(inner(x))


def attention(x):
    x = kl.Reshape((2, 3))(x)
    return kl.MultiHeadAttention(2, 3)(x, x)[:, 0]


def cross_attention(x):
    query, value = kl.Reshape((2, 3))(x), kl.Reshape((3, 2))(x)
    layer = kl.MultiHeadAttention(2, 3, value_dim=2, output_shape=3, flash_attention=False)
    # With the scores, since JAX knows no other way for values of a size of their own.
    return layer(query, value, return_attention_scores=True)[0][:, 0]


def attention_along_two_axes(x):
    x = kl.Reshape((2, 1, 3))(x)
    return kl.MultiHeadAttention(2, 3, attention_axes=(1, 2))(x, x)[:, 0, 0]


def grouped_query_attention(x):
    query = kl.Reshape((2, 3))(x)
    value = kl.ZeroPadding1D(1)(query)
    return kl.GroupQueryAttention(2, 4, 2)(query, value, use_causal_mask=True)[:, 1]


def separable_twice(x):
    layer = kl.SeparableConv1D(2, 2, padding="same", activation="tanh")
    return kl.Dense(3)(kl.Flatten()(layer(layer(kl.Reshape((3, 2))(x)))))


class Cell(keras.Layer):
    """A recurrent cell of two Dense layers."""

    def __init__(self, units, **arguments):
        super().__init__(**arguments)
        self.state_size = units
        self.from_inputs, self.from_state = kl.Dense(units), kl.Dense(units)

    def build(self, shape):
        self.from_inputs.build(shape)
        self.from_state.build((None, self.state_size))
        self.built = True

    def call(self, x, states):
        h = keras.ops.tanh(self.from_inputs(x) + self.from_state(states[0]))
        return h, [h]


class ReadTwice(keras.Layer):
    """Uses a Dense layer `uses` times and reads its kernel besides."""

    def __init__(self, uses, as_loss):
        super().__init__()
        self.dense, self.uses, self.as_loss = kl.Dense(6, activation="tanh"), uses, as_loss

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        for _ in range(self.uses):
            x = self.dense(x)
        if self.as_loss:
            self.add_loss(0.1 * keras.ops.sum(keras.ops.square(self.dense.kernel)))
            return x
        return keras.ops.matmul(x, keras.ops.transpose(self.dense.kernel))


class InCondition(keras.Layer):
    """Uses a Dense layer in a branch and outside of it."""

    def __init__(self):
        super().__init__()
        self.dense = kl.Dense(6, activation="tanh")

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        y = keras.ops.cond(keras.ops.sum(x) < 1e9, lambda: self.dense(x), lambda: x)
        return self.dense(y)


def rnn(x, unroll):
    return kl.RNN(Cell(3), unroll=unroll)(kl.Reshape((3, 2))(x))


# With the number of layers whose gradient is restricted.
NETWORKS = {
    "used twice": (shared(2), 2),
    "used three times": (shared(3), 2),
    "nested": (functional(nested), 2),
    "attention": (functional(attention), 4),
    "cross-attention": (functional(cross_attention), 4),
    "attention along two axes": (functional(attention_along_two_axes), 4),
    "grouped queries": (functional(grouped_query_attention), 4),
    "separable convolution used twice": (functional(separable_twice), 3),
    "cell in a loop": (functional(lambda x: rnn(x, False)), 0),
    "cell unrolled": (functional(lambda x: rnn(x, True)), 2),
    "kernel read": (functional(lambda x: kl.Dense(3)(ReadTwice(1, False)(x))), 2),
    "used twice and read": (functional(lambda x: kl.Dense(3)(ReadTwice(2, False)(x))), 2),
    "kernel in a loss": (functional(lambda x: kl.Dense(3)(ReadTwice(1, True)(x))), 2),
    "used twice and in a loss": (functional(lambda x: kl.Dense(3)(ReadTwice(2, True)(x))), 2),
    "in a branch": (functional(lambda x: kl.Dense(3)(InCondition()(x))), 2),
    "constraint": (functools.partial(small_mlp, kernel_constraint="non_neg"), 2),
}
