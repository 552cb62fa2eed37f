"""Embedding and LSTM: is a review good or bad?

python examples/gallery/text_classification.py

The reviews are made up by a small grammar, so that nothing has to be downloaded: adjectives have a
sign, "not" and "hardly" turn that of the next one, and what comes after "but" is what counts. So
the order of the words matters, and an accuracy of 100 % is possible, which it is not for real
reviews. Words become numbers with a dictionary: `keras_freeze.save` refuses models with a
TextVectorization layer, whose vocabulary is not a variable.
"""

from pathlib import Path

import finish
import keras
import numpy as np
from absl import app, flags
from keras import layers

import keras_freeze as kf

_EPOCHS = flags.DEFINE_integer("epochs", 8, "Passes over the training data.", lower_bound=1)
_REVIEWS = flags.DEFINE_integer("reviews", 4000, "How many reviews to train with; half to test.")
_DENSE = flags.DEFINE_boolean("dense", True, "Train the dense network as well, to compare.")
_SEED = flags.DEFINE_integer("seed", 0, "Of reviews, weights and batches.")
_OUTPUT_DIR = flags.DEFINE_string(
    "output_dir", "runs/gallery/text_classification", "The folder to write to."
)

_FREEZE_RATE = 0.95
_LENGTH = 12  # words of a review, with padding

_GOOD = [
    "good",
    "great",
    "lovely",
    "clever",
    "moving",
    "brilliant",
    "charming",
    "funny",
    "fresh",
    "warm",
]
_BAD = ["bad", "poor", "dull", "silly", "tiresome", "awful", "clumsy", "sad", "stale", "cold"]
_NOUNS = ["film", "plot", "cast", "ending", "music", "book", "play", "story", "dialogue", "pace"]
_TURNS = ["not", "hardly"]
_OTHERS = ["the", "is", "was", "but", "really", "quite"]
_NUMBERS = {word: 1 + i for i, word in enumerate(_GOOD + _BAD + _NOUNS + _TURNS + _OTHERS)}


def write_clause(random: np.random.Generator) -> tuple[list[str], bool]:
    """Return words such as "the plot is hardly great", and whether they are praise."""
    is_good = random.random() < 0.5
    words = ["the", random.choice(_NOUNS), random.choice(["is", "was"])]
    modifier = random.choice([None, "really", "quite", *_TURNS])
    if modifier is not None:
        words.append(modifier)
    words.append(random.choice(_GOOD if is_good else _BAD))
    return words, is_good != (modifier in _TURNS)


def write_review(random: np.random.Generator) -> tuple[list[str], bool]:
    words, is_good = write_clause(random)
    if random.random() < 0.5:
        more, is_good = write_clause(random)
        words += ["but", *more]
    return words, is_good


def encode(words: list[str]) -> np.ndarray:
    tokens = np.zeros(_LENGTH, "int32")  # 0 is padding
    tokens[: len(words)] = [_NUMBERS[word] for word in words]
    return tokens


def write_data(count: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    reviews, labels = zip(*(write_review(random) for _ in range(count)), strict=True)
    return np.stack([encode(words) for words in reviews]), np.array(labels, "float32")


def compile_model(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(_SEED.value)  # the same start for both
    model = keras.Sequential(
        [
            keras.Input((_LENGTH,), dtype="int32"),
            layers.Embedding(1 + len(_NUMBERS), 32, mask_zero=True),
            layers.LSTM(64),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(optimizer, loss="binary_crossentropy", metrics=["accuracy"])
    return model


def main(_: list[str]) -> None:
    random = np.random.default_rng(_SEED.value)
    training = write_data(_REVIEWS.value, random)
    test = write_data(_REVIEWS.value // 2, random)

    freezing = kf.FreezeOptimizer(keras.optimizers.Adam(0.01), _FREEZE_RATE)
    model = compile_model(freezing)
    mask = kf.freeze(model, training[0][:500], training[1][:500])
    frozen = finish.frozen_values(model, mask)
    models = {"95 % frozen": model}
    if _DENSE.value:
        models["dense"] = compile_model(keras.optimizers.Adam(0.01))
    for trained in models.values():
        trained.fit(*training, batch_size=50, epochs=_EPOCHS.value, verbose=2)

    finish.save_load_export(model, frozen, test[0][:100], Path(_OUTPUT_DIR.value))
    for name, trained in models.items():
        accuracy = trained.evaluate(*test, verbose=0, return_dict=True)["accuracy"]
        print(f"Test accuracy, {name}: {accuracy:.1%}")
    for text in ("the plot was clever", "the plot was clever but the ending is hardly warm"):
        print(f"{text!r}: {model.predict(encode(text.split())[None], verbose=0).item():.2f}")


if __name__ == "__main__":
    app.run(main)
