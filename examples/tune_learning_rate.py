"""The paper's search for learning rates: 0.1 * 2^n, n = -4..4, over freezing rates, three seeds.

    python examples/tune_learning_rate.py
    python examples/tune_learning_rate.py --search=bayesian --rates=0.99

Prints a Markdown table of test accuracies (at the best validation epoch, mean and deviation over
seeds) and writes it beside results.jsonl. The best learning rate of each freezing rate, by mean
validation accuracy, is in bold. Finished runs are not repeated, so that the script can be stopped
and started again. With the default flags: 81 runs of a few seconds each.

A chief and two workers share the runs; on one machine:

    export KERASTUNER_ORACLE_IP=127.0.0.1 KERASTUNER_ORACLE_PORT=8000 RUN=tune_learning_rate.py
    for ID in worker0 worker1; do KERASTUNER_TUNER_ID=$ID python examples/$RUN & done
    KERASTUNER_TUNER_ID=chief python examples/$RUN

With another --search, one of KerasTuner's own tuners looks for the highest validation accuracy:
through the grid, or anywhere between its ends. It prints the best trial of each freezing rate.
"""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
import keras_tuner
from absl import flags

import keras_freeze as kf
from keras_freeze import tuning
from keras_freeze.files import replacing
from keras_freeze.runs import Results, Run

_DATASET = flags.DEFINE_string("dataset", "mnist_5k", f"One of {', '.join(kf.datasets.NAMES)}.")
_MODEL = flags.DEFINE_string("model", "lenet_300_100", f"One of {', '.join(kf.models.MODELS)}.")
_METHOD = flags.DEFINE_string("method", "freezenet", f"One of {', '.join(kf.training.METHODS)}.")
_RATES = flags.DEFINE_list("rates", "0.9,0.99,0.995", "Freezing rates, with commas between them.")
_LEARNING_RATES = flags.DEFINE_list(
    "learning_rates",
    [f"{rate:g}" for rate in kf.training.LEARNING_RATES],
    "Learning rates of the first steps, with commas between them.",
)
_SEEDS = flags.DEFINE_list("seeds", "0,1,2", "Seeds; a --search takes the first alone.")
_EPOCHS = flags.DEFINE_integer("epochs", 10, "Epochs of each run; shortens the paper's schedule.")
_SEARCH = flags.DEFINE_enum(
    "search",
    "sweep",
    ["sweep", "grid", "random", "bayesian", "hyperband"],
    "The paper's table, or what searches instead.",
)
_TRIALS = flags.DEFINE_integer("trials", 20, "Trials of a random or Bayesian search.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's folder of data. Default: TFDS's own.")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/tune_learning_rate", "The folder to write to; the workers' too."
)


def main() -> None:
    rates, learning_rates = (
        command_line.numbers(_RATES, float),
        command_line.numbers(_LEARNING_RATES, float),
    )
    seeds = command_line.numbers(_SEEDS, int)
    if _SEARCH.value == "sweep":
        _sweep(rates, learning_rates, seeds)
    else:
        _search(rates, learning_rates, seeds[0])


def _sweep(rates: list[float], learning_rates: list[float], seeds: list[int]) -> None:
    points = list(itertools.product(rates, learning_rates))
    runs = {
        (q, rate, seed): Run(
            _DATASET.value,
            _MODEL.value,
            _METHOD.value,
            q,
            seed,
            epochs=_EPOCHS.value,
            learning_rate=rate,
        )
        for seed in seeds  # first one seed of everything, then the next
        for q, rate in points
    }
    results = tuning.sweep(runs.values(), _OUTPUT_DIR.value, data_dir=_DATA_DIR.value)
    _show(_table(rates, learning_rates, seeds, runs, results))


def _table(
    rates: list[float],
    learning_rates: list[float],
    seeds: list[int],
    runs: dict[tuple[float, float, int], Run],
    results: Results,
) -> str:
    rows = [["q", *(f"{rate:g}" for rate in learning_rates)]]
    for q in rates:
        cells, validation = [], []
        for rate in learning_rates:
            of_seeds = [results[runs[q, rate, seed]]["result"] for seed in seeds]
            cells.append(_mean([result["test_accuracy"] for result in of_seeds]))
            # A run without an epoch of finite loss has none.
            validation.append(
                statistics.mean(result["validation_accuracy"] or 0.0 for result in of_seeds)
            )
        best = validation.index(max(validation))
        cells[best] = f"**{cells[best]}**"
        rows.append([f"{q:g}", *cells])
    return _markdown(rows)


def _search(rates: list[float], learning_rates: list[float], seed: int) -> None:
    is_grid = _SEARCH.value == "grid"
    hypermodel = tuning.FreezeHyperModel(
        _DATASET.value,
        _MODEL.value,
        rates,
        methods=_METHOD.value,
        learning_rates=(
            learning_rates if is_grid else tuning.LogRange(min(learning_rates), max(learning_rates))
        ),
        seeds=seed,
        epochs=_EPOCHS.value,
        data_dir=_DATA_DIR.value,
    )
    kinds: dict[str, tuple[type, dict[str, Any]]] = {
        "grid": (keras_tuner.GridSearch, {}),
        "random": (keras_tuner.RandomSearch, {"max_trials": _TRIALS.value, "seed": seed}),
        "bayesian": (keras_tuner.BayesianOptimization, {"max_trials": _TRIALS.value, "seed": seed}),
        "hyperband": (keras_tuner.Hyperband, {"max_epochs": _EPOCHS.value, "seed": seed}),
    }
    kind, arguments = kinds[_SEARCH.value]
    tuner = kind(
        hypermodel,
        objective="val_accuracy",
        directory=_OUTPUT_DIR.value,
        project_name=_SEARCH.value,
        **arguments,
    )
    tuner.search(verbose=2)
    tuning.check_trials(tuner)
    if isinstance(tuner.oracle, keras_tuner.Oracle):  # else a worker, and the chief shows the table
        _show(_table_of_trials(list(tuner.oracle.trials.values())))


def _table_of_trials(trials: Sequence[Any]) -> str:
    rows = [["q", "trials", "best learning rate", "validation accuracy (%)"]]
    of_rate: dict[float, list[Any]] = {}
    for trial in trials:
        of_rate.setdefault(trial.hyperparameters.values.get("freeze_rate", 0.0), []).append(trial)
    for q, group in sorted(of_rate.items()):
        best = max(group, key=lambda trial: trial.score)
        rate = best.hyperparameters.values["learning_rate"]
        rows.append([f"{q:g}", str(len(group)), f"{rate:.3g}", f"{100 * best.score:.2f}"])
    return _markdown(rows)


def _show(table: str) -> None:
    path = Path(_OUTPUT_DIR.value) / f"{_SEARCH.value}.md"
    with replacing(path) as temporary:
        temporary.write_text(table + "\n")
    print(table)
    print(f"Written to {path}")


def _markdown(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _mean(accuracies: list[float]) -> str:
    cell = f"{100 * statistics.mean(accuracies):.2f}"
    if len(accuracies) > 1:
        cell += f" ± {100 * statistics.stdev(accuracies):.2f}"
    return cell


if __name__ == "__main__":
    command_line.run(main)
