"""The initial values: bits, distributions, and independence of everything but seed and stream."""

import hashlib
import json
import math
import os
import subprocess
import sys

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras.src.initializers.random_initializers import compute_fans as keras_fans
from scipy import special, stats

from keras_freeze import initializers, reinitialize
from keras_freeze._utils import portable
from keras_freeze.initializers import generator, seeded
from keras_freeze.initializers.seeded import (
    DISTRIBUTIONS,
    ConstantSigma,
    KaimingUniform,
    PlusMinusSigma,
    XavierNormal,
    compute_fans,
    get,
)

ALL = sorted(DISTRIBUTIONS)
MASK_64 = 2**64 - 1

# sha256 of the little-endian float32 bytes. A change here is a new file format.
GOLDEN = {
    "xavier_normal": [
        "1cd5c48e2eb19b46693137cb291bf3cc754baef0d522f926392c580aaa43b471",
        "f3ab38ca7e359797a4259e403ddfb5db83caa5a6a5c6216a820c058ea343b171",
        "c89af8f8167060419e3b8bb45d52c070feceafb6b546917827f4eb18e92ec3b5",
        "d4320afd1c31e1e625fb0297eabf7f356dce9736262c6d91cb3c80042fa25711",
        "bfbd5cf257ebc5ed1fc0ebf56ccd6472028947e06bf81bb05e823d3264dfe53f",
        "7165e39be67c74a444811868e18516bffc29ea63d42e1721637491ec97cae756",
        "295e34488f40aacebf1d411960ec651c37b590c030d41991d8190e78f7814598",
    ],
    "kaiming_uniform": [
        "d96afd62cc5e88bc79e82be94dd9e3e8d0fd18d407ee9c01ff07114e240ceace",
        "5cad15805cefc050bda031c74ddb47ef5fc8491744d52c917b76afbfb681a187",
        "257420623b494cbcbbc2672ad49df31ee4131a28704020a087bad2c43c3d1178",
        "5173bd8cc5a0b33f4acf6e2dcfc88b0a5e5c9226733c0567e5f7ca31fcfe9f45",
        "110ccaac20144916b364159357a0780b161e99fa274c02fff91d0de17de93583",
        "0bd8d1e254ecaf4e0c1044c1bb986ad7a6baed46643679eac94cdec83fc858aa",
        "756af2681fd74df27ce599762cdd1b667742b0bc4eacdb1953de4f019f6256c6",
    ],
    "pm_sigma": [
        "e00e5eb9444182f352323374ef4e08ebcb784725fdd4fd612d7730540b3e0c8c",
        "ad47d7e6a63e828bce9a2fdd958f5b929f6aff638dbf094b52d563628430f299",
        "d0452152980ef17225a15d6bfb1f3525d6e950e7536454aca043bc888c694593",
        "2e90108408a656d792aedf66b73dea3c248bfc5b94164578668765a0442aa19c",
        "d5fc12cadac6a151c18795e920bd8c8833d3319eb94dd7eb530fea0bf58b1a44",
        "b71578012da400fc7734cfeef1d46c53a580bad4e5cac71acc38684ea1159ad8",
        "0e66745e2c72baccbf010ec19726c134b0b57d8ec3aca6aba2d6a36932413c65",
    ],
    "standard_normal": [
        "1cd5c48e2eb19b46693137cb291bf3cc754baef0d522f926392c580aaa43b471",
        "08713a44802adad1a04dd8782b69aa319a030f56af631e90e85bfbc21a9bc054",
        "ec8324ce919c71b60c4bd6fffe3442f04f2a2b40a4b1b8565dd89eae8327d4b1",
        "eaed83fba184e01ccbab6b9d7bdf62c25eacc95359e7e84f93cdd5c8708dde90",
        "31fa3b72632f00fb1ac6c01b8e6229998d3a44233a46b611fec02781ae9556b7",
        "b684624a02f05c16b043f8d0f160d058929721f2b69c5b8527ab62d337f82221",
        "0bfccee4480b3bfe09eba05a139e472e270a14e5532b1027f2322239cc43dd66",
    ],
}
CASES = [
    ((), 0, 0),
    ((7,), 1, 0),
    ((784, 300), 0, 0),
    ((784, 300), 0, 1),
    ((784, 300), 1, 0),
    ((5, 5, 20, 50), 2**32 - 1, 3),
    ((3, 3, 3, 4, 5), 123456789, 2**32 - 1),
]


def digest(values):
    return hashlib.sha256(np.asarray(values).astype("<f4").tobytes()).hexdigest()


def philox_words(seed, stream, count):
    """Philox4x64-10 (Salmon et al., 2011) in Python integers; the counter starts at 1."""
    words = []
    for block in range(1, -(-count // 4) + 1):
        c0, c1, c2, c3 = block, 0, 0, 0
        k0, k1 = seed, stream
        for _ in range(10):
            product0, product1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
            c0, c1, c2, c3 = (
                (product1 >> 64) ^ c1 ^ k0,
                product1 & MASK_64,
                (product0 >> 64) ^ c3 ^ k1,
                product0 & MASK_64,
            )
            k0 = (k0 + 0x9E3779B97F4A7C15) & MASK_64
            k1 = (k1 + 0xBB67AE8584CAA73B) & MASK_64
        words += [c0, c1, c2, c3]
    return words[:count]


def expected_values(name, shape, seed, stream):
    """The generator from its description, with SciPy's quantile and a count of the fans by loop."""
    fan_in = fan_out = 1
    for axis, size in enumerate(shape):
        fan_in *= 1 if axis == len(shape) - 1 and len(shape) > 1 else size
        fan_out *= 1 if axis == len(shape) - 2 else size
    values = []
    for word in philox_words(seed, stream, math.prod(shape)):
        sign = -1.0 if word >> 63 else 1.0
        fraction = ((word >> 11) % 2**52 + 0.5) / 2**52
        magnitude = {
            "xavier_normal": lambda f: -special.ndtri(f / 2) * math.sqrt(2 / (fan_in + fan_out)),
            "kaiming_uniform": lambda f: f * math.sqrt(6 / fan_in),
            "pm_sigma": lambda f: math.sqrt(2 / (fan_in + fan_out)),
            "standard_normal": lambda f: -special.ndtri(f / 2),
        }[name](fraction)
        values.append(sign * magnitude)
    return np.array(values).reshape(shape)


# ---------------------------------------------------------------- the bits


@pytest.mark.parametrize(("seed", "stream"), [(0, 0), (1, 0), (0, 1), (2**32 - 1, 2**32 - 1)])
def test_numpy_philox_is_philox4x64_10_as_published(seed, stream):
    generator = np.random.Philox(key=np.array([seed, stream], np.uint64))
    assert generator.random_raw(37).tolist() == philox_words(seed, stream, 37)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_golden_checksums(name, case):
    shape, seed, stream = CASES[case]
    assert digest(get(name, seed, stream).values(shape)) == GOLDEN[name][case]


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(0, 5), max_size=5).map(tuple),
    seed=st.integers(0, 2**32 - 1),
    stream=st.integers(0, 2**32 - 1),
)
def test_values_follow_the_published_recipe(name, shape, seed, stream):
    values = get(name, seed, stream).values(shape)
    assert values.shape == shape
    assert values.dtype == np.float32
    if values.size:
        # half a unit in the last place of float32, and a little for the quantile
        np.testing.assert_allclose(
            values, expected_values(name, shape, seed, stream), rtol=2**-24 + 1e-9
        )


def test_words_become_sign_and_fraction_exactly():
    words = np.array([0, 2**63, 2**64 - 1, 2**11 - 1, 2**11, 2**62], np.uint64)
    signs, fractions = portable.split_words(words)
    assert signs.tolist() == [1, -1, -1, 1, 1, 1]
    assert fractions.tolist() == [
        2.0**-53,
        2.0**-53,
        1 - 2.0**-53,
        2.0**-53,
        3 * 2.0**-53,
        0.5 + 2.0**-53,
    ]


def test_upper_quantile_agrees_with_scipy_down_to_the_smallest_tail():
    rng = np.random.default_rng(0)
    p = np.concatenate(
        [
            rng.random(200_000) / 2,
            2.0 ** -rng.uniform(1, 54, 200_000),
            0.125 + np.arange(-50, 50) * 2.0**-55,
            0.5 - 2.0 ** -np.arange(2, 55),
            2.0 ** -np.arange(2, 55),
        ]
    )
    p = np.clip(p, 2.0**-54, 0.5 - 2.0**-54)
    np.testing.assert_allclose(generator.upper_quantile(p), -special.ndtri(p), rtol=1e-10)


def test_upper_quantile_rounds_after_every_operation():
    # Python's floats are never fused, vectorised or reordered: the bits must be the same
    def polynomial(coefficients, x):
        result = coefficients[-1]
        for coefficient in coefficients[-2::-1]:
            result = result * x
            result = result + coefficient
        return result

    def upper_quantile(p):
        if p >= 0.125:
            q = 0.5 - p
            return q * polynomial(generator._CENTER, q * q)
        mantissa, exponent = math.frexp(p)
        s = (mantissa - portable._SQRT_HALF) / (mantissa + portable._SQRT_HALF)
        series = s * polynomial(portable._LOG_SERIES, s * s)
        root = math.sqrt(-((exponent - 0.5) * portable._LN_2 + series))
        x = generator._TAIL_A - generator._TAIL_B / (root + 4.0)
        return polynomial(generator._TAIL, x)

    words = np.random.Philox(key=np.array([8, 9], np.uint64)).random_raw(20_000)
    p = np.concatenate([portable.split_words(words)[1] / 2, 2.0 ** -np.arange(2, 55)])
    assert generator.upper_quantile(p).tolist() == [upper_quantile(x) for x in p.tolist()]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("chunk", [1, 3, 64, 10_000])
def test_values_do_not_depend_on_the_chunk_size(name, chunk, monkeypatch):
    expected = get(name, 5, 6).values((41, 17))
    monkeypatch.setattr(initializers.seeded, "_CHUNK", chunk)
    assert get(name, 5, 6).values((41, 17)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ALL)
def test_every_chunk_goes_on_where_the_last_one_ended(name):
    values = get(name, 1, 2).values((3, seeded._CHUNK)).ravel()
    words = np.random.Philox(key=np.array([1, 2], np.uint64)).random_raw(values.size)
    assert np.array_equal(np.signbit(values), words >= 2**63)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ALL)
def test_eager_graph_xla_and_numpy_give_the_same_bits(name):
    initializer = get(name, 11, 12)
    shape = (3, 3, 8, 16)
    expected = initializer.values(shape).tobytes()
    graph = tf.function(lambda: initializer(shape))
    compiled = tf.function(lambda: initializer(shape), jit_compile=True)
    assert initializer(shape).numpy().tobytes() == expected
    assert graph().numpy().tobytes() == expected
    assert compiled().numpy().tobytes() == expected


@pytest.mark.cases(1)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_layer_built_inside_a_tf_function_gets_the_same_bits(jit_compile):
    layer = keras.layers.Dense(5, kernel_initializer=XavierNormal(3, 4))
    tf.function(lambda x: layer(x), jit_compile=jit_compile)(tf.ones((2, 7)))
    assert layer.kernel.numpy().tobytes() == XavierNormal(3, 4).values((7, 5)).tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float32"])
@pytest.mark.parametrize("jit_compile", [None, False, True])
def test_other_dtypes_are_the_float32_values_converted(dtype, jit_compile):
    initializer = XavierNormal(1, 2)

    def draw():
        return initializer((40, 30), dtype=dtype)

    tensor = draw() if jit_compile is None else tf.function(draw, jit_compile=jit_compile)()
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    assert tensor.dtype.name == dtype
    expected = initializer.values((40, 30)).astype(numpy_dtype)
    assert tensor.numpy().tobytes() == expected.tobytes()


def test_default_dtype_is_floatx():
    assert XavierNormal()((2, 2)).dtype == keras.config.floatx()
    assert XavierNormal()((2, 2), dtype=tf.float16).dtype == tf.float16


def test_other_random_functions_and_order_of_construction_change_nothing():
    def build(order):
        kernels = {}
        for stream in order:
            layer = keras.layers.Dense(6, kernel_initializer=KaimingUniform(9, stream))
            layer.build((None, 4))
            kernels[stream] = layer.kernel.numpy().tobytes()
        return kernels

    first = build([0, 1, 2])
    keras.utils.set_random_seed(77)
    np.random.seed(5)
    np.random.random(1000)
    tf.random.normal((100,))
    keras.random.normal((100,))
    assert build([2, 0, 1]) == first
    assert len(set(first.values())) == 3


@pytest.mark.exhaustive
def test_same_bits_in_a_fresh_process_without_vector_instructions():
    # features beyond the baseline that NumPy uses on this processor; switching them off selects
    # other inner loops, as another processor would
    features = np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
    code = (
        "import json, random, keras, numpy, hashlib\n"
        "keras.utils.set_random_seed(4321)\n"
        "from keras_freeze.initializers import get\n"
        f"cases, names = {CASES!r}, {ALL!r}\n"
        "print(json.dumps({name: [hashlib.sha256(get(name, seed, stream).values(shape)"
        ".astype('<f4').tobytes()).hexdigest() for shape, seed, stream in cases]"
        " for name in names}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONHASHSEED": "99",
            "NPY_DISABLE_CPU_FEATURES": " ".join(features),
            "TF_CPP_MIN_LOG_LEVEL": "2",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == GOLDEN


# ---------------------------------------------------------------- the distributions


def standardized(name, seed=0, shape=(500, 400)):
    """Values divided by the scale their shape asks for."""
    xavier = math.sqrt(2 / sum(shape))
    scale = {"kaiming_uniform": math.sqrt(6 / shape[0]), "standard_normal": 1.0}.get(name, xavier)
    return get(name, seed, 0).values(shape).ravel().astype(np.float64) / scale


@pytest.mark.parametrize("name", ["xavier_normal", "standard_normal"])
@pytest.mark.parametrize("seed", range(5))
def test_normal_weights_have_the_moments_of_a_normal_variable(seed, name):
    z = standardized(name, seed)
    assert stats.kstest(z, "norm").pvalue > 1e-3
    n = z.size
    assert abs(z.mean()) < 5 / math.sqrt(n)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs(stats.skew(z)) < 5 * math.sqrt(6 / n)
    assert abs(stats.kurtosis(z)) < 5 * math.sqrt(24 / n)


@pytest.mark.parametrize("name", ["xavier_normal", "standard_normal"])
def test_normal_weights_are_not_truncated(name):
    z = np.abs(standardized(name))
    for sigmas in (2, 3, 4):
        probability = math.erfc(sigmas / math.sqrt(2))
        expected = z.size * probability
        assert abs((z > sigmas).sum() - expected) < 5 * math.sqrt(expected)


@pytest.mark.parametrize("seed", range(5))
def test_kaiming_uniform_is_uniform(seed):
    z = standardized("kaiming_uniform", seed)
    assert stats.kstest(z, "uniform", args=(-1, 2)).pvalue > 1e-3
    assert np.abs(z).max() <= 1 + 2**-23
    assert np.abs(z).max() > 0.9999


@pytest.mark.parametrize("seed", range(5))
def test_pm_sigma_is_fair_and_has_one_magnitude(seed):
    z = standardized("pm_sigma", seed)
    np.testing.assert_allclose(np.abs(z), 1, rtol=2**-23)
    assert len(np.unique(z)) == 2
    assert stats.binomtest(int((z > 0).sum()), z.size).pvalue > 1e-3


@pytest.mark.parametrize("shape", [(), (7,), (784, 300), (5, 5, 20, 50), (3, 3, 3, 4, 5)])
def test_constant_sigma_is_the_standard_deviation_of_xavier_normal(shape):
    *field, fan_in, fan_out = (1, 1, *shape)[-max(2, len(shape)) :]
    if len(shape) == 1:
        fan_in = fan_out
    sigma = np.float32(math.sqrt(2 / (math.prod(field) * (fan_in + fan_out))))
    values = ConstantSigma()(shape).numpy()
    assert values.shape == shape
    assert values.dtype == np.float32
    assert (values == sigma).all()
    assert np.array_equal(values, np.abs(PlusMinusSigma(1, 2).values(shape)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_constant_sigma_in_other_dtypes_is_that_of_float32_converted(dtype):
    values = ConstantSigma()((40, 30), dtype=dtype)
    numpy_dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    assert values.dtype.name == dtype
    assert (values.numpy() == np.float32(math.sqrt(2 / 70)).astype(numpy_dtype)).all()


@pytest.mark.parametrize("name", ALL)
def test_seeds_and_streams_are_uncorrelated(name):
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (1, 2), (2**31, 0), (0, 2**31), (12, 34)]
    rows = np.stack([get(name, *pair).values((100, 100)).ravel() for pair in pairs])
    rows = np.concatenate([rows, rows[:, ::-1], np.roll(rows, 1, axis=1), np.roll(rows, 4, axis=1)])
    correlation = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlation).max() < 6 / math.sqrt(rows.shape[1])


# ---------------------------------------------------------------- fans


@pytest.mark.parametrize(
    "layer",
    [
        (keras.layers.Dense(3), (None, 5)),
        (keras.layers.Conv1D(4, 3), (None, 9, 2)),
        (keras.layers.Conv2D(4, (3, 5)), (None, 9, 9, 2)),
        (keras.layers.Conv3D(4, 2), (None, 9, 9, 9, 2)),
        (keras.layers.Conv2DTranspose(4, 3), (None, 9, 9, 2)),
        (keras.layers.DepthwiseConv2D(3, depth_multiplier=2), (None, 9, 9, 5)),
        (keras.layers.SeparableConv2D(4, 3), (None, 9, 9, 5)),
        (keras.layers.LSTM(6), (None, 8, 3)),
        (keras.layers.EinsumDense("abc,cde->abde", (None, 2, 3)), (None, 4, 5)),
        (keras.layers.Embedding(10, 3), (None, 4)),
    ],
    ids=lambda layer: type(layer[0]).__name__,
)
def test_fans_are_those_of_keras_for_real_layers(layer):
    layer, input_shape = layer
    layer.build(input_shape)
    assert layer.weights
    for variable in layer.weights:
        assert compute_fans(variable.shape) == keras_fans(variable.shape)


@given(st.lists(st.integers(0, 9), max_size=6).map(tuple))
def test_fans_are_those_of_keras_for_any_shape(shape):
    assert compute_fans(shape) == keras_fans(shape)


# ---------------------------------------------------------------- as Keras initializers


@pytest.mark.parametrize("name", ALL)
def test_layers_take_them_like_any_initializer(name):
    initializer = get(name, 21, 22)
    layers = [
        (keras.layers.Conv2D(4, 3, kernel_initializer=initializer), (None, 9, 9, 2), "kernel"),
        (
            keras.layers.LSTM(6, recurrent_initializer=initializer),
            (None, 8, 3),
            "recurrent_kernel",
        ),
        (keras.layers.Embedding(10, 3, embeddings_initializer=initializer), (None,), "embeddings"),
    ]
    for layer, input_shape, kernel in layers:
        layer.build(input_shape)
        (variable,) = [v for v in layer.weights if v.name == kernel]
        assert variable.numpy().tobytes() == initializer.values(variable.shape).tobytes()


@pytest.mark.parametrize("name", ALL)
def test_config_round_trip(name):
    initializer = get(name, 2**32 - 1, 17)
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(initializer)))
    assert config["registered_name"] == f"keras_freeze>{type(initializer).__name__}"
    for again in (
        keras.saving.deserialize_keras_object(config),
        keras.initializers.get(config),
        initializer.clone(),
    ):
        assert type(again) is type(initializer)
        assert (again.seed, again.stream) == (2**32 - 1, 17)


def test_saved_model_keeps_its_initializer(tmp_path):
    layer = keras.layers.Dense(3, kernel_initializer=PlusMinusSigma(5, 6))
    keras.Sequential([keras.Input((4,)), layer]).save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").layers[-1].kernel_initializer
    assert type(loaded) is PlusMinusSigma
    assert loaded.get_config() == {"seed": 5, "stream": 6}


def test_constant_sigma_is_saved_with_its_model(tmp_path):
    layer = keras.layers.Dense(3, kernel_initializer=get("constant_sigma"))
    keras.Sequential([keras.Input((4,)), layer]).save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras").layers[-1].kernel_initializer
    assert type(loaded) is ConstantSigma


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (0, 0), (3, 3, 0, 2), (0, 3, 4)])
def test_empty_weights_work(shape):
    for name in initializers.INITIALIZERS:
        assert get(name)(shape).shape == shape


def test_numpy_integers_and_tensor_shapes_are_accepted():
    initializer = XavierNormal(np.uint32(5), stream=np.int64(6))
    assert initializer.get_config() == {"seed": 5, "stream": 6}
    assert json.dumps(initializer.get_config())
    shape = tf.TensorShape((2, 3))
    assert initializer(shape).numpy().tobytes() == initializer.values([2, 3]).tobytes()


# ---------------------------------------------------------------- get


def test_get_makes_the_named_distribution():
    for name, kind in DISTRIBUTIONS.items():
        initializer = get(name, seed=3, stream=4)
        assert type(initializer) is kind
        assert initializer.get_config() == {"seed": 3, "stream": 4}


def test_get_makes_the_named_constant():
    assert type(get("ones", seed=3, stream=4)) is keras.initializers.Ones
    assert type(get("constant_sigma", seed=3, stream=4)) is ConstantSigma


def test_reinitialize_takes_every_name():
    model = keras.Sequential(
        [keras.Input((9, 9, 2)), keras.layers.Conv2D(4, 3), keras.layers.Flatten()]
    )
    model.add(keras.layers.Dense(5))
    kernels = [model.layers[0].kernel, model.layers[-1].kernel]
    constants = {"ones": [1, 1], "constant_sigma": [math.sqrt(2 / 54), math.sqrt(2 / 201)]}
    for name in initializers.INITIALIZERS:
        reinitialize(model, name, seed=6)
        for stream, kernel in enumerate(kernels):
            if name in constants:
                expected = np.full(kernel.shape, constants[name][stream], np.float32)
            else:
                expected = get(name, 6, stream).values(kernel.shape)
            assert kernel.numpy().tobytes() == expected.tobytes()


def test_get_lets_an_instance_keep_its_seed_and_gives_it_the_stream():
    instance = KaimingUniform(seed=8, stream=1)
    initializer = get(instance, seed=3, stream=4)
    assert initializer.get_config() == {"seed": 8, "stream": 4}
    assert instance.get_config() == {"seed": 8, "stream": 1}


@pytest.mark.parametrize("seed", [None, 5])
def test_get_tells_the_weights_of_a_random_keras_initializer_apart(seed):
    instance = keras.initializers.HeNormal(seed=seed)
    draws = [get(instance, stream=stream)((4, 4)).numpy() for stream in (0, 1, 1, 2)]
    assert np.array_equal(draws[0], instance((4, 4)).numpy())
    assert np.array_equal(draws[1], draws[2])
    assert not np.array_equal(draws[0], draws[1])
    assert not np.array_equal(draws[1], draws[3])


@pytest.mark.parametrize(
    "instance",
    [
        keras.initializers.Constant(0.5),
        keras.initializers.RandomNormal(seed=keras.random.SeedGenerator(1)),
    ],
)
def test_get_returns_other_keras_initializers_as_they_are(instance):
    assert get(instance, 1, 2) is instance


def test_get_lists_what_it_accepts():
    names = r"constant_sigma.*kaiming_uniform.*ones.*pm_sigma.*standard_normal.*xavier_normal"
    with pytest.raises(ValueError, match=f"{names}.*'glorot'"):
        get("glorot")
    for wrong in (None, 3, XavierNormal, lambda shape, dtype=None: 0):
        with pytest.raises(TypeError, match=r"xavier_normal.*Received: initializer="):
            get(wrong)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("name", ["seed", "stream"])
@pytest.mark.parametrize("kind", list(DISTRIBUTIONS.values()))
def test_seed_and_stream_are_32_bit_integers(kind, name):
    for value in (-1, 2**32, 10**30):
        with pytest.raises(ValueError, match=rf"`{name}` must be .*Received: {name}={value}"):
            kind(**{name: value})
    for value in (None, 1.0, "1", True, np.True_, [1]):
        with pytest.raises(TypeError, match=rf"`{name}` must be .*Received: {name}="):
            kind(**{name: value})
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        get(keras.initializers.Zeros(), **{name: -1})


@pytest.mark.parametrize("kind", [XavierNormal, ConstantSigma])
@pytest.mark.parametrize("shape", [(None, 3), (-1, 3), (2.5,), 7, None, "ab"])
def test_unknown_or_negative_shapes_are_rejected(shape, kind):
    with pytest.raises(ValueError, match="Received: shape="):
        kind()(shape)


@pytest.mark.parametrize("kind", [XavierNormal, ConstantSigma])
@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8"])
def test_integer_dtypes_are_rejected(dtype, kind):
    with pytest.raises(ValueError, match=f"floating-point.*Received: dtype='{dtype}'"):
        kind()((2, 2), dtype=dtype)
