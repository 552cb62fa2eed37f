"""The paper's architectures (figures S9 to S12, table S1) in Markdown, read off the models."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import groupby
from typing import NamedTuple

import keras
from keras import layers

from keras_freeze._keras_private import creating_layer
from keras_freeze.paper.experiments.markdown import NO, YES, markdown_table
from keras_freeze.paper.models import MODELS
from keras_freeze.parameters import BIAS, NORMALIZATION, WEIGHT, kind_of
from keras_freeze.reporting import report

_DRAWN = {
    layers.Conv2D: "Conv2D",
    layers.Dense: "linear",
    layers.MaxPooling2D: "MaxPool",
    layers.GlobalAveragePooling2D: "AvgPool",
    layers.Flatten: "flatten",
}

_HEADER = (
    "layer",
    "times",
    "n_in",
    "n_out",
    "kernel",
    "stride",
    "padding",
    "output",
    "bias",
    "BatchNorm",
    "ReLU",
    "weights",
    "biases",
    "normalization",
)


class _Network(NamedTuple):
    """A network of the paper; its parameters in all, weights, biases, normalization, by classes."""

    model: str
    title: str
    source: str
    counts: dict[int, tuple[int, int, int, int]]


_NETWORKS = (
    _Network("lenet_300_100", "LeNet-300-100", "figure S9", {10: (266_610, 266_200, 410, 0)}),
    _Network("lenet_5_caffe", "LeNet-5-Caffe", "figure S10", {10: (431_080, 430_500, 580, 0)}),
    _Network(
        "vgg16_d",
        "VGG16-D",
        "figure S11",
        {
            10: (15_255_626, 15_239_872, 5_258, 10_496),
            100: (15_301_796, 15_285_952, 5_348, 10_496),
        },
    ),
    _Network(
        "resnet34",
        "ResNet34",
        "table S1 and figure S12",
        {200: (21_383_816, 21_366_464, 200, 17_152)},
    ),
)


def markdown() -> str:
    """Describe the four networks: their layers, their parameters, beside the paper's counts.

    Returns:
        A page of Markdown, which ends with a newline; the diagrams in it are in Mermaid.

    Example:

    ```python
    Path("docs/paper/architectures.md").write_text(markdown())
    ```
    """
    blocks = [
        "# The paper's architectures",
        "Generated from `keras_freeze.models` by `python examples/reproduce.py "
        "--experiment=architectures`. Kernels, strides and padding are the same in both "
        "directions. Consecutive layers that are alike share a line, with the parameters of all "
        "of them. The networks return logits: the paper's log-softmax belongs to the loss.",
    ]
    for network in _NETWORKS:
        blocks += _section(network)
    return "\n\n".join(blocks) + "\n"


@dataclass
class _Row:
    """A layer with the normalization and the ReLU that follow it, or a whole ResBlock."""

    kind: str
    n_in: int
    n_out: int
    kernel: str = ""
    stride: str = ""
    padding: str = ""
    output: str = ""
    bias: bool = False
    batch_norm: bool = False
    relu: bool = False
    weights: int = 0
    biases: int = 0
    normalization: int = 0


def _section(network: _Network) -> list[str]:
    built = {classes: _build(network.model, classes) for classes in network.counts}
    model = next(iter(built.values()))
    height, width, channels = model.input_shape[1:]
    blocks = [
        f"## {network.title} ({network.source})",
        f"For images of {height} x {width} x {channels} and {model.output_shape[-1]} classes:",
        _layer_table(model),
        _count_table(network, built),
    ]
    if network.model == "resnet34":
        blocks += [
            "A ResBlock with stride 2, whose shortcut is a convolution. So is that of the first "
            "ResBlock of all, although it keeps 64 channels: the paper's caption asks for one only "
            "where the channels change, but its counts have it.",
            _diagram(model, "stage2_block1"),
            "A ResBlock with stride 1:",
            _diagram(model, "stage1_block2"),
        ]
    return blocks


def _build(name: str, num_classes: int) -> keras.Model:
    return MODELS[name](num_classes=num_classes, initializer=keras.initializers.Zeros())


def _count_table(network: _Network, built: Mapping[int, keras.Model]) -> str:
    rows = []
    for classes, model in built.items():
        rows.append([f"{classes} classes, counted", *map(_number, _counts(model))])
        rows.append([f"{classes} classes, the paper", *map(_number, network.counts[classes])])
    return markdown_table(["", "parameters", "weights", "biases", "normalization"], rows)


def _counts(model: keras.Model) -> tuple[int, int, int, int]:
    """Return the numbers of all parameters, weights, biases, normalization."""
    sizes = Counter[str]()
    for row in report(model).rows:
        sizes[row.kind] += row.size
    return sizes.total(), sizes[WEIGHT], sizes[BIAS], sizes[NORMALIZATION]


def _layer_table(model: keras.Model) -> str:
    lines = []
    for values, group in groupby(_rows(model), key=astuple):
        count = len(list(group))
        kind, *shapes, bias, batch_norm, relu, weights, biases, normalization = values
        marks = [YES if has else NO for has in (bias, batch_norm, relu)]
        sizes = [_number(count * size) for size in (weights, biases, normalization)]
        lines.append([kind, str(count), *map(str, shapes), *marks, *sizes])
    return markdown_table(_HEADER, lines)


def _rows(model: keras.Model) -> list[_Row]:
    """Return the layers in order, those of each ResBlock as one."""
    named: list[tuple[str, _Row]] = []
    of_layer: dict[str, _Row] = {}
    for layer in model.layers:
        if type(layer) in _DRAWN:
            named.append((layer.name, _row_of(layer)))
            of_layer[layer.name] = named[-1][1]
        elif isinstance(layer, (layers.BatchNormalization, layers.ReLU)):
            source = _sources(layer)[0].name
            if source in of_layer:  # else it is the ReLU after an addition
                of_layer[layer.name] = of_layer[source]
                _add_to(of_layer[source], layer)
    rows = []
    for block, group in groupby(named, key=lambda pair: _block_of(pair[0])):
        members = [row for _, row in group]
        rows += [_merged(members)] if block else members
    return rows


def _row_of(layer: keras.layers.Layer) -> _Row:
    """Return the row of a layer that has one."""
    shape, channels = layer.output.shape[1:], layer.input.shape[-1]
    row = _Row(_DRAWN[type(layer)], channels, shape[-1])
    if len(shape) == 3:
        row.output = _by(shape[:2])
    if isinstance(layer, (layers.Conv2D, layers.MaxPooling2D)):
        size = layer.kernel_size if isinstance(layer, layers.Conv2D) else layer.pool_size
        row.kernel, row.stride = _by(size), _by(layer.strides)
        row.padding = str(_padding(layer, size[0]))
    elif isinstance(layer, layers.GlobalAveragePooling2D):
        row.kernel = _by(layer.input.shape[1:3])
    _add_to(row, layer)
    return row


def _add_to(row: _Row, layer: keras.layers.Layer) -> None:
    """Add a layer's parameters and features to a row."""
    for variable in layer.trainable_variables:
        size = math.prod(variable.shape)
        match kind_of(variable):
            case "weight":
                row.weights += size
            case "bias":
                row.biases += size
            case "normalization":
                row.normalization += size
    row.bias |= row.biases > 0
    row.batch_norm |= row.normalization > 0
    row.relu |= isinstance(layer, layers.ReLU)
    row.relu |= getattr(layer, "activation", None) is keras.activations.relu


def _padding(layer: keras.layers.Layer, size: int) -> int:
    """Return how many zeros are added on each side."""
    if layer.padding == "same":
        return size // 2  # with a stride of 1, the only one that the networks have with it
    source = _sources(layer)[0]
    return source.padding[0][0] if isinstance(source, layers.ZeroPadding2D) else 0


def _merged(members: Sequence[_Row]) -> _Row:
    """Return the row of a ResBlock."""
    first = next(row for row in members if row.kernel == "3 x 3")
    has_shortcut = any(row.kernel == "1 x 1" for row in members)
    return replace(
        first,
        kind="ResBlock, convolution as shortcut" if has_shortcut else "ResBlock",
        weights=sum(row.weights for row in members),
        normalization=sum(row.normalization for row in members),
    )


def _diagram(model: keras.Model, block: str) -> str:
    """Return a ResBlock as a Mermaid flow chart."""
    lines = ["```mermaid", "flowchart TD"]
    edges = []
    for layer in model.layers:
        if _block_of(layer.name) != block or isinstance(layer, layers.ZeroPadding2D):
            continue
        lines.append(f'    {layer.name}["{_caption(layer)}"]')
        for source in _sources(layer):
            if isinstance(source, layers.ZeroPadding2D):
                (source,) = _sources(source)
            name = source.name if _block_of(source.name) == block else "input"
            edges.append(f"    {name} --> {layer.name}")
    return "\n".join([*lines, *edges, "```"])


def _caption(layer: keras.layers.Layer) -> str:
    if isinstance(layer, layers.Conv2D):
        n_in, n_out = layer.kernel.shape[-2:]
        kernel = _by(layer.kernel_size)
        return f"{kernel} convolution, {n_in} to {n_out}, stride {layer.strides[0]}"
    return {layers.BatchNormalization: "BatchNorm", layers.ReLU: "ReLU", layers.Add: "+"}[
        type(layer)
    ]


def _sources(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    return [creating_layer(tensor) for tensor in keras.tree.flatten(layer.input)]


def _block_of(name: str) -> str | None:
    found = re.match(r"stage\d+_block\d+", name)
    return found and found[0]


def _by(lengths: Sequence[int]) -> str:
    return " x ".join(map(str, lengths))


def _number(count: int) -> str:
    return f"{count:,}"
