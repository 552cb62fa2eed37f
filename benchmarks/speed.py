"""Times a training step beside plain Keras, gradients masked by hand, PyTorch, and the floor.

    python benchmarks/speed.py --networks=lenet_300_100
    python benchmarks/speed.py --data_dir=<TFDS's folder, with mnist and cifar10>
    python benchmarks/speed.py --growth=width
    python benchmarks/speed.py --growth=batch
    python benchmarks/speed.py --draw

Each network and rate has one mask, SNIP's on the first batch of training data, that all variants
share; so do they the initial weights and the batches, which lie in memory without augmentation.
The variants take turns, in a new order each round, so that the machine's drift reaches all alike.
A run is one call of a function that does all its steps (`steps_per_execution`), so that Python
costs nothing; "train()" is timed over one epoch of what `keras_freeze.training.train` feeds. The
floor is the forward pass and the input gradient: kernels have no gradient, all else is trained.

PyTorch runs the same networks in a process of its own (pip install -e '.[benchmark]').

`--output_dir` gets speed.json, to which every network and rate is added as soon as it is measured,
in place of what was measured of it before; speed.png and growth.png; Markdown tables are printed.
"""

import functools
import gc
import importlib.util
import itertools
import json
import math
import os
import pickle
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf
from _bare_loop import BareLoop
from _common import BLUE, GRAY, GREEN, ORANGE, compile_model, log, masked, mlp, table
from absl import app, flags, logging
from matplotlib.figure import Figure

import keras_freeze as kf
from keras_freeze._utils.files import replacing
from keras_freeze.paper import models


class Setting(NamedTuple):
    """Where a network's batches come from, and how it is timed unless flags say otherwise."""

    dataset: str
    batch_size: int
    steps: int
    runs: int
    has_convolutions: bool


SETTINGS = {
    "lenet_300_100": Setting("mnist", 100, 100, 15, False),
    "lenet_5_caffe": Setting("mnist", 100, 100, 15, True),
    "mlp_4096": Setting("mnist", 128, 5, 12, False),
    "vgg16_d": Setting("cifar10", 128, 1, 5, True),
    "resnet34": Setting("cifar10", 16, 1, 3, True),
}
WIDTHS = (512, 1024, 2048, 4096, 8192)
BATCH_SIZES = (16, 32, 64, 128, 256, 512, 1024)

VARIANTS = {
    "plain_sgd": "plain SGD",
    "plain_adam": "plain Adam",
    "masked_sgd": "masked SGD",
    "freeze_sgd_ordinary": "FreezeOptimizer(SGD), ordinary gradients",
    "freeze_sgd": "FreezeOptimizer(SGD)",
    "freeze_adam_ordinary": "FreezeOptimizer(Adam), ordinary gradients",
    "freeze_adam": "FreezeOptimizer(Adam)",
    "floor": "floor: no kernel gradient",
    "bare": "the same as FreezeOptimizer(SGD), bare tf.function",
    "train": "train()",
    "torch_sgd": "PyTorch SGD",
    "torch_hooks": "PyTorch SGD, gradient hooks",
}
GROWTH_VARIANTS = ("plain_sgd", "masked_sgd", "freeze_sgd", "floor")
BARE = ("lenet_300_100",)  # a step so small that what stands around it would show
TRAINABLE = ("lenet_300_100", "lenet_5_caffe")  # small enough for an epoch of train() in a run

# The most that a step of FreezeOptimizer(SGD) may take, relative to plain SGD.
TARGETS = {
    ("lenet_300_100", 0.99): 0.90,
    ("lenet_5_caffe", 0.99): 1.00,
    ("mlp_4096", 0.99): 0.80,
    ("mlp_4096", 0.995): 0.70,
    ("mlp_4096", 0.999): 0.60,
    ("vgg16_d", 0.99): 0.95,
    ("vgg16_d", 0.995): 0.92,
    **{(network, 0.9): 1.03 for network in SETTINGS},
}

# Small rates: a NaN or a denormal number would change the times.
SGD = {"learning_rate": 0.01, "momentum": 0.9}
ADAM = {"learning_rate": 1e-4}
ROWS_IN_MEMORY = 20_000
WARM_UP_STEPS = 3  # Keras traces and compiles in the first, PyTorch chooses algorithms in them

FLAGS = flags.FLAGS
flags.DEFINE_list("networks", list(SETTINGS), "The networks.")
flags.DEFINE_list("rates", ["0.9", "0.99", "0.995", "0.999"], "Freezing rates, above 0, below 1.")
flags.DEFINE_list("variants", list(VARIANTS), "What is timed; plain_sgd always is.")
flags.DEFINE_string("data_dir", None, "TFDS's folder with mnist and cifar10.")
flags.DEFINE_integer("steps", None, "Steps in a run; each network has its default.", 1)
flags.DEFINE_integer("runs", None, "Runs of each variant; each network has its default.", 1)
flags.DEFINE_float("minutes", 4, "No round starts later than this in a network and rate.", 0)
flags.DEFINE_bool("torch", True, "Whether PyTorch is timed, too.")
flags.DEFINE_bool(
    "jit_compile",
    None,
    "Whether XLA compiles all variants of Keras. By default where there are no convolutions, which "
    "is what makes plain Keras fastest on a CPU.",
)
flags.DEFINE_enum(
    "growth", "none", ["width", "batch", "none"], "Instead: how cost grows, of wider networks, say."
)
flags.DEFINE_string("output_dir", "runs/speed", "The folder to write to.")
flags.DEFINE_bool("draw", False, "Only print and draw what speed.json has.")


class Case(NamedTuple):
    """One thing to measure: a network at a rate."""

    kind: str  # "network", "width" or "batch"
    network: str
    rate: float
    batch_size: int
    steps: int
    runs: int
    variants: tuple[str, ...]
    dataset: str
    jit_compile: bool

    @property
    def num_images(self):
        return self.steps * self.batch_size


def main(_):
    logging.set_verbosity(logging.ERROR)  # TFDS tells of every file that it opens
    folder = Path(FLAGS.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    cases = [] if FLAGS.draw else planned_cases()
    for number, case in enumerate(cases, start=1):
        start = time.perf_counter()
        block = measured(case)
        add(block, folder / "speed.json")
        print_block(block)
        log(f"{number}/{len(cases)} {title(block)}: {time.perf_counter() - start:.0f} s")
    blocks = read(folder / "speed.json")
    if not blocks:
        raise app.UsageError(f"There is nothing to draw in {folder}.")
    if FLAGS.draw:
        for block in blocks:
            print_block(block)
    print_summary([block for block in blocks if block["kind"] == "network"])
    print_growth([block for block in blocks if block["kind"] != "network"])
    written = ["speed.json", *draw(blocks, folder)]
    log(f"Written to {folder}: {', '.join(written)}")


def planned_cases():
    rates = [float(rate) for rate in FLAGS.rates]
    unknown = [*{*FLAGS.networks} - {*SETTINGS}, *{*FLAGS.variants} - {*VARIANTS}]
    if unknown or not all(0 < rate < 1 for rate in rates):
        raise app.UsageError(
            f"Networks are {', '.join(SETTINGS)}; variants {', '.join(VARIANTS)}; rates between 0 "
            f"and 1. Received: {', '.join([*unknown, *FLAGS.rates])}"
        )
    if FLAGS.growth == "width":
        return [
            growth_case("width", width, rate, 128) for width in WIDTHS for rate in (0.99, 0.999)
        ]
    if FLAGS.growth == "batch":
        return [growth_case("batch", 4096, 0.99, batch_size) for batch_size in BATCH_SIZES]
    return [
        network_case(network, rate)
        for network, rate in itertools.product(networks_with_data(), rates)
    ]


def networks_with_data():
    left_out = [
        name
        for name in FLAGS.networks
        if FLAGS.data_dir is None and SETTINGS[name].dataset != "mnist"
    ]
    if FLAGS.data_dir is None:
        log("No --data_dir: MNIST is the embedded 5,000 digits.")
    if left_out:
        log(f"No --data_dir, so no CIFAR-10: left out are {', '.join(left_out)}.")
    return [name for name in FLAGS.networks if name not in left_out]


def network_case(network, rate):
    setting = SETTINGS[network]
    return Case(
        "network",
        network,
        rate,
        setting.batch_size,
        FLAGS.steps or setting.steps,
        FLAGS.runs or setting.runs,
        chosen_variants(network),
        setting.dataset,
        not setting.has_convolutions if FLAGS.jit_compile is None else FLAGS.jit_compile,
    )


def growth_case(kind, width, rate, batch_size):
    jit_compile = True if FLAGS.jit_compile is None else FLAGS.jit_compile
    # About as much work in a run whatever the width, as far as whole steps allow.
    steps = FLAGS.steps or min(100, max(1, 5 * 4096**2 // width**2))
    return Case(
        kind,
        f"mlp_{width}",
        rate,
        batch_size,
        steps,
        FLAGS.runs or 9,
        GROWTH_VARIANTS,
        "mnist",
        jit_compile,
    )


def chosen_variants(network):
    variants = ["plain_sgd", *(v for v in VARIANTS if v in FLAGS.variants and v != "plain_sgd")]
    if network not in BARE:
        variants = [v for v in variants if v != "bare"]
    if network not in TRAINABLE:
        variants = [v for v in variants if v != "train"]
    if not has_torch():
        variants = [v for v in variants if not v.startswith("torch")]
    return tuple(variants)


@functools.cache
def has_torch():
    if not FLAGS.torch:
        return False
    is_installed = importlib.util.find_spec("torch") is not None
    if not is_installed:
        log("PyTorch is not installed and left out: pip install -e '.[benchmark]'.")
    return is_installed


def measured(case):
    """Everything about one network at one rate, as it goes to speed.json."""
    images, labels = batches(case)
    mask = kf.freeze(
        compile_model(build(case), freeze_optimizer("sgd", case.rate)),
        images[: case.batch_size],
        labels[: case.batch_size],
    )
    block = {
        **case._asdict(),
        "num_trained": mask.num_trained,
        "num_weights": mask.num_weights,
        "work_left": work_left(build(case), mask),
        "versions": {**kf.training.versions(), "cpus": os.cpu_count()},
    }
    worker = None
    torch_variants = [v for v in case.variants if v.startswith("torch")]
    if torch_variants:
        worker = TorchWorker(case, torch_variants, images, labels, mask)
        block["versions"]["torch"] = worker.version
    try:
        runners = {v: runner(v, case, images, labels, mask, worker) for v in case.variants}
        block["runs_of"] = timed(runners, case.steps, case.runs)
    finally:
        if worker is not None:
            worker.close()
    del runners
    keras.backend.clear_session()
    gc.collect()
    return block


@functools.lru_cache(maxsize=1)
def rows_in_memory(dataset):
    name = "mnist_5k" if FLAGS.data_dir is None else dataset
    images, labels = kf.datasets.load_arrays(name, data_dir=FLAGS.data_dir)
    return images[:ROWS_IN_MEMORY].copy(), labels[:ROWS_IN_MEMORY].copy()


def batches(case):
    """The images and labels of a run, from the first again where the data set is too small."""
    images, labels = rows_in_memory(case.dataset)
    chosen = np.arange(case.num_images) % len(images)
    return images[chosen], labels[chosen]


def build(case):
    if case.network.startswith("mlp_"):
        return mlp(int(case.network.removeprefix("mlp_")))
    facts = kf.datasets.info(case.dataset)
    return models.MODELS[case.network](facts.num_classes, facts.image_shape, seed=0)


def freeze_optimizer(inner, rate):
    return kf.FreezeOptimizer(sgd() if inner == "sgd" else adam(), rate)


def sgd():
    return keras.optimizers.SGD(**SGD)


def adam():
    return keras.optimizers.Adam(**ADAM)


def work_left(model, mask):
    """The share of the weight gradients' products in rows and columns with a trained weight."""
    left = whole = 0
    for entry in mask.entries:
        layer = model.get_layer(entry.path.split("/")[-2])
        trained = entry.trained.reshape(-1, *entry.trained.shape[-2:])
        active = trained.any((0, 2)).mean() * trained.any((0, 1)).mean()
        products = entry.trained.size * math.prod(layer.output.shape[1:-1])
        left += active * products
        whole += products
    return left / whole


def runner(variant, case, images, labels, mask, worker):
    """A function that does one run and gives wall and CPU seconds a step, and the last loss."""
    if variant.startswith("torch"):
        return functools.partial(worker.run, variant)
    if variant == "train":
        return train_runner(case)
    shape = (case.steps, case.batch_size)
    images, labels = images.reshape(*shape, *images.shape[1:]), labels.reshape(shape)
    if variant == "bare":
        return BareLoop(build(case), mask, images, labels, jit_compile=case.jit_compile, **SGD)
    model = build_variant(variant, case, mask)
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    return functools.partial(fit, model, data.prefetch(tf.data.AUTOTUNE), case.steps, Stopwatch)


def build_variant(variant, case, mask):
    model = build(case)
    if variant == "floor":
        variables = model.trainable_variables
        for entry in mask.entries:
            variables[entry.position].trainable = False
    settings = {"steps_per_execution": case.steps, "jit_compile": case.jit_compile}
    compile_model(model, optimizer_of(variant, case.rate, mask), **settings)
    if variant.startswith("freeze"):
        kf.freeze(model, mask=mask)
    if variant.endswith("ordinary"):
        kf.restore_gradients(model)
    return model


def optimizer_of(variant, rate, mask):
    if variant.startswith("freeze"):
        return freeze_optimizer("adam" if "adam" in variant else "sgd", rate)
    if variant == "masked_sgd":
        return masked(keras.optimizers.SGD, mask, **SGD)
    return adam() if variant == "plain_adam" else sgd()


def train_runner(case):
    dataset = "mnist_5k" if FLAGS.data_dir is None else case.dataset
    setup = kf.training.prepare(
        dataset, case.network, "freezenet", case.rate, data_dir=FLAGS.data_dir
    )
    return functools.partial(
        fit, setup.network, setup.batches(), setup.steps_per_epoch, EpochStopwatch
    )


def fit(model, data, steps, make_watch):
    watch = make_watch()
    history = model.fit(data, shuffle=False, verbose=0, callbacks=[watch]).history
    return watch.seconds / steps, watch.cpu_seconds / steps, history["loss"][-1]


class Stopwatch(keras.callbacks.Callback):
    """Times the one call that does all steps, without what `fit` needs to start and to end."""

    def on_train_batch_begin(self, batch, logs=None):
        self.start()

    def on_train_batch_end(self, batch, logs=None):
        self.stop()

    def start(self):
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def stop(self):
        self.seconds = time.perf_counter() - self._start
        self.cpu_seconds = time.process_time() - self._cpu_start


class EpochStopwatch(Stopwatch):
    """Times a whole epoch: many calls, and the data set's start."""

    def on_train_batch_begin(self, batch, logs=None):
        pass

    def on_train_batch_end(self, batch, logs=None):
        pass

    def on_epoch_begin(self, epoch, logs=None):
        self.start()

    def on_epoch_end(self, epoch, logs=None):
        self.stop()


class TorchWorker:
    """A process that runs PyTorch's variants when it is asked to."""

    def __init__(self, case, variants, images, labels, mask):
        self._steps = case.steps
        script = Path(__file__).with_name("_torch_worker.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        model = build(case)
        kernels = [model.trainable_variables[entry.position].numpy() for entry in mask.entries]
        task = {
            "variants": variants,
            "network": case.network,
            "images": images,
            "labels": labels,
            "batch_size": case.batch_size,
            "kernels": in_torch_layout(mask, kernels),
            "masks": in_torch_layout(mask, [entry.trained for entry in mask.entries]),
            **SGD,
        }
        self.version = self._ask(task)

    def _ask(self, message):
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()
        return pickle.load(self._process.stdout)

    def run(self, variant):
        seconds, cpu_seconds, loss = self._ask(variant)
        time.sleep(0.2)  # its threads wait busily for more work before they sleep
        return seconds / self._steps, cpu_seconds / self._steps, loss

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def in_torch_layout(mask, arrays):
    """Arrays of kernels' shapes by the name of the layer: outputs first, then inputs."""
    layouts, channels = {}, None
    for entry, array in zip(mask.entries, arrays, strict=True):
        if array.ndim == 4:
            channels = array.shape[-1]
            array = array.transpose(3, 2, 0, 1)
        else:
            if channels is not None:  # PyTorch flattens images with their channels first
                array = array.reshape(-1, channels, array.shape[1]).swapaxes(0, 1)
                array = array.reshape(-1, array.shape[-1])
            channels = None
            array = array.T
        layouts[entry.path.split("/")[-2]] = np.ascontiguousarray(array)
    return layouts


def timed(runners, steps, runs):
    """Wall and CPU milliseconds a step of every run, by variant."""
    for run in runners.values():
        for _ in range(math.ceil(WARM_UP_STEPS / steps)):
            run()
    times = {variant: {"wall_ms": [], "cpu_ms": []} for variant in runners}
    deadline = time.perf_counter() + 60 * FLAGS.minutes
    shuffled = random.Random(0)
    for done in range(runs):
        if done and time.perf_counter() > deadline:
            log(f"The time is up: {done} of {runs} runs.")
            break
        for variant in shuffled.sample(list(runners), len(runners)):
            seconds, cpu_seconds, loss = runners[variant]()
            if not math.isfinite(loss):
                raise FloatingPointError(f"{variant}: the loss is {loss}, so no time means much.")
            times[variant]["wall_ms"].append(1e3 * seconds)
            times[variant]["cpu_ms"].append(1e3 * cpu_seconds)
    return times


def read(path):
    return json.loads(path.read_text()) if path.exists() else []


def add(block, path):
    """Adds a block to the file, in place of an older one of the same network, rate and batch."""

    def key(block):
        return [block[name] for name in ("kind", "network", "rate", "batch_size")]

    blocks = [*(other for other in read(path) if key(other) != key(block)), block]
    with replacing(path) as new:
        new.write_text(json.dumps(blocks, indent=1) + "\n")


def fastest(block, variant):
    return min(block["runs_of"][variant]["wall_ms"])


def median(block, variant, clock="wall_ms"):
    return statistics.median(block["runs_of"][variant][clock])


def ratio(block, variant, other="plain_sgd", of=median):
    """The ratio of two variants' times a step; None where one was not measured."""
    if not {variant, other} <= block["runs_of"].keys():
        return None
    return of(block, variant) / of(block, other)


def shown(number):
    return "-" if number is None else f"{number:.2f}"


def title(block):
    return f"{block['network']}, q = {block['rate']:g}, batches of {block['batch_size']}"


def print_block(block):
    runs = len(block["runs_of"]["plain_sgd"]["wall_ms"])
    compiler = "with XLA" if block["jit_compile"] else "without XLA"
    header = [
        "",
        "fastest, ms a step",
        "median, ms",
        "CPU, ms",
        "median / plain SGD",
        "fastest / plain SGD",
    ]
    rows = [
        [
            VARIANTS[variant],
            f"{fastest(block, variant):.2f}",
            f"{median(block, variant):.2f}",
            f"{median(block, variant, 'cpu_ms'):.2f}",
            shown(ratio(block, variant)),
            shown(ratio(block, variant, of=fastest)),
        ]
        for variant in block["runs_of"]
    ]
    table(
        f"{title(block)}, {compiler}: {runs} runs of {block['steps']} steps; "
        f"{100 * block['work_left']:.0f} % of the weight gradients' products are left",
        header,
        rows,
    )


def print_summary(blocks):
    if not blocks:
        return
    rows = []
    for block in blocks:
        frozen = ratio(block, "freeze_sgd")
        target = TARGETS.get((block["network"], block["rate"]))
        rows.append(
            [
                block["network"],
                f"{block['rate']:g}",
                f"{100 * block['work_left']:.0f} %",
                shown(frozen),
                shown(ratio(block, "freeze_sgd", of=fastest)),
                shown(ratio(block, "floor")),
                shown(ratio(block, "masked_sgd")),
                shown(ratio(block, "freeze_sgd_ordinary")),
                shown(ratio(block, "freeze_adam", "plain_adam")),
                shown(ratio(block, "torch_hooks", "torch_sgd")),
                shown(target),
                met(frozen, target),
            ]
        )
    header = [
        "network",
        "q",
        "work left",
        "FreezeOptimizer / plain",
        "the same, fastest",
        "floor / plain",
        "masked / plain",
        "ordinary gradients / plain",
        "Adam: FreezeOptimizer / plain",
        "PyTorch: hooks / plain",
        "target",
        "met",
    ]
    table("Time of a step, ratios of medians", header, rows)
    print_train([block for block in blocks if {"train", "torch_hooks"} <= block["runs_of"].keys()])


def met(number, target):
    if number is None or target is None:
        return "-"
    return "yes" if number <= target else "no"


def print_train(blocks):
    if not blocks:
        return
    variants = ("train", "torch_hooks", "torch_sgd", "plain_sgd")
    rows = [
        [
            block["network"],
            f"{block['rate']:g}",
            *(shown(median(block, v) if v in block["runs_of"] else None) for v in variants),
            met(median(block, "train"), median(block, "torch_hooks")),
        ]
        for block in blocks
    ]
    header = ["network", "q", *(VARIANTS[v] for v in variants), "train() at most hooks"]
    table("`train()` beside PyTorch, medians, ms a step", header, rows)


def print_growth(blocks):
    for kind, what in (("width", "width"), ("batch", "batch size")):
        of_kind = sorted(
            (block for block in blocks if block["kind"] == kind),
            key=lambda block: (block["rate"], size_of(block)),
        )
        rows = [
            [
                f"{block['rate']:g}",
                f"{size_of(block)}",
                f"{100 * block['work_left']:.0f} %",
                f"{median(block, 'plain_sgd'):.2f}",
                *(shown(ratio(block, v)) for v in GROWTH_VARIANTS[1:]),
            ]
            for block in of_kind
        ]
        if rows:
            names = [f"{VARIANTS[v]} / plain SGD" for v in GROWTH_VARIANTS[1:]]
            header = ["q", what, "work left", "plain SGD, ms", *names]
            table(f"Time of a step by {what}, ratios of medians", header, rows)


def size_of(block):
    """The width or the batch size, whichever grows."""
    if block["kind"] == "width":
        return int(block["network"].removeprefix("mlp_"))
    return block["batch_size"]


LINES = {
    "masked_sgd": ("gradients masked after their computation", ORANGE, "^"),
    "freeze_sgd_ordinary": ("FreezeOptimizer, ordinary gradients", GRAY, "s"),
    "freeze_sgd": ("FreezeOptimizer", BLUE, "o"),
    "floor": ("floor: no kernel gradient at all", GREEN, "v"),
}


def draw(blocks, folder):
    """Draws what there is to draw, and gives the names of the files."""
    kinds = [block["kind"] for block in blocks]
    figures = {}
    if "network" in kinds:
        figures["speed.png"] = draw_networks([b for b in blocks if b["kind"] == "network"])
    if {"width", "batch"} & {*kinds}:
        figures["growth.png"] = draw_growth([b for b in blocks if b["kind"] != "network"])
    for name, figure in figures.items():
        with replacing(folder / name) as path:
            figure.savefig(path)
    return list(figures)


def draw_networks(blocks):
    names = [name for name in SETTINGS if any(b["network"] == name for b in blocks)]
    panels = {
        name: sorted((b for b in blocks if b["network"] == name), key=lambda b: b["rate"])
        for name in names
    }
    figure, axes = empty_figure(len(panels))
    for panel, (name, those) in zip(axes, panels.items(), strict=True):
        draw_ratios(panel, those, [f"{b['rate']:g}" for b in those], name)
        panel.set_xlabel("freezing rate q")
    return with_legend(figure, axes)


def draw_growth(blocks):
    panels = {}
    for block in sorted(blocks, key=lambda b: (b["kind"] != "width", b["rate"], size_of(b))):
        panels.setdefault((block["kind"], block["rate"]), []).append(block)
    figure, axes = empty_figure(len(panels))
    for panel, ((kind, rate), those) in zip(axes, panels.items(), strict=True):
        network = "two hidden layers" if kind == "width" else "4096 wide"
        draw_ratios(panel, those, [f"{size_of(b)}" for b in those], f"{network}, q = {rate:g}")
        panel.set_xlabel("width" if kind == "width" else "batch size")
    return with_legend(figure, axes)


def empty_figure(columns):
    figure = Figure(figsize=(1.2 + 2.6 * columns, 3.8), dpi=130, layout="constrained")
    [axes] = figure.subplots(1, columns, sharey=True, squeeze=False)
    axes[0].set_ylabel("fastest step / plain SGD's")
    return figure, axes


def draw_ratios(axes, blocks, labels, name):
    axes.axhline(1, color="#BBBBBB", linewidth=1)
    for variant, (label, color, marker) in LINES.items():
        points = [(x, ratio(block, variant, of=fastest)) for x, block in enumerate(blocks)]
        points = [(x, y) for x, y in points if y is not None]
        if points:
            axes.plot(*zip(*points, strict=True), marker, ls="-", color=color, label=label, ms=5)
    axes.set_xticks(range(len(labels)), labels)
    axes.margins(x=0.12)
    axes.set_title(name, fontsize=10)
    axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9)


def with_legend(figure, axes):
    entries = {}
    for panel in axes:
        handles, labels = panel.get_legend_handles_labels()
        entries.update(zip(labels, handles, strict=True))
    columns = min(len(entries), 4 if len(axes) > 2 else 2 if len(axes) == 2 else 1)
    figure.legend(
        entries.values(),
        entries.keys(),
        loc="outside upper center",
        ncols=columns,
        frameon=False,
        fontsize=9,
    )
    return figure


if __name__ == "__main__":
    app.run(main)
