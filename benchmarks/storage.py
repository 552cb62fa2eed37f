"""Measures a `.freeze` file: bytes by part and beside other ways, accuracy of rounded values, time.

    python benchmarks/storage.py --data_dir=<TFDS's folder>

Masks are SNIP's on the first batch of training data, as in the paper. The LeNets are trained on
MNIST for `--epochs` epochs; VGG16-D and ResNet34 (with 10 classes, for 32 x 32 images) see a few
dozen small batches of CIFAR-10: enough for values that have moved, too little for an accuracy.
Without `--data_dir`, the LeNets alone are measured, on the embedded 5,000 digits.

Prints Markdown tables; `--output_dir` gets storage.json and storage.png.
"""

import contextlib
import functools
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path
from unittest import mock

import keras
import numpy as np
from absl import app, flags, logging
from matplotlib.figure import Figure

import keras_freeze as kf
from keras_freeze._utils.files import replacing
from keras_freeze.paper import models
from keras_freeze.paper.sizes import paper_sizes
from keras_freeze.storage import inspect, loading, saving

FLAGS = flags.FLAGS
flags.DEFINE_list("models", list(models.MODELS), "The networks.")
flags.DEFINE_list("rates", ["0.9", "0.99", "0.995", "0.999"], "Freezing rates, above 0, below 1.")
flags.DEFINE_string("data_dir", None, "TFDS's folder with mnist and cifar10.")
flags.DEFINE_integer("epochs", 3, "Epochs of each LeNet.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "Of weights, order of the data and mask.")
flags.DEFINE_integer("repeats", 7, "Saves and loads that are timed.", lower_bound=1)
flags.DEFINE_string("output_dir", "runs/storage", "The folder to write to.")

LENETS = ("lenet_300_100", "lenet_5_caffe")
TIMED = ("vgg16_d", 0.99)
STEPS, BATCH_SIZE = 24, 16  # of the networks that are not LeNets

# What is timed inside `save` and `load`: the function that does it in each.
PIECES = {
    "draw the frozen weights from the seed": ("guess", "regenerate"),
    "code the mask": ("encode_masks", "decode_masks"),
    "code the values": ("encode_values", "decode_values"),
    "build the model": ("check_loads_again", "build_model"),
    "checksums of the variables": ("checksum", "checksum"),
    "the file and its SHA-256": ("write_container", "read_container"),
}

# Okabe and Ito's colors, as in keras_freeze.plots.
BLUE, ORANGE, GREEN, GRAY = "#0072B2", "#D55E00", "#009E73", "#777777"
SKY, YELLOW = "#56B4E9", "#F0C94A"


def main(_):
    logging.set_verbosity(logging.ERROR)  # TFDS tells of every file that it opens
    folder = Path(FLAGS.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    runs = planned_runs()
    results, timing = [], None
    for number, (name, rate) in enumerate(runs, start=1):
        start = time.perf_counter()
        model, dataset = trained(name, rate)
        with tempfile.TemporaryDirectory() as scratch:
            results.append(measured(model, dataset, rate, Path(scratch)))
            if (name, rate) == TIMED:
                timing = timed(model, Path(scratch))
        log(f"{number}/{len(runs)} {name}, q = {rate:g}: {time.perf_counter() - start:.0f} s")
    with replacing(folder / "storage.json") as path:
        path.write_text(json.dumps({"files": results, "seconds": timing}, indent=2) + "\n")
    with replacing(folder / "storage.png") as path:
        draw(results).savefig(path)
    print_tables(results, timing)
    log(f"Written to {folder}: storage.json, storage.png")


def planned_runs():
    names = FLAGS.models
    if FLAGS.data_dir is None:
        names = [name for name in names if name in LENETS]
        log("No --data_dir: the LeNets alone, on the embedded 5,000 digits.")
    rates = [float(rate) for rate in FLAGS.rates]
    if not names or not all(0 < rate < 1 for rate in rates):
        raise app.UsageError("It needs a network it has data for, and rates between 0 and 1.")
    return list(itertools.product(names, rates))


def trained(name, rate):
    """A trained network, and the name of its data set."""
    if name not in LENETS:
        return trained_a_little(name, rate, "cifar10"), "cifar10"
    dataset = "mnist_5k" if FLAGS.data_dir is None else "mnist"
    result = kf.training.train(
        dataset,
        name,
        "freezenet",
        rate,
        epochs=FLAGS.epochs,
        seed=FLAGS.seed,
        data_dir=FLAGS.data_dir,
        verbose=False,
    )
    return result.model, dataset


def trained_a_little(name, rate, dataset):
    facts = kf.datasets.info(dataset)
    load = functools.partial(kf.datasets.load, dataset, seed=FLAGS.seed, data_dir=FLAGS.data_dir)
    model = models.MODELS[name](facts.num_classes, facts.image_shape, seed=FLAGS.seed)
    model.compile(
        kf.FreezeOptimizer(keras.optimizers.SGD(0.01, momentum=0.9), rate, l2=5e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    kf.freeze(model, load())
    model.fit(load(batch_size=BATCH_SIZE).take(STEPS), shuffle=False, verbose=0)
    return model


def measured(model, dataset, rate, folder):
    """Everything about the files of one network, as numbers of bytes."""
    path = folder / "model.freeze"
    kf.save(model, path)
    mask = kf.get_mask(model)
    found = inspect(path)
    num_stored = sum(row.num_stored for row in found.rows)
    return {
        "model": model.name,
        "dataset": dataset,
        "freeze_rate": rate,
        "num_weights": mask.num_weights,
        "num_parameters": kf.report(model).num_parameters,
        "num_stored": num_stored,
        "parts": dict(found.num_bytes),
        "mask": {"coded": found.num_bytes["mask"], **other_masks(mask)},
        "files": {
            ".freeze": found.total_bytes,
            **other_files(model, mask, folder),
            "12 bytes a weight": 12 * mask.num_trained + 4 * (num_stored - mask.num_trained),
        },
        "values": rounded(model, dataset, folder) if dataset.startswith("mnist") else None,
    }


def other_masks(mask):
    """What the mask takes in other ways, the two entropy bounds among them."""
    sizes = [(np.count_nonzero(e.trained), e.trained.size) for e in mask.entries]
    packed = b"".join(np.packbits(e.trained).tobytes() for e in mask.entries)
    return {
        "one rate for all": entropy(mask.num_trained, mask.num_weights),
        "one rate a layer": sum(itertools.starmap(entropy, sizes)),
        "packed bits": len(packed),
        "zlib": len(zlib.compress(packed, 9)),
    }


def entropy(num_trained, size):
    """Bytes of a mask of independent entries, all trained with one known probability."""
    rates = (num_trained / size, 1 - num_trained / size)
    return -sum(size * rate * math.log2(rate) for rate in rates if rate) / 8


def other_files(model, mask, folder):
    """Bytes of files that Keras, zip and NumPy write, and of `.freeze` with the optimizer."""
    kf.save(model, folder / "optimizer.freeze", include_optimizer=True)
    model.save(folder / "optimizer.keras")
    keras.models.load_model(folder / "optimizer.keras", compile=False).save(folder / "model.keras")
    with zipfile.ZipFile(folder / "model.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / "model.keras")
    np.savez_compressed(folder / "all.npz", *[v.numpy() for v in model.variables])
    trained = {id(model.trainable_variables[e.position]): e.trained for e in mask.entries}
    bits = [np.packbits(array) for array in trained.values()]
    values = [v.numpy()[trained.get(id(v), ...)] for v in model.variables]
    np.savez_compressed(folder / "mask.npz", *bits, *values)
    files = {
        ".keras": "model.keras",
        ".keras, zipped": "model.zip",
        ".npz of all weights": "all.npz",
        ".npz of mask bits and values": "mask.npz",
        ".freeze with optimizer": "optimizer.freeze",
        ".keras with optimizer": "optimizer.keras",
    }
    return {way: (folder / file).stat().st_size for way, file in files.items()}


def rounded(model, dataset, folder):
    """Bytes and test accuracy of what is loaded, by the dtype of the values in the file."""
    test = kf.datasets.load(dataset, split="test", batch_size=500, data_dir=FLAGS.data_dir)
    described = {}
    for values in ("float32", "float16", "bfloat16"):
        path = folder / f"{values}.freeze"
        kf.save(model, path, values=values)
        tested = kf.load(path).evaluate(test, return_dict=True, verbose=0)
        described[values] = {"bytes": path.stat().st_size, "accuracy": tested["accuracy"]}
    return described


def timed(model, folder):
    """Median seconds of `save` and `load`, by piece, and of Keras's own; they take turns."""
    freeze_file, keras_file = folder / "timed.freeze", folder / "timed.keras"
    calls = {
        "save": (saving, 0, lambda: kf.save(model, freeze_file)),
        "load": (loading, 1, lambda: kf.load(freeze_file)),
        ".keras save": (None, 0, lambda: model.save(keras_file)),
        ".keras load": (None, 0, lambda: keras.models.load_model(keras_file)),
    }
    runs = {name: [] for name in calls}
    for run in range(FLAGS.repeats + 1):
        for name, (module, column, call) in calls.items():
            pieces = {} if module is None else {what: PIECES[what][column] for what in PIECES}
            with stopwatch(module, pieces) as seconds:
                start = time.perf_counter()
                call()
                total = time.perf_counter() - start
            if run:  # the first run finds cold caches
                rest = total - sum(seconds.values())
                runs[name].append({**seconds, "rest": rest, "total": total})
    medians = {
        name: {what: statistics.median(run[what] for run in those) for what in those[0]}
        for name, those in runs.items()
    }
    return {"dense_bytes": inspect(freeze_file).dense_bytes, **medians}


@contextlib.contextmanager
def stopwatch(module, pieces):
    """Adds up the seconds that a module's functions take where the module calls them."""
    seconds = dict.fromkeys(pieces, 0.0)

    def watched(what, function):
        def call(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[what] += time.perf_counter() - start
            return result

        return call

    with contextlib.ExitStack() as stack:
        for what, name in pieces.items():
            function = watched(what, getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, function))
        yield seconds


def print_tables(results, timing):
    print_files(results)
    print_parts(results)
    print_masks(results)
    print_values([result for result in results if result["values"]])
    print_paper([result for result in results if result["model"] == "lenet_5_caffe"])
    if timing is None:
        print(f"\nSave and load are timed with {TIMED[0]} at q = {TIMED[1]}, which was not run.")
    else:
        print_timing(timing)


def print_files(results):
    ways = [way for way in results[0]["files"] if not way.endswith("optimizer")]
    rows = [
        [*key(r), *(kib(r["files"][way]) for way in ways), factor(r, ".keras")] for r in results
    ]
    table(
        "Whole files, KiB, without the optimizer's state",
        ["network", "q", *ways, "`.keras` / `.freeze`"],
        rows,
    )
    ways = [".freeze with optimizer", ".keras with optimizer"]
    rows = [[*key(r), *(kib(r["files"][way]) for way in ways)] for r in results]
    table("Whole files, KiB, with the state of SGD with momentum", ["network", "q", *ways], rows)


def print_parts(results):
    parts = list(results[0]["parts"])
    rows = []
    for r in results:
        value_bytes = r["parts"]["exponents"] + r["parts"]["mantissas"]
        numbers = [f"{r['parts'][part]:,}" for part in parts]
        bits = 8 * value_bytes / r["num_stored"]
        rows.append([*key(r), *numbers, f"{r['files']['.freeze']:,}", f"{bits:.1f}"])
    table("A `.freeze` file, bytes", ["network", "q", *parts, "file", "bits a value"], rows)


def print_masks(results):
    others = list(results[0]["mask"])[1:]
    rows = []
    for r in results:
        ratios = [f"{r['mask']['coded'] / r['mask'][other]:.3f}" for other in others]
        rows.append([*key(r), kib(r["mask"]["coded"]), *ratios])
    header = ["network", "q", "mask, KiB", *(f"/ {other}" for other in others)]
    table("The mask beside entropy bounds and simpler codes", header, rows)


def print_values(results):
    if not results:
        return
    rows = []
    for r in results:
        cells = [
            cell
            for value in r["values"].values()
            for cell in (kib(value["bytes"]), f"{100 * value['accuracy']:.2f}")
        ]
        rows.append([*key(r), *cells])
    names = ["float32", "float16", "bfloat16"]
    header = [cell for name in names for cell in (f"{name}, KiB", "accuracy, %")]
    table("Values rounded, test accuracy of the loaded network", ["network", "q", *header], rows)


def print_paper(results):
    if not results:
        return
    dense = 4 * results[0]["num_parameters"]
    rows = []
    for r in results:
        weights = r["num_weights"]
        [paper] = paper_sizes(weights, r["num_parameters"] - weights, [r["freeze_rate"]])
        values = r["parts"]["exponents"] + r["parts"]["mantissas"]
        sizes = (values, values + r["parts"]["mask"], r["files"][".freeze"])
        rows.append(
            [
                f"{r['freeze_rate']:g}",
                f"{paper.paper_size:,.1f} (x{paper.paper_compression_factor:.1f})",
                *(f"{kib(size)} (x{dense / size:.1f})" for size in sizes),
            ]
        )
    header = ["q", "the paper: values", "our values", "and mask", "and architecture: the file"]
    table(
        f"The paper's table 2, LeNet-5-Caffe: KiB, and the factor to the dense {kib(dense)}",
        header,
        rows,
    )


def print_timing(timing):
    ways = ("save", "load")
    rows = [
        [what, *(f"{1e3 * timing[way][what]:.0f}" for way in ways)]
        for what in [*PIECES, "rest", "total"]
    ]
    ours = [timing[way]["total"] for way in ways]
    keras_own = [timing[f".keras {way}"]["total"] for way in ways]
    rows.append(
        ["MB/s of dense float32", *(f"{timing['dense_bytes'] / t / 1e6:.0f}" for t in ours)]
    )
    rows.append(["Keras's own `.keras`", *(f"{1e3 * t:.0f}" for t in keras_own)])
    ratios = [t / own for t, own in zip(ours, keras_own, strict=True)]
    rows.append(["total / `.keras`", *(f"{ratio:.2f}" for ratio in ratios)])
    name, rate = TIMED
    table(f"{name} at q = {rate}, ms, medians of {FLAGS.repeats}", ["", "save", "load"], rows)


def key(result):
    return [result["model"], f"{result['freeze_rate']:g}"]


def kib(size):
    return f"{size / 1024:,.1f}"


def factor(result, way):
    return f"{result['files'][way] / result['files']['.freeze']:.1f}"


def table(title, header, rows):
    print(f"\n**{title}**\n")
    for cells in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(cells)} |")


def log(line):
    print(line, file=sys.stderr, flush=True)


def draw(results):
    """Sizes of whole files above, what is in a `.freeze` file below; a column for each network."""
    names = list(dict.fromkeys(result["model"] for result in results))
    figure = Figure(figsize=(9.0, 5.6), dpi=130, layout="constrained")
    rows = figure.subplots(
        2, len(names), sharex="col", sharey="row", squeeze=False, height_ratios=(3, 2)
    )
    for sizes, shares, name in zip(*rows, names, strict=True):
        of_network = [result for result in results if result["model"] == name]
        draw_sizes(sizes, of_network)
        draw_shares(shares, of_network)
        rates = [f"{result['freeze_rate']:g}" for result in of_network]
        shares.set_xticks(range(len(rates)), rates)
        shares.set_xlabel("freezing rate q", fontsize=9)
        shares.set_xlim(-0.6, len(rates) - 0.4)
        for axes in (sizes, shares):
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=9)
    rows[0][0].set_ylabel("size (KiB)")
    rows[1][0].set_ylabel("share of the .freeze file")
    for (first, *_), side in zip(rows, ("upper", "lower"), strict=True):
        handles, labels = first.get_legend_handles_labels()
        figure.legend(
            handles, labels, loc=f"outside {side} center", ncols=5, frameon=False, handlelength=1.5
        )
    return figure


def draw_sizes(axes, results):
    ways = {
        ".keras": (".keras", GRAY, "s"),
        "12 bytes a weight": ("12 bytes a weight: value, two indices", ORANGE, "^"),
        ".freeze": (".freeze (x: times smaller than .keras)", BLUE, "o"),
    }
    for way, (label, color, marker) in ways.items():
        sizes = [result["files"][way] / 1024 for result in results]
        axes.plot(range(len(sizes)), sizes, marker=marker, color=color, label=label, markersize=5)
    keras_size = results[0]["files"][".keras"] / 1024
    write_near(axes, f"{keras_size:,.0f}", (0, keras_size), 5, GRAY)
    for position, size in enumerate(sizes):
        text = f"{size:.1f}" if size < 10 else f"{size:,.0f}"
        write_near(axes, f"{text}\nx{keras_size / size:.0f}", (position, size), -25, BLUE)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.margins(y=0.22)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(results[0]["model"], fontsize=10)


def write_near(axes, text, point, offset, color):
    axes.annotate(
        text,
        point,
        (0, offset),
        textcoords="offset points",
        horizontalalignment="center",
        color=color,
        fontsize=8,
    )


def draw_shares(axes, results):
    parts = {
        "mantissas": ("mantissas", BLUE),
        "exponents": ("exponents", SKY),
        "mask": ("mask", GREEN),
        "header": ("header: architecture, seeds", YELLOW),
        "checksums": ("checksums", GRAY),
    }
    bottom = np.zeros(len(results))
    for part, (label, color) in parts.items():
        shares = [100 * r["parts"][part] / r["files"][".freeze"] for r in results]
        axes.bar(range(len(shares)), shares, 0.75, bottom, color=color, label=label)
        bottom += shares
    axes.yaxis.set_major_formatter("{x:g} %")


if __name__ == "__main__":
    app.run(main)
