"""The criterion GraSP: its settings, its score, and the examples that it is computed on."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_freeze._utils.validation import check_int, check_number

GRASP = "grasp"


@keras.saving.register_keras_serializable(package="keras_freeze")
@dataclass(frozen=True)
class GraSP:
    """The importance score w * (H g) of GraSP, for `criterion=`; "grasp" stands for `GraSP()`.

    g is the gradient of the loss over the weights that may be frozen, and H its Hessian over the
    same weights. Without the weights of the largest scores the norm of g would shrink most; the
    sign counts (supplement, section "GraSP"). It needs a call to `freeze`, in which the
    gradient of all data comes first and its product with the Hessian second, in training mode
    and with the same Dropout. Bilinear resizing after a weight, as in `UpSampling2D`, makes the
    score inexact: TensorFlow takes the derivative of its gradient as zero. Where TensorFlow says
    that it has no second derivative, `freeze` raises a ValueError.

    Args:
        temperature: every output of the model is divided by it before the loss, as the published
            code does with logits. Not meant for outputs that are not logits, such as probabilities:
            1.0 leaves them as they are. The model's own losses, such as regularizers, are not
            divided and would outweigh the data: prefer the optimizer's `l2`. Defaults to 200.0.
        samples_per_class: how many examples of each class to score with, the first of the data
            that `freeze` is given (arrays, or the first `steps` batches of a dataset; it then takes
            more than one). The published code takes 10 on CIFAR-10. None, the default, scores with
            all of these data.

    Raises:
        TypeError, ValueError: for arguments out of range.

    Example:

    ```python
    criterion = keras_freeze.criteria.GraSP(samples_per_class=10)
    optimizer = keras_freeze.FreezeOptimizer("sgd", 0.99, criterion=criterion)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    keras_freeze.freeze(model, dataset, steps=5)
    ```
    """

    temperature: float = 200.0
    samples_per_class: int | None = None

    def __post_init__(self) -> None:
        temperature = check_number("temperature", self.temperature, positive=True)
        samples = self.samples_per_class
        if samples is not None:
            samples = check_int("samples_per_class", samples, minimum=1)
        object.__setattr__(self, "temperature", temperature)
        object.__setattr__(self, "samples_per_class", samples)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "GraSP":
        """Make the criterion from what `get_config` has returned."""
        return cls(**config)


def grasp(weights: Any, hessian_gradients: Any) -> Any:
    """Compute GraSP's importance score w * (H g), signed."""
    return ops.multiply(weights, hessian_gradients)


def as_grasp(criterion: Any) -> GraSP | None:
    """Return the GraSP that a criterion is or names; None for every other criterion."""
    if criterion == GRASP:
        return GraSP()
    return criterion if isinstance(criterion, GraSP) else None


def first_of_each_class(
    batches: Iterable[Any], samples_per_class: int, num_outputs: int | None
) -> list[Any]:
    """Return the first examples of each class, in equal batches no larger than the given ones.

    Args:
        batches: tuples (x, y, sample_weight, weight), read until every class is complete. y holds
            integer class labels of shape (batch,) or (batch, 1), or rows of a one-hot array.
        num_outputs: width of the model's output, which tells the number of classes where y does
            not; 1 means two classes.

    Returns:
        Batches whose weights are their shares, so that they make up one batch.

    Raises:
        ValueError: for labels that are not classes, or a class with too few examples.
    """
    counts: np.ndarray | None = None
    parts, largest = [], 1
    for x, y, sample_weight, _ in batches:
        labels, num_classes = _class_labels(y, num_outputs)
        counts = np.zeros(num_classes, int) if counts is None else counts
        largest = max(largest, labels.size)
        rows = []
        for row, label in enumerate(labels):
            if counts[label] < samples_per_class:
                counts[label] += 1
                rows.append(row)
        if rows:
            parts.append(_rows((x, y, sample_weight), np.array(rows)))
        if counts.min() == samples_per_class:
            return _equal_batches(_joined(parts), int(counts.sum()), largest)
    assert counts is not None
    raise ValueError(
        f"The criterion GraSP needs samples_per_class={samples_per_class} examples of each class, "
        "but the data end before: pass more of them, or more `steps` of a dataset. "
        f"Received: {counts.min()} examples of class {counts.argmin()} of {counts.size}"
    )


def _class_labels(y: Any, num_outputs: int | None) -> tuple[np.ndarray, int]:
    """Return the class of each example, and how many classes there are."""
    wanted = (
        "GraSP's `samples_per_class` needs as targets one array of integer class labels or of "
        "one-hot rows. Received: "
    )
    if y is None or tree.is_nested(y):
        raise ValueError(f"{wanted}y of type {type(y)}")
    array = ops.convert_to_numpy(y)
    if array.ndim == 2 and array.shape[1] > 1:
        if not (np.isin(array, (0, 1)).all() and (array.sum(1) == 1).all()):
            raise ValueError(f"{wanted}rows that are not one-hot, such as {array[0]}")
        return array.argmax(1), array.shape[1]
    if array.ndim > 2 or array.size != len(array):
        raise ValueError(f"{wanted}y of shape {array.shape}")
    if num_outputs is None:
        raise ValueError(
            "GraSP's `samples_per_class` takes the number of classes from one-hot targets or from "
            "the width of the model's only output. Received: integer labels, and several "
            "outputs or one whose width is not known"
        )
    num_classes = max(2, num_outputs)
    labels = array.reshape(-1).astype(int)
    if (labels != array.reshape(-1)).any() or labels.min() < 0 or labels.max() >= num_classes:
        raise ValueError(
            f"{wanted}labels from {array.min()} to {array.max()} of dtype {array.dtype} for a "
            f"model of {num_classes} classes."
        )
    return labels, num_classes


def _rows(data: Any, rows: np.ndarray) -> Any:
    return tree.map_structure(lambda a: None if a is None else ops.take(a, rows, axis=0), data)


def _joined(parts: list[Any]) -> Any:
    def join(*arrays: Any) -> Any:
        return None if arrays[0] is None else ops.concatenate(arrays, axis=0)

    return tree.map_structure(join, *parts)


def _equal_batches(data: Any, size: int, largest: int) -> list[Any]:
    pieces = np.array_split(np.arange(size), -(-size // largest))
    return [(*_rows(data, rows), rows.size / size) for rows in pieces]
