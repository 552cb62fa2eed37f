"""Constraints of kernels that are frozen in part: what cannot hold is said."""

import warnings

import axes
import keras
import numpy as np
import pytest
from helpers import blobs, compiled, fit, sgd, two_dense_layers, value_of

import keras_freeze as kf

pytestmark = pytest.mark.cases(None, tensorflow=1, jax=1)

each_way = pytest.mark.parametrize("way", axes.WAYS)


def constrained(freeze_rate=0.5, constraint=None, **arguments):
    model = two_dense_layers()
    model.layers[0].kernel.constraint = constraint or keras.constraints.NonNeg()
    return compiled(model, kf.FreezeOptimizer(sgd(), freeze_rate, **arguments))


def train(model, way):
    x, y = blobs()
    if way == "freeze":
        kf.freeze(model, x, y)
    fit(model, x, y)


@pytest.mark.cases(None, tensorflow=0)
@each_way
def test_a_constraint_that_cannot_hold_is_a_warning_once(way):
    model = constrained()
    with pytest.warns(UserWarning, match=r"Constraints cannot hold .* NonNeg of '\S*body/kernel'$"):
        train(model, way)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Constraints")
        fit(model, *blobs())


def test_a_mask_of_ones_own_warns_of_a_bias_that_it_freezes():
    model = constrained()
    model.layers[1].bias.constraint = keras.constraints.MaxNorm()
    with pytest.warns(UserWarning, match=r"MaxNorm of '\S*head/bias'$"):
        kf.freeze(model, mask={"head/bias": np.array([True, False, True])})


@pytest.mark.cases(4, tensorflow=0)
@each_way
@pytest.mark.parametrize(
    "arguments", [{"freeze_rate": 0.0}, {"frozen_weights": "zero"}, {"exclude": "body"}]
)
def test_a_constraint_that_can_hold_is_no_warning_and_holds(way, arguments):
    model = constrained(**arguments)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Constraints")
        train(model, way)
        fit(model, *blobs())
    assert (value_of(model.layers[0].kernel) >= 0.0).all()
