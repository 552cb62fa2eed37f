"""Reproduce the paper's figures and tables from runs of your own.

    python examples/reproduce.py --list
    python examples/reproduce.py --experiment=lenet5_extreme_rates --data_dir=/path/to/data

Without other flags an experiment is the paper's in full: hours to months of computing, which --list
estimates. A minute or two, on digits that need no download, takes

    python examples/reproduce.py --experiment=lenet5_extreme_rates --dataset=mnist_5k \
        --model=lenet_300_100 --epochs=5 --seeds=2 --rates=0.99,0.999

Each finished run is a line of results.jsonl and is not repeated, so that the script can be stopped
and started again; once all are there, it only writes the reports anew. Each experiment has a folder
for its report.md and its picture, named after it and after what the flags change of it, such as
lenet5_extreme_rates-epochs=5-seeds=2: only the same call replaces them. All share results.jsonl.

`--experiment=architectures` writes a page on the networks instead. To spread the runs over
processes or machines, see `keras_freeze.tuning.sweep`; the chief writes the reports.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import command_line
import keras
from absl import flags

import keras_freeze as kf
from keras_freeze._utils.files import replacing
from keras_freeze.paper.experiments import EXPERIMENTS, Experiment, architectures, tables, work
from keras_freeze.paper.runs import Results, Run

_EXPERIMENT = flags.DEFINE_list(
    "experiment", [], "Names out of --list with commas between them; or all; or architectures."
)
_LIST = flags.DEFINE_bool("list", False, "Only list the experiments and the work they are.")
_EPOCHS = flags.DEFINE_integer("epochs", None, "Shortens the schedule of each run in proportion.")
_SEEDS = flags.DEFINE_integer("seeds", None, "How many seeds. Default: the paper's number.")
_RATES = flags.DEFINE_list("rates", None, "Freezing rates instead of the experiment's.")
_STEPS = flags.DEFINE_integer(
    "steps_per_epoch", None, "Only the first so many batches of the images."
)
_MODEL = flags.DEFINE_string("model", None, f"Another one of {', '.join(kf.models.MODELS)}.")
_DATASET = flags.DEFINE_string("dataset", None, f"Another one of {', '.join(kf.datasets.NAMES)}.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's folder of data. Default: TFDS's own.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/reproduce", "The folder to write to.")
_TENSORBOARD = flags.DEFINE_bool(
    "tensorboard", False, "Write TensorBoard logs of each run into a folder of tensorboard/."
)


def main() -> None:
    folder = Path(_OUTPUT_DIR.value)
    if _EXPERIMENT.value == ["architectures"]:
        _write_architectures(folder)
        return
    experiments = _chosen()
    if _LIST.value:
        print(work.overview(experiments))
        return
    folder.mkdir(parents=True, exist_ok=True)  # fails now rather than after the first run
    runs = list(dict.fromkeys(run for experiment in experiments for run in experiment.runs))
    _announce(experiments, runs, Results(folder / "results.jsonl"))
    failure = _sweep(runs, folder)
    _report(experiments, folder)
    if failure:
        raise failure


def _chosen() -> list[Experiment]:
    """The experiments that were asked for, changed as the flags say."""
    names = _EXPERIMENT.value
    if names == ["all"] or (_LIST.value and not names):
        names = list(EXPERIMENTS)
    unknown = [name for name in names if name not in EXPERIMENTS]
    if unknown or not names:
        received = ", ".join(map(repr, unknown)) or "none"
        raise ValueError(
            f"experiment must be names out of --list, or all, or architectures. "
            f"Received: {received}. The names are {', '.join(EXPERIMENTS)}"
        )
    changes: dict[str, Any] = {
        "epochs": _EPOCHS.value,
        "seeds": _SEEDS.value,
        "rates": None if _RATES.value is None else command_line.numbers(_RATES, float),
        "steps_per_epoch": _STEPS.value,
        "model": _MODEL.value,
        "dataset": _DATASET.value,
    }
    return [EXPERIMENTS[name].changed(**changes) for name in dict.fromkeys(names)]


def _announce(experiments: Sequence[Experiment], runs: Sequence[Run], results: Results) -> None:
    for experiment in experiments:
        print(f"{experiment.name} ({experiment.source}): {experiment.title}")
        if experiment.changes:
            print(f"  changed: {'; '.join(experiment.changes)}")
    left = work.work_of(run for run in runs if run not in results)
    print(
        f"{len(runs):,} runs, {len(runs) - left.runs:,} of them finished; the others take "
        f"{left.steps:,} steps, very roughly {left.hours:,.1f} hours on two CPU cores",
        flush=True,
    )


def _sweep(runs: Sequence[Run], folder: Path) -> RuntimeError | None:
    """Executes what is not finished; returns the error if runs failed."""
    from keras_freeze.paper.tuning import sweep  # needs KerasTuner, which --list does without

    logs = (lambda run: [_tensorboard(folder, run)]) if _TENSORBOARD.value else None
    try:
        sweep(runs, folder, data_dir=_DATA_DIR.value, callbacks_of=logs)
    except RuntimeError as error:
        return error
    return None


def _tensorboard(folder: Path, run: Run) -> keras.callbacks.TensorBoard:
    logs = folder / "tensorboard" / run.label
    if logs.exists():  # of a run that was killed, whose curves would double back
        shutil.rmtree(logs)
    return keras.callbacks.TensorBoard(logs, write_graph=False)


def _report(experiments: Sequence[Experiment], folder: Path) -> None:
    """Prints and writes what the runs so far came to, each experiment into a folder of its own."""
    from keras_freeze.paper.tuning import is_worker

    if is_worker():
        return  # the chief does it
    results = Results(folder / "results.jsonl")
    for experiment in experiments:
        own = folder / _folder_of(experiment)
        print(tables.write_report([experiment], results, own, kf.plots.plot_experiment))
        print(f"Written to {own}\n")


def _folder_of(experiment: Experiment) -> str:
    """Its name, and what the flags changed of it."""
    parts = [experiment.name]
    for name in ("dataset", "model", "epochs", "seeds", "rates", "steps_per_epoch"):
        value = getattr(experiment, name)
        if value != getattr(EXPERIMENTS[experiment.name], name):
            parts.append(f"{name}={','.join(map(str, value)) if name == 'rates' else value}")
    return "-".join(parts)


def _write_architectures(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "architectures.md") as path:
        path.write_text(architectures.markdown(), encoding="utf-8")
    print(f"Written to {folder}: architectures.md")


if __name__ == "__main__":
    command_line.run(main)
