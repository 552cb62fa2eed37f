"""What convolutions compute, as products whose gradient can be restricted to a block."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from keras import ops

from keras_freeze import backend
from keras_freeze.restricted.cost_model import WAYS
from keras_freeze.restricted.operations import Axes, as_matrices, take


class Convolution:
    """What Conv1D, Conv2D and Conv3D without groups compute: a matrix at each place of the kernel.

    Attributes:
        axes: which axes of the kernel are places, rows and columns.
        ways: whether some rows, and some columns, can be taken alone: all that is possible.
        costs: as of `cheapest_block`.
        strides, dilation_rate: as of the layer.
        channels: the axis of inputs and outputs that has the channels.
    """

    ways: tuple[tuple[bool, bool], ...] = WAYS
    costs = backend.CONVOLUTION_COSTS

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._rank = layer.rank
        self._kernel_size = layer.kernel_size
        self._padding = layer.padding
        self.strides = layer.strides
        self.dilation_rate = layer.dilation_rate
        self.channels = layer.rank + 1 if layer.data_format == "channels_last" else 1
        self.axes: Axes = tuple(range(layer.rank)), (layer.rank,), (layer.rank + 1,)

    def matrices(self, trained: np.ndarray) -> np.ndarray:
        """Return a mask of the kernel in the shape of the matrices that are multiplied."""
        return as_matrices(trained, self.axes)

    def apply(self, inputs: Any, kernel: Any) -> Any:
        """Compute the convolution of inputs with a kernel, as the layer does."""
        if self._padding == "causal":  # only Conv1D has it
            return self._apply_padded(inputs, kernel)
        return self._convolve(inputs, kernel, self._padding)

    def _convolve(self, inputs: Any, kernel: Any, padding: str) -> Any:
        strides, data_format = list(self.strides), self._layer.data_format
        return ops.conv(inputs, kernel, strides, padding, data_format, self.dilation_rate)

    def _apply_padded(self, inputs: Any, kernel: Any) -> Any:
        """Compute a causal convolution, or a dilated one of strides 1, with a separate padding."""
        paddings = self.paddings((1,) * self._rank)
        paddings.insert(self.channels - 1, (0, 0))
        return self._convolve(ops.pad(inputs, [(0, 0), *paddings]), kernel, "valid")

    def paddings(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """Return how many zeros go before and after inputs of these sizes, along each axis."""
        axes = zip(sizes, self._kernel_size, self.strides, self.dilation_rate, strict=True)
        return [self._padding_of(*axis) for axis in axes]

    def _padding_of(self, size: int, width: int, stride: int, dilation: int) -> tuple[int, int]:
        spread = (width - 1) * dilation
        if self._padding == "causal":
            return spread, 0
        if self._padding == "valid":
            return 0, 0
        missing = max(0, spread - (size - 1) % stride)
        return missing // 2, missing - missing // 2

    def places(self, input_shape: Sequence[int | None]) -> tuple[int, int]:
        """Return how many places the inputs and the outputs of one example have."""
        outputs = self._layer.compute_output_shape(input_shape)
        return self._num_places(input_shape), self._num_places(outputs)

    def _num_places(self, shape: Sequence[int | None]) -> int:
        sizes = [size or 1 for axis, size in enumerate(shape) if axis not in (0, self.channels)]
        return math.prod(sizes)

    def gradient(
        self, inputs: Any, upstream: Any, rows: Any, columns: Any, shape: Sequence[int]
    ) -> Any:
        """Compute the kernel's gradient in some rows and columns (None: all)."""
        x = take(inputs, rows, self.channels)
        dy = take(upstream, columns, self.channels)
        channels = [ops.shape(tensor)[self.channels] for tensor in (x, dy)]
        return backend.convolution_gradient(self, x, [*shape[:-2], *channels], dy)

    def apply_to_some(self, inputs: Any, kernel: Any) -> Any:
        """Compute the convolution of some channels, of which the number may be unknown."""
        # TensorFlow cannot pad for a dilated kernel of which it does not know the channels.
        is_dilated = self._padding == "same" and max(self.dilation_rate) > 1
        return (self._apply_padded if is_dilated else self.apply)(inputs, kernel)


class Pointwise(Convolution):
    """The second half of what SeparableConv1D and SeparableConv2D compute: a kernel of size 1."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self._kernel_size = self.strides = self.dilation_rate = (1,) * layer.rank
        self._padding = "valid"

    def _convolve(self, inputs: Any, kernel: Any, padding: str) -> Any:
        # TensorFlow cannot convolve with the channels first on a CPU.
        x = ops.moveaxis(inputs, self.channels, -1)
        outputs = ops.conv(x, kernel, 1, padding, "channels_last")
        return ops.moveaxis(outputs, -1, self.channels)

    def places(self, input_shape: Sequence[int | None]) -> tuple[int, int]:
        """Return how many places the inputs and the outputs of one example have."""
        outputs = super().places(input_shape)[1]
        return outputs, outputs


class Depthwise(Convolution):
    """What DepthwiseConv1D and DepthwiseConv2D compute, and SeparableConv in its first half.

    There are no columns: each input channel, a row, has output channels of its own.
    """

    ways = ((True, True),)

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.axes = (*range(layer.rank), layer.rank + 1), (layer.rank,), ()

    def matrices(self, trained: np.ndarray) -> np.ndarray:
        """Return a mask of the kernel in the shape of the matrices that are multiplied."""
        if not backend.DEPTHWISE_GRADIENTS_ARE_DENSE:
            return super().matrices(trained)
        own = np.eye(trained.shape[-2], dtype=bool)[:, :, np.newaxis]
        diagonal = trained[..., np.newaxis, :] & own
        return diagonal.reshape(-1, trained.shape[-2], trained.shape[-2] * trained.shape[-1])

    def _convolve(self, inputs: Any, kernel: Any, padding: str) -> Any:
        strides, data_format = self.strides, self._layer.data_format
        return ops.depthwise_conv(inputs, kernel, strides, padding, data_format, self.dilation_rate)

    def gradient(
        self, inputs: Any, upstream: Any, rows: Any, columns: Any, shape: Sequence[int]
    ) -> Any:
        """Compute the kernel's gradient in some rows (None: all)."""
        channels, multiplier = shape[-2:]
        before, after = ops.shape(upstream)[: self.channels], ops.shape(upstream)[self.channels :]
        x = take(inputs, rows, self.channels)
        dy = ops.reshape(upstream, (*before, channels, multiplier, *after[1:]))
        dy = take(dy, rows, self.channels)
        num_rows = ops.shape(x)[self.channels]
        dy = ops.reshape(dy, (*before, num_rows * multiplier, *after[1:]))
        function = functools.partial(self.apply_to_some, x)
        product = backend.gradient_at_zero(function, [*shape[:-2], num_rows, multiplier], dy)
        return ops.swapaxes(product, -1, -2)
