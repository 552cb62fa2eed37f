"""Reproduce the paper's figures and tables from your own runs.

    python examples/reproduce.py --list
    python examples/reproduce.py --experiment=lenet5_extreme_rates --data_dir=/path/to/data

Without other flags an experiment is the paper's in full: hours to months of computing, which --list
estimates. A minute or two, on digits that need no download, takes

    python examples/reproduce.py --experiment=lenet5_extreme_rates --dataset=mnist_5k \
        --model=lenet_300_100 --epochs=5 --seeds=2 --rates=0.99,0.999

Each finished run is a line of results.jsonl and is not repeated, and a run that was stopped goes on
from its last backup, at most a minute and an epoch before: the script can be stopped and started
again. Once all are finished, it only writes the reports. Each experiment has a folder
for its report.md and its figure, named after it and after what the flags change of it, such as
lenet5_extreme_rates-epochs=5-seeds=2: only the same call replaces them. All share results.jsonl.

`--experiment=architectures` writes a page on the networks instead. To spread the runs over
processes or machines, see `keras_freeze.tuning.sweep`; the chief writes the reports.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import command_line
import keras
from absl import flags

from keras_freeze._utils.files import replacing
from keras_freeze.paper.experiments import EXPERIMENTS, Experiment, architectures, work
from keras_freeze.paper.runs import Results, Run
from keras_freeze.paper.views.reports import write_report

_EXPERIMENT = flags.DEFINE_list(
    "experiment", [], "Names out of --list with commas between them; or all; or architectures."
)
_LIST = flags.DEFINE_bool("list", False, "Only list the experiments and the work they are.")
_CHANGES = command_line.define_settings("dataset", "model", "epochs", "steps_per_epoch")
_SEEDS = flags.DEFINE_integer("seeds", None, "How many seeds. Default: the experiment's number.")
_RATES = flags.DEFINE_list("rates", None, "Freezing rates instead of the experiment's.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's folder of data. Default: TFDS's own.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/reproduce", "The folder to write to.")
_TENSORBOARD = flags.DEFINE_bool(
    "tensorboard",
    False,
    "Write TensorBoard logs of each run into a folder of tensorboard/. A run that was stopped then "
    "starts again.",
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
    """Return the experiments that the flags name, changed as the flags say."""
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
    rates = None if _RATES.value is None else command_line.numbers(_RATES, float)
    changes = {"seeds": _SEEDS.value, "rates": rates, **_CHANGES()}
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
    """Execute what is not finished; return the error if runs failed."""
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
    """Print and write reports of the finished runs, each experiment into a folder."""
    from keras_freeze.paper.tuning import is_worker

    if is_worker():
        return  # the chief does it
    results = Results(folder / "results.jsonl")
    for experiment in experiments:
        own = folder / _folder_of(experiment)
        print(write_report([experiment], results, own))
        print(f"Written to {own}\n")


def _folder_of(experiment: Experiment) -> str:
    """Return its name, and what the flags changed of it."""
    changed, usual = map(_parts_of, (experiment, EXPERIMENTS[experiment.name]))
    parts = [f"{name}={value}" for name, value in changed.items() if value != usual[name]]
    return "-".join([experiment.name, *parts])


def _parts_of(experiment: Experiment) -> dict[str, object]:
    return {
        "dataset": experiment.dataset,
        "model": experiment.model,
        "epochs": experiment.settings.get("epochs"),
        "seeds": experiment.seeds,
        "rates": ",".join(map(str, experiment.rates)),
        "steps_per_epoch": experiment.settings.get("steps_per_epoch"),
    }


def _write_architectures(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "architectures.md") as path:
        path.write_text(architectures.markdown(), encoding="utf-8")
    print(f"Written to {folder}: architectures.md")


if __name__ == "__main__":
    command_line.run(main)
