"""Reports of what is trained: counts, freezing rates and sizes as in the paper."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np

from keras_freeze._utils.bits import numpy_dtype
from keras_freeze._utils.text import jsonable
from keras_freeze.masks.mask import FreezeMask
from keras_freeze.model_state import (
    ModelOptimizers,
    check_model,
    check_not_quantized,
    get_mask,
    is_built,
)
from keras_freeze.parameters import UNKNOWN, Parameter, classify

_FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Row:
    """One trainable variable in a report.

    Attributes:
        path: The variable's path.
        kind: "weight", "bias", "normalization" or "unknown".
        shape: The variable's shape.
        size: How many parameters it has.
        num_trained: How many of them are trained.
        is_weight: Whether it counts towards |W|: a weight that is not excluded from freezing.
    """

    path: str
    kind: str
    shape: tuple[int, ...]
    size: int
    num_trained: int
    is_weight: bool


@dataclass(frozen=True)
class Report:
    """Counts and sizes of a model; `str()` gives them as a table, `to_dict()` for JSON.

    Attributes:
        rows: A `Row` for each trainable variable, in the model's order.
        has_mask: Whether there is a freezing mask. Without one, all weights are trained.
        num_rescued: Weights trained only because their layer would have none; part of
            `num_trained_weights`.
        num_non_trainable: Numbers in non-trainable variables, such as moving statistics. They are
            no parameters and count nowhere else.
        optimizer_state_bytes: All variables of the optimizer as they are now: moments, counters,
            and the FreezeOptimizer's own indices or masks. 0 before it is built.
        gradient_bytes: What each of several processes that train together gives in a step: the
            gradients of the trained parameters; of all parameters without a mask, or where the
            inner optimizer needs whole variables. On JAX, gradients of layers that
            `restrict_gradients` does not restrict are exchanged whole, and are not counted so.
        dense_gradient_bytes: The gradients of all trainable parameters.
    """

    rows: tuple[Row, ...]
    has_mask: bool
    num_rescued: int
    num_non_trainable: int
    optimizer_state_bytes: int
    gradient_bytes: int
    dense_gradient_bytes: int

    @property
    def num_weights(self) -> int:
        """|W|: the weights of trainable layers that are not excluded."""
        return sum(row.size for row in self.rows if row.is_weight)

    @property
    def num_trained_weights(self) -> int:
        """||m||_0: how many of them are trained."""
        return sum(row.num_trained for row in self.rows if row.is_weight)

    @property
    def num_other(self) -> int:
        """All other trainable parameters: biases, normalization, unknown and excluded ones."""
        return sum(row.size for row in self.rows if not row.is_weight)

    @property
    def num_other_trained(self) -> int:
        """|B|: how many of these are trained. All, unless the user's mask says otherwise."""
        return sum(row.num_trained for row in self.rows if not row.is_weight)

    @property
    def num_parameters(self) -> int:
        """|W| + |B|, as in the dense network."""
        return self.num_weights + self.num_other

    @property
    def num_trained_parameters(self) -> int:
        """||m||_0 + |B|."""
        return self.num_trained_weights + self.num_other_trained

    @property
    def freeze_rate(self) -> float:
        """The freezing rate q = 1 - ||m||_0 / |W|; 0.0 without weights."""
        return _frozen_share(self.num_trained_weights, self.num_weights)

    @property
    def real_freeze_rate(self) -> float:
        """The real freezing rate q_beta = 1 - (||m||_0 + |B|) / (|W| + |B|)."""
        return _frozen_share(self.num_trained_parameters, self.num_parameters)

    @property
    def network_bytes(self) -> int:
        """The network size of the paper's table 2: trained parameters as float32, no mask."""
        return self.num_trained_parameters * _FLOAT32_BYTES

    @property
    def network_kib(self) -> float:
        """The network size in KiB (1024 bytes), which the paper prints as kB."""
        return self.network_bytes / 1024

    @property
    def dense_bytes(self) -> int:
        """The size of the dense network: all its trainable parameters as float32."""
        return self.num_parameters * _FLOAT32_BYTES

    @property
    def dense_kib(self) -> float:
        """The size of the dense network in KiB."""
        return self.dense_bytes / 1024

    @property
    def compression_factor(self) -> float | None:
        """Dense size divided by network size; None if nothing is trained."""
        return _ratio(self.num_parameters, self.num_trained_parameters)

    @property
    def unknown_paths(self) -> tuple[str, ...]:
        """Parameters of unknown names that are trained: only a mask from the user freezes them."""
        return tuple(
            row.path for row in self.rows if row.kind == UNKNOWN and row.num_trained == row.size
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report, its properties included, as numbers, strings, lists and dicts."""
        names = [name for name, value in vars(Report).items() if isinstance(value, property)]
        values: dict[str, Any] = jsonable(
            {**asdict(self), **{name: getattr(self, name) for name in names}}
        )
        return values

    def __str__(self) -> str:
        header = ("parameter", "kind", "shape", "size", "trained", "share")
        table = [header, *(_cells(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(header))]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 3 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in table
        ]
        rule = "-" * max(len(line) for line in lines)
        return "\n".join([lines[0], rule, *lines[1:], rule, *self._summary()])

    def _summary(self) -> list[str]:
        rescued = f", {self.num_rescued} of them as the only ones of a layer"
        factor = self.compression_factor
        lines = [
            f"Weights: {self.num_weights:,}, trained: {self.num_trained_weights:,}"
            + (rescued if self.num_rescued else ""),
            f"Other trained parameters: {self.num_other_trained:,} of {self.num_other:,}",
            f"Freezing rate q = {self.freeze_rate:.6g}, "
            f"real freezing rate q_beta = {self.real_freeze_rate:.6g}",
            f"Network size: {self.network_kib:,.1f} KiB of {self.dense_kib:,.1f} KiB"
            + (f" (x{factor:,.1f})" if factor is not None else "")
            + ", trained parameters as float32 without the mask",
            f"Optimizer state: {self.optimizer_state_bytes / 1024:,.1f} KiB; "
            f"gradients for other machines: {self.gradient_bytes / 1024:,.1f} KiB a step",
        ]
        if not self.has_mask:
            lines.insert(0, "No freezing mask: all weights are trained")
        if self.num_non_trainable:
            lines.append(f"Non-trainable state, not counted: {self.num_non_trainable:,}")
        if self.unknown_paths:
            lines.append(f"Unknown, so always trained: {', '.join(self.unknown_paths)}")
        return lines


def report(model: Any) -> Report:
    """Count what is trained in a model and what storing it takes.

    Sizes are the paper's network sizes (table 2): trained parameters as float32, in KiB, without
    the mask. `keras_freeze.paper.sizes` explains where the paper counts a little differently.

    Args:
        model: A built Keras model. Without a FreezeOptimizer, or before its mask is decided, it
            counts as the dense network.

    Returns:
        The `Report`.

    Raises:
        TypeError: If `model` is not a Keras model.
        ValueError: If the model is not built, or the mask is not about its variables.

    Example:
        >>> model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(10)])
        >>> report(model).num_parameters
        7850
    """
    check_model(model)
    if not is_built(model):
        raise ValueError(
            "Argument `model` must be built: call it on data, or give its input shape. "
            f"Received: model={model!r}"
        )
    mask = get_mask(model)
    optimizers = ModelOptimizers(model)
    optimizer = optimizers.outer
    state = [] if optimizer is None else optimizer.variables
    check_not_quantized(model)
    parameters = _classified(model, optimizer if mask is None else None)
    rows = tuple(_row(p, mask) for p in parameters)
    widths = [_itemsize(variable) for variable in model.trainable_variables]
    is_compact = all(one.compact_update is not None for one in optimizers.all)
    return Report(
        rows=rows,
        has_mask=mask is not None,
        num_rescued=0 if mask is None else mask.num_rescued,
        num_non_trainable=sum(math.prod(v.shape) for v in model.non_trainable_variables),
        optimizer_state_bytes=sum(math.prod(v.shape) * _itemsize(v) for v in state),
        gradient_bytes=sum(
            width * (row.num_trained if is_compact else row.size)
            for row, width in zip(rows, widths, strict=True)
        ),
        dense_gradient_bytes=sum(w * row.size for row, w in zip(rows, widths, strict=True)),
    )


def _frozen_share(trained: int, total: int) -> float:
    return (total - trained) / total if total else 0.0


def _ratio(dense: float, trained: float) -> float | None:
    return dense / trained if trained else None


def _cells(row: Row) -> tuple[str, ...]:
    share = f"{row.num_trained / row.size:.3%}" if row.size else "-"
    kind = row.kind if row.is_weight or row.kind != "weight" else "weight, excluded"
    shape = " x ".join(str(length) for length in row.shape) or "scalar"
    return (row.path, kind, shape, f"{row.size:,}", f"{row.num_trained:,}", share)


def _row(parameter: Parameter, mask: FreezeMask | None) -> Row:
    num_trained, is_weight = parameter.size, parameter.is_frozen_candidate
    if mask is not None:
        entry = mask.find(parameter.variable)  # None outside the mask, where all is trained
        is_weight = entry is not None and entry.is_weight
        if entry is not None:
            num_trained = int(np.count_nonzero(entry.trained))
    shape = tuple(int(length) for length in parameter.variable.shape)
    return Row(parameter.path, parameter.kind, shape, parameter.size, num_trained, is_weight)


def _classified(model: keras.Model, optimizer: Any) -> list[Parameter]:
    while optimizer is not None and not hasattr(optimizer, "classify"):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return (classify if optimizer is None else optimizer.classify)(model.trainable_variables)


def _itemsize(variable: Any) -> int:
    return numpy_dtype(keras.backend.standardize_dtype(variable.dtype)).itemsize
