"""The paper's search for learning rates: 0.1 * 2^n, n = -4..4, over freezing rates, three seeds.

    python examples/tune_learning_rate.py
    python examples/tune_learning_rate.py --search=bayesian --rates=0.99

Prints tables of test accuracies and of the best learning rate of each freezing rate by mean
validation accuracy. Finished runs are lines of results.jsonl and are not repeated, so that the
script can be stopped and started again. With the default flags: 81 runs of a few seconds each.

A chief and two workers share the runs; on one machine:

    export KERASTUNER_ORACLE_IP=127.0.0.1 KERASTUNER_ORACLE_PORT=8000 RUN=tune_learning_rate.py
    for ID in worker0 worker1; do KERASTUNER_TUNER_ID=$ID python examples/$RUN & done
    KERASTUNER_TUNER_ID=chief python examples/$RUN

With another --search, one of KerasTuner's tuners looks for the highest validation accuracy at
each freezing rate: through the grid, or anywhere between its ends. The best trial of each is
printed. A chief and workers search at one freezing rate only: KerasTuner's workers cannot follow a
chief from one search to the next.

What is printed is also a file of the output folder. Its name ends in a digest of the flags, and so
do those of KerasTuner's folders: the same flags continue a search, others start one.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import command_line
import keras_tuner
from absl import flags

from keras_freeze._utils.files import replacing
from keras_freeze.paper import tuning
from keras_freeze.paper.experiments import EXPERIMENTS, Experiment, Series
from keras_freeze.paper.experiments.markdown import markdown_table
from keras_freeze.paper.runs import Run
from keras_freeze.paper.titles import title_of
from keras_freeze.paper.training import LEARNING_RATES
from keras_freeze.paper.views.reports import markdown

_SETTINGS = command_line.define_settings(
    *("dataset", "model", "method", "epochs"),
    dataset="mnist_5k",
    model="lenet_300_100",
    method="freezenet",
    epochs=10,
)
_RATES = flags.DEFINE_list("rates", "0.9,0.99,0.995", "Freezing rates, with commas between them.")
_LEARNING_RATES = flags.DEFINE_list(
    "learning_rates",
    [f"{rate:g}" for rate in LEARNING_RATES],
    "Learning rates of the first steps, with commas between them.",
)
_SEEDS = flags.DEFINE_integer("seeds", 3, "How many seeds; another --search takes one.")
_SEARCH = flags.DEFINE_enum(
    "search",
    "sweep",
    ["sweep", "grid", "random", "bayesian", "hyperband"],
    "The paper's table, or what searches instead.",
)
_TRIALS = flags.DEFINE_integer(
    "trials", 20, "Trials of a random or Bayesian search.", lower_bound=1
)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's folder of data. Default: TFDS's own.")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/tune_learning_rate", "The folder to write to; the workers' too."
)


def main() -> None:
    rates = command_line.numbers(_RATES, float)
    rates = list(dict.fromkeys(Run(freeze_rate=q, **_SETTINGS()).freeze_rate for q in rates))
    learning_rates = command_line.numbers(_LEARNING_RATES, float)
    text = (_sweep if _SEARCH.value == "sweep" else _search)(rates, learning_rates)
    if not tuning.is_worker():
        path = Path(_OUTPUT_DIR.value) / f"{_name(rates, learning_rates)}.md"
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
        print(text)
        print(f"Written to {path}")


def _name(rates: list[float], learning_rates: list[float]) -> str:
    """Return the name of a file or folder: the kind of search, and a digest of the flags."""
    run = _SETTINGS()
    settings = [rates, learning_rates, run["dataset"], run["model"], run["method"]]
    settings += [_SEEDS.value, run["epochs"], _TRIALS.value]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    return f"{_SEARCH.value}-{digest[:8]}"


def _sweep(rates: list[float], learning_rates: list[float]) -> str:
    experiment = _experiment(rates, learning_rates)
    results = tuning.sweep(experiment.runs, _OUTPUT_DIR.value, data_dir=_DATA_DIR.value)
    return markdown(experiment, results)


def _experiment(rates: list[float], learning_rates: list[float]) -> Experiment:
    """Return the paper's experiment, changed as the flags say."""
    settings = _SETTINGS()
    method = settings.pop("method")
    changes = []
    if method != "freezenet":
        changes.append(f"{title_of(method)} instead of FreezeNet")
    if tuple(learning_rates) != LEARNING_RATES:
        changes.append("learning rates " + ", ".join(f"{rate:g}" for rate in learning_rates))
    series = tuple(
        Series(f"{rate:g}", {"method": method, "learning_rate": rate}) for rate in learning_rates
    )
    paper = EXPERIMENTS["lenet5_best_learning_rates"]
    return replace(paper, series=series, changes=tuple(changes)).changed(
        rates=rates, seeds=_SEEDS.value, **settings
    )


def _search(rates: list[float], learning_rates: list[float]) -> str:
    """Search at each freezing rate; over all rates it would spend its trials at the lowest."""
    if "KERASTUNER_ORACLE_IP" in os.environ and len(rates) > 1:
        raise ValueError(
            "rates must be one freezing rate where a chief and workers search. "
            f"Received: --rates={','.join(_RATES.value)}"
        )
    rows = []
    for q in rates:
        trials = _trials(q, learning_rates)
        if trials:
            best = max(trials, key=lambda trial: trial.score)
            rate = best.hyperparameters.values["learning_rate"]
            rows.append([f"{q:g}", str(len(trials)), f"{rate:.3g}", f"{100 * best.score:.2f}"])
    return markdown_table(["q", "trials", "best learning rate", "validation accuracy (%)"], rows)


def _trials(q: float, learning_rates: list[float]) -> Sequence[Any]:
    """Return all trials at one freezing rate; of a worker none: the chief has them."""
    settings = _SETTINGS()
    hypermodel = tuning.FreezeHyperModel(
        settings["dataset"],
        settings["model"],
        q,
        methods=settings["method"],
        learning_rates=(
            learning_rates
            if _SEARCH.value == "grid"
            else tuning.LogRange(min(learning_rates), max(learning_rates))
        ),
        epochs=settings["epochs"],
        data_dir=_DATA_DIR.value,
    )
    kinds: dict[str, tuple[type, dict[str, Any]]] = {
        "grid": (keras_tuner.GridSearch, {}),
        "random": (keras_tuner.RandomSearch, {"max_trials": _TRIALS.value, "seed": 0}),
        "bayesian": (keras_tuner.BayesianOptimization, {"max_trials": _TRIALS.value, "seed": 0}),
        "hyperband": (keras_tuner.Hyperband, {"max_epochs": settings["epochs"], "seed": 0}),
    }
    kind, arguments = kinds[_SEARCH.value]
    tuner = kind(
        hypermodel,
        objective="val_accuracy",
        directory=_OUTPUT_DIR.value,
        project_name=_name([q], learning_rates),
        **arguments,
    )
    tuner.search(verbose=2)
    tuning.check_trials(tuner)
    return [] if tuning.is_worker() else list(tuner.oracle.trials.values())


if __name__ == "__main__":
    command_line.run(main)
