"""Measures memory: the optimizer's state, the peak of training a wide network, masks at scale.

    python benchmarks/memory.py --data_dir=<TFDS's folder, with cifar10>
    python benchmarks/memory.py --parts=training --width=2048

Peaks are the kernel's high-water mark of fresh processes (VmHWM; where there is none, `getrusage`),
less what the process held before the network was built. TensorFlow keeps freed memory for later, so
that the `freeze` pass, which computes all gradients once, and training are told apart by processes
that are given the mask.

Without `--data_dir` VGG16-D is left out. Prints Markdown tables; `--output_dir` gets memory.json,
part by part as they are measured, and memory.png.
"""

import contextlib
import functools
import gc
import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np
from _common import BLUE, compile_model, log, masked, mlp, num_bytes, table
from absl import app, flags, logging
from matplotlib.figure import Figure

import keras_freeze as kf
from keras_freeze._utils.files import replacing
from keras_freeze.optimizer.strategy import COORDINATE_WISE
from keras_freeze.paper import models

PARTS = ("state", "training", "vgg16_d", "scores")

FLAGS = flags.FLAGS
flags.DEFINE_list("parts", list(PARTS), "What is measured.")
flags.DEFINE_string("data_dir", None, "TFDS's folder with cifar10.")
flags.DEFINE_integer("width", 8192, "Of the two hidden layers that are trained.", 1)
flags.DEFINE_float("rate", 0.99, "The freezing rate of all parts but the state.", 0, 1)
flags.DEFINE_integer("batch_size", 128, "Images in a step.", 1)
flags.DEFINE_integer("steps", 4, "Steps of training.", 1)
flags.DEFINE_integer("runs", 3, "Processes for each measurement of a peak.", 1)
flags.DEFINE_bool("jit_compile", False, "Whether XLA compiles the steps; Keras's default on a CPU.")
flags.DEFINE_string("output_dir", "runs/memory", "The folder to write to.")
flags.DEFINE_string("mask_file", None, "Of a process: the mask; set by the script itself.")
flags.DEFINE_string("process", None, "What this process measures: set by the script itself.")

VARIANTS = {
    "plain": "plain Adam",
    "masked": "masked gradients",
    "freeze_ordinary": "FreezeOptimizer(Adam), ordinary gradients",
    "freeze": "FreezeOptimizer(Adam)",
    "freeze_and_train": "FreezeOptimizer(Adam), freeze pass too",
}
STATE_RATES = (0.9, 0.99)
ADAM = {"learning_rate": 1e-4}

# The kernels of VGG-16 for ImageNet: 138 million weights.
VGG_CHANNELS = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
VGG_SHAPES = [
    *((3, 3, *channels) for channels in itertools.pairwise(VGG_CHANNELS)),
    (25088, 4096),
    (4096, 4096),
    (4096, 1000),
]


def main(_):
    logging.set_verbosity(logging.ERROR)  # TFDS tells of every file that it opens
    if FLAGS.process is not None:
        print(json.dumps(PROCESSES[FLAGS.process]()))
        return
    unknown = {*FLAGS.parts} - {*PARTS}
    if unknown:
        raise app.UsageError(f"Parts are {', '.join(PARTS)}. Received: {', '.join(unknown)}")
    folder = Path(FLAGS.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "memory.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for part in FLAGS.parts:
        result = MEASURES[part]()
        if result is None:
            continue
        PRINTERS[part](result)
        results[part] = {"settings": settings(), "result": result}
        with replacing(path) as new:
            new.write_text(json.dumps(results, indent=1) + "\n")
    if "training" in FLAGS.parts:
        with replacing(folder / "memory.png") as path:
            draw(results["training"]["result"]).savefig(path)
    log(f"Written to {folder}.")


def settings():
    names = ("width", "rate", "batch_size", "steps", "jit_compile", "runs")
    return {**{name: FLAGS[name].value for name in names}, **kf.training.versions()}


def measure_state():
    """Bytes of optimizer state for each weight-wise Keras optimizer, on LeNet-300-100."""
    x, y = digits(100)
    results = []
    for optimizer_class in COORDINATE_WISE:
        plain = models.lenet_300_100()
        optimizer = new_optimizer(optimizer_class)
        optimizer.build(plain.trainable_variables)
        for rate in STATE_RATES:
            model = compile_model(
                models.lenet_300_100(),
                kf.FreezeOptimizer(new_optimizer(optimizer_class), rate),
            )
            kf.freeze(model, x, y)
            results.append(
                {
                    "optimizer": optimizer_class.__name__,
                    "rate": rate,
                    "dense_bytes": moment_bytes(optimizer),
                    "bytes": moment_bytes(model.optimizer.inner_optimizer),
                    "bookkeeping_bytes": bookkeeping_bytes(model.optimizer.compact_update),
                    "expected": 1 - kf.report(model).real_freeze_rate,
                }
            )
        keras.backend.clear_session()
    log("The optimizers' state: done")
    return results


def bookkeeping_bytes(update):
    """Indices of the trained weights, vectors of their values, and places in smaller products."""
    vectors = [*update.indices.values(), *update._values.values()]
    inside = [block._inside.numpy() for block in update.blocks.values()]
    return num_bytes(vectors) + sum(places.nbytes for places in inside)


def new_optimizer(optimizer_class):
    momentum = {"momentum": 0.9} if optimizer_class is keras.optimizers.SGD else {}
    return optimizer_class(**momentum)


def moment_bytes(optimizer):
    """What it holds for each weight: all its variables but scalars."""
    return num_bytes([v for v in optimizer.variables if v.shape != ()])


def measure_training():
    with tempfile.TemporaryDirectory() as folder:
        mask_file = str(Path(folder) / "mask.freeze")
        in_process("mask", mask_file)
        return {variant: in_processes(variant, mask_file) for variant in VARIANTS}


def measure_vgg():
    if FLAGS.data_dir is None:
        log("No --data_dir, so no CIFAR-10: VGG16-D is left out.")
        return None
    return {**in_processes("vgg16_d_step"), **in_processes("vgg16_d_freeze")}


def measure_scores():
    return in_processes("scores")


def in_processes(what, mask_file=None):
    """Medians, number by number, of what fresh processes measure."""
    start = time.perf_counter()
    runs = [in_process(what, mask_file) for _ in range(FLAGS.runs)]
    log(f"{what}: {time.perf_counter() - start:.0f} s")
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def in_process(what, mask_file):
    flagged = [f"--{name}={FLAGS[name].value}" for name in ("width", "rate", "batch_size", "steps")]
    flagged += [f"--jit_compile={FLAGS.jit_compile}", f"--process={what}"]
    for name, value in (("data_dir", FLAGS.data_dir), ("mask_file", mask_file)):
        if value is not None:
            flagged.append(f"--{name}={value}")
    finished = subprocess.run(
        [sys.executable, __file__, *flagged], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(finished.stdout.splitlines()[-1])


def write_mask():
    """Writes SNIP's mask of the wide network, for the processes that are given it."""
    model = compile_model(mlp(FLAGS.width), kf.FreezeOptimizer("sgd", FLAGS.rate))
    kf.freeze(model, *digits(FLAGS.batch_size)).save(FLAGS.mask_file)


def trained(variant):
    """The peak of building and training a wide network, and of freezing it where that is done."""
    x, y = digits(FLAGS.steps * FLAGS.batch_size)
    warm_up(x, y)
    mask = None if variant == "plain" else kf.FreezeMask.load(FLAGS.mask_file)
    start = Memory()
    model = mlp(FLAGS.width)
    compile_model(model, adam_of(variant, mask), jit_compile=FLAGS.jit_compile)
    peaks = {}
    if variant == "freeze_and_train":
        kf.freeze(model, x[: FLAGS.batch_size], y[: FLAGS.batch_size])
        peaks["freeze_peak"] = start.peak()
    elif variant.startswith("freeze"):
        kf.freeze(model, mask=mask)
    if variant == "freeze_ordinary":
        kf.restore_gradients(model)
    fit(model, x, y)
    peaks["peak"] = start.peak()
    return {"before": start.held, "weight_bytes": num_bytes(model.trainable_variables), **peaks}


def adam_of(variant, mask):
    if variant == "masked":
        return masked(keras.optimizers.Adam, mask, **ADAM)
    adam = keras.optimizers.Adam(**ADAM)
    return adam if variant == "plain" else kf.FreezeOptimizer(adam, FLAGS.rate)


def fit(model, x, y):
    model.fit(x, y, batch_size=FLAGS.batch_size, shuffle=False, verbose=0)


def step_of_vgg():
    """Seconds and peak of a training step of plain VGG16-D."""
    x, y = photographs()
    warm_up(*digits(FLAGS.batch_size))
    start = Memory()
    model = compile_model(models.vgg16_d(), new_sgd())
    fit(model, x, y)  # traces
    seconds = [seconds_of(lambda: fit(model, x, y)) for _ in range(3)]
    return {
        "step_seconds": min(seconds),
        "step_peak": start.peak(),
        "weight_bytes": num_bytes(model.trainable_variables),
    }


def freeze_vgg():
    """Seconds and peak of the saliency and mask of VGG16-D."""
    x, y = photographs()
    warm_up(*digits(FLAGS.batch_size))
    start = Memory()
    model = compile_model(models.vgg16_d(), kf.FreezeOptimizer(new_sgd(), FLAGS.rate))
    first = seconds_of(lambda: kf.freeze(model, x, y))
    again = [seconds_of(lambda: kf.freeze(model, x, y, overwrite=True)) for _ in range(2)]
    return {"first_seconds": first, "again_seconds": min(again), "freeze_peak": start.peak()}


def photographs():
    x, y = kf.datasets.load_arrays("cifar10", data_dir=FLAGS.data_dir)
    return x[: FLAGS.batch_size].copy(), y[: FLAGS.batch_size].copy()


def new_sgd():
    return keras.optimizers.SGD(0.01, momentum=0.9)


def mask_of_scores():
    """Seconds and peak of the mask of 138 million weights from their scores."""
    rng = np.random.default_rng(0)
    scores = [np.abs(rng.standard_normal(shape, np.float32)) for shape in VGG_SHAPES]
    start = Memory()
    seconds = seconds_of(lambda: kf.FreezeMask.from_scores(scores, FLAGS.rate))
    return {
        "num_weights": sum(array.size for array in scores),
        "score_bytes": sum(array.nbytes for array in scores),
        "seconds": seconds,
        "peak": start.peak(),
    }


def digits(count):
    """Digits from the 5,000 that are embedded, from the first again where they are too few."""
    x, y = kf.datasets.load_arrays("mnist_5k")
    chosen = np.arange(count) % len(x)
    return x[chosen], y[chosen]


def warm_up(x, y):
    """What TensorFlow loads for the first training in a process is nobody's."""
    model = compile_model(mlp(8), keras.optimizers.Adam(), jit_compile=FLAGS.jit_compile)
    fit(model, x, y)
    keras.backend.clear_session()


def seconds_of(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


class Memory:
    """What the process holds now; `peak()` says how much more it has held since."""

    def __init__(self):
        gc.collect()
        reset_peak()
        self.held = held_now()

    def peak(self):
        return max(0, peak_so_far() - self.held)


def held_now():
    return status("VmRSS") or peak_so_far()


def peak_so_far():
    peak = status("VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def status(name):
    """Bytes that Linux tells of this process; None elsewhere."""
    path = Path("/proc/self/status")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return None


def reset_peak():
    """Sets the high-water mark back to what is held now, where that is possible."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


PROCESSES = {
    "mask": write_mask,
    "vgg16_d_step": step_of_vgg,
    "vgg16_d_freeze": freeze_vgg,
    "scores": mask_of_scores,
    **{variant: functools.partial(trained, variant) for variant in VARIANTS},
}
MEASURES = {
    "state": measure_state,
    "training": measure_training,
    "vgg16_d": measure_vgg,
    "scores": measure_scores,
}


def print_state(results):
    rows = []
    for r in results:
        share = r["bytes"] / r["dense_bytes"]
        rows.append(
            [
                r["optimizer"],
                f"{r['rate']:g}",
                f"{r['dense_bytes']:,}",
                f"{r['bytes']:,}",
                f"{share:.4f}",
                f"{r['expected']:.4f}",
                f"{100 * (share / r['expected'] - 1):+.2f} %",
                f"{r['bookkeeping_bytes']:,}",
            ]
        )
    header = [
        "optimizer",
        "q",
        "plain, bytes",
        "frozen, bytes",
        "ratio",
        "1 - q_beta",
        "deviation",
        "besides: book-keeping, bytes",
    ]
    table("State of the optimizer for each weight, LeNet-300-100", header, rows)


def print_training(results):
    plain = results["plain"]
    rows = [
        [
            VARIANTS[variant],
            mib(r["before"]),
            mib(r["peak"]),
            f"{r['peak'] / plain['peak']:.2f}",
            mib(r["freeze_peak"]) if "freeze_peak" in r else "-",
        ]
        for variant, r in results.items()
    ]
    compiler = "with XLA" if FLAGS.jit_compile else "without XLA"
    table(
        f"Peak memory above what is held before, MiB: 784-{FLAGS.width}-{FLAGS.width}-10, "
        f"{mib(plain['weight_bytes'])} MiB of weights, q = {FLAGS.rate:g}, batches of "
        f"{FLAGS.batch_size}, {compiler}, medians of {FLAGS.runs}",
        ["", "before", "peak", "/ plain", "in the freeze pass"],
        rows,
    )


def print_vgg(r):
    step = r["step_seconds"]
    rows = [
        ["a plain training step", f"{step:.2f}", "1.00", mib(r["step_peak"])],
        ["saliency and mask", *timed_as(r["first_seconds"], step), mib(r["freeze_peak"])],
        ["the same, called again", *timed_as(r["again_seconds"], step), "-"],
    ]
    header = ["", "s", "/ step", "peak, MiB"]
    table(
        f"VGG16-D ({mib(r['weight_bytes'])} MiB of weights), batch of {FLAGS.batch_size}",
        header,
        rows,
    )


def timed_as(seconds, step):
    return f"{seconds:.2f}", f"{seconds / step:.2f}"


def print_scores(r):
    cells = [
        f"{r['num_weights']:,}",
        f"{r['seconds']:.2f}",
        mib(r["score_bytes"]),
        mib(r["peak"]),
        f"{r['peak'] / r['score_bytes']:.2f}",
    ]
    header = ["weights", "s", "scores, MiB", "peak above them, MiB", "/ scores"]
    table(f"`FreezeMask.from_scores` at q = {FLAGS.rate:g}", header, [cells])


PRINTERS = {
    "state": print_state,
    "training": print_training,
    "vgg16_d": print_vgg,
    "scores": print_scores,
}


def mib(size):
    return f"{size / 2**20:,.0f}"


def draw(results):
    """A bar for the peak of each variant."""
    figure = Figure(figsize=(7.0, 2.9), dpi=130, layout="constrained")
    axes = figure.subplots()
    peaks = [r["peak"] / 2**20 for r in results.values()]
    bars = axes.barh(range(len(peaks)), peaks, 0.6, color=BLUE)
    axes.bar_label(bars, [f"{peak:,.0f}" for peak in peaks], padding=4, fontsize=9)
    axes.set_yticks(range(len(peaks)), [VARIANTS[name] for name in results])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("peak memory of training (MiB)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)
    return figure


if __name__ == "__main__":
    app.run(main)
