"""Frozen weights keep their bits in random networks, trained in random ways."""

import tempfile
from pathlib import Path

import axes
import keras
import numpy as np
import pytest
from helpers import crossentropy, is_weight, same_bits, value_of, values_of
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from keras import layers as kl

import keras_freeze as kf

FEW = {"tensorflow": 5, "jax": 4, "torch": 25}[axes.BACKEND]

ACTIVATIONS = ["relu", "tanh", "gelu", "linear"]
WIDTHS = st.integers(1, 6)

LAYERS = st.one_of(
    st.builds(
        lambda units, activation, constraint, regularizer: (
            lambda: kl.Dense(
                units,
                activation,
                kernel_constraint=constraint,
                kernel_regularizer=regularizer,
            )
        ),
        WIDTHS,
        st.sampled_from(ACTIVATIONS),
        st.sampled_from([None, "non_neg", "max_norm"]),
        st.sampled_from([None, "l2"]),
    ),
    st.builds(
        lambda filters, size: lambda: kl.Conv1D(filters, size, padding="same"),
        WIDTHS,
        st.integers(1, 3),
    ),
    st.builds(lambda filters: lambda: kl.Conv1DTranspose(filters, 2, strides=2), WIDTHS),
    st.builds(lambda units: lambda: kl.GRU(units, return_sequences=True), WIDTHS),
    st.builds(lambda rate: lambda: kl.Dropout(rate, seed=1), st.floats(0.0, 0.9)),
    st.sampled_from(
        [kl.BatchNormalization, kl.LayerNormalization, kl.PReLU, kl.DepthwiseConv1D]
    ).map(lambda kind: lambda: kind(1) if kind is kl.DepthwiseConv1D else kind()),
)

CALLBACKS = {
    "none": lambda x, y, folder: [],
    "schedule": lambda x, y, folder: [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1),
    ],
    "best": lambda x, y, folder: [
        keras.callbacks.EarlyStopping("loss", restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(folder / "best.weights.h5", save_weights_only=True),
    ],
    "backup": lambda x, y, folder: [keras.callbacks.BackupAndRestore(folder / "backup")],
    "flow": lambda x, y, folder: [kf.callbacks.GradientFlowHistory(x, y)],
    "board": lambda x, y, folder: [kf.callbacks.FreezeBoard(folder / "board", x, y)],
}


@st.composite
def trainings(draw):
    """A network, an optimizer and a way to train, as keyword arguments of `train`."""
    return {
        "layers": draw(st.lists(LAYERS, min_size=1, max_size=4)),
        "tokens": draw(st.booleans()),
        "dtype": draw(st.sampled_from(axes.DTYPES)),
        "inner": draw(st.sampled_from(list(axes.OPTIMIZERS))),
        "freezing": {
            "freeze_rate": draw(st.one_of(st.floats(0, 1), st.sampled_from([0, 0.5, 0.95, 1]))),
            "criterion": draw(st.sampled_from(["snip", "magnitude", "random"])),
            "frozen_weights": draw(st.sampled_from(["keep", "zero"])),
            "l2": draw(st.sampled_from([0.0, 0.01])),
            "seed": draw(st.integers(0, 2**32 - 1)),
        },
        "way": draw(st.sampled_from(axes.WAYS)),
        "callbacks": draw(st.sampled_from(list(CALLBACKS))),
        "run_eagerly": draw(st.sampled_from([True, True, True, False])),
        "batch_size": draw(st.integers(5, 12)),
        "seed": draw(st.integers(0, 1000)),
    }


def network(layers, tokens, dtype, seed):
    keras.utils.set_random_seed(seed)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(12, 4, 3)).astype("float32")
    start = [keras.Input((4, 3))]
    if tokens:
        x = rng.integers(5, size=(12, 4)).astype("int32")
        start = [keras.Input((4,), dtype="int32"), kl.Embedding(5, 3)]
    default = keras.config.dtype_policy()
    keras.config.set_dtype_policy(dtype)
    try:
        end = [kl.Flatten(), kl.Dense(axes.NUM_CLASSES, name="head")]
        model = keras.Sequential([*start, *(make() for make in layers), *end])
    finally:
        keras.config.set_dtype_policy(default)
    return model, x, np.arange(12) % axes.NUM_CLASSES


def train(optimizer, layers, tokens, dtype, way, callbacks, run_eagerly, batch_size, seed):
    """The variables, what they were before training, and the mask."""
    model, x, y = network(layers, tokens, dtype, seed)
    model.compile(optimizer, crossentropy(), run_eagerly=run_eagerly)
    if isinstance(optimizer, kf.FreezeOptimizer) and way == "freeze":
        kf.freeze(model, x, y)
    before = values_of(model.trainable_variables)
    with tempfile.TemporaryDirectory() as folder:
        chosen = CALLBACKS[callbacks](x, y, Path(folder))
        model.fit(x, y, batch_size=batch_size, epochs=2, verbose=0, callbacks=chosen)
    return model.trainable_variables, before, kf.get_mask(model)


def assert_no_drift(variables, before, mask, frozen_weights):
    """Compares frozen weights; returns whether something else has changed."""
    has_moved = False
    for variable, old in zip(variables, before, strict=True):
        new = value_of(variable)
        if mask is None:  # every step was too large for float16
            assert same_bits(new, old)
        elif is_weight(variable):
            frozen = ~mask[variable]
            if frozen_weights == "zero":
                old = np.zeros_like(old)
            assert same_bits(new[frozen], old[frozen]), variable.path
            has_moved = has_moved or not same_bits(new[~frozen], old[~frozen])
    return has_moved


@pytest.mark.cases(1, tensorflow=0, jax=0)
@pytest.mark.parametrize("draws", [FEW, pytest.param(200, marks=pytest.mark.exhaustive)])
@pytest.mark.filterwarnings("ignore")
def test_frozen_weights_do_not_drift(draws):
    done = 0

    @settings(
        max_examples=draws,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(trainings())
    def check(arguments):
        nonlocal done
        inner, freezing = arguments.pop("inner"), arguments.pop("freezing")
        try:
            optimizer = kf.FreezeOptimizer(axes.OPTIMIZERS[inner](), **freezing)
            found = train(optimizer, **arguments)
        except AssertionError:
            raise
        except Exception as error:
            if arguments["callbacks"] in ("flow", "board"):
                arguments["callbacks"] = "none"
            with pytest.raises(
                (type(error.__cause__ or error), RuntimeError)
            ):  # plain Keras cannot do this either
                train(axes.OPTIMIZERS[inner](), **arguments)
            assume(False)
        done += assert_no_drift(*found, freezing["frozen_weights"])

    check()
    assert done > draws / 2  # the others cannot be trained by Keras, or train biases alone
