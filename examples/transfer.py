"""Adapt a network pretrained on ImageNet to CIFAR: accuracy against the bytes to ship.

    pip install '.[transfer]'
    python examples/transfer.py --data_dir=/path/to/tensorflow_datasets
    python examples/transfer.py --datasets=cifar10,cifar100 --seeds=0,1,2
    python examples/transfer.py --datasets=mnist_5k --weights=random --image_size=32 \\
        --num_images=500 --epochs=1 --methods=head,freezenet_0.99   # a minute, no download

The base is EfficientNet-Lite0 with a head of zeros. A head is trained on its features first; the
other methods start from there and train, besides the head: biases, LoRA factors (Keras's
`enable_lora`, on all convolutions that have it), everything, or biases and the weights that
FreezeNet chooses. Each learning rate is the best of several in short runs on the validation images,
with the first seed; variants of FreezeNet take that of the method that they vary. Adam; the rate
falls to zero as a cosine.

Each network is saved as two `.freeze` deltas on the base: exact (float32), and small, with the
values that `quantize` has rounded. Accuracies are those of the networks in the files. All methods
train with a FreezeOptimizer, which `quantize` needs; its rate is 0 or 1 where nothing is chosen.

`--output_dir` keeps the base, the deltas, and what has been measured in transfer.jsonl, one line a
trained network: nothing in there is done again. With the default flags and one core: about an hour.
"""

import functools
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adaptation
import command_line
import keras
import numpy as np
from absl import flags
from adaptation import BY_NAME, Data, Method, accuracy, choose_methods, save_exact, save_small

import keras_freeze as kf
from keras_freeze._utils.files import replacing
from keras_freeze.paper.datasets import sources
from keras_freeze.paper.figures import style

_DATASETS = flags.DEFINE_list("datasets", "cifar10", "cifar10, cifar100, mnist_5k.")
_METHODS = flags.DEFINE_list("methods", None, "Names of methods. Default: all of them.")
_SEEDS = flags.DEFINE_list("seeds", "0", "Of the choice of images, the data order and the draws.")
_EPOCHS = flags.DEFINE_integer("epochs", 4, "Epochs of each network.", lower_bound=1)
_SEARCH_EPOCHS = flags.DEFINE_integer(
    "search_epochs", 1, "Epochs of the runs that choose a learning rate.", lower_bound=1
)
_SEARCH_IMAGES = flags.DEFINE_integer(
    "search_images", 2500, "Images for training in these runs.", lower_bound=1
)
_LEARNING_RATES = flags.DEFINE_list(
    "learning_rates", None, "To choose from. Default: three for each method."
)
_NUM_IMAGES = flags.DEFINE_integer("num_images", 5000, "Images for training.", lower_bound=1)
_NUM_VALIDATION = flags.DEFINE_integer(
    "num_validation", 1000, "Images that choose learning rates and steps.", lower_bound=1
)
_NUM_TEST = flags.DEFINE_integer("num_test", 10_000, "Images of the test set.", lower_bound=1)
_IMAGE_SIZE = flags.DEFINE_integer("image_size", 96, "What images are resized to.", lower_bound=32)
_WEIGHTS = flags.DEFINE_enum("weights", "imagenet", ["imagenet", "random"], "Of the base.")
_NORMALIZATION = flags.DEFINE_enum(
    "normalization",
    "folded",
    ["folded", "frozen", "batch"],
    "BatchNormalization of the base: folded into the convolutions; frozen; or trained, with the "
    "statistics of the batch.",
)
_TOLERANCE = flags.DEFINE_float(
    "tolerance", 0.01, "By how much the loss may change in small files, relative to what it is."
)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's folder of data. Default: TFDS's own.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/transfer", "The folder to write to.")

# All networks in a folder have these in common.
_FIXED = (
    _EPOCHS,
    _SEARCH_EPOCHS,
    _SEARCH_IMAGES,
    _NUM_IMAGES,
    _NUM_VALIDATION,
    _NUM_TEST,
    _IMAGE_SIZE,
    _WEIGHTS,
    _NORMALIZATION,
    _TOLERANCE,
)
_NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "mnist_5k": "5,000 digits"}


@dataclass(frozen=True)
class Task:
    """A data set to adapt the base to, with the images that one seed chooses."""

    dataset: str
    seed: int
    num_classes: int
    train: Data
    validation: Data
    test: Data


class Results:
    """The file of what has been measured: one line of JSON for each trained network."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows = [json.loads(line) for line in path.open()] if path.exists() else []

    def find(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """Return what has been measured with these settings, or None."""
        matches = (row for row in self._rows if row["settings"] == settings)
        return next(matches, None)

    def add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    methods, seeds = choose_methods(_METHODS.value), command_line.numbers(_SEEDS, int)
    logging.getLogger("tensorflow").setLevel("ERROR")  # it warns of many models in a process
    datasets = list(dict.fromkeys(_DATASETS.value))
    unknown = set(datasets) - set(_NAMES)
    if unknown or not datasets:
        raise ValueError(f"datasets must be among {', '.join(_NAMES)}. Received: {datasets}")
    folder = Path(_OUTPUT_DIR.value)
    folder.mkdir(parents=True, exist_ok=True)  # fails now rather than after training
    command_line.check_settings(folder / "settings.json", _FIXED)
    results = Results(folder / "transfer.jsonl")
    rows = []
    for dataset in datasets:
        for seed in seeds:
            study = Study(folder, results, _load_task(dataset, seed), seeds[0])
            rows += [study.row(method) for method in methods]
    table = summarize(rows)
    with replacing(folder / "result.json") as path:
        path.write_text(json.dumps(table, indent=2) + "\n")
    with replacing(folder / "transfer.png") as path:
        draw(table).savefig(path)
    for dataset in datasets:
        print(f"EfficientNet-Lite0 on {_NAMES[dataset]}:\n\n{as_text(table, dataset)}\n")
    print(f"Written to {folder}: the bases, the .freeze files, transfer.jsonl, result.json,")
    print("transfer.png")


def _load_task(dataset: str, seed: int) -> Task:
    images, labels = _read(dataset, "train")
    chosen = np.random.default_rng(seed).permutation(len(images))
    split = min(_NUM_IMAGES.value, len(images) - _NUM_VALIDATION.value)
    if split < 1:
        raise ValueError(f"num_images and num_validation are too large: {len(images)} in all")
    train, validation = chosen[:split], chosen[split : split + _NUM_VALIDATION.value]
    test_images, test_labels = _read(dataset, "test")
    # In a fixed random order, since some test sets are sorted.
    count = np.random.default_rng(0).permutation(len(test_images))[: _NUM_TEST.value]
    return Task(
        dataset,
        seed,
        int(labels.max()) + 1,
        (images[train], labels[train]),
        (images[validation], labels[validation]),
        (test_images[count], test_labels[count]),
    )


def _read(dataset: str, part: str) -> Data:
    images, labels = sources.read(dataset, part, _DATA_DIR.value)
    return np.repeat(images, 3 // images.shape[-1], axis=-1), labels  # gray ones, too, have colors


class Study:
    """All methods on one task.

    Args:
        folder: where files are.
        results: what has been measured.
        task: the task.
        search_seed: the seed with which learning rates are chosen.
    """

    def __init__(self, folder: Path, results: Results, task: Task, search_seed: int) -> None:
        self._folder = folder
        self._results = results
        self._task = task
        self._search_seed = search_seed
        self._base = adaptation.Base(
            folder / f"base_{task.dataset}.keras",
            task.num_classes,
            task.train[0].shape[1:],
            _IMAGE_SIZE.value,
            _WEIGHTS.value,
            _NORMALIZATION.value,
        )

    def row(self, method: Method) -> dict[str, Any]:
        """Train and save a network by one method, unless that has been done."""
        rate = 0.0 if method.name == "head" else self._best_learning_rate(method)
        settings = self._settings(method, rate, self._task.seed, "final")
        done = self._results.find(settings)
        if done is None:
            done = {"settings": settings, **self._measure(method, rate)}
            self._results.add(done)
        return done

    def _best_learning_rate(self, method: Method) -> float:
        if method.like is not None:
            return self._best_learning_rate(BY_NAME[method.like])
        rates = method.learning_rates
        if _LEARNING_RATES.value is not None:
            rates = tuple(command_line.numbers(_LEARNING_RATES, float))
        if len(rates) == 1:
            return rates[0]
        found = {rate: self._search(method, rate) for rate in rates}
        return max(rates, key=found.__getitem__)

    def _search(self, method: Method, rate: float) -> float:
        """Return the validation accuracy of a short run with a learning rate."""
        settings = self._settings(method, rate, self._search_seed, "search")
        done = self._results.find(settings)
        if done is None:
            start = time.time()
            training = tuple(array[: _SEARCH_IMAGES.value] for array in self._task.train)
            network = self._adapt(method, training, rate, _SEARCH_EPOCHS.value)
            found = accuracy(network, self._task.validation)
            done = {
                "settings": settings,
                "validation_accuracy": found,
                "seconds": time.time() - start,
            }
            self._results.add(done)
            self._progress(f"{method.label}: rate {rate:g}, {found:.2%} in validation", start)
        return done["validation_accuracy"]

    def _measure(self, method: Method, rate: float) -> dict[str, Any]:
        start = time.time()
        network = self._adapt(method, self._task.train, rate, _EPOCHS.value)
        seconds = time.time() - start
        validation_accuracy = accuracy(network, self._task.validation)
        num_trained = kf.report(network).num_trained_parameters
        stem = f"{self._task.dataset}_{method.name}_{self._task.seed}"
        exact, small = (self._folder / f"{stem}{end}.freeze" for end in ("", "_small"))
        save_exact(network, self._base, exact)
        files = [self._file("exact", exact, network)]
        save_small(network, self._base, small, self._task.validation, _TOLERANCE.value)
        files.append(self._file("small", small, network))
        sizes = [f"{file['bytes']:,} bytes {file['test_accuracy']:.2%}" for file in files]
        self._progress(f"{method.label}: {', '.join(sizes)}", start)
        return {
            "num_trained": num_trained,
            "validation_accuracy": validation_accuracy,
            "training_seconds": seconds,
            "files": files,
        }

    def _adapt(self, method: Method, training: Data, rate: float, epochs: int) -> keras.Model:
        return adaptation.adapt(
            self._base, self._head, method, training, rate, epochs, self._task.seed
        )

    @functools.cached_property
    def _head(self) -> list[np.ndarray]:
        """The head that all methods start from."""
        training, validation = (
            (adaptation.features(self._base, images), labels)
            for images, labels in (self._task.train, self._task.validation)
        )
        return adaptation.train_head(training, validation, self._task.num_classes, self._task.seed)

    def _file(self, kind: str, path: Path, network: keras.Model) -> dict[str, Any]:
        return {
            "kind": kind,
            "file": path.name,
            "bytes": path.stat().st_size,
            "test_accuracy": accuracy(network, self._task.test),
        }

    def _settings(self, method: Method, rate: float, seed: int, purpose: str) -> dict[str, Any]:
        return {
            "purpose": purpose,
            "dataset": self._task.dataset,
            "method": method.name,
            "learning_rate": rate,
            "seed": seed,
        }

    def _progress(self, line: str, start: float) -> None:
        seconds = time.time() - start
        place = f"{_NAMES[self._task.dataset]}, seed {self._task.seed}"
        print(f"{place}: {line} ({seconds:.0f} s)", file=sys.stderr, flush=True)


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the means over the seeds: a row for each data set, method and kind of file."""
    groups: dict[tuple[str, str, str], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for row in rows:
        for file in row["files"]:
            key = (row["settings"]["dataset"], row["settings"]["method"], file["kind"])
            groups.setdefault(key, []).append((row, file))
    return [_mean(*key, group) for key, group in groups.items()]


def _mean(
    dataset: str, method: str, kind: str, group: Sequence[tuple[dict[str, Any], dict[str, Any]]]
) -> dict[str, Any]:
    accuracies = [file["test_accuracy"] for _, file in group]
    return {
        "dataset": dataset,
        "method": method,
        "kind": kind,
        "learning_rate": group[0][0]["settings"]["learning_rate"],
        "num_trained": group[0][0]["num_trained"],
        "bytes": round(statistics.mean(file["bytes"] for _, file in group)),
        "test_accuracy": statistics.mean(accuracies),
        "deviation": statistics.stdev(accuracies) if len(group) > 1 else None,
        "num_seeds": len(group),
        "validation_accuracy": statistics.mean(row["validation_accuracy"] for row, _ in group),
    }


def as_text(table: Sequence[dict[str, Any]], dataset: str) -> str:
    """Return the rows of one data set as a table in Markdown."""
    lines = [["method", "values", "learning rate", "trained values", "bytes", "test accuracy"]]
    lines.append(["---", "---", *["---:"] * 4])
    lines += [_cells(row) for row in table if row["dataset"] == dataset]
    return command_line.table(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    accuracy = f"{100 * row['test_accuracy']:.2f}"
    if row["deviation"] is not None:
        accuracy += f" ± {100 * row['deviation']:.2f}"
    return [
        BY_NAME[row["method"]].label,
        row["kind"],
        f"{row['learning_rate']:g}" if row["learning_rate"] else "",
        f"{row['num_trained']:,}",
        f"{row['bytes']:,}",
        accuracy,
    ]


def draw(table: Sequence[dict[str, Any]]) -> Any:
    """Return a figure of accuracy against bytes, one plot for each data set."""
    logging.getLogger("tensorflow").setLevel("ERROR")  # it warns of many models in a process
    datasets = list(dict.fromkeys(row["dataset"] for row in table))
    figure = style.new_figure(6.5 * len(datasets), 4.5)
    for number, dataset in enumerate(datasets, start=1):
        axes = figure.add_subplot(1, len(datasets), number)
        for label, look, points in _series([row for row in table if row["dataset"] == dataset]):
            xs, ys = (
                [row["bytes"] for row in points],
                [100 * row["test_accuracy"] for row in points],
            )
            axes.plot(xs, ys, label=label, markersize=6, **look)
        axes.set_xscale("log")
        axes.set_xlabel("bytes of the file")
        axes.set_ylabel("test accuracy in percent")
        axes.set_title(f"EfficientNet-Lite0 on {_NAMES[dataset]}", fontsize=10)
        style.draw_grid(axes)
        axes.legend(fontsize=7)
    return figure


def _series(
    rows: Sequence[dict[str, Any]],
) -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    """Yield label, looks and points, in the order of bytes, of each line in a plot."""
    looks = {
        "FreezeNet": (style.BLUE, "o"),
        "FreezeNet, drawn": (style.GREEN, "^"),
        "FreezeNet, other masks": (style.SKY, "P"),
        "LoRA": (style.ORANGE, "s"),
        "biases and head": (style.PURPLE, "D"),
        "head only": (style.BLACK, "X"),
        "full fine-tuning": (style.GRAY, "v"),
    }
    for name, (color, marker) in looks.items():
        for kind, dash in (("exact", "-"), ("small", "--")):
            points = [r for r in rows if r["kind"] == kind and _group(r["method"]) == name]
            if not points:
                continue
            line = dash if name in ("FreezeNet", "FreezeNet, drawn", "LoRA") else ""
            face = color if kind == "exact" else "white"
            look = {"color": color, "marker": marker, "linestyle": line, "markerfacecolor": face}
            yield f"{name}, {kind}", look, sorted(points, key=lambda row: row["bytes"])


def _group(name: str) -> str:
    method = BY_NAME[name]
    if method.rank:
        return "LoRA"
    if not 0 < method.freeze_rate < 1:
        return method.label
    if method.is_drawn:
        return "FreezeNet, drawn"
    return "FreezeNet" if method.like is None else "FreezeNet, other masks"


if __name__ == "__main__":
    command_line.run(main)
