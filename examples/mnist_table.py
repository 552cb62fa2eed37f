"""Test accuracies over freezing rates and methods, mean and deviation over seeds, as Markdown.

    python examples/mnist_table.py --data_dir=/path/to/tensorflow_datasets

Finished runs are kept in results.jsonl and not repeated, so that the script can be stopped and
started again. Beside the values stand, in parentheses, those of an independent implementation in
NumPy alone, where there are any. With the default flags: thirty runs of half a minute.
"""

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import command_line
from absl import flags

import keras_freeze as kf
from keras_freeze.files import replacing
from keras_freeze.mask import check_freeze_rate

_DATASET = flags.DEFINE_string("dataset", "mnist", f"One of {', '.join(kf.datasets.NAMES)}.")
_MODEL = flags.DEFINE_string("model", "lenet_300_100", f"One of {', '.join(kf.models.MODELS)}.")
_METHODS = flags.DEFINE_list(
    "methods",
    "baseline,freezenet,snip,random",
    f"Some of {', '.join(kf.training.METHODS)}, with commas between them.",
)
_RATES = flags.DEFINE_list("rates", "0.9,0.99,0.995", "Freezing rates, with commas between them.")
_SEEDS = flags.DEFINE_list("seeds", "0,1,2", "Seeds, with commas between them.")
_EPOCHS = flags.DEFINE_integer("epochs", 25, "Epochs of each run; shortens the paper's schedule.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's folder of data. Default: TFDS's own.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/mnist_table", "The folder to write to.")

# (mean, deviation) in per cent over three seeds: LeNet-300-100, MNIST, 25 epochs; manual
# backpropagation, no framework.
_REFERENCE = {
    ("baseline", 0.0): (98.38, 0.04),
    ("freezenet", 0.9): (97.96, 0.04),
    ("snip", 0.9): (98.06, 0.11),
    ("random", 0.9): (97.17, 0.09),
    ("freezenet", 0.95): (97.46, 0.13),
    ("snip", 0.95): (97.70, 0.10),
    ("random", 0.95): (96.13, 0.04),
    ("freezenet", 0.99): (94.85, 0.12),
    ("snip", 0.99): (93.85, 0.24),
    ("random", 0.99): (90.36, 0.67),
    ("freezenet", 0.995): (92.27, 0.36),
    ("snip", 0.995): (87.43, 0.62),
    ("random", 0.995): (85.87, 0.54),
}


def main() -> None:
    file = Path(_OUTPUT_DIR.value) / "results.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    done = _read(file)
    runs = _planned_runs()
    for number, (method, rate, seed) in enumerate(runs, start=1):
        if _key(method, rate, seed) in done:
            continue
        print(f"{number}/{len(runs)} {method}, q = {rate:g}, seed {seed}", flush=True)
        result = kf.training.train(
            _DATASET.value,
            _MODEL.value,
            method,
            rate,
            epochs=_EPOCHS.value,
            seed=seed,
            data_dir=_DATA_DIR.value,
        )
        done[_key(method, rate, seed)] = result.to_dict()
        with replacing(file) as path:
            path.write_text("".join(json.dumps(entry) + "\n" for entry in done.values()))
    print(_table({run: done[_key(*run)]["test_accuracy"] for run in runs}))


def _planned_runs() -> list[tuple[str, float, int]]:
    rates = [check_freeze_rate(rate) for rate in _numbers(_RATES, float)]
    seeds = _numbers(_SEEDS, int)
    runs = []
    for seed, method in itertools.product(seeds, _METHODS.value):
        if method not in kf.training.METHODS:
            raise ValueError(
                f"methods must be some of {', '.join(kf.training.METHODS)}. Received: {method!r}"
            )
        only_rate = kf.training.METHODS[method].freeze_rate
        runs += [(method, rate, seed) for rate in (rates if only_rate is None else [only_rate])]
    return runs


def _numbers(flag: flags.FlagHolder, kind: type) -> list[Any]:
    try:
        return [kind(text) for text in flag.value]
    except ValueError as error:
        raise ValueError(
            f"{flag.name} must be numbers with commas between them. "
            f"Received: --{flag.name}={','.join(flag.value)}"
        ) from error


def _key(method: str, rate: float, seed: int) -> tuple[Any, ...]:
    return _DATASET.value, _MODEL.value, method, rate, seed, _EPOCHS.value


def _read(file: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    fields = ("dataset", "model", "method", "freeze_rate", "seed")
    return {
        (*(entry[field] for field in fields), entry["recipe"]["epochs"]): entry
        for entry in map(json.loads, lines)
    }


def _table(accuracies: dict[tuple[str, float, int], float]) -> str:
    methods = list(dict.fromkeys(method for method, _, _ in accuracies))
    lines = [["q", *methods], ["---"] * (len(methods) + 1)]
    for rate in sorted({rate for _, rate, _ in accuracies}):
        cells = []
        for method in methods:
            values = [100 * a for (m, r, _), a in accuracies.items() if (m, r) == (method, rate)]
            cells.append(_cell(method, rate, values))
        lines.append([f"{rate:g}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(method: str, rate: float, values: list[float]) -> str:
    if not values:
        return ""
    cell = f"{statistics.mean(values):.2f}"
    if len(values) > 1:
        cell += f" ± {statistics.stdev(values):.2f}"
    comparable = (_DATASET.value, _MODEL.value, _EPOCHS.value) == ("mnist", "lenet_300_100", 25)
    if comparable and (method, rate) in _REFERENCE:
        cell += " ({:.2f} ± {:.2f})".format(*_REFERENCE[method, rate])
    return cell


if __name__ == "__main__":
    command_line.run(main)
