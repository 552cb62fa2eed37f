"""Which weight gradients are restricted, where what that costs decides."""

import functools

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers as kl
from restricted import corner_mask, few_examples, freeze_optimizer, restricted_layers

import keras_freeze as kf
from keras_freeze.restricted.convolutions import Depthwise
from keras_freeze.restricted.cost_model import cheapest_block

BACKEND = keras.backend.backend()
pytestmark = [pytest.mark.cases(1, jax=0), pytest.mark.slow_on("tensorflow")]
on_every_backend = pytest.mark.cases(1, jax=1)


@on_every_backend
@pytest.mark.parametrize("kind", [kl.MultiHeadAttention, kl.GroupQueryAttention])
@pytest.mark.parametrize("length", [64, None])
def test_projections_of_attention_are_restricted_where_that_pays(kind, length):
    x = keras.Input((length, 256))
    arguments = (8, 32) if kind is kl.MultiHeadAttention else (32, 8, 8)
    model = keras.Model(x, kind(*arguments)(x, x))
    model.compile(freeze_optimizer(), "mse")
    kf.freeze(model, mask=functools.partial(corner_mask, last=False))
    names = {layer.name for layer in restricted_layers(model)}
    assert names == {"query", "key", "value", "attention_output"}


def mask_with(rows, columns, active_rows, active_columns):
    mask = np.zeros((1, rows, columns), bool)
    mask[:, :active_rows, :active_columns] = True
    return mask


sizes = st.integers(1, 300)


@few_examples
@given(rows=sizes, columns=sizes, places=st.tuples(sizes, sizes))
def test_layer_whose_channels_are_all_active_is_left_alone(rows, columns, places):
    diagonal = np.zeros((1, rows, columns), bool)
    larger = np.arange(max(rows, columns))
    diagonal[0, larger % rows, larger % columns] = True
    assert cheapest_block(diagonal, places) is None


@few_examples
@given(rows=sizes, columns=sizes, places=st.tuples(sizes, sizes))
def test_layer_without_trained_weights_is_restricted(rows, columns, places):
    assert cheapest_block(mask_with(rows, columns, 0, 0), places) is not None


@few_examples
@given(
    rows=st.integers(1, 4000),
    columns=st.integers(1, 1000),
    share=st.floats(0.0, 1.0),
    other_share=st.floats(0.0, 1.0),
    column_share=st.floats(0.0, 1.0),
    places=st.integers(1, 400),
)
def test_fewer_active_rows_never_make_restriction_dearer(
    rows, columns, share, other_share, column_share, places
):
    few, many = sorted(int(np.ceil(s * rows)) for s in (share, other_share))
    active_columns = int(np.ceil(column_share * columns))
    ways = [
        cheapest_block(mask_with(rows, columns, active, active_columns), (places, places))
        for active in (few, many)
    ]
    assert ways[1] is None or ways[0] is not None


def test_only_channels_that_can_be_left_out_are_taken():
    way = cheapest_block(mask_with(4096, 4096, 40, 4096), (1, 1))
    assert way == (True, False)
    assert cheapest_block(mask_with(4096, 4096, 4096, 40), (1, 1)) == (False, True)


@on_every_backend
@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, True), (0.1, BACKEND == "jax"), (1.0, False)]
)
def test_depthwise_kernel_is_restricted_where_its_gradient_is_dear(share, expected):
    layer = kl.DepthwiseConv2D(3, depth_multiplier=2)
    layer.build((None, 16, 16, 256))
    trained = np.zeros((3, 3, 256, 2), bool)
    trained[:, :, : round(share * 256)] = True
    operation = Depthwise(layer)
    places = operation.places((None, 16, 16, 256))
    way = cheapest_block(operation.matrices(trained), places, operation.ways)
    assert (way is not None) == expected
