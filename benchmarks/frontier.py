"""Measures test error against the bytes of the whole file, for LeNets on MNIST.

    KERAS_BACKEND=jax python benchmarks/frontier.py --data_dir=<TFDS's folder>
    python benchmarks/frontier.py --epochs=4 --seeds=0 --rates=0.99    # a few minutes

Each network is trained once for each freezing rate, kind of mask (SNIP's own, or drawn at its
rates) and seed, and saved with each kind of values: exact, rounded to bfloat16, and quantized with
several tolerances, for which 5,000 training images are kept apart; and once for each of `--grids`,
with `FreezeOptimizer(grid=)`. Test errors are those of the loaded files. `--output_dir` keeps each
network that is trained, as a file, and what has been measured, in frontier.jsonl, one line a file:
neither is done again. Prints the means over the seeds, and draws them beside published results of
other methods and the paper's table 2.
"""

import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from absl import app, flags, logging

import keras_freeze as kf
from keras_freeze._utils.files import replacing
from keras_freeze.paper.titles import title_of

FLAGS = flags.FLAGS
flags.DEFINE_list("models", ["lenet_300_100", "lenet_5_caffe"], "The networks.")
flags.DEFINE_list("rates", ["0.9", "0.95", "0.99", "0.995", "0.999"], "Freezing rates.")
flags.DEFINE_list("masks", ["snip", "drawn"], "Kinds of masks.")
flags.DEFINE_list("tolerances", ["0.01", "0.03", "0.1"], "Tolerances of `quantize`.")
flags.DEFINE_list("grids", ["0.1"], "Steps of grids on which networks are trained.")
flags.DEFINE_bool("exact", True, "Whether to train without a grid, too.")
flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of weights, order of the data and draws.")
flags.DEFINE_integer("epochs", 30, "Epochs of each network.", lower_bound=1)
flags.DEFINE_float("learning_rate", 0.05, "At the start; it falls to 0 as a cosine.", 0)
flags.DEFINE_string("data_dir", None, "TFDS's folder with mnist.")
flags.DEFINE_string("output_dir", "runs/frontier", "The folder to write to.")

BATCH_SIZE, NUM_VALIDATION = 100, 5_000

# Bytes and test error in percent of the networks on MNIST; none of the others counts the
# architecture, and the paper's do not count the mask.
PUBLISHED = {
    "lenet_300_100": {
        "Deep Compression": (27_000, 1.58),
        "entropy-penalized": (8_560, 1.9),
    },
    "lenet_5_caffe": {
        "Deep Compression": (44_000, 0.74),
        "soft weight sharing": (10_600, 0.97),
        "Weightless": (4_520, 1.0),
        "entropy-penalized": (2_840, 1.0),
        "Bayesian compression": (2_300, 1.0),
        "MIRACLE": (1_520, 0.96),
        "FreezeNet's paper, q = 0.99": (19_558, 1.06),
        "FreezeNet's paper, q = 0.995": (10_957, 1.45),
        "FreezeNet's paper, q = 0.999": (3_994, 4.39),
    },
}


@dataclasses.dataclass(frozen=True)
class Run:
    """What one network is trained with."""

    model: str
    mask: str
    rate: float
    seed: int
    epochs: int
    learning_rate: float
    grid: float  # 0 without one

    @property
    def kinds_of_values(self):
        if self.grid:
            return [f"grid {self.grid:g}"]
        return ["float32", "bfloat16", *(f"tolerance {t}" for t in FLAGS.tolerances)]


def main(_):
    logging.set_verbosity(logging.ERROR)  # TFDS tells of every file that it opens
    folder = Path(FLAGS.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    runs = planned_runs()
    done = read(folder)
    data = None
    for number, run in enumerate(runs, start=1):
        found = [
            row for row in done if all(row[k] == v for k, v in dataclasses.asdict(run).items())
        ]
        if {row["values"] for row in found} >= set(run.kinds_of_values):
            continue
        data = data or load_data()
        start = time.perf_counter()
        rows = measured(run, data, folder)
        with open(folder / "frontier.jsonl", "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        seconds = time.perf_counter() - start
        print(f"{number}/{len(runs)} {run}: {seconds:.0f} s", file=sys.stderr, flush=True)
    rows = means(read(folder), {dataclasses.astuple(run) for run in runs})
    print_table(rows)
    with replacing(folder / "frontier.png") as path:
        draw(rows).savefig(path, dpi=150)
    print(f"Written to {folder}: frontier.jsonl, frontier.png", file=sys.stderr)


def planned_runs():
    grids = [*([0.0] if FLAGS.exact else []), *map(float, FLAGS.grids)]
    choices = itertools.product(
        FLAGS.models, FLAGS.masks, map(float, FLAGS.rates), grids, map(int, FLAGS.seeds)
    )
    return [
        Run(model, mask, rate, seed, FLAGS.epochs, FLAGS.learning_rate, grid)
        for model, mask, rate, grid, seed in choices
    ]


def read(folder):
    path = folder / "frontier.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def load_data():
    """Images with mean 0 and deviation 1, and labels: for training, validation and test."""
    import tensorflow_datasets as tfds

    whole = {
        split: tfds.load("mnist", split=split, batch_size=-1, data_dir=FLAGS.data_dir)
        for split in ("train", "test")
    }
    x = {split: np.asarray(part["image"], "float32") for split, part in whole.items()}
    y = {split: np.asarray(part["label"], "int32") for split, part in whole.items()}
    mean, deviation = x["train"].mean(), x["train"].std()
    x = {split: (images - mean) / deviation for split, images in x.items()}
    end = len(x["train"]) - NUM_VALIDATION
    return {
        "train": (x["train"][:end], y["train"][:end]),
        "validation": (x["train"][end:], y["train"][end:]),
        "test": (x["test"], y["test"]),
    }


def measured(run, data, folder):
    """Train a network, save it with each kind of values, and return what each file is like."""
    settings = "-".join(map(str, dataclasses.astuple(run)))
    trained_file = folder / f"{settings}.freeze"
    if not trained_file.exists():
        kf.save(trained(run, data["train"]), trained_file)
    rows = []
    for kind in run.kinds_of_values:
        path = trained_file.with_suffix(f".measured-{os.getpid()}")
        loaded = kf.load(trained_file)
        kind_of_save = "bfloat16" if kind == "bfloat16" else "float32"
        if kind.startswith("tolerance"):
            kf.quantize(loaded, *data["validation"], tolerance=float(kind.split()[1]))
        kf.save(loaded, path, values=kind_of_save, include_compile=False)
        loaded = kf.load(path)
        loaded.compile(loss=loss(), metrics=["accuracy"])
        _, accuracy = loaded.evaluate(*data["test"], batch_size=1_000, verbose=0)
        parts = dict(kf.storage.inspect(path).num_bytes)
        row = {"values": kind, "error": 100 * (1 - accuracy), "bytes": sum(parts.values())}
        rows.append({**dataclasses.asdict(run), **row, "parts": parts})
        path.unlink()
    return rows


def trained(run, data):
    x, y = data
    keras.utils.set_random_seed(run.seed)
    model = kf.models.MODELS[run.model](seed=run.seed)
    steps = run.epochs * (len(x) // BATCH_SIZE)
    rate = keras.optimizers.schedules.CosineDecay(run.learning_rate, steps)
    inner = keras.optimizers.SGD(rate, momentum=0.9)
    optimizer = kf.FreezeOptimizer(inner, run.rate, l2=5e-4, seed=run.seed, grid=run.grid or None)
    jit_compile = "auto" if keras.backend.backend() == "jax" else False  # XLA's convolutions
    model.compile(optimizer, loss(), metrics=["accuracy"], jit_compile=jit_compile)
    first = BATCH_SIZE * 10
    kf.freeze(model, x[:first], y[:first], drawn=run.mask == "drawn")
    model.fit(x, y, batch_size=BATCH_SIZE, epochs=run.epochs, verbose=0)
    return model


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def means(rows, chosen):
    """One row for each network, mask, rate and kind of values: means over the seeds."""
    fields = [field.name for field in dataclasses.fields(Run)]
    groups = {}
    for row in rows:
        if tuple(row[field] for field in fields) in chosen:
            key = row["model"], row["mask"], row["rate"], row["values"]
            groups.setdefault(key, []).append(row)
    found = []
    for (model, mask, rate, values), group in groups.items():
        size, error = (statistics.mean(row[name] for row in group) for name in ("bytes", "error"))
        spread = statistics.stdev([row["error"] for row in group]) if len(group) > 1 else 0.0
        parts = {k: statistics.mean(row["parts"][k] for row in group) for k in group[0]["parts"]}
        found.append(
            {
                "model": model,
                "mask": mask,
                "rate": rate,
                "values": values,
                "bytes": size,
                "error": error,
                "spread": spread,
                "parts": parts,
            }
        )
    return sorted(found, key=lambda row: (row["model"], row["mask"], row["rate"], -row["bytes"]))


def print_table(rows):
    print("| network | mask | q | values | bytes | header | mask, bytes | values, bytes | error |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        parts = row["parts"]
        cells = [title_of(row["model"]), row["mask"], f"{row['rate']:g}", row["values"]]
        stored = parts["exponents"] + parts["mantissas"]
        cells += [f"{n:,.0f}" for n in (row["bytes"], parts["header"], parts["mask"], stored)]
        cells.append(f"{row['error']:.2f} ± {row['spread']:.2f} %")
        print(f"| {' | '.join(cells)} |")


COLORS = ("#E69F00", "#777777", "#D55E00", "#CC79A7", "#56B4E9", "#0072B2", "#009E73", "#000000")


def draw(rows):
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["model"] for row in rows))
    figure = Figure(figsize=(6.2 * len(names), 4.6), layout="constrained")
    kinds = sorted({row["values"] for row in rows}, key=lambda kind: (kind.split()[0], kind))
    colors = dict(zip(kinds, itertools.cycle(COLORS), strict=False))
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(names))), names, strict=True):
        of_model = [row for row in rows if row["model"] == name]
        curves = dict.fromkeys((row["mask"], row["values"]) for row in of_model)
        for mask, values in curves:
            points = [r for r in of_model if (r["mask"], r["values"]) == (mask, values)]
            axes.errorbar(
                [p["bytes"] for p in points],
                [p["error"] for p in points],
                [p["spread"] for p in points],
                color=colors[values],
                linestyle="-" if mask == "snip" else "--",
                marker="o" if mask == "snip" else "s",
                markersize=4,
                label=f"{values}, {'mask of SNIP' if mask == 'snip' else 'drawn mask'}",
            )
        for label, (size, error) in PUBLISHED.get(name, {}).items():
            axes.plot(size, error, "k+")
            axes.annotate(
                label,
                (size, error),
                fontsize=6,
                rotation=25,
                xytext=(3, 2),
                textcoords="offset points",
            )
        axes.set(xscale="log", yscale="log", title=title_of(name))
        axes.margins(0.12)  # for the labels
        axes.set(xlabel="bytes of the whole file", ylabel="test error, %")
        axes.xaxis.set_minor_formatter("")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=6)
    return figure


if __name__ == "__main__":
    app.run(main)
