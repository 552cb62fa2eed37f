"""A small classifier with Dropout and BatchNormalization, its data, and what it holds."""

import keras
import numpy as np
from keras import layers

import keras_freeze as kf


def make_data(size=64, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(size, 10)).astype("float32")
    return x, (x @ rng.normal(size=(10, 4))).argmax(1)


def build_model(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((10,)),
            layers.Dense(12, activation="relu", name="fc1"),
            layers.BatchNormalization(name="norm"),
            layers.Dropout(0.5, name="dropout"),
            layers.Dense(4, name="fc2"),
        ]
    )


def compile_model(model, inner=None, **arguments):
    inner = inner or keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(
        optimizer=kf.FreezeOptimizer(inner, **{"freeze_rate": 0.75, **arguments}),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def make_model(**arguments):
    return compile_model(build_model(), **arguments)


def everything(model):
    """Every number that a model and its optimizer hold, as bytes."""
    generator = keras.src.random.seed_generator.global_seed_generator()
    variables = [*model.variables, *model.metrics_variables, generator.state]
    return [v.numpy().tobytes() for v in variables]


def masks_of(model):
    mask = kf.get_mask(model)
    return [mask[model.get_layer(name).kernel] for name in ("fc1", "fc2")]
