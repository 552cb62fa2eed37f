"""The four architectures: the paper's counts, shapes, reproducible kernels, clear errors."""

import functools
import math

import keras
import numpy as np
import pytest

from keras_freeze import initializers
from keras_freeze.paper.models import MODELS, lenet_5_caffe, lenet_300_100, resnet34, vgg16_d

pytestmark = pytest.mark.cases(2)

DEFAULT_INPUT = {
    "lenet_300_100": (28, 28, 1),
    "lenet_5_caffe": (28, 28, 1),
    "vgg16_d": (32, 32, 3),
    "resnet34": (64, 64, 3),
}
ALL = sorted(DEFAULT_INPUT)


@functools.cache
def build(name, **kwargs):
    return MODELS[name](**kwargs)


def count(model, *names):
    return sum(math.prod(v.shape) for v in model.trainable_variables if v.name in names)


def kernels(model):
    return [v for v in model.trainable_variables if v.name == "kernel"]


def images(model, number=2):
    rng = np.random.default_rng(0)
    return rng.standard_normal((number, *model.input_shape[1:])).astype(np.float32)


def convolve(x, kernel, stride):
    """Valid cross-correlation of (batch, height, width, channels) with a Keras kernel."""
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel.shape[:2], axis=(1, 2))
    return np.einsum("bhwcij,ijcd->bhwd", windows[:, ::stride, ::stride], kernel)


def relu(x):
    return np.maximum(x, 0)


# ---------------------------------------------------------------- architecture


@pytest.mark.parametrize(
    ("name", "num_classes", "weights", "biases", "batch_norm"),
    [
        ("lenet_300_100", 10, 266_200, 410, 0),
        ("lenet_5_caffe", 10, 430_500, 580, 0),
        ("vgg16_d", 10, 15_239_872, 5_258, 10_496),
        ("vgg16_d", 100, 15_285_952, 5_348, 10_496),
        ("resnet34", 200, 21_366_464, 200, 17_152),
    ],
)
def test_parameter_counts_are_the_papers(name, num_classes, weights, biases, batch_norm):
    model = build(name, num_classes=num_classes)
    assert count(model, "kernel") == weights
    assert count(model, "bias") == biases
    assert count(model, "gamma", "beta") == batch_norm
    total = sum(math.prod(v.shape) for v in model.trainable_variables)
    assert total == weights + biases + batch_norm


@pytest.mark.parametrize("name", ALL)
def test_default_call_is_the_papers_network(name):
    model = build(name)
    assert model.name == name
    assert model.input_shape == (None, *DEFAULT_INPUT[name])
    assert model.output_shape == (None, 200 if name == "resnet34" else 10)
    distribution = "KaimingUniform" if name == "resnet34" else "XavierNormal"
    assert type(model.layers[-1].kernel_initializer).__name__ == distribution


@pytest.mark.parametrize("name", ALL)
def test_outputs_are_logits(name):
    model = build(name)
    logits = model.predict(images(model, 3), verbose=0)
    assert logits.shape == (3, model.output_shape[1])
    assert logits.min() < 0 < logits.max()
    assert not np.allclose(logits.sum(axis=1), 1)
    assert model.layers[-1].activation is keras.activations.linear


def test_lenet_300_100_computes_three_dense_layers():
    model = build("lenet_300_100", seed=3)
    x = images(model)
    hidden = x.reshape(2, -1)
    first, second, last = (kernel.numpy() for kernel in kernels(model))
    expected = relu(relu(hidden @ first) @ second) @ last
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_lenet_5_caffe_computes_its_figure():
    model = build("lenet_5_caffe", seed=3)
    x = hidden = images(model)
    conv1, conv2, fc1, fc2 = (kernel.numpy() for kernel in kernels(model))
    for kernel in (conv1, conv2):
        hidden = relu(convolve(hidden, kernel, 1))
        batch, height, width, channels = hidden.shape
        pools = hidden.reshape(batch, height // 2, 2, width // 2, 2, channels)
        hidden = pools.max(axis=(2, 4))
    assert hidden.shape == (2, 4, 4, 50)
    expected = relu(hidden.reshape(2, -1) @ fc1) @ fc2
    np.testing.assert_allclose(model(x), expected, rtol=1e-4, atol=1e-5)


def test_vgg16_d_pools_to_one_pixel():
    model = build("vgg16_d")
    sizes = [model.get_layer(f"pool{n}").output.shape[1:] for n in range(1, 6)]
    assert sizes == [(16, 16, 64), (8, 8, 128), (4, 4, 256), (2, 2, 512), (1, 1, 512)]
    assert model.get_layer("flatten").output.shape == (None, 512)
    assert [kernel.shape[-1] for kernel in kernels(model)] == (
        [64] * 2 + [128] * 2 + [256] * 3 + [512] * 6 + [512, 512, 10]
    )


def test_resnet34_stages_are_those_of_the_table():
    model = build("resnet34")
    assert model.get_layer("conv1_relu").output.shape == (None, 64, 64, 64)
    for stage, (size, channels, blocks) in enumerate(
        [(32, 64, 3), (16, 128, 4), (8, 256, 6), (4, 512, 3)], start=1
    ):
        for block in range(1, blocks + 1):
            name = f"stage{stage}_block{block}"
            assert model.get_layer(f"{name}_relu").output.shape == (None, size, size, channels)
    shortcuts = [layer.name for layer in model.layers if layer.name.endswith("shortcut")]
    assert shortcuts == [f"stage{stage}_block1_shortcut" for stage in (1, 2, 3, 4)]


def test_resnet34_block_computes_its_figure():
    model = build("resnet34")
    first = model.get_layer("stage1_block3_relu").output
    last = model.get_layer("stage2_block1_relu").output
    x, y = (out.numpy() for out in keras.Model(model.input, [first, last])(images(model)))
    scale = 1 / math.sqrt(1 + 1e-5)  # BatchNorm as it starts: mean 0, variance 1

    def conv_bn(x, name, stride):
        kernel = model.get_layer(f"stage2_block1_{name}").kernel.numpy()
        pad = kernel.shape[0] // 2
        x = np.pad(x, [(0, 0), (pad, pad), (pad, pad), (0, 0)])
        return convolve(x, kernel, stride) * scale

    inner = conv_bn(relu(conv_bn(x, "conv1", 2)), "conv2", 1)
    np.testing.assert_allclose(y, relu(inner + conv_bn(x, "shortcut", 2)), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["vgg16_d", "resnet34"])
def test_batch_norm_has_pytorchs_defaults(name):
    norms = [
        layer for layer in build(name).layers if isinstance(layer, keras.layers.BatchNormalization)
    ]
    assert {(layer.momentum, layer.epsilon) for layer in norms} == {(0.9, 1e-5)}
    convolutions = [layer for layer in build(name).layers if isinstance(layer, keras.layers.Conv2D)]
    assert {layer.use_bias for layer in convolutions} == {name == "vgg16_d"}


# ---------------------------------------------------------------- names and seeds


def test_registry_has_the_four_functions():
    functions = [lenet_300_100, lenet_5_caffe, vgg16_d, resnet34]
    assert [*MODELS.items()] == [(function.__name__, function) for function in functions]


@pytest.mark.parametrize("name", ALL)
def test_names_do_not_depend_on_what_was_built_before(name):
    first = MODELS[name]()
    second = MODELS[name]()
    assert [v.path for v in first.variables] == [v.path for v in second.variables]
    assert [layer.name for layer in first.layers] == [layer.name for layer in second.layers]
    paths = [v.path for v in first.variables]
    assert len(set(paths)) == len(paths)


@pytest.mark.parametrize("name", ALL)
def test_same_seed_same_bits_other_seed_other_bits(name):
    model = MODELS[name](seed=2**32 - 1)
    keras.utils.set_random_seed(1)
    again = MODELS[name](seed=2**32 - 1)
    other = MODELS[name](seed=1)
    for v, w in zip(model.variables, again.variables, strict=True):
        assert v.numpy().tobytes() == w.numpy().tobytes()
    for v, w in zip(kernels(model), kernels(other), strict=True):
        assert (v.numpy() != w.numpy()).mean() > 0.99


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("distribution", sorted(initializers.DISTRIBUTIONS))
def test_kernels_are_drawn_from_seed_and_position(name, distribution):
    model = MODELS[name](initializer=distribution, seed=7)
    for position, kernel in enumerate(kernels(model)):
        expected = initializers.get(distribution, 7, position).values(kernel.shape)
        assert kernel.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ALL)
def test_everything_but_kernels_starts_at_zero_or_one(name):
    start = {"bias": 0, "beta": 0, "moving_mean": 0, "gamma": 1, "moving_variance": 1}
    for v in build(name).variables:
        if v.name != "kernel":
            assert np.all(v.numpy() == start[v.name])


def test_an_initializer_instance_brings_its_own_seed():
    model = lenet_300_100(initializer=initializers.PlusMinusSigma(seed=4), seed=9)
    expected = lenet_300_100(initializer="pm_sigma", seed=4)
    for v, w in zip(model.variables, expected.variables, strict=True):
        assert v.numpy().tobytes() == w.numpy().tobytes()


def test_a_keras_initializer_does_not_repeat_itself():
    model = vgg16_d(initializer=keras.initializers.HeNormal(seed=1))
    same_shape = [k.numpy() for k in kernels(model) if k.shape == (3, 3, 512, 512)]
    assert len(same_shape) == 5
    assert len({kernel.tobytes() for kernel in same_shape}) == 5


# ---------------------------------------------------------------- classes and sizes


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("num_classes", [1, 7, np.int64(3)])
def test_any_number_of_classes(name, num_classes):
    model = MODELS[name](num_classes)
    assert model.output_shape == (None, num_classes)
    assert model(images(model)).shape == (2, num_classes)


@pytest.mark.parametrize(
    ("name", "input_shape", "features"),
    [
        ("lenet_300_100", (784,), 784),
        ("lenet_300_100", [5, 3, 2], 30),
        ("lenet_5_caffe", (16, 16, 1), 50),
        ("lenet_5_caffe", (32, 17, 3), 5 * 50),
        ("vgg16_d", (63, 32, 1), 512),
        ("vgg16_d", (64, 96, 3), 2 * 3 * 512),
        ("resnet34", (16, 16, 3), 512),
        ("resnet34", (33, 50, 1), 512),
    ],
)
def test_other_input_sizes(name, input_shape, features):
    model = MODELS[name](4, input_shape)
    assert model(images(model)).shape == (2, 4)
    assert features in [kernel.shape[0] for kernel in kernels(model) if len(kernel.shape) == 2]


def test_channels_first_as_global_default_changes_nothing():
    expected = [v.shape for v in build("resnet34").variables]
    keras.config.set_image_data_format("channels_first")
    try:
        assert [v.shape for v in resnet34().variables] == expected
        assert lenet_5_caffe().get_layer("flatten").output.shape == (None, 800)
    finally:
        keras.config.set_image_data_format("channels_last")


# ---------------------------------------------------------------- saving


@pytest.mark.parametrize("name", ALL)
def test_saved_model_gives_the_same_outputs(name, tmp_path):
    model = build(name)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    x = images(model)
    assert np.array_equal(model.predict(x, verbose=0), loaded.predict(x, verbose=0))
    assert [k.shape for k in kernels(loaded)] == [k.shape for k in kernels(model)]
    streams = [
        layer.kernel_initializer.stream
        for layer in loaded.layers
        if hasattr(layer, "kernel_initializer")
    ]
    assert streams == list(range(len(kernels(model))))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("name", ALL)
def test_wrong_arguments_are_named(name):
    model = MODELS[name]
    for value in (0, -3):
        with pytest.raises(ValueError, match=f"a positive int. Received: num_classes={value}"):
            model(value)
    for value in (2.0, None, "10", True):
        with pytest.raises(TypeError, match=r"must be a positive int.*Received: num_c"):
            model(value)
    for shape in ((28, 0, 1), (-28, 28, 1), ()):
        with pytest.raises(ValueError, match=r"Received: input_shape(=|\[\d\]=)"):
            model(input_shape=shape)
    for shape in ((28, None, 1), (28.0, 28, 1), 28, None, "abc"):
        with pytest.raises(TypeError, match=r"Received: input_shape(=|\[\d\]=)"):
            model(input_shape=shape)
    with pytest.raises(ValueError, match="Received: seed=-1"):
        model(seed=-1)
    with pytest.raises(TypeError, match="Received: seed=None"):
        model(seed=None)
    with pytest.raises(ValueError, match=r"xavier_normal.*Received: initializer='glorot'"):
        model(initializer="glorot")


@pytest.mark.parametrize(
    ("name", "smallest"), [("lenet_5_caffe", 16), ("vgg16_d", 32), ("resnet34", 16)]
)
def test_images_that_are_too_small_or_flat_are_rejected(name, smallest):
    for shape in ((smallest - 1, 64, 3), (64, smallest - 1, 3), (64, 64), (4, 64, 64, 3)):
        with pytest.raises(ValueError, match=f"at least {smallest}. Received"):
            MODELS[name](input_shape=shape)
