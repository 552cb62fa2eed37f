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
import random
import time
from pathlib import Path

import keras
from _common import compile_model, log
from _speed_cases import (
    BARE,
    BATCH_SIZES,
    GROWTH_VARIANTS,
    SETTINGS,
    TRAINABLE,
    VARIANTS,
    WIDTHS,
    Case,
)
from _speed_report import draw, print_block, print_growth, print_summary, title
from _speed_torch import TorchWorker
from _speed_variants import batches, build, freeze_optimizer, runner, work_left
from absl import app, flags, logging

import keras_freeze as kf
from keras_freeze._utils.files import replacing

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
        dataset_of(setting.dataset),
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
        dataset_of("mnist"),
        jit_compile,
    )


def dataset_of(name):
    return "mnist_5k" if FLAGS.data_dir is None else name


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
    images, labels = batches(case, FLAGS.data_dir)
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
        given = (case, images, labels, mask, worker, FLAGS.data_dir)
        runners = {variant: runner(variant, *given) for variant in case.variants}
        block["runs_of"] = timed(runners, case.steps, case.runs)
    finally:
        if worker is not None:
            worker.close()
    del runners
    keras.backend.clear_session()
    gc.collect()
    return block


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


if __name__ == "__main__":
    app.run(main)
