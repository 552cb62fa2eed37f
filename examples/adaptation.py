"""Methods of adapting EfficientNet-Lite0: what transfer.py and many_deltas.py share.

All methods train a new head. They start from a head that has been trained on the features of the
base, and train with a FreezeOptimizer, which `quantize` needs: its rate is 0 or 1 where no weights
are chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command_line  # noqa: F401  # first of all: it keeps TensorFlow quiet
import efficientnet_lite
import keras
import numpy as np

import keras_freeze as kf
from keras_freeze._utils.files import replacing

BATCH_SIZE = 50
_HEAD_EPOCHS = 5
_HEAD_LEARNING_RATES = (0.001, 0.003)
_QUANTIZE_IMAGES = 500

Data = tuple[np.ndarray, np.ndarray]
Head = list[np.ndarray]


@dataclass(frozen=True)
class Method:
    """A method of adapting the base; all of them train the head.

    Attributes:
        name: its name for `--methods`, and in the names of files.
        label: its name in the table.
        freeze_rate: the share of the weights that FreezeNet freezes. 0: none; 1: all of them.
        rank: of LoRA, which freezes all weights. 0: no LoRA.
        trains_bias: whether biases are trained (or what BatchNormalization has instead of them).
        learning_rates: what to choose from.
        criterion, saliency_batches, is_drawn: how FreezeNet chooses the weights.
        like: the method whose learning rate it takes; None: its own search.
    """

    name: str
    label: str
    freeze_rate: float = 0.0
    rank: int = 0
    trains_bias: bool = True
    learning_rates: tuple[float, ...] = (0.0003, 0.001, 0.003)
    criterion: str = "snip"
    saliency_batches: int = 1
    is_drawn: bool = False
    like: str | None = None


def _freezenet(rate: float, name: str = "", words: str = "", **settings: Any) -> Method:
    """Return FreezeNet at a rate, or a variant of it."""
    plain = f"freezenet_{rate:g}"
    return Method(
        f"{plain}_{name}" if name else plain,
        f"FreezeNet, q = {rate:g}" + (f", {words}" if words else ""),
        rate,
        learning_rates=(0.0003, 0.001, 0.003) if rate > 0.99 else (0.0001, 0.0003, 0.001),
        like=plain if name else None,
        **settings,
    )


METHODS = (
    Method("head", "head only", 1.0, trains_bias=False),
    _freezenet(0.99),
    Method("lora_4", "LoRA, rank 4", 1.0, rank=4, trains_bias=False),
    _freezenet(0.99, "drawn", "drawn", is_drawn=True),
    Method("bias", "biases and head", 1.0),
    _freezenet(0.9),
    Method("lora_1", "LoRA, rank 1", 1.0, rank=1, trains_bias=False),
    _freezenet(0.999),
    _freezenet(0.9, "drawn", "drawn", is_drawn=True),
    _freezenet(0.999, "drawn", "drawn", is_drawn=True),
    Method("full", "full fine-tuning", learning_rates=(0.00003, 0.0001, 0.0003)),
    _freezenet(0.99, "no_bias", "biases frozen", trains_bias=False),
    _freezenet(0.99, "50", "50 batches", saliency_batches=50),
    _freezenet(0.99, "magnitude", "magnitude", criterion="magnitude"),
    _freezenet(0.99, "random", "random", criterion="random"),
)
BY_NAME = {method.name: method for method in METHODS}


def choose_methods(
    names: list[str] | None, methods: Mapping[str, Method] = BY_NAME
) -> list[Method]:
    """Return methods by their names; None: all of them.

    Raises:
        ValueError: for an unknown name.
    """
    names = list(methods) if names is None else names
    unknown = [name for name in names if name not in methods]
    if unknown:
        raise ValueError(f"methods must be among {', '.join(methods)}. Received: {unknown[0]}")
    return [methods[name] for name in names]


@dataclass(frozen=True)
class Base:
    """The pretrained network that deltas go on, with a head of zeros.

    Attributes:
        file: its `.keras` file, which is written when it is needed and not there.
        num_classes: the outputs of its head.
        image_shape: the shape of the images, with pixels from 0 to 255.
        image_size: the height and the width that they are resized to.
        weights: "imagenet" or "random".
        normalization: "folded", "frozen" or "batch", see the flag of transfer.py.
    """

    file: Path
    num_classes: int
    image_shape: tuple[int, int, int]
    image_size: int = 96
    weights: str = "imagenet"
    normalization: str = "folded"

    def load(self) -> keras.Model:
        """Return a copy of it."""
        if not self.file.exists():
            with replacing(self.file) as path:
                self._build().save(path)
        return keras.models.load_model(self.file)

    def _build(self) -> keras.Model:
        keras.utils.set_random_seed(0)
        network = efficientnet_lite.efficientnet_lite0(
            self.num_classes,
            (self.image_size, self.image_size, 3),
            image_shape=self.image_shape,
            folded=self.normalization == "folded",
        )
        if self.weights == "imagenet":
            efficientnet_lite.load_imagenet_weights(network)
        head = network.get_layer(efficientnet_lite.HEAD)
        head.set_weights([np.zeros(v.shape, "float32") for v in head.weights])
        return network


def features(base: Base, images: np.ndarray) -> np.ndarray:
    """Return what the head of the base gets for images."""
    network = base.load()
    body = keras.Model(network.inputs, network.get_layer("pool").output)
    return body.predict(images, batch_size=100, verbose=0)


def train_head(
    training: Data,
    validation: Data,
    num_classes: int,
    seed: int,
    epochs: int = _HEAD_EPOCHS,
    learning_rates: Sequence[float] = _HEAD_LEARNING_RATES,
) -> Head:
    """Train a head on features; of several learning rates the best in validation counts."""
    heads = [
        _head_at(rate, training, validation, num_classes, seed, epochs) for rate in learning_rates
    ]
    return max(heads, key=lambda pair: pair[0])[1]


def _head_at(
    rate: float, training: Data, validation: Data, num_classes: int, seed: int, epochs: int
) -> tuple[float, Head]:
    """Return the validation accuracy and the weights of a head."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input(training[0].shape[1:])
    dense = keras.layers.Dense(num_classes, kernel_initializer="zeros")
    head = keras.Model(inputs, dense(inputs))
    compile_for(head, _adam(rate, epochs * num_steps(training)), training)
    head.fit(*training, batch_size=BATCH_SIZE, epochs=epochs, verbose=0)
    return accuracy(head, validation), head.get_weights()


def adapt(
    base: Base, head: Head, method: Method, training: Data, rate: float, epochs: int, seed: int
) -> keras.Model:
    """Return a copy of the base, adapted by a method.

    Args:
        base, head: the base, and the weights of the head to start with.
        method: the method.
        training: images and labels.
        rate: the learning rate of Adam, which falls to zero as a cosine.
        epochs: how often the images are used.
        seed: of the data order, LoRA's factors and drawn masks.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    network = base.load()
    network.get_layer(efficientnet_lite.HEAD).set_weights(head)
    for layer in network.layers:
        if layer.name != efficientnet_lite.HEAD:
            _choose_trained(layer, method, base.normalization)
    optimizer = kf.FreezeOptimizer(
        _adam(rate, epochs * num_steps(training)),
        method.freeze_rate,
        criterion=method.criterion,
        exclude=[efficientnet_lite.HEAD],
        seed=seed,
    )
    compile_for(network, optimizer, training)
    chosen = slice(method.saliency_batches * BATCH_SIZE)
    kf.freeze(
        network,
        *(array[chosen] for array in training),
        batch_size=BATCH_SIZE,
        drawn=method.is_drawn,
    )
    if method.name != "head":
        network.fit(*training, batch_size=BATCH_SIZE, epochs=epochs, verbose=0)
    return network


def _choose_trained(layer: keras.layers.Layer, method: Method, normalization: str) -> None:
    """Freeze what a method does not train, other than by a mask; add LoRA's factors."""
    if isinstance(layer, keras.layers.BatchNormalization):
        layer.trainable = method.trains_bias or normalization == "batch"
    elif method.rank and hasattr(layer, "enable_lora"):
        layer.enable_lora(method.rank)
    if getattr(layer, "bias", None) is not None and not method.trains_bias:
        layer.bias.trainable = False


def save_exact(network: keras.Model, base: Base, path: Path) -> None:
    """Save a network as a delta on the base, for inference."""
    kf.save(network, path, base=base.file, include_compile=False)


def save_small(
    network: keras.Model, base: Base, path: Path, validation: Data, tolerance: float
) -> None:
    """Round a network in place, and save it as a delta on the base."""
    some = [array[:_QUANTIZE_IMAGES] for array in validation]
    kf.quantize(network, *some, base=base.file, tolerance=tolerance)
    save_exact(network, base, path)


def accuracy(network: keras.Model, data: Data) -> float:
    """Return the share of images that a network classifies correctly."""
    return network.evaluate(*data, batch_size=100, return_dict=True, verbose=0)["accuracy"]


def num_steps(training: Data) -> int:
    """Return the number of steps in an epoch."""
    return -(-len(training[0]) // BATCH_SIZE)


def compile_for(
    network: keras.Model, optimizer: keras.optimizers.Optimizer, training: Data
) -> None:
    """Compile a classifier with logits."""
    can_merge = keras.backend.backend() != "torch"  # which runs one step at a time
    network.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=min(20, num_steps(training)) if can_merge else 1,
    )


def _adam(rate: float, num_steps: int) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, num_steps))
