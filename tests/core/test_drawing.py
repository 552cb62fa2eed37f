"""`initializers.draw`: known bits on every backend, and the generator written down again."""

import hashlib
import re
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
import pytest
from helpers import same_bits
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

import keras_freeze as kf
from keras_freeze.initializers import draw
from keras_freeze.initializers.portable import SEEDED

PAGE = Path(__file__).parents[2] / "docs" / "reproducibility.md"

# Of seed 7, stream 3 and the shape (6, 5): the first bits, and the start of the SHA-256 of all. A
# change here is another generator, which needs another name.
GOLDEN = {
    "standard_normal": ([0x3D378CBB, 0xBF421FFA, 0x3FD23A04], "7623641d491b39c8"),
    "normal": ([0x3B12D6FC, 0xBD1B4CC8, 0x3DA82E69], "2d2f9274338752d5"),
    "truncated_normal": ([0x3B0C2784, 0xBD12D760, 0x3D96936C], "7743ff58aeb6ca7a"),
    "uniform": ([0x3D457AD9, 0xBCB79CA3, 0x3BA4AC25], "2bf583bf473cbe8b"),
    "xavier_normal": ([0x3C9C8820, 0xBEA58CDF, 0x3F334828], "60a0d3b3ce56ca5f"),
    "kaiming_uniform": ([0x3F76D98F, 0xBEE583CC, 0x3DCDD72E], "ee607940e13a9642"),
    "pm_sigma": ([0x3EDA514A, 0xBEDA514A, 0x3EDA514A], "665e96ebf0c2c5c4"),
    "orthogonal": ([0x3CFE61AB, 0x3E2DA7D1, 0xBF1F4ADF], "118be66d8b00861c"),
}
SHAPES = st.lists(st.integers(0, 6), max_size=3).map(tuple)
SEEDS = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize("name", GOLDEN)
def test_drawn_values_have_known_bits_on_every_backend(name):
    values = draw((6, 5), name, seed=7, stream=3)
    bits, digest = GOLDEN[name]
    assert kf.initializers.GENERATOR == "philox4x64-sign-fraction52-v1"
    assert (values.dtype, values.shape) == (np.float32, (6, 5))
    assert values.view(np.uint32).ravel()[:3].tolist() == bits
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest().startswith(digest)


def signs_and_fractions(shape, seed, stream):
    """From the words of NumPy's generator, with Python's integers."""
    words = np.random.Philox(key=[seed, stream]).random_raw(int(np.prod(shape)))
    signs = [-1.0 if int(word) >> 63 else 1.0 for word in words]
    fractions = [((int(word) >> 11) % 2**52 + 0.5) / 2**52 for word in words]
    return np.array(signs).reshape(shape), np.array(fractions).reshape(shape)


@given(SHAPES, SEEDS, SEEDS)
def test_drawn_values_are_made_of_words_of_numpys_philox(shape, seed, stream):
    signs, fractions = signs_and_fractions(shape, seed, stream)
    uniform = draw(shape, "uniform", seed=seed, stream=stream, minval=-1.0, maxval=1.0)
    expected = (signs * fractions).astype(np.float32)
    assert same_bits(uniform, np.minimum(expected, np.nextafter(np.float32(1), np.float32(0))))
    normal = draw(shape, seed=seed, stream=stream)
    expected = -signs * special.ndtri(fractions / 2)
    np.testing.assert_allclose(normal, expected, rtol=2**-24 + 1e-9)


@pytest.mark.parametrize("name", ["standard_normal", "normal", "truncated_normal", "uniform"])
def test_values_of_a_number_do_not_depend_on_the_shape(name):
    long = draw((1000,), name, seed=1)
    assert same_bits(long[:60], draw((3, 4, 5), name, seed=1).ravel())


def test_a_mask_of_a_rate_is_drawn_from_a_few_bytes():
    mask = draw((300, 400), "uniform", seed=1, minval=0.0, maxval=1.0) < 0.1
    assert abs(mask.mean() - 0.1) < 4 * (0.09 / mask.size) ** 0.5
    digest = hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()
    assert digest.startswith("289c489c168650b8")


@pytest.mark.parametrize("name", sorted(set(SEEDED) - {"variance_scaling"}))
def test_draw_gives_the_values_of_the_initializer(name):
    initializer = SEEDED[name](seed=5, stream=6)
    assert same_bits(draw((8, 9), name, seed=5, stream=6), initializer.values((8, 9)))


def test_parameters_are_those_of_the_initializer():
    values = draw((50,), "normal", seed=1, mean=3.0, stddev=0.5)
    assert same_bits(values, kf.initializers.RandomNormal(3.0, 0.5, seed=1).values((50,)))
    matrix = draw((6, 6), "orthogonal", seed=1, gain=2.0).astype(np.float64)
    np.testing.assert_allclose(matrix.T @ matrix, 4 * np.eye(6), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_conversions_are_those_of_the_layers(dtype):
    values = draw((40, 50), seed=2)
    converted = values.astype(getattr(ml_dtypes, dtype, dtype)).astype(np.float64)
    tensor = kf.initializers.StandardNormal(seed=2)((40, 50), dtype)
    assert np.array_equal(
        converted, keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32")).astype(np.float64)
    )


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((3,), "gauss"), ValueError, "`distribution` must be one of 'xavier_normal'"),
        (((3,), "variance_scaling"), ValueError, "`distribution` must be one of"),
        (((3,), ["normal"]), ValueError, "`distribution` must be one of"),
        ((3,), ValueError, "`shape` must be a sequence of known sizes"),
        (((-1,),), ValueError, "`shape` must be"),
        (((None,),), ValueError, "`shape` must be"),
        (((3,), "orthogonal"), ValueError, "two dimensions"),
    ],
)
def test_shapes_and_distributions_that_are_not_possible_are_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        draw(*arguments, seed=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, TypeError, "seed"),
        ({"seed": 0.5}, TypeError, "`seed` must be an int"),
        ({"seed": -1}, ValueError, "`seed` must be an int"),
        ({"seed": 0, "stream": 2**32}, ValueError, "`stream` must be an int"),
        ({"seed": 0, "minval": 0.0}, TypeError, "`minval` is no parameter .* has `mean`, `stddev`"),
        ({"seed": 0, "mean": "a"}, TypeError, "`mean` must be"),
        ({"seed": 0, "stddev": float("nan")}, ValueError, "`stddev` must be"),
    ],
)
def test_arguments_that_are_not_possible_are_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        draw((3,), "normal", **arguments)


def test_a_distribution_without_parameters_says_so():
    with pytest.raises(TypeError, match="which has none"):
        draw((3,), seed=0, mean=1.0)


@pytest.mark.cases(None, tensorflow=0)
def test_the_projection_of_the_page_is_stored_as_its_seed(tmp_path):
    section = PAGE.read_text(encoding="utf-8").split("## A seed instead of a matrix\n")[1]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section.split("\n## ")[0], re.M | re.S)
    scope = {}
    exec(compile(code, str(PAGE), "exec"), scope)
    layer, x = scope["RandomProjection"], np.ones((2, 784), "float32")
    model = keras.Sequential([keras.Input((784,)), layer(64, seed=7), keras.layers.Dense(10)])
    assert model.count_params() == 650
    kf.save(model, tmp_path / "model.freeze")
    model.save(tmp_path / "model.keras")
    matrix = draw((784, 64), "orthogonal", seed=7)
    for loaded in (
        kf.load(tmp_path / "model.freeze"),
        keras.models.load_model(tmp_path / "model.keras"),
    ):
        assert same_bits(loaded.layers[0].matrix, matrix)
        assert same_bits(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    assert (tmp_path / "model.freeze").stat().st_size < matrix.nbytes / 50
