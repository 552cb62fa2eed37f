"""What is known about each data set before any of it is read."""

from dataclasses import dataclass
from typing import Any

from keras_freeze._utils.validation import check_one_of


@dataclass(frozen=True)
class DatasetInfo:
    """The fixed facts about one data set, as `info(name)` returns them.

    Attributes:
        name: the name `load` takes.
        image_shape: (height, width, channels).
        num_classes: labels run from 0 to `num_classes - 1`.
        num_training: images of the training set, the validation images among them.
        num_test: images of the test set.
        batch_size: what `load` takes for `batch_size=None`; the paper's, section 4.
        validation_fraction: the share of the training set that is held out for validation
            when `validation_fraction=None`.
        augment: whether training images are flipped and shifted when `augment=None`.
        per_channel: whether each color channel is standardized by its own mean and deviation.
    """

    name: str
    image_shape: tuple[int, int, int]
    num_classes: int
    num_training: int
    num_test: int
    batch_size: int
    validation_fraction: float = 0.1
    augment: bool = False
    per_channel: bool = False

    @property
    def num_examples(self) -> dict[str, int]:
        """Images per split at the default `validation_fraction`."""
        train = self.num_left(self.validation_fraction)
        return {
            "train": train,
            "validation": self.num_training - train,
            "test": self.num_test,
        }

    def num_left(self, validation_fraction: float) -> int:
        """Return how many training images are left where this share is held out for validation."""
        return self.num_training - round(validation_fraction * self.num_training)


_COLOR: dict[str, Any] = {"batch_size": 128, "augment": True, "per_channel": True}

_INFOS = {
    entry.name: entry
    for entry in (
        # 500 of each digit: 50 for the test set, 50 for validation, 400 for training.
        DatasetInfo("mnist_5k", (28, 28, 1), 10, 4_500, 500, 100, validation_fraction=1 / 9),
        DatasetInfo("mnist", (28, 28, 1), 10, 60_000, 10_000, 100),
        DatasetInfo("cifar10", (32, 32, 3), 10, 50_000, 10_000, **_COLOR),
        DatasetInfo("cifar100", (32, 32, 3), 100, 50_000, 10_000, **_COLOR),
        DatasetInfo("tiny_imagenet", (64, 64, 3), 200, 100_000, 10_000, **_COLOR),
    )
}

NAMES = tuple(_INFOS)


def info(name: str) -> DatasetInfo:
    """Look up the shape, classes, sizes and defaults of a data set.

    Nothing is read or downloaded.

    Args:
        name: one of `NAMES`.

    Returns:
        A `DatasetInfo`.

    Raises:
        ValueError: the name is unknown.

    Example:
        >>> info("cifar10").image_shape
        (32, 32, 3)
        >>> info("mnist").num_examples
        {'train': 54000, 'validation': 6000, 'test': 10000}
    """
    return _INFOS[check_one_of("name", name, NAMES)]
