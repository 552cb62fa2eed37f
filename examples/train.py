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

_DATASET = flags.DEFINE_string("dataset", "mnist_5k", f"One of {', '.join(kf.datasets.NAMES)}.")
_MODEL = flags.DEFINE_string("model", "lenet_5_caffe", f"One of {', '.join(kf.models.MODELS)}.")
_METHOD = flags.DEFINE_string("method", "freezenet", f"One of {', '.join(kf.training.METHODS)}.")
_FREEZE_RATE = flags.DEFINE_float(
    "freeze_rate", 0.99, "Share of the weights that is frozen, from 0 to 1; not for the baseline."
)
_CRITERION = flags.DEFINE_string(
    "criterion", None, "What chooses the trained weights, instead of the method's own criterion."
)
_EPOCHS = flags.DEFINE_integer(
    "epochs", None, "Shortens the paper's schedule in proportion. Default: the full schedule."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of weights, validation split, data order and mask.")
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", None, "Of the first steps. Default: the paper's for the data set."
)
_DATA_DIR = flags.DEFINE_string("data_dir", None, "TFDS's folder of data. Default: TFDS's own.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/train", "The folder to write to.")


def main() -> None:
    folder = Path(_OUTPUT_DIR.value)
    folder.mkdir(parents=True, exist_ok=True)  # fails now rather than after training
    result = kf.training.train(
        _DATASET.value,
        _MODEL.value,
        _METHOD.value,
        _FREEZE_RATE.value,
        criterion=_CRITERION.value,
        epochs=_EPOCHS.value,
        seed=_SEED.value,
        learning_rate=_LEARNING_RATE.value,
        data_dir=_DATA_DIR.value,
    )
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
