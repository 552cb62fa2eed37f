"""99.9 % of LeNet-5-Caffe's weights frozen, or pruned, or none: three runs side by side.

python examples/demo.py

Real handwritten digits, no download, two to three minutes. Writes a plot of the three runs.
"""

from pathlib import Path

import command_line
from absl import flags

import keras_freeze as kf
from keras_freeze._utils.files import replacing
from keras_freeze.paper.titles import title_of

_EPOCHS = flags.DEFINE_integer("epochs", None, "Fewer epochs for a quicker look.")
_SEED = flags.DEFINE_integer("seed", 0, "Of weights, validation split, data order and mask.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/demo", "The folder to write to.")

_FREEZE_RATE = 0.999
_FROZEN_WEIGHTS = {
    "baseline": "no frozen weights",
    "freezenet": "frozen weights keep their random start",
    "snip": "frozen weights are zero",
}


def main() -> None:
    folder = Path(_OUTPUT_DIR.value)
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for number, (method, meaning) in enumerate(_FROZEN_WEIGHTS.items(), start=1):
        print(f"{number}/{len(_FROZEN_WEIGHTS)} {title_of(method)}: {meaning}", flush=True)
        result = kf.training.train(
            "mnist_5k",
            "lenet_5_caffe",
            method,
            _FREEZE_RATE,
            epochs=_EPOCHS.value,
            seed=_SEED.value,
        )
        results.append(result)
    print(f"\n{'':16}{'trained weights':>18}{'size in KiB':>14}{'test accuracy':>16}")
    for result in results:
        print(
            f"{title_of(result.method):16}{result.report.num_trained_weights:>18,}"
            f"{result.report.network_kib:>14,.1f}{result.test_accuracy:>16.1%}"
        )
    path = folder / "comparison.png"
    with replacing(path) as temporary:
        kf.plots.plot_comparison(results).savefig(temporary)
    print(f"\nThe curves: {path}")


if __name__ == "__main__":
    command_line.run(main)
