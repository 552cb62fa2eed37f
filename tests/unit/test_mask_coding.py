"""The coded mask: exact for every mask, and as small as the format promises."""

import math

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_freeze.masks.mask import FreezeMask
from keras_freeze.storage.coding.masks import decode_masks, encode_masks
from keras_freeze.storage.errors import FreezeFileError

SHAPES = arrays.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=7)


def entropy_bound(num_trained, size):
    """Bytes of a mask whose entries are independent, with the rate known."""
    if num_trained in (0, size):
        return 0.0
    p = num_trained / size
    return -size * (p * math.log2(p) + (1 - p) * math.log2(1 - p)) / 8


def layer_bound(masks):
    return sum(entropy_bound(int(mask.sum()), mask.size) for mask in masks)


def network_bound(masks):
    return entropy_bound(sum(int(m.sum()) for m in masks), sum(m.size for m in masks))


def assert_same(masks, decoded):
    assert len(masks) == len(decoded)
    for mask, found in zip(masks, decoded, strict=True):
        assert found.dtype == bool
        assert np.array_equal(mask, found)


def coded(masks):
    stream = encode_masks(masks)
    assert_same(masks, decode_masks(stream, [mask.shape for mask in masks]))
    return len(stream)


@given(st.lists(arrays.arrays(bool, SHAPES), max_size=4))
def test_every_mask_comes_back(masks):
    coded(masks)


@given(
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from([(300,), (90, 70), (3, 3, 40, 30), (5, 5, 1, 20), (2, 3, 3, 8, 24)]),
    spread=st.floats(0, 6),
    rate=st.floats(0.0, 1.0),
)
def test_masks_with_rows_and_columns_of_their_own_come_back(seed, shape, spread, rate):
    rng = np.random.default_rng(seed)
    levels = sum(
        rng.normal(scale=spread, size=[n if i == axis else 1 for i, n in enumerate(shape)])
        for axis in range(len(shape))
    )
    scores = levels + rng.logistic(size=shape)
    masks = [np.zeros(shape, bool)]
    masks[0].reshape(-1)[np.argsort(scores, axis=None)[: int(rate * scores.size)]] = True
    assert coded(masks) <= layer_bound(masks) * 1.01 + 64


@pytest.mark.cases(3)
@pytest.mark.parametrize("rate", [0.0, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_random_masks_cost_next_to_nothing_above_the_bound_of_each_layer(rate):
    shapes = [(3, 3, 64, 64), (784, 300), (512, 512), (3, 3, 3, 64), (512, 10), (1000,), ()]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        masks = [np.asarray(rng.random(shape) < rate) for shape in shapes]
        assert coded(masks) <= layer_bound(masks) * 1.01 + 64


def test_one_trained_weight_in_each_of_many_layers_stays_within_the_bound():
    rng = np.random.default_rng(0)
    masks = [np.zeros((3, 3, 32, 32), bool) for _ in range(100)]
    for mask in masks:
        mask.reshape(-1)[rng.integers(mask.size)] = True
    assert coded(masks) <= layer_bound(masks) * 1.01 + 64


def test_whole_neurons_cost_a_few_bits_each():
    rng = np.random.default_rng(0)
    mask = np.zeros((800, 500), bool)
    mask[:, rng.random(500) < 0.1] = True
    assert coded([mask]) < 500 / 8 + 40
    assert entropy_bound(int(mask.sum()), mask.size) > 20_000


def test_a_product_of_rows_and_columns_is_coded_far_below_the_bound_of_the_layer():
    rng = np.random.default_rng(0)
    row, column = np.exp(rng.normal(size=(600, 1)) * 1.5), np.exp(rng.normal(size=(1, 400)) * 1.5)
    masks = [rng.random((600, 400)) < np.minimum(0.003 * row * column, 0.9)]
    assert coded(masks) < 0.75 * layer_bound(masks)


# At most so many times the bound over the whole network (the targets that were set for SNIP masks).
TARGETS = {
    "lenet_300_100": {0.9: 0.95, 0.99: 0.72, 0.995: 0.68, 0.999: 0.65},
    "lenet_5_caffe": {0.9: 0.75, 0.99: 0.72, 0.995: 0.68, 0.999: 0.60},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", list(TARGETS))
@pytest.mark.parametrize("seed", [0, 1])
def test_snip_masks_are_as_small_as_promised(name, seed):
    import keras

    import keras_freeze as kf

    x, y = kf.datasets.load_arrays("mnist_5k", "train")
    model = kf.models.MODELS[name](seed=seed)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    chosen = np.random.default_rng(seed).permutation(len(x))[:100]
    scores = kf.compute_saliency(model, x[chosen], y[chosen])
    for rate, target in TARGETS[name].items():
        mask = FreezeMask.from_scores(list(scores.values()), rate, seed=seed)
        masks = [entry.trained for entry in mask.entries]
        assert coded(masks) <= target * network_bound(masks), rate


def test_equal_masks_have_equal_bytes():
    mask = np.random.default_rng(0).random((200, 100)) < 0.05
    assert encode_masks([mask]) == encode_masks([np.asfortranarray(mask)])


@given(stream=st.binary(max_size=400), width=st.integers(1, 60))
def test_any_bytes_are_a_mask_or_an_error(stream, width):
    shapes = [(width, 40), (3, 3, 5, width), (width,)]
    try:
        masks = decode_masks(stream, shapes)
    except FreezeFileError:
        return
    assert [mask.shape for mask in masks] == shapes


def test_a_stream_that_goes_on_is_an_error():
    stream = encode_masks([np.eye(40, dtype=bool)])
    with pytest.raises(FreezeFileError, match="longer than its content"):
        decode_masks(stream + bytes(range(1, 65)), [(40, 40)])
