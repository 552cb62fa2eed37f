"""Keep twenty networks on one base: CIFAR-100's superclasses as twenty `.freeze` deltas.

    pip install '.[transfer]'
    python examples/many_deltas.py --data_dir=/path/to/tensorflow_datasets
    python examples/many_deltas.py --dataset=mnist_5k --weights=random --image_size=32 \\
        --num_images=200 --epochs=1    # two tasks of five digits, a minute, no download

Each superclass of CIFAR-100 (fish, flowers, insects, ...) is a task of its own: which of its five
classes is it? The base is EfficientNet-Lite0, pretrained on ImageNet. For each task, a head is
trained on its features, and then the whole network by `--method` of transfer.py, which starts from
that head. Both are saved as deltas on the base, exact and rounded by `quantize`. One copy of the
base then becomes each of the networks in turn: the table has the kilobytes of all files together,
the time to switch from one task to another (`remove_delta` and `apply_delta`, files read), and the
mean accuracy.

`--output_dir` keeps the base, the deltas, and what has been measured in tasks.jsonl, one line a
task: nothing in there is done again. With the default flags and one core: about 40 minutes.
"""

import json
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import adaptation
import command_line
import keras
import numpy as np
from absl import flags
from adaptation import Data, accuracy

import keras_freeze as kf
from keras_freeze._utils.files import replacing
from keras_freeze.paper.datasets import sources

_DATASET = flags.DEFINE_enum("dataset", "cifar100", ["cifar100", "mnist_5k"], "Which images.")
_METHOD = flags.DEFINE_string("method", "freezenet_0.99_drawn", "A method of transfer.py.")
_LEARNING_RATE = flags.DEFINE_float("learning_rate", 0.001, "Of Adam, for all tasks.", 0)
_EPOCHS = flags.DEFINE_integer("epochs", 4, "Epochs of each network.", lower_bound=1)
_NUM_IMAGES = flags.DEFINE_integer(
    "num_images", 1000, "Images for training, for each task.", lower_bound=1
)
_NUM_VALIDATION = flags.DEFINE_integer(
    "num_validation", 500, "Images that choose heads and steps.", lower_bound=1
)
_IMAGE_SIZE = flags.DEFINE_integer("image_size", 96, "What images are resized to.", lower_bound=32)
_WEIGHTS = flags.DEFINE_enum("weights", "imagenet", ["imagenet", "random"], "Of the base.")
_TOLERANCE = flags.DEFINE_float(
    "tolerance", 0.01, "By how much the loss may change in small files, relative to what it is."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the choice of images and the data order.", 0)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's folder of data. Default: TFDS's own.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/many_deltas", "The folder to write to.")

_NUM_CLASSES = 5
_KINDS = ("head", "head_small", "delta", "delta_small")
_LABELS = ("heads", "heads, small", "deltas", "deltas, small")


def main() -> None:
    (method,) = adaptation.choose_methods([_METHOD.value])
    logging.getLogger("tensorflow").setLevel("ERROR")  # it warns of many models in a process
    folder = Path(_OUTPUT_DIR.value)
    folder.mkdir(parents=True, exist_ok=True)  # fails now rather than after training
    tasks = _tasks("train"), _tasks("test")
    image_shape = tasks[0][0][0].shape[1:]
    base = adaptation.Base(
        folder / "base.keras", _NUM_CLASSES, image_shape, _IMAGE_SIZE.value, _WEIGHTS.value
    )
    results = _read_results(folder / "tasks.jsonl")
    for number in range(len(tasks[0])):
        if number not in results:
            results[number] = _train(number, tasks[0][number], base, method)
            with (folder / "tasks.jsonl").open("a") as file:
                file.write(json.dumps(results[number]) + "\n")
    rows = _receive(base, tasks[1])
    with replacing(folder / "result.json") as path:
        path.write_text(json.dumps(rows, indent=2) + "\n")
    print(f"{len(tasks[0])} tasks with {_NUM_CLASSES} classes, {method.label}:\n")
    print(_table(rows))
    print("\nOne copy of the base became each of them in turn, and the base again, bit for bit.")
    print(f"Written to {folder}: base.keras, the .freeze files, tasks.jsonl, result.json")


def _tasks(part: str) -> list[Data]:
    """Return images and labels from 0 to 4 for each task."""
    images, labels = sources.read(_DATASET.value, part, _DATA_DIR.value)
    images = np.repeat(images, 3 // images.shape[-1], axis=-1)  # gray ones, too, have colors
    if _DATASET.value == "cifar100":
        task_of_image = _read_superclasses(part)
    else:
        task_of_image = labels // _NUM_CLASSES
    tasks = []
    for number in range(task_of_image.max() + 1):
        chosen = task_of_image == number
        _, of_task = np.unique(labels[chosen], return_inverse=True)
        tasks.append((images[chosen], of_task.astype(np.int32)))
    return tasks


def _read_superclasses(part: str) -> np.ndarray:
    """Return the superclass of each image of CIFAR-100, in the order of `sources.read`."""
    import tensorflow_datasets as tfds

    examples = tfds.load(
        "cifar100",
        split=part,
        data_dir=_DATA_DIR.value,
        shuffle_files=False,
        decoders={"image": tfds.decode.SkipDecoding()},
    )
    found = [batch["coarse_label"].numpy() for batch in examples.batch(1000)]
    return np.concatenate(found).astype(np.int32)


def _read_results(path: Path) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in path.open()] if path.exists() else []
    return {row["task"]: row for row in rows}


def _train(
    number: int, data: Data, base: adaptation.Base, method: adaptation.Method
) -> dict[str, Any]:
    """Adapt the base to a task by a head and by the method, and save both."""
    start = time.time()
    images, labels = data
    order = np.random.default_rng(_SEED.value).permutation(len(images))
    split = min(_NUM_IMAGES.value, len(images) - _NUM_VALIDATION.value)
    if split < 1:
        raise ValueError(f"num_validation is too large: a task has {len(images)} images in all")
    parts = order[:split], order[split : split + _NUM_VALIDATION.value]
    training, validation = ((images[part], labels[part]) for part in parts)
    extracted = [
        (adaptation.features(base, images), labels) for images, labels in (training, validation)
    ]
    head = adaptation.train_head(*extracted, _NUM_CLASSES, _SEED.value)
    row: dict[str, Any] = {"task": number}
    for kind, way in (("head", adaptation.BY_NAME["head"]), ("delta", method)):
        network = adaptation.adapt(
            base, head, way, training, _LEARNING_RATE.value, _EPOCHS.value, _SEED.value
        )
        row[kind] = accuracy(network, validation)
        adaptation.save_exact(network, base, _file(base, number, kind))
        small = _file(base, number, f"{kind}_small")
        adaptation.save_small(network, base, small, validation, _TOLERANCE.value)
        row[f"{kind}_small"] = accuracy(network, validation)
    words = ", ".join(f"{name} {row[kind]:.1%}" for name, kind in zip(_LABELS, _KINDS, strict=True))
    seconds = time.time() - start
    print(f"task {number}: {words} in validation ({seconds:.0f} s)", file=sys.stderr, flush=True)
    return row


def _file(base: adaptation.Base, number: int, kind: str) -> Path:
    return base.file.with_name(f"task_{number:02}_{kind}.freeze")


def _receive(base: adaptation.Base, tests: Sequence[Data]) -> list[dict[str, Any]]:
    """Do what a device does: switch one copy of the base from task to task."""
    device = base.load()
    adaptation.compile_for(device, keras.optimizers.Adam(), tests[0])
    before = _bits(device)
    rows = []
    for kind, label in zip(_KINDS, _LABELS, strict=True):
        accuracies, seconds, sizes = [], [], []
        for number, test in enumerate(tests):
            file = _file(base, number, kind)
            start = time.perf_counter()
            kf.apply_delta(device, file)
            applied = time.perf_counter()
            accuracies.append(accuracy(device, test))
            removing = time.perf_counter()
            kf.remove_delta(device, file)
            seconds.append(time.perf_counter() - removing + applied - start)
            sizes.append(file.stat().st_size)
            if _bits(device) != before:
                raise ValueError(f"after {file.name}, the base is not bit for bit what it was")
        rows.append(_row(label, len(tests), sizes, seconds, accuracies))
    whole = base.file.stat().st_size
    rows.append(_row("whole networks", len(tests), [whole] * len(tests), [], []))
    return rows


def _bits(network: keras.Model) -> bytes:
    return b"".join(array.tobytes() for array in network.get_weights())


def _row(
    label: str,
    num_tasks: int,
    sizes: Sequence[int],
    seconds: Sequence[float],
    accuracies: Sequence[float],
) -> dict[str, Any]:
    return {
        "files": f"{num_tasks} {label}",
        "bytes": sum(sizes),
        "seconds_to_switch": statistics.median(seconds) if seconds else None,
        "test_accuracy": statistics.mean(accuracies) if accuracies else None,
        "lowest": min(accuracies) if accuracies else None,
        "accuracies": list(accuracies),
    }


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["files", "kilobytes", "ms to switch", "mean test accuracy", "lowest"]]
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    for row in rows:
        seconds, mean, lowest = row["seconds_to_switch"], row["test_accuracy"], row["lowest"]
        lines.append(
            [
                row["files"],
                f"{row['bytes'] / 1000:,.0f}",
                "" if seconds is None else f"{1000 * seconds:.0f}",
                "" if mean is None else f"{100 * mean:.2f}",
                "" if lowest is None else f"{100 * lowest:.1f}",
            ]
        )
    return command_line.table(lines)


if __name__ == "__main__":
    command_line.run(main)
