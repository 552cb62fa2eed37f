"""Federated learning: clients with different digits train a few per cent of one network together.

    python examples/federated.py
    python examples/federated.py --rates=0.99 --clients=20 --rounds=50
    pip install flwr && python examples/federated.py --engine=flower

No client sends images. The training data are sorted by digit and cut into shards, so that each
client has two or three of the ten digits. All make the same network from one seed. First, each
client computes SNIP's scores on its own images and sends them; the server adds them, weighted by
the number of images, and sends back one mask. Then, in each round, every client trains from the
server's values on its own images, and the server averages what they send: vectors of the trained
values (`get_trained`, `set_trained`). Clients keep no state between rounds, so that one network
stands for all of them in turn.

The table compares this with averaging all weights: what each client sends in a round (it receives
as much), what it sends and receives in all rounds, scores and mask included, and the accuracy on
test images of all digits.

About a minute with the default flags and one core. Writes result.json, and the masks as `.freeze`
files.
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
from keras_freeze._utils.validation import check_number
from keras_freeze.masks.selection import check_freeze_rate

_DATASET = flags.DEFINE_enum("dataset", "mnist_5k", ["mnist_5k", "mnist"], "Which digits.")
_MODEL = flags.DEFINE_enum(
    "model", "lenet_300_100", ["lenet_300_100", "lenet_5_caffe"], "Which network."
)
_RATES = flags.DEFINE_list("rates", "0.9,0.99", "Freezing rates, with commas between them.")
_CLIENTS = flags.DEFINE_integer("clients", 10, "How many clients there are.", lower_bound=1)
_SHARDS = flags.DEFINE_integer("shards", 2, "Shards of each client.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 20, "How often values are averaged.", lower_bound=1)
_EPOCHS = flags.DEFINE_integer("epochs", 1, "Epochs of a client in a round.", lower_bound=1)
_LEARNING_RATES = flags.DEFINE_list(
    "learning_rates", "0.05,0.2", "Of SGD: for each row of the table, the best is chosen."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of weights, shards and data order.", lower_bound=0)
_ENGINE = flags.DEFINE_enum("engine", "numpy", ["numpy", "flower"], "What calls and averages.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's folder of data. Default: TFDS's own.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/federated", "The folder to write to.")

_BATCH_SIZE = 20

Data = tuple[np.ndarray, np.ndarray]
Row = dict[str, Any]
Average = Callable[[Sequence["Client"], np.ndarray, str], np.ndarray]


@dataclass(frozen=True)
class Client:
    """A client with images of its own.

    Attributes:
        network: the network that it trains, the same for all clients of this process.
        images, labels: its data.
    """

    network: keras.Model
    images: np.ndarray
    labels: np.ndarray

    def scores(self) -> dict[str, np.ndarray]:
        """Return SNIP's scores on the client's data, by path."""
        return kf.compute_saliency(self.network, self.images, self.labels)

    def train(self, vector: np.ndarray, fingerprint: str) -> np.ndarray:
        """Train from the values of a vector, and return those after training."""
        kf.set_trained(self.network, vector, fingerprint=fingerprint)
        self.network.fit(
            self.images, self.labels, batch_size=_BATCH_SIZE, epochs=_EPOCHS.value, verbose=0
        )
        return kf.get_trained(self.network)


def main() -> None:
    rates = [check_freeze_rate(rate) for rate in command_line.numbers(_RATES, float)]
    learning_rates = [
        check_number("learning_rates", rate, positive=True)
        for rate in command_line.numbers(_LEARNING_RATES, float)
    ]
    average = _flower_average() if _ENGINE.value == "flower" else _average
    folder = Path(_OUTPUT_DIR.value)
    folder.mkdir(parents=True, exist_ok=True)  # fails now rather than after training
    images, labels = _load("train")
    members = _deal(labels)
    rows = []
    for rate in (0.0, *(rate for rate in rates if rate)):
        tried = []
        for learning_rate in learning_rates:
            network = _network(rate, learning_rate)
            clients = [Client(network, images[own], labels[own]) for own in members]
            tried.append(_federate(clients, rate, learning_rate, average, folder))
        rows.append(_best(tried))
    digits = [len(np.unique(labels[own])) for own in members]
    result = {
        "num_examples": [len(own) for own in members],
        "num_digits": digits,
        "rounds": _ROUNDS.value,
        "rows": rows,
    }
    with replacing(folder / "result.json") as path:
        path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{len(members)} clients with {np.mean(digits):.3g} of 10 digits each, on average.")
    print("Test accuracy after so many rounds:\n")
    print(_table(rows))
    print(f"\nWritten to {folder}: result.json and the masks")


def _best(tried: Sequence[Row | None]) -> Row:
    """Return the row that was best in validation."""
    finished = [row for row in tried if row is not None]
    if not finished:
        raise ValueError(
            "training diverged with each of the learning_rates: try smaller ones. "
            f"Received: --learning_rates={','.join(_LEARNING_RATES.value)}"
        )
    return max(finished, key=lambda row: row["validation_accuracy"])


def _flower_average() -> Average:
    try:
        import federated_flower
    except ImportError as error:
        raise ImportError(f"--engine=flower needs Flower: pip install flwr. {error}") from error
    return federated_flower.average


def _load(split: str) -> Data:
    return kf.datasets.load_arrays(
        _DATASET.value, split, seed=_SEED.value, data_dir=_DATA_DIR.value
    )


def _deal(labels: np.ndarray) -> list[np.ndarray]:
    """Return which examples each client has: some shards of those sorted by digit."""
    num_shards = _CLIENTS.value * _SHARDS.value
    if num_shards > len(labels):
        raise ValueError(
            f"clients times shards must be at most {len(labels)}, the number of images. "
            f"Received: --clients={_CLIENTS.value}, --shards={_SHARDS.value}"
        )
    shards = np.array_split(np.argsort(labels, kind="stable"), num_shards)
    order = np.random.default_rng(_SEED.value).permutation(num_shards)
    hands = order.reshape(_CLIENTS.value, _SHARDS.value)
    return [np.concatenate([shards[number] for number in hand]) for hand in hands]


def _network(rate: float, learning_rate: float) -> keras.Model:
    keras.utils.set_random_seed(_SEED.value)
    network = kf.models.MODELS[_MODEL.value](seed=_SEED.value)
    network.compile(
        optimizer=kf.FreezeOptimizer(keras.optimizers.SGD(learning_rate), rate),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


def _federate(
    clients: Sequence[Client], rate: float, learning_rate: float, average: Average, folder: Path
) -> Row | None:
    """Train a network by all clients: choose its mask, then average in rounds.

    Returns:
        A row of the table; None if training has diverged.
    """
    network = clients[0].network
    mask = kf.freeze(network, mask=_common_mask(clients, rate))
    once = 0
    if rate:
        file = folder / f"mask_{rate:g}.freeze"
        mask.save(file)
        once = 4 * mask.num_weights + file.stat().st_size  # float32 scores, and the mask
    test = _load("test")
    vector = kf.get_trained(network)
    accuracies = []
    for _ in range(_ROUNDS.value):
        averaged = average(clients, vector, mask.fingerprint)
        if not np.isfinite(averaged).all():
            return None
        kf.set_trained(network, averaged)
        vector = kf.get_trained(network)  # what the server sends, in the network's dtype
        accuracies.append(_accuracy(network, test))
    validation = _accuracy(network, _load("validation"))
    words = f"q = {rate:g}, learning rate {learning_rate:g}: {validation:.1%} in validation"
    print(words, file=sys.stderr, flush=True)
    return {
        "freeze_rate": rate,
        "learning_rate": learning_rate,
        "validation_accuracy": validation,
        "num_values": vector.size,
        "bytes_a_round": vector.nbytes,
        "bytes_once": once,
        "bytes_in_all": once + 2 * vector.nbytes * _ROUNDS.value,
        "accuracies": accuracies,
    }


def _accuracy(network: keras.Model, data: Data) -> float:
    return network.evaluate(*data, batch_size=500, return_dict=True, verbose=0)["accuracy"]


def _common_mask(clients: Sequence[Client], rate: float) -> Mapping[str, np.ndarray]:
    """Return the mask of the largest of the clients' scores, added up."""
    summed: dict[str, Any] = {}
    for client in clients:
        for path, scores in client.scores().items():
            summed[path] = summed.get(path, 0.0) + len(client.labels) * scores
    mask = kf.FreezeMask.from_scores(list(summed.values()), rate, paths=list(summed))
    return {path: mask[path] for path in mask}


def _average(clients: Sequence[Client], vector: np.ndarray, fingerprint: str) -> np.ndarray:
    """Let all clients train, and return the average of what they send (FedAvg)."""
    vectors = [client.train(vector, fingerprint) for client in clients]
    return np.average(vectors, axis=0, weights=[len(client.labels) for client in clients])


def _table(rows: Sequence[Row]) -> str:
    rounds = sorted({max(1, _ROUNDS.value * part // 4) for part in (1, 2, 4)})
    lines = [["", "values", "learning rate", "bytes a round", "megabytes in all"]]
    lines[0] += map(str, rounds)
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    for row in rows:
        rate = row["freeze_rate"]
        lines.append(
            [
                f"FreezeNet, q = {rate:g}" if rate else "all weights",
                f"{row['num_values']:,}",
                f"{row['learning_rate']:g}",
                f"{row['bytes_a_round']:,}",
                f"{row['bytes_in_all'] / 1e6:.2f}",
                *(f"{100 * row['accuracies'][number - 1]:.1f}" for number in rounds),
            ]
        )
    return command_line.table(lines)


if __name__ == "__main__":
    command_line.run(main)
