"""Masks that are drawn: exact counts, the right rates, and the same bits everywhere."""

import hashlib
import itertools
import math

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from keras_freeze.masks.drawn import Draw, fit_draw
from keras_freeze.masks.levels import EMPTY, ZERO, matrix_shape
from keras_freeze.storage.coding.masks import count_masks, decode_masks, encode_masks
from keras_freeze.storage.errors import FreezeFileError

SHAPES = arrays.array_shapes(min_dims=0, max_dims=5, min_side=1, max_side=7)


@st.composite
def masks(draw):
    mask = draw(arrays.arrays(bool, draw(SHAPES)))
    if not mask.any():
        mask.reshape(-1)[draw(st.integers(0, mask.size - 1))] = True
    return mask


def line_counts(mask):
    """How many entries are trained in each line along each axis with levels."""
    matrix = mask.reshape(matrix_shape(mask.shape))
    axes = range(matrix.ndim)
    return [matrix.sum(tuple(j for j in axes if j != i)) for i in axes]


@given(masks(), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_as_many_are_trained_as_in_the_mask_and_none_on_empty_lines(mask, seed, position):
    draw = fit_draw(mask, seed, position)
    drawn = draw.mask(mask.shape)
    assert drawn.shape == mask.shape
    assert drawn.sum() == mask.sum()
    for found, symbols in zip(line_counts(drawn), draw.levels, strict=True):
        assert not found[symbols == EMPTY].any()


@given(st.lists(masks(), max_size=4), st.data())
def test_draws_and_masks_share_a_stream(chosen, data):
    coded, keys = [], []
    for number, mask in enumerate(chosen):
        is_drawn = data.draw(st.booleans())
        draw = fit_draw(mask, seed=number, position=number)
        coded.append(draw if is_drawn else mask)
        keys.append((draw.seed, draw.stream) if is_drawn else None)
    stream, shapes = encode_masks(coded), [mask.shape for mask in chosen]
    for before, after, shape in zip(coded, decode_masks(stream, shapes, keys), shapes, strict=True):
        assert type(after) is type(before)
        first, second = (m.mask(shape) if isinstance(m, Draw) else m for m in (before, after))
        assert np.array_equal(first, second)
    assert count_masks(stream, shapes, 10**6, keys) == [int(mask.sum()) for mask in chosen]


@given(st.binary(max_size=60), SHAPES)
def test_any_bytes_are_a_draw_or_an_error(stream, shape):
    try:
        (draw,) = decode_masks(stream, [shape], [(0, 0)])
        mask = draw.mask(shape)
    except (FreezeFileError, ValueError):
        return
    assert mask.sum() == draw.num_trained


def snip_like(shape=(60, 40), rate=0.05, seed=0):
    """A mask that prefers some rows and columns to others."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=shape) ** 2
    scores *= np.exp(rng.normal(size=(shape[0], 1))) * np.exp(rng.normal(size=shape[1]))
    return scores > np.quantile(scores, 1 - rate)


def test_a_mask_is_the_same_bits_on_every_machine():
    mask = fit_draw(snip_like(), seed=7, position=3).mask((60, 40))
    digest = hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()
    assert digest == "79d4bebaee23a31c87be6e55d5eb38416ecc7ad0bd406ac62e3da78235c0ff87"


def rates_by_hand(draw, shape):
    """-ln(1 - p) of each entry, where the odds are 2^(level / 4)."""
    rates = []
    for place in itertools.product(*draw.levels):
        odds = 2 ** (sum(int(s) - ZERO for s in place) / 4)
        rates.append(0.0 if EMPTY in place else math.log1p(odds))
    return np.reshape(rates, shape)


def test_entries_are_drawn_at_the_rates_of_their_lines():
    """Chi-square over blocks of equal rates, against a simulation with NumPy's own generator."""
    fitted = fit_draw(snip_like(), seed=0, position=0)
    rates = rates_by_hand(fitted, (60, 40))
    blocks = np.unique(rates)[1:]
    rng = np.random.default_rng(1)
    drawn, expected = np.zeros(blocks.size), np.zeros(blocks.size)
    for seed in range(300):
        mask = Draw(fitted.levels, fitted.num_trained, seed, 5).mask((60, 40))
        with np.errstate(divide="ignore"):
            times = rng.exponential(size=rates.shape) / rates
        by_hand = times <= np.sort(times, axis=None)[fitted.num_trained - 1]
        drawn += [mask[rates == rate].sum() for rate in blocks]
        expected += [by_hand[rates == rate].sum() for rate in blocks]
    _, p_value, _, _ = stats.chi2_contingency(np.stack([drawn, expected]))
    assert p_value > 1e-3


def test_entries_of_equal_rates_are_drawn_alike():
    levels = tuple(np.full(n, ZERO, np.uint8) for n in (8, 5))
    counts = sum(Draw(levels, 10, seed, 0).mask((8, 5)).astype(int) for seed in range(2_000))
    assert stats.chisquare(counts.reshape(-1)).pvalue > 1e-3


def test_rows_and_columns_keep_their_share():
    mask = snip_like((400, 300))
    drawn = fit_draw(mask, seed=0, position=0).mask(mask.shape)
    for found, expected in zip(line_counts(drawn), line_counts(mask), strict=True):
        assert np.corrcoef(found, expected)[0, 1] > 0.9
    # Otherwise it is another mask.
    assert (mask & drawn).sum() < 0.6 * mask.sum()


def bits_by_hand(mask, levels):
    """The information in a mask at these levels, and about what the levels take in a file."""
    odds = 2.0 ** (sum(np.ix_(*[np.asarray(axis, float) for axis in levels])) / 4)
    side = 0
    for axis in levels:
        counts = np.unique(axis, return_counts=True)[1]
        side += 10 * counts.size - (counts * np.log2(counts / counts.sum())).sum()
    return side - np.log2(np.where(mask, odds, 1) / (1 + odds)).sum()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(5))
def test_levels_of_a_small_kernel_are_nearly_the_best_of_all(seed):
    """Against every choice of one of five levels for each line."""
    rng = np.random.default_rng(seed)
    mask = rng.random((3, 4)) < [[0.2], [0.5], [0.9]]
    mask[:, 1] = True, False, True
    best = min(
        bits_by_hand(mask, (rows, columns))
        for rows in itertools.product(range(-8, 12, 4), repeat=3)
        for columns in itertools.product(range(-8, 12, 4), repeat=4)
    )
    fitted = [axis.astype(int) - ZERO for axis in fit_draw(mask, 0, 0).levels]
    assert all((axis >= -96).all() for axis in fitted)
    assert bits_by_hand(mask, fitted) <= best + 4


def test_more_than_can_be_trained_is_refused():
    levels = np.array([ZERO, EMPTY], np.uint8), np.array([ZERO], np.uint8)
    assert Draw(levels, 1, 0, 0).mask((2, 1)).tolist() == [[True], [False]]
    with pytest.raises(ValueError, match="fewer than 2 entries"):
        Draw(levels, 2, 0, 0).mask((2, 1))
