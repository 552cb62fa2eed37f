"""The portable versions of Keras's initializers: distributions and bits."""

import hashlib
import math

import format_reader
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from keras_freeze.initializers import portable as portable_initializers
from keras_freeze.initializers.portable import (
    PORTABLE,
    Orthogonal,
    RandomNormal,
    RandomUniform,
    TruncatedNormal,
    VarianceScaling,
    portable_version,
)

OF_KERAS = keras.initializers
NAMES = {made: name for name, made in PORTABLE.items()}

# Each random initializer of Keras, and the distribution of its values for a shape of (40, 50), as
# SciPy has it.


def truncated(variance):
    stddev = math.sqrt(variance) / stats.truncnorm(-2, 2).std()
    return stats.truncnorm(-2, 2, scale=stddev)


def uniform(limit):
    return stats.uniform(-limit, 2 * limit)


DISTRIBUTIONS = {
    "random_uniform": (OF_KERAS.RandomUniform(-0.2, 0.7), stats.uniform(-0.2, 0.9)),
    "random_normal": (OF_KERAS.RandomNormal(1.5, 0.3), stats.norm(1.5, 0.3)),
    "truncated_normal": (
        OF_KERAS.TruncatedNormal(-1.0, 0.5),
        stats.truncnorm(-2, 2, loc=-1.0, scale=0.5),
    ),
    "glorot_uniform": (OF_KERAS.GlorotUniform(), uniform(math.sqrt(6 / 90))),
    "glorot_normal": (OF_KERAS.GlorotNormal(), truncated(2 / 90)),
    "he_uniform": (OF_KERAS.HeUniform(), uniform(math.sqrt(6 / 40))),
    "he_normal": (OF_KERAS.HeNormal(), truncated(2 / 40)),
    "lecun_uniform": (OF_KERAS.LecunUniform(), uniform(math.sqrt(3 / 40))),
    "lecun_normal": (OF_KERAS.LecunNormal(), truncated(1 / 40)),
    "fan_out": (
        OF_KERAS.VarianceScaling(3.0, "fan_out", "untruncated_normal"),
        stats.norm(0, math.sqrt(3 / 50)),
    ),
    "axes": (
        OF_KERAS.VarianceScaling(1.0, "fan_in", "uniform", input_axes=[1], output_axes=[0]),
        uniform(math.sqrt(3 / 50)),
    ),
}


def draws(initializer, count=50):
    """Values of many streams, the shape being part of the distribution."""
    versions = [portable_version(initializer, seed=7, stream=stream) for stream in range(count)]
    return np.concatenate([one.values((40, 50)).ravel() for one in versions]).astype(np.float64)


@pytest.mark.cases(7)
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_values_have_the_distribution_that_keras_documents(name):
    initializer, expected = DISTRIBUTIONS[name]
    values = draws(initializer)
    error = 1 / math.sqrt(values.size)
    assert abs(values.mean() - expected.mean()) < 4 * expected.std() * error
    kurtosis = float(expected.stats("k"))
    assert abs(values.var() / expected.var() - 1) < 4 * math.sqrt(kurtosis + 2) * error
    assert abs(stats.kurtosis(values) - kurtosis) < 4 * math.sqrt(24) * error
    assert stats.kstest(values, expected.cdf).pvalue > 0.01
    low, high = expected.support()
    assert low <= values.min()
    assert values.max() <= high


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_keras_itself_draws_from_the_same_distribution(name):
    initializer, _ = DISTRIBUTIONS[name]
    config = {**initializer.get_config(), "seed": 3}
    values = keras.ops.convert_to_numpy(type(initializer).from_config(config)((40, 50))).ravel()
    assert stats.ks_2samp(values, draws(initializer)).pvalue > 0.001


@pytest.mark.parametrize("bound", [1 / 3, 0.1, 1e-3, 1.0, 1e30])
def test_uniform_values_keep_to_their_bounds_after_rounding(bound):
    class Extremes(RandomUniform):
        def _drawn(self, shape, transform, dtype):
            fractions = np.array([2.0**-53, 1 - 2.0**-53] * 2)
            return transform(np.array([1.0, 1.0, -1.0, -1.0]), fractions).astype(dtype)

    for low, high in [(-bound, bound), (0.0, bound), (-bound, 0.0)]:
        values = Extremes(low, high).values((4,)).astype(np.float64)
        assert low <= values.min()
        assert values.max() < high


@pytest.mark.parametrize("stddev", [1 / 3, 0.1, 0.05 / 0.87962566103423978, -0.3])
@pytest.mark.parametrize("mean", [0.0, 1 / 7])
def test_truncated_values_keep_to_two_standard_deviations_after_rounding(mean, stddev):
    class Extremes(TruncatedNormal):
        def _drawn(self, shape, transform, dtype):
            return transform(np.array([1.0, -1.0]), np.full(2, 2.0**-53)).astype(dtype)

    values = Extremes(mean, stddev).values((2,)).astype(np.float64)
    np.testing.assert_allclose(np.abs(values - mean), 2 * abs(stddev), rtol=1e-6)
    assert abs(values - mean).max() <= 2 * abs(stddev) + 1e-17


def test_equal_bounds_give_that_value():
    assert RandomUniform(0.25, 0.25).values((3,)).tolist() == [0.25] * 3
    assert TruncatedNormal(0.25, 0.0).values((3,)).tolist() == [0.25] * 3


SHAPES = [
    (1, 1),
    (4, 1),
    (1, 4),
    (2, 2),
    (5, 3),
    (3, 5),
    (16, 64),
    (3, 3, 4, 6),
    (3, 3, 2, 60),
    (200, 130),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonal_rows_or_columns(shape):
    matrix = Orthogonal(gain=2.0, seed=1).values(shape).reshape(-1, shape[-1]).astype(np.float64)
    rows, columns = matrix.shape
    products = matrix.T @ matrix if rows >= columns else matrix @ matrix.T
    np.testing.assert_allclose(products, 4.0 * np.eye(min(rows, columns)), atol=4e-6)


def test_orthogonal_has_no_preferred_direction():
    """Haar measure: entries of an n x n matrix have known moments, and signs are fair."""
    n = 6
    matrices = np.stack([Orthogonal(seed=2, stream=s).values((n, n)) for s in range(3000)])
    matrices = matrices.astype(np.float64)
    # An entry's square is Beta(1/2, (n - 1) / 2).
    for i, j in [(0, 0), (n - 1, n - 1), (0, n - 1), (n - 1, 0), (2, 3)]:
        squares = matrices[:, i, j] ** 2
        assert stats.kstest(squares, stats.beta(0.5, (n - 1) / 2).cdf).pvalue > 0.01, (i, j)
        assert stats.binomtest(int((matrices[:, i, j] > 0).sum()), 3000).pvalue > 0.01, (i, j)
    assert stats.binomtest(int((np.linalg.det(matrices) > 0).sum()), 3000).pvalue > 0.01
    traces = np.trace(matrices, axis1=1, axis2=2)
    assert abs(traces.mean()) < 4 / math.sqrt(3000)
    assert abs(traces.var() - 1) < 0.15  # exactly 1 for n of at least 2


def test_orthogonal_agrees_with_keras_in_distribution():
    ours = [Orthogonal(seed=3, stream=s).values((4, 3))[0, 0] for s in range(400)]
    theirs = [
        keras.ops.convert_to_numpy(OF_KERAS.Orthogonal(seed=s)((4, 3)))[0, 0] for s in range(400)
    ]
    assert stats.ks_2samp(ours, theirs).pvalue > 0.001


@pytest.mark.parametrize("shape", [(1, 1), (6, 1), (9, 7), (5, 8)])
def test_orthogonal_needs_no_particular_order_of_sums(shape):
    """Integers may be summed in any order: with Python's integers the bits are the same."""
    expected = Orthogonal(seed=5).values(shape)
    assert np.array_equal(expected, format_reader.drawn(shape, "orthogonal", 5, 0, {"gain": 1.0}))


def test_a_single_column_is_a_uniform_direction():
    columns = np.stack([Orthogonal(seed=4, stream=s).values((3, 1))[:, 0] for s in range(2000)])
    for i in range(3):  # of a sphere in three dimensions, each coordinate is uniform
        assert stats.kstest(columns[:, i], stats.uniform(-1, 2).cdf).pvalue > 0.01
    signs = [float(Orthogonal(seed=4, stream=s).values((1, 1))[0, 0]) for s in range(400)]
    assert set(signs) == {-1.0, 1.0}
    assert stats.binomtest(signs.count(1.0), 400).pvalue > 0.01


def test_orthogonal_with_nothing_in_it():
    assert Orthogonal().values((0, 4)).shape == (0, 4)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_orthogonal_needs_two_dimensions(shape):
    with pytest.raises(ValueError, match="two dimensions"):
        Orthogonal().values(shape)


def test_orthogonal_refuses_what_sums_would_not_hold():
    with pytest.raises(ValueError, match="at most 524288 rows"):
        Orthogonal().values((2**20, 1))


# sha256 of the little-endian float32 bytes. A change here is a new file format.
GOLDEN = {
    "uniform": "fe553d06435e0a89ada031989d77cd766b98c658299e7a822a113f455b2e9a30",
    "normal": "b36647386eedd9921a8babf4fecfc0ac8e6711972eeedb5faceec11ec10c1979",
    "truncated_normal": "2d86e05c66afb207154fb9b11de4f7ee719c42749fba1ef3ce440df53f476a2f",
    "variance_scaling": "7fbbef2011fbc7be2251fb08dd584b1d9f18dffbf68a3fe3866996d05fd8e44d",
    "orthogonal": "7d1a570628fd3a7250afe17c42a9d9c0655df66ebf410b3cc9cf6bcc5b687cf9",
}
MADE = {
    "uniform": RandomUniform(-0.1, 0.3, seed=1, stream=2),
    "normal": RandomNormal(0.1, 0.3, seed=1, stream=2),
    "truncated_normal": TruncatedNormal(0.1, 0.3, seed=1, stream=2),
    "variance_scaling": VarianceScaling(2.0, "fan_in", "truncated_normal", seed=1, stream=2),
    "orthogonal": Orthogonal(1.5, seed=1, stream=2),
}


@pytest.mark.parametrize("name", PORTABLE)
def test_golden_checksums(name):
    values = [MADE[name].values(shape).astype("<f4") for shape in [(30, 40), (3, 3, 5, 70)]]
    digest = hashlib.sha256(b"".join(one.tobytes() for one in values)).hexdigest()
    assert digest == GOLDEN[name]


@pytest.mark.parametrize("shape", [(4, 30), (30, 4), (3, 2, 5, 40)])
@pytest.mark.parametrize("name", portable_initializers.SEEDED)
def test_values_are_in_c_order(name, shape):
    assert portable_initializers.SEEDED[name]().values(shape).flags.c_contiguous


made = st.one_of(
    st.builds(RandomUniform, st.floats(-9, 9), st.floats(-9, 9)),
    st.builds(RandomNormal, st.floats(-9, 9), st.floats(-9, 9)),
    st.builds(TruncatedNormal, st.floats(-9, 9), st.floats(-9, 9)),
    st.builds(Orthogonal, st.floats(-9, 9)),
    st.builds(
        VarianceScaling,
        st.floats(1e-3, 9),
        st.sampled_from(["fan_in", "fan_out", "fan_avg"]),
        st.sampled_from(["truncated_normal", "untruncated_normal", "uniform"]),
        st.sampled_from([None, [0], [0, 1]]),
        st.sampled_from([None, [1]]),
    ),
)


@given(made, st.tuples(st.integers(1, 4), st.integers(1, 6)), st.integers(0, 2**32 - 1))
def test_the_page_about_the_format_gives_the_same_bits(initializer, shape, seed):
    config = {**initializer.get_config(), "seed": seed, "stream": 3}
    initializer = type(initializer).from_config(config)
    name = NAMES[type(initializer)]
    again = format_reader.drawn(shape, name, seed, 3, initializer.parameters)
    assert np.array_equal(initializer.values(shape).view(np.uint32), again.view(np.uint32))


@given(made)
def test_an_initializer_comes_back_from_its_configuration(initializer):
    again = keras.initializers.deserialize(keras.initializers.serialize(initializer))
    assert type(again) is type(initializer)
    assert again.get_config() == initializer.get_config()


def test_streams_and_seeds_give_other_values():
    for initializer in MADE.values():
        config = initializer.get_config()
        first = initializer.values((4, 5))
        for change in ({"seed": 2}, {"stream": 3}):
            other = type(initializer).from_config({**config, **change})
            assert not np.array_equal(first, other.values((4, 5)))


def test_every_random_initializer_of_keras_has_a_portable_version():
    random = [
        kind
        for kind in vars(OF_KERAS).values()
        if isinstance(kind, type) and hasattr(kind(), "seed")
    ]
    assert len(set(random)) >= 11
    for kind in set(random):
        version = portable_version(kind(), seed=1, stream=2)
        assert version is not None, kind
        assert (version.seed, version.stream) == (1, 2)


def test_a_subclass_may_do_anything_and_has_no_portable_version():
    class Mine(OF_KERAS.HeNormal):
        pass

    assert portable_version(Mine(), 0, 0) is None
    assert portable_version(OF_KERAS.Zeros(), 0, 0) is None
    assert portable_version(lambda shape, dtype: None, 0, 0) is None


def test_seeded_initializers_of_this_package_keep_what_they_are():
    version = portable_version(RandomNormal(1.0, 2.0, seed=5), seed=1, stream=2)
    assert version.get_config() == {"mean": 1.0, "stddev": 2.0, "seed": 1, "stream": 2}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes_are_float32_converted(dtype):
    initializer = MADE["variance_scaling"]
    values = keras.ops.convert_to_numpy(initializer((20, 30), dtype=dtype))
    expected = keras.ops.cast(keras.ops.convert_to_tensor(initializer.values((20, 30))), dtype)
    assert np.array_equal(values, keras.ops.convert_to_numpy(expected))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: RandomUniform("a"), TypeError, "`minval` must be a number"),
        (lambda: RandomNormal(0.0, math.nan), ValueError, "`stddev` must be a number"),
        (lambda: VarianceScaling(0.0), ValueError, "`scale` must be a positive number"),
        (lambda: VarianceScaling(1.0, "fan"), ValueError, "`mode` must be one of"),
        (
            lambda: VarianceScaling(distribution="normal"),
            ValueError,
            "`distribution` must be",
        ),
        (lambda: VarianceScaling(input_axes=0.5), TypeError, "`input_axes` must be None or a list"),
        (
            lambda: VarianceScaling(input_axes=[4], output_axes=[0]).values((2, 3)),
            ValueError,
            "has no axes",
        ),
    ],
)
def test_what_is_not_possible_is_said(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_the_module_names_each_class_once():
    assert len(set(PORTABLE.values())) == len(PORTABLE)
    assert set(PORTABLE) < set(portable_initializers.SEEDED)
