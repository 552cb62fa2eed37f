"""Several machines: the time of a step against their number, from a model that is measured, too.

    python benchmarks/scale.py                       # the model alone: a table and a figure
    python benchmarks/scale.py --parts=model,measure

`measure` starts 1, 2 and 4 processes of PyTorch (gloo) on this machine, which average the gradients
of VGG16-D: dense, in buckets of 25 MiB as DistributedDataParallel does, and those of what is
trained at q = 0.99, as the FreezeOptimizer does. With `--rates`, this is repeated in a network
namespace of its own whose loopback device is limited to so many bits a second (Linux, root, `tc`).
All messages of all processes share this device. Medians; beside each, what the model predicts.

`model` takes the quicker of a ring, in which each of N machines sends 2 (N - 1) messages of 1 / N
of all bytes, and a tree, which needs 2 log2(N) messages of all bytes. A step is the time to
compute, plus that of the messages; "overlapped" is the best case for dense gradients, which are
sent while others are computed. The networks and times to compute are those of `WORKLOADS`.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from absl import app, flags

from keras_freeze._utils.files import replacing
from keras_freeze.paper.figures import style

FLAGS = flags.FLAGS
flags.DEFINE_list("parts", ["model"], "What to do: model, measure.")
flags.DEFINE_list("processes", ["1", "2", "4"], "How many processes are measured.")
flags.DEFINE_list("rates", [], "Also with a limited device, as tc writes it: 1gbit, 100mbit.")
flags.DEFINE_integer("repeats", 15, "Reductions that are timed.", lower_bound=1)
flags.DEFINE_string("output_dir", "runs/scale", "Where the figure is written.")

FREEZE_RATE = 0.99
WORKER = Path(__file__).with_name("_scale_worker.py")

# Parameters, bytes of each, and milliseconds to compute a step: assumptions about one accelerator.
WORKLOADS = {
    "ResNet50": (25.6e6, 4, 100.0),
    "BERT-base": (110e6, 4, 150.0),
    "8 billion": (8e9, 2, 2000.0),
}
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Bits a second, and seconds for a message.
NETWORKS = {"10 Gbit/s": (10e9, 30e-6), "100 Gbit/s": (100e9, 10e-6)}
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def main(_):
    for part in FLAGS.parts:
        PARTS[part]()


def reduction_seconds(num_bytes, workers, bits_per_second, latency):
    """The time to sum so many bytes over all machines: of a ring, or of a tree."""
    whole = 8 * num_bytes / bits_per_second
    ring = 2 * (workers - 1) * (latency + whole / workers)
    tree = 2 * math.ceil(math.log2(workers)) * (latency + whole)
    return min(ring, tree)


def predict():
    rows = []
    for workload, (parameters, width, compute) in WORKLOADS.items():
        for network, (rate, latency) in NETWORKS.items():
            for workers in (8, 64, 1024):
                dense, compact = (
                    1000 * reduction_seconds(share * parameters * width, workers, rate, latency)
                    for share in (1, 1 - FREEZE_RATE)
                )
                cells = [compute + dense, max(compute, dense), compute + compact]
                rows.append([workload, network, str(workers), *(f"{c:,.0f}" for c in cells)])
    header = ["network", "connection", "machines", "dense", "dense, overlapped", "compact"]
    table(f"Milliseconds a step, q = {FREEZE_RATE}", header, rows)
    folder = Path(FLAGS.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "scale.png") as path:
        draw().savefig(path)
    print(f"\nWritten: {folder / 'scale.png'}")


def draw():
    figure = style.new_figure(12.0, 3.8)
    for number, (workload, (parameters, width, compute)) in enumerate(WORKLOADS.items(), 1):
        axes = figure.add_subplot(1, len(WORKLOADS), number)
        for network, (rate, latency) in NETWORKS.items():
            dash = "-" if network.startswith("100") else "--"
            for label, share, color in (
                ("dense", 1, style.ORANGE),
                (f"compact, q = {FREEZE_RATE}", 1 - FREEZE_RATE, style.BLUE),
            ):
                times = [
                    reduction_seconds(share * parameters * width, n, rate, latency) for n in WORKERS
                ]
                milliseconds = [compute + 1000 * seconds for seconds in times]
                axes.plot(WORKERS, milliseconds, dash, color=color, label=f"{label}, {network}")
        axes.set_xscale("log", base=2)
        axes.set_xticks(WORKERS[::2], map(str, WORKERS[::2]))
        axes.set_ylim(0)
        axes.set_title(f"{workload}, {compute:,.0f} ms to compute", fontsize=10)
        axes.set_xlabel("machines")
        style.draw_grid(axes)
    figure.axes[0].set_ylabel("milliseconds a step")
    figure.axes[0].legend(fontsize=7)
    return figure


def measure():
    rows = []
    for rate in ["", *FLAGS.rates]:
        for count in map(int, FLAGS.processes):
            found = run_workers(count, rate)
            cells = [rate or "not limited", str(count)]
            for kind in ("dense", "compact"):
                seconds, size = found[kind], found[f"{kind}_bytes"]
                cells.append(f"{1000 * seconds:,.1f}")
                if rate:
                    # All processes share the device.
                    predicted = found["latency"] + 8 * 2 * (count - 1) * size / bits_of(rate)
                    cells.append(f"{1000 * predicted:,.1f}")
                else:
                    cells.append("")
            share = found["compact"] / found["dense"] if count > 1 else 0.0
            rows.append([*cells, f"{share:.1%}" if count > 1 else ""])
    header = ["loopback", "processes", "dense", "predicted", "compact", "predicted", "ratio"]
    table(f"Milliseconds to average the gradients of VGG16-D, q = {FREEZE_RATE}", header, rows)


def run_workers(count, rate):
    """Run so many workers, in a network of their own if its rate is limited."""
    command = [sys.executable, str(WORKER), str(count), str(FREEZE_RATE), str(FLAGS.repeats)]
    if rate:
        if not all(map(shutil.which, ("unshare", "tc", "ip"))):
            raise app.UsageError("--rates needs Linux with unshare, ip and tc, and root.")
        limit = f"tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 200ms"
        command = ["unshare", "-n", "sh", "-c", f'ip link set lo up && {limit} && exec "$@"', "sh",
                   *command]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def bits_of(rate):
    unit = next(unit for unit in BITS if rate.endswith(unit))
    return float(rate.removesuffix(unit)) * BITS[unit]


def table(title, header, rows):
    print(f"\n**{title}**\n")
    for cells in (header, ["---"] * len(header), *rows):
        print(f"| {' | '.join(cells)} |")
    sys.stdout.flush()


PARTS = {"model": predict, "measure": measure}

if __name__ == "__main__":
    app.run(main)
