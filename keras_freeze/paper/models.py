"""The four networks of the paper's experiments, with exactly its parameter counts.

All of them are functional Keras models on images in channels-last order, return logits, start with
zero biases, and draw each kernel from `(seed, position of the kernel in the model)`: the same seed
gives the same bits, whatever was built or drawn before. The paper's log-softmax belongs to the
loss (`from_logits=True`).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras
from keras import layers

from keras_freeze import initializers
from keras_freeze._utils.validation import check_int, type_error, value_error

_FORMAT = "channels_last"

_Initializer: TypeAlias = str | keras.initializers.Initializer
_NextKernel = Callable[[], keras.initializers.Initializer]


def lenet_300_100(
    num_classes: int = 10,
    input_shape: Sequence[int] = (28, 28, 1),
    *,
    initializer: _Initializer = "xavier_normal",
    seed: int = 0,
) -> keras.Model:
    """Build LeNet-300-100, two hidden layers of 300 and 100 ReLU neurons (figure S9).

    With 10 classes and 28 x 28 inputs: 266,200 weights and 410 biases.

    Args:
        num_classes: number of logits, at least 1.
        input_shape: shape of one image (or any array), without the batch axis; it is flattened.
        initializer: "xavier_normal", "kaiming_uniform", "pm_sigma", or a Keras initializer, which
            has its own seed (see `keras_freeze.initializers.get`).
        seed: the model's seed, an integer in [0, 2**32).

    Returns:
        A model from `(batch, *input_shape)` to logits `(batch, num_classes)`.

    Raises:
        TypeError: `num_classes`, a dimension or `seed` is not an integer, or `initializer` is not
            an initializer.
        ValueError: `num_classes` or a dimension is below 1, `seed` is outside [0, 2**32), or the
            initializer's name is unknown.

    Example:
        >>> lenet_300_100(seed=1).count_params()
        266610
    """
    classes, shape = _check_sizes(num_classes, input_shape)
    kernel = _kernels(initializer, seed)
    image = keras.Input(shape, name="image")
    x = layers.Flatten(data_format=_FORMAT, name="flatten")(image)
    x = _dense(300, "fc1", kernel, activation="relu")(x)
    x = _dense(100, "fc2", kernel, activation="relu")(x)
    x = _dense(classes, "fc3", kernel)(x)
    return keras.Model(image, x, name="lenet_300_100")


def lenet_5_caffe(
    num_classes: int = 10,
    input_shape: Sequence[int] = (28, 28, 1),
    *,
    initializer: _Initializer = "xavier_normal",
    seed: int = 0,
) -> keras.Model:
    """Build LeNet-5-Caffe: two 5 x 5 convolutions with max-pooling, one hidden layer (figure S10).

    With 10 classes and 28 x 28 x 1 inputs: 430,500 weights and 580 biases.

    Args:
        input_shape: `(height, width, channels)`, height and width at least 16, so that a pixel is
            left after both convolutions (no padding) and poolings.
        num_classes, initializer, seed: as in `lenet_300_100`.

    Returns:
        A model from `(batch, height, width, channels)` to logits `(batch, num_classes)`.

    Raises:
        TypeError, ValueError: as in `lenet_300_100`, and for an image that is too small.

    Example:
        >>> lenet_5_caffe(seed=1).count_params()
        431080
    """
    classes, shape = _check_sizes(num_classes, input_shape, smallest=16)
    kernel = _kernels(initializer, seed)
    x = image = keras.Input(shape, name="image")
    for number, filters in enumerate((20, 50), start=1):
        x = _conv(filters, 5, f"conv{number}", kernel, activation="relu")(x)
        x = layers.MaxPooling2D(2, data_format=_FORMAT, name=f"pool{number}")(x)
    x = layers.Flatten(data_format=_FORMAT, name="flatten")(x)
    x = _dense(500, "fc1", kernel, activation="relu")(x)
    x = _dense(classes, "fc2", kernel)(x)
    return keras.Model(image, x, name="lenet_5_caffe")


def vgg16_d(
    num_classes: int = 10,
    input_shape: Sequence[int] = (32, 32, 3),
    *,
    initializer: _Initializer = "xavier_normal",
    seed: int = 0,
) -> keras.Model:
    """Build VGG16-D: 13 convolutions and two dense layers, all with BatchNorm (figure S11).

    With 10 classes and 32 x 32 x 3 inputs: 15,239,872 weights, 5,258 biases and 10,496 BatchNorm
    parameters (gamma and beta; Keras's `count_params()` adds as many moving statistics).
    BatchNorm's momentum and epsilon are PyTorch's defaults.

    Args:
        input_shape: `(height, width, channels)`, height and width at least 32, so that a pixel is
            left after five poolings. Up to 63 exactly one is left, as in the paper; from 64 on the
            first dense layer grows with what is left.
        num_classes, initializer, seed: as in `lenet_300_100`.

    Returns:
        A model from `(batch, height, width, channels)` to logits `(batch, num_classes)`.

    Raises:
        TypeError, ValueError: as in `lenet_300_100`, and for an image that is too small.

    Example:
        >>> vgg16_d(num_classes=100, initializer="kaiming_uniform").output_shape
        (None, 100)
    """
    classes, shape = _check_sizes(num_classes, input_shape, smallest=32)
    kernel = _kernels(initializer, seed)
    x = image = keras.Input(shape, name="image")
    conv_number = itertools.count(1)
    for stage, (filters, repeat) in enumerate(
        ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)), start=1
    ):
        for _ in range(repeat):
            name = f"conv{next(conv_number)}"
            x = _conv(filters, 3, name, kernel, padding="same")(x)
            x = _batch_norm(name)(x)
            x = layers.ReLU(name=f"{name}_relu")(x)
        x = layers.MaxPooling2D(2, data_format=_FORMAT, name=f"pool{stage}")(x)
    x = layers.Flatten(data_format=_FORMAT, name="flatten")(x)
    for name in ("fc1", "fc2"):
        x = _dense(512, name, kernel)(x)
        x = _batch_norm(name)(x)
        x = layers.ReLU(name=f"{name}_relu")(x)
    x = _dense(classes, "fc3", kernel)(x)
    return keras.Model(image, x, name="vgg16_d")


def resnet34(
    num_classes: int = 200,
    input_shape: Sequence[int] = (64, 64, 3),
    *,
    initializer: _Initializer = "kaiming_uniform",
    seed: int = 0,
) -> keras.Model:
    """Build ResNet34 for small images: a 3 x 3 stem and 16 residual blocks (table S1, figure S12).

    With 200 classes: 21,366,464 weights, 200 biases and 17,152 BatchNorm parameters (gamma and
    beta). Convolutions have no bias. A block whose output differs in shape from its input, by
    channels or by stride, has a 1 x 1 convolution with BatchNorm as its shortcut: so does the very
    first, although it keeps 64 channels. (The caption of figure S12 asks for one only where the
    channels change, which contradicts the paper's own count.)

    Args:
        input_shape: `(height, width, channels)`, height and width at least 16: four stages halve
            them. What is left is averaged; 64 x 64 leaves the paper's 4 x 4.
        num_classes, initializer, seed: as in `lenet_300_100`.

    Returns:
        A model from `(batch, height, width, channels)` to logits `(batch, num_classes)`.

    Raises:
        TypeError, ValueError: as in `lenet_300_100`, and for an image that is too small.

    Example:
        >>> resnet34(num_classes=10, input_shape=(32, 32, 3)).output_shape
        (None, 10)
    """
    classes, shape = _check_sizes(num_classes, input_shape, smallest=16)
    kernel = _kernels(initializer, seed)
    image = keras.Input(shape, name="image")
    x = _conv_bn(image, 64, 3, 1, "conv1", kernel)
    x = layers.ReLU(name="conv1_relu")(x)
    for stage, (filters, repeat) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(1, repeat + 1):
            x = _res_block(x, filters, 2 if block == 1 else 1, f"stage{stage}_block{block}", kernel)
    x = layers.GlobalAveragePooling2D(data_format=_FORMAT, name="pool")(x)
    x = _dense(classes, "fc", kernel)(x)
    return keras.Model(image, x, name="resnet34")


MODELS: dict[str, Callable[..., keras.Model]] = {
    "lenet_300_100": lenet_300_100,
    "lenet_5_caffe": lenet_5_caffe,
    "vgg16_d": vgg16_d,
    "resnet34": resnet34,
}
"""The architectures by name; all take the same arguments."""


def _res_block(x: Any, filters: int, stride: int, name: str, kernel: _NextKernel) -> Any:
    shortcut = x
    y = _conv_bn(x, filters, 3, stride, f"{name}_conv1", kernel)
    y = layers.ReLU(name=f"{name}_conv1_relu")(y)
    y = _conv_bn(y, filters, 3, 1, f"{name}_conv2", kernel)
    if stride != 1 or x.shape[-1] != filters:
        shortcut = _conv_bn(x, filters, 1, stride, f"{name}_shortcut", kernel)
    y = layers.Add(name=f"{name}_add")([y, shortcut])
    return layers.ReLU(name=f"{name}_relu")(y)


def _conv_bn(x: Any, filters: int, size: int, stride: int, name: str, kernel: _NextKernel) -> Any:
    """Apply a convolution without bias and BatchNorm, padded by size // 2 on every side."""
    if size > 1:
        # padding="same" would pad a strided convolution on the right and below only
        x = layers.ZeroPadding2D(size // 2, data_format=_FORMAT, name=f"{name}_pad")(x)
    x = _conv(filters, size, name, kernel, strides=stride, use_bias=False)(x)
    return _batch_norm(name)(x)


def _conv(
    filters: int, size: int, name: str, kernel: _NextKernel, **kwargs: Any
) -> keras.layers.Layer:
    return layers.Conv2D(
        filters, size, data_format=_FORMAT, kernel_initializer=kernel(), name=name, **kwargs
    )


def _dense(units: int, name: str, kernel: _NextKernel, **kwargs: Any) -> keras.layers.Layer:
    return layers.Dense(units, kernel_initializer=kernel(), name=name, **kwargs)


def _batch_norm(name: str) -> keras.layers.Layer:
    # PyTorch's momentum 0.1 is the weight of the new value, Keras's 0.9 that of the old one
    return layers.BatchNormalization(axis=-1, momentum=0.9, epsilon=1e-5, name=f"{name}_bn")


def _kernels(initializer: _Initializer, seed: int) -> _NextKernel:
    """Return a function that returns the initializer of the next kernel of the model each time."""
    streams = itertools.count()
    return lambda: initializers.get(initializer, seed, next(streams))


def _check_sizes(
    num_classes: Any, input_shape: Any, smallest: int | None = None
) -> tuple[int, tuple[int, ...]]:
    """Return classes and shape, of an image with sides of at least `smallest` if that is given."""
    classes = check_int("num_classes", num_classes, minimum=1)
    if not isinstance(input_shape, Sequence) or isinstance(input_shape, str):
        raise type_error("input_shape", input_shape, "a sequence of positive integers")
    shape = tuple(
        check_int(f"input_shape[{axis}]", dimension, minimum=1)
        for axis, dimension in enumerate(input_shape)
    )
    if not shape:
        raise value_error("input_shape", input_shape, "of at least one dimension")
    if smallest is not None and (len(shape) != 3 or min(shape[:2]) < smallest):
        accepted = f"(height, width, channels) with height and width at least {smallest}"
        raise value_error("input_shape", input_shape, accepted)
    return classes, shape
