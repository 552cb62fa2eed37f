"""Send a retrained network to devices that hold its base: what each method of fine-tuning costs.

    python examples/fine_tune.py
    python examples/fine_tune.py --dataset=mnist --data_dir=/path/to/tensorflow_datasets

A network with five outputs learns the digits 0-4. This base is adapted to the digits 5-9, which
take over its outputs in order: by training all of it, its head only, LoRA factors (Keras's
`enable_lora`, on every layer that has it) and biases, or the weights that FreezeNet chooses and
biases; these also with a mask that is drawn and values that are rounded. All methods start from the
base, head included, and see the same data as often; each has the learning rate of Adam that is best
for it on the validation data.

The table has what must be sent in float32 (the weights file of the whole network; the bare numbers
of the head or of LoRA, without a file around them) and as a `.freeze` file on the base. The files
are then received: one copy of the base becomes each retrained network in turn, and the base again,
bit for bit. LoRA's are loaded instead: they bring variables that the base does not have.

About a minute with the default flags. Writes base.keras, full.weights.h5, a `.freeze` file for each
method, and result.json.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import command_line
import keras
import numpy as np
from absl import flags

import keras_freeze as kf
from keras_freeze._utils.files import replacing
from keras_freeze.masks.selection import check_freeze_rate

_DATASET = flags.DEFINE_enum("dataset", "mnist_5k", ["mnist_5k", "mnist"], "Which digits.")
_MODEL = flags.DEFINE_enum(
    "model", "lenet_300_100", ["lenet_300_100", "lenet_5_caffe"], "Which network."
)
_RATES = flags.DEFINE_list("rates", "0.9,0.99,0.999", "Freezing rates, with commas between them.")
_EPOCHS = flags.DEFINE_integer(
    "epochs", 10, "Epochs on the digits 0-4, and again on 5-9.", lower_bound=1
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Of weights, validation split and data order.", lower_bound=0
)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's folder of data. Default: TFDS's own.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/fine_tune", "The folder to write to.")

_NUM_CLASSES = 5
_BATCH_SIZE = 50
_PRETRAINING_RATE = 0.001
_LEARNING_RATES = (0.001, 0.005, 0.02)
_LORA_RANKS = (1, 4)
_SALIENCY_IMAGES = 1000
_FLOAT32_BYTES = 4
_TOLERANCE = 0.03  # by how much the loss may change when values are rounded, relative to what it is

Data = tuple[np.ndarray, np.ndarray]
Prepare = Callable[[keras.Model, keras.optimizers.Optimizer], keras.optimizers.Optimizer]


@dataclass(frozen=True)
class Method:
    """A method of adapting the base.

    Attributes:
        label: its name in the table.
        stem: its name in the folder.
        prepare: prepares a copy of the base and returns the optimizer to compile it with.
        is_small: whether the mask is drawn, and the trained values are rounded after training.
    """

    label: str
    stem: str
    prepare: Prepare
    is_small: bool = False


@dataclass(frozen=True)
class Adapted:
    """The base adapted by one method, with the learning rate that was best in validation."""

    method: Method
    network: keras.Model
    learning_rate: float
    validation_accuracy: float
    file: Path


def main() -> None:
    methods = _methods(_rates())
    folder = Path(_OUTPUT_DIR.value)
    folder.mkdir(parents=True, exist_ok=True)  # fails now rather than after training
    base = _pretrained()
    base_file = folder / "base.keras"
    with replacing(base_file) as path:
        _without_optimizer(base).save(path)
    data = {split: _digits(split, first=5) for split in ("train", "validation", "test")}
    adapted = []
    for number, method in enumerate(methods, start=1):
        _progress(f"{number}/{len(methods)} {method.label}")
        adapted.append(_adapt(method, base_file, data))
        kf.save(adapted[-1].network, adapted[-1].file, base=base_file)
    rows = [_base_row(base, data["test"]), *(_row(one, data["test"]) for one in adapted)]
    _receive(adapted, base_file, data["test"][0])
    base_accuracy = _accuracy(base, _digits("test", first=0))
    result = {
        "dataset": _DATASET.value,
        "model": _MODEL.value,
        "epochs": _EPOCHS.value,
        "seed": _SEED.value,
        "base_accuracy": base_accuracy,
        "rows": rows,
    }
    with replacing(folder / "result.json") as path:
        path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"Test accuracy of the base on the digits 0-4: {base_accuracy:.2%}. On 5-9:\n")
    print(_table(rows))
    print()
    print("Received: each file gave the outputs of the network that was sent, bit for bit. One")
    print("copy of the base became all of them but LoRA's in turn, and after each the base again.")
    print(f"Written to {folder}: base.keras, full.weights.h5, the .freeze files, result.json")


def _rates() -> list[float]:
    try:
        rates = [float(text) for text in _RATES.value]
    except ValueError as error:
        raise ValueError(
            "rates must be numbers with commas between them. "
            f"Received: --rates={','.join(_RATES.value)}"
        ) from error
    return [check_freeze_rate(rate) for rate in rates]


def _methods(rates: Sequence[float]) -> list[Method]:
    return [
        Method("full fine-tuning", "full", lambda network, optimizer: optimizer),
        Method("head only", "head", _train_head),
        *(Method(f"LoRA, rank {rank}", f"lora_{rank}", _with_lora(rank)) for rank in _LORA_RANKS),
        *(Method(f"FreezeNet, q = {q:g}", f"freezenet_{q:g}", _with_freezenet(q)) for q in rates),
        *(
            Method(f"the same, small, q = {q:g}", f"small_{q:g}", _with_freezenet(q), is_small=True)
            for q in rates
        ),
    ]


def _train_head(
    network: keras.Model, optimizer: keras.optimizers.Optimizer
) -> keras.optimizers.Optimizer:
    for layer in network.layers[:-1]:
        layer.trainable = False
    return optimizer


def _with_lora(rank: int) -> Prepare:
    def prepare(
        network: keras.Model, optimizer: keras.optimizers.Optimizer
    ) -> keras.optimizers.Optimizer:
        for layer in network.layers:
            if hasattr(layer, "enable_lora"):
                layer.enable_lora(rank)
        return optimizer

    return prepare


def _with_freezenet(rate: float) -> Prepare:
    # The head is not excluded: it is not new, so that its weights compete with all others.
    return lambda network, optimizer: kf.FreezeOptimizer(optimizer, rate, seed=_SEED.value)


def _digits(split: str, first: int) -> Data:
    """Return the images of five digits, labeled 0-4."""
    images, labels = kf.datasets.load_arrays(
        _DATASET.value, split, seed=_SEED.value, data_dir=_DATA_DIR.value
    )
    chosen = (first <= labels) & (labels < first + _NUM_CLASSES)
    return images[chosen], labels[chosen] - first


def _pretrained() -> keras.Model:
    _progress("base: digits 0-4")
    keras.utils.set_random_seed(_SEED.value)
    training = _digits("train", first=0)
    network = kf.models.MODELS[_MODEL.value](_NUM_CLASSES, seed=_SEED.value)
    _compile(network, keras.optimizers.Adam(_PRETRAINING_RATE), len(training[0]))
    _fit(network, training)
    return network


def _adapt(method: Method, base_file: Path, data: Mapping[str, Data]) -> Adapted:
    images, labels = data["train"]
    tried = []
    for learning_rate in _LEARNING_RATES:
        keras.utils.set_random_seed(_SEED.value)
        network = keras.models.load_model(base_file)
        optimizer = method.prepare(network, keras.optimizers.Adam(learning_rate))
        _compile(network, optimizer, len(images))
        if isinstance(optimizer, kf.FreezeOptimizer):
            first = slice(_SALIENCY_IMAGES)
            kf.freeze(network, images[first], labels[first], drawn=method.is_small)
        _fit(network, data["train"])
        if method.is_small:
            kf.quantize(network, *data["validation"], base=base_file, tolerance=_TOLERANCE)
        accuracy = _accuracy(network, data["validation"])
        _progress(f"  learning rate {learning_rate:g}: {accuracy:.1%} in validation")
        file = base_file.with_name(f"{method.stem}.freeze")
        tried.append(Adapted(method, network, learning_rate, accuracy, file))
    return max(tried, key=lambda one: one.validation_accuracy)


def _compile(network: keras.Model, optimizer: keras.optimizers.Optimizer, num_images: int) -> None:
    can_merge = keras.backend.backend() != "torch"  # which runs one step at a time
    network.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=min(100, -(-num_images // _BATCH_SIZE)) if can_merge else 1,
    )


def _fit(network: keras.Model, training: Data) -> None:
    network.fit(*training, batch_size=_BATCH_SIZE, epochs=_EPOCHS.value, verbose=0)


def _accuracy(network: keras.Model, data: Data) -> float:
    return network.evaluate(*data, batch_size=500, return_dict=True, verbose=0)["accuracy"]


def _without_optimizer(network: keras.Model) -> keras.Model:
    # Keras writes the state of an optimizer into weights files, too; nobody would send that.
    copy = keras.Model.from_config(network.get_config())
    copy.set_weights(network.get_weights())
    return copy


def _base_row(base: keras.Model, test: Data) -> dict[str, Any]:
    return {
        "way": "base, not adapted",
        "file": None,
        "learning_rate": None,
        "test_accuracy": _accuracy(base, test),
        "num_trained": 0,
        "float32_bytes": 0,
        "freeze_bytes": 0,
    }


def _row(one: Adapted, test: Data) -> dict[str, Any]:
    num_trained = kf.report(one.network).num_trained_parameters
    return {
        "way": one.method.label,
        "file": one.file.name,
        "learning_rate": one.learning_rate,
        "test_accuracy": _accuracy(one.network, test),
        "num_trained": num_trained,
        "float32_bytes": _float32_bytes(one, num_trained),
        "freeze_bytes": one.file.stat().st_size,
    }


def _float32_bytes(one: Adapted, num_trained: int) -> int | None:
    """Return the bytes sent without this package; None for FreezeNet, which needs positions."""
    if kf.get_mask(one.network) is not None:
        return None
    if one.method.stem != "full":
        return _FLOAT32_BYTES * num_trained
    file = one.file.with_name("full.weights.h5")
    with replacing(file) as path:
        _without_optimizer(one.network).save_weights(path)
    return file.stat().st_size


def _receive(adapted: Sequence[Adapted], base_file: Path, images: np.ndarray) -> None:
    """Do what a device does with each file, and compare outputs and base bit for bit."""
    device = keras.models.load_model(base_file)
    base_outputs, base_weights = _outputs(device, images), _bits(device.get_weights())
    for one in adapted:
        sent = _outputs(one.network, images)
        if len(one.network.weights) != len(device.weights):
            received = kf.load(one.file, base=base_file)
            _check_same(_outputs(received, images), sent, f"outputs of {one.file.name}")
            continue
        kf.apply_delta(device, one.file)
        _check_same(_outputs(device, images), sent, f"outputs of the base with {one.file.name}")
        kf.remove_delta(device, one.file)
        _check_same(_outputs(device, images), base_outputs, f"outputs after {one.file.name}")
        _check_same(_bits(device.get_weights()), base_weights, f"weights after {one.file.name}")


def _outputs(network: keras.Model, images: np.ndarray) -> bytes:
    return _bits([network.predict(images, batch_size=500, verbose=0)])


def _bits(arrays: Sequence[np.ndarray]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


def _check_same(received: bytes, expected: bytes, what: str) -> None:
    if received != expected:
        raise ValueError(f"the {what} are not bit for bit what they should be")


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        ["", "test accuracy", "learning rate", "trained values", "float32, bytes", ".freeze, bytes"]
    ]
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    for row in rows:
        rate, bare = row["learning_rate"], row["float32_bytes"]
        lines.append(
            [
                row["way"],
                f"{100 * row['test_accuracy']:.2f}",
                "" if rate is None else f"{rate:g}",
                f"{row['num_trained']:,}",
                "" if bare is None else f"{bare:,}",
                f"{row['freeze_bytes']:,}",
            ]
        )
    return command_line.table(lines)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    command_line.run(main)
