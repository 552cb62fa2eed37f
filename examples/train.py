"""Train a network by one of the paper's methods; about a minute with the default flags.

    python examples/train.py --method=freezenet --freeze_rate=0.99
    python examples/train.py --dataset=cifar10 --model=vgg16_d --data_dir=/path/to/data

Prints what is trained and the accuracies. Writes result.json, history.csv, curves.png, mask.png and
the trained model.keras.
"""

from pathlib import Path

import command_line
from absl import flags

import keras_freeze as kf
from keras_freeze._utils.files import replacing

_SETTINGS = command_line.define_settings(
    *("dataset", "model", "method", "freeze_rate", "seed", "epochs", "learning_rate", "l2"),
    *("initializer", "reinitializer", "validation_fraction", "steps_per_epoch", "criterion"),
    *("distribution", "mask", "schedule"),
    dataset="mnist_5k",
    model="lenet_5_caffe",
    method="freezenet",
    freeze_rate=0.99,
    seed=0,
    distribution="global",
    mask="computed",
)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's folder of data. Default: TFDS's own.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/train", "The folder to write to.")


def main() -> None:
    folder = Path(_OUTPUT_DIR.value)
    folder.mkdir(parents=True, exist_ok=True)  # fails now rather than after training
    result = kf.training.train(**_SETTINGS(), data_dir=_DATA_DIR.value)
    result.save(folder)
    figures = {
        "curves.png": kf.plots.plot_history(result),
        "mask.png": kf.plots.plot_mask(kf.get_mask(result.model)),
    }
    for name, figure in figures.items():
        with replacing(folder / name) as path:
            figure.savefig(path)
    print(result.report)
    print()
    print(result.summary())
    print(f"Written to {folder}: result.json, history.csv, {', '.join(figures)}, model.keras")


if __name__ == "__main__":
    command_line.run(main)
