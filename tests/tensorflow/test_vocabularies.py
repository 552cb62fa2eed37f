"""Layers with vocabularies in the `.freeze` file: the same after loading, and checked before."""

import subprocess
import sys
from pathlib import Path

import format_reader
import keras
import numpy as np
import pytest
import vocabulary_cases
from helpers import compiled, crossentropy, same_bits, sgd, value_of
from keras import layers
from vocabulary_cases import LAYERS, TEXTS, layer_in, model_of, outputs_of

import keras_freeze as kf
from keras_freeze.storage.container import read_container, write_container

pytest.importorskip("tensorflow")  # Keras's lookups need it on every backend

BACKEND = keras.backend.backend()
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a file of each layer, what the layers give, and what a fresh process finds."""
    folder = tmp_path_factory.mktemp("vocabularies")
    expected = {}
    for name, (make, data) in LAYERS.items():
        model = model_of(make(), data)
        kf.save(model, folder / f"{name}.freeze")
        expected[name] = outputs_of(model, data)
    script = Path(vocabulary_cases.__file__)
    subprocess.run([sys.executable, str(script), str(folder)], check=True)
    return folder, expected


@pytest.mark.parametrize("name", LAYERS)
def test_a_loaded_layer_gives_what_the_saved_one_gives(name, saved):
    folder, expected = saved
    found = outputs_of(kf.load(folder / f"{name}.freeze"), LAYERS[name][1])
    assert np.array_equal(found, expected[name])
    assert found.dtype == expected[name].dtype
    in_a_fresh_process = np.load(folder / f"{name}.npy", allow_pickle=True)
    assert np.array_equal(in_a_fresh_process, expected[name])


@pytest.mark.parametrize("name", LAYERS)
def test_a_loaded_layer_is_saved_again_as_the_same_file(name, saved, tmp_path):
    path = saved[0] / f"{name}.freeze"
    kf.save(kf.load(path), tmp_path / "again.freeze")
    first, second = read_container(path).header, read_container(tmp_path / "again.freeze").header
    assert first.get("vocabularies") == second.get("vocabularies")


@pytest.mark.parametrize("name", [n for n in LAYERS if n.startswith(("text", "str", "int"))])
def test_the_second_reader_finds_the_vocabulary(name, saved):
    folder, _ = saved
    path = folder / f"{name}.freeze"
    layer = layer_in(kf.load(path))
    (found,) = format_reader.vocabularies(format_reader.read_layout(path.read_bytes())[0]) or [None]
    if found is None:
        assert "given" in name or "mask" in name or "unset" in name or "inverted" in name
        return
    tokens, weights = found
    assert tokens == list(layer.get_vocabulary())
    assert (weights is None) == ("tf_idf" not in name)


def test_a_list_that_is_in_the_configuration_is_stored_once(saved):
    header = read_container(saved[0] / "strings_given.freeze").header
    assert "vocabularies" not in header
    header = read_container(saved[0] / "strings_reset.freeze").header
    assert header["vocabularies"] == [{"tokens": ["[UNK]", "wolf", "cow"]}]


def text_model(vocabulary_from=TEXTS):
    vectorize = layers.TextVectorization(output_sequence_length=4)
    vectorize.adapt(vocabulary_from)
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((), dtype="string"),
            vectorize,
            layers.Embedding(20, 5),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )
    return compiled(model, kf.FreezeOptimizer(sgd(momentum=0.9), freeze_rate=0.75))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="Keras takes texts in models on TensorFlow")
@pytest.mark.parametrize("include_optimizer", [False, True])
def test_a_frozen_text_classifier_predicts_and_trains_on_the_same(include_optimizer, tmp_path):
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((TEXTS, [0, 1, 2, 0])).batch(2)
    model = text_model()
    kf.reinitialize(model, seed=2)
    kf.freeze(model, data)
    model.fit(data, verbose=0)
    path = tmp_path / "model.freeze"
    kf.save(model, path, include_optimizer=include_optimizer)
    loaded = kf.load(path)
    assert kf.get_mask(loaded) == kf.get_mask(model)
    texts = tf.constant(TEXTS)
    assert same_bits(model.predict(texts, verbose=0), loaded.predict(texts, verbose=0))
    if include_optimizer:
        model.fit(data, verbose=0)
        loaded.fit(data, verbose=0)
        for first, second in zip(model.variables, loaded.variables, strict=True):
            assert same_bits(value_of(first), value_of(second))
    assert crossentropy().name == loaded.loss.name


def test_a_delta_has_its_vocabulary_and_goes_on_no_other(tmp_path):
    base, other = text_model(), text_model(TEXTS[:2])
    for first, second in zip(base.variables, other.variables, strict=True):
        second.assign(first)
    kf.save(base, tmp_path / "delta.freeze", base=base)
    loaded = kf.load(tmp_path / "delta.freeze", base=other)
    assert loaded.layers[0].get_vocabulary() == base.layers[0].get_vocabulary()
    kf.apply_delta(base, tmp_path / "delta.freeze")
    with pytest.raises(kf.FreezeFileError, match="vocabularies of the model"):
        kf.apply_delta(other, tmp_path / "delta.freeze")


def test_a_delta_goes_on_no_base_with_another_list(tmp_path):
    models = [
        model_of(layers.StringLookup(vocabulary=["a", word]), vocabulary_cases.WORDS)
        for word in ("b", "c")
    ]
    models[1].set_weights(models[0].get_weights())
    kf.save(models[0], tmp_path / "delta.freeze", base=models[0])
    with pytest.raises(kf.FreezeFileError, match="vocabularies of the model"):
        kf.apply_delta(models[1], tmp_path / "delta.freeze")


# Files of vocabularies


@pytest.fixture
def vocabulary_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("wolf\ncow\n")
    return path


@pytest.mark.parametrize("layer_class", [layers.StringLookup, layers.TextVectorization])
def test_a_vocabulary_file_is_stored_as_its_contents(layer_class, vocabulary_file, tmp_path):
    data = vocabulary_cases.WORDS if layer_class is layers.StringLookup else TEXTS
    model = model_of(layer_class(vocabulary=str(vocabulary_file)), data)
    expected = outputs_of(model, data)
    kf.save(model, tmp_path / "model.freeze")
    vocabulary_file.unlink()
    loaded = kf.load(tmp_path / "model.freeze")
    assert np.array_equal(outputs_of(loaded, data), expected)
    assert layer_in(loaded).get_vocabulary()[-2:] == ["wolf", "cow"]


def configured(header, **settings):
    """The header with other settings of its layers with vocabularies."""

    def change(value):
        if isinstance(value, dict):
            if value.get("class_name") in ("StringLookup", "IntegerLookup", "TextVectorization"):
                value["config"].update(settings)
            for part in value.values():
                change(part)
        elif isinstance(value, list):
            for part in value:
                change(part)

    change(header)
    return header


def rewritten(path, header):
    content = read_container(path)
    write_container(path, header, content.mask, content.exponents, content.mantissas)
    return path


def copied(saved, name, tmp_path):
    path = tmp_path / "model.freeze"
    path.write_bytes((saved[0] / f"{name}.freeze").read_bytes())
    return path, read_container(path).header


@pytest.mark.parametrize("name", ["text", "strings", "integers"])
def test_a_vocabulary_file_in_a_configuration_is_never_opened(
    name, saved, tmp_path, vocabulary_file, monkeypatch
):
    import tensorflow as tf

    path, header = copied(saved, name, tmp_path)
    header.pop("vocabularies")
    rewritten(path, configured(header, vocabulary=str(vocabulary_file)))
    opened = []
    monkeypatch.setattr(tf.io.gfile, "exists", lambda path: opened.append(path) or True)
    monkeypatch.setattr(
        tf.lookup, "TextFileInitializer", lambda *args, **kwargs: opened.append(args)
    )
    with pytest.raises(kf.FreezeFileError, match=r"not a list|the path of a file"):
        kf.load(path)
    assert opened == []


@pytest.mark.parametrize(
    "settings",
    [
        {"vocabulary": ["x" * 20_000, *map(str, range(20_000))]},
        {"num_oov_indices": 10**12},
        {"ngrams": 10**12},
        {"max_tokens": 10**12, "pad_to_max_tokens": True},
    ],
)
def test_settings_that_would_take_much_memory_are_refused(settings, saved, tmp_path):
    path, header = copied(saved, "text", tmp_path)
    rewritten(path, configured(header, **settings))
    with pytest.raises(kf.FreezeFileError, match="would create an array"):
        kf.load(path)


# Vocabularies that do not fit

BAD = {
    "no list": ("text", [5]),
    "tokens missing": ("text", [{}]),
    "tokens of another kind": ("text", [{"tokens": ["", "[UNK]", 1.5]}]),
    "true and false": ("integers", [{"tokens": [-1, True]}]),
    "numbers for texts": ("text", [{"tokens": [1, 2, 3]}]),
    "texts for numbers": ("integers", [{"tokens": ["a", "b", "c"]}]),
    "numbers that are too large": ("integers", [{"tokens": [-1, 2**70]}]),
    "a token twice": ("text", [{"tokens": ["", "[UNK]", "a", "a"]}]),
    "special tokens missing": ("text", [{"tokens": ["a", "b"]}]),
    "special tokens in between": ("text", [{"tokens": ["", "[UNK]", "a", ""]}]),
    "none at all": ("text", [{"tokens": []}]),
    "another size": ("text_multi_hot", [{"tokens": ["[UNK]", "a"]}]),
    "more than max_tokens": ("text_multi_hot", [{"tokens": ["[UNK]", *"abcdefgh"]}]),
    "weights where none belong": (
        "text",
        [{"tokens": ["", "[UNK]", "a"], "idf_weights": [1, 2, 3]}],
    ),
    "weights missing": ("strings_tf_idf", [{"tokens": ["[UNK]", "a", "b", "c"]}]),
    "too few weights": (
        "strings_tf_idf",
        [{"tokens": ["[UNK]", "a", "b", "c"], "idf_weights": [1.0, 2.0]}],
    ),
    "weights that are no numbers": (
        "strings_tf_idf",
        [{"tokens": ["[UNK]", "a", "b", "c"], "idf_weights": [1.0, 2.0, "3", 4.0]}],
    ),
    "padding that is not zero": (
        "strings_tf_idf_padded",
        [{"tokens": ["[UNK]", "a", "b", "c"], "idf_weights": [1.0] * 9}],
    ),
    "one too many": ("text", [None, {"tokens": ["", "[UNK]", "a"]}]),
    "no layer for it": ("normalization", [{"tokens": ["a"]}]),
}


@pytest.mark.parametrize("what", BAD)
def test_vocabularies_that_do_not_fit_are_refused(what, saved, tmp_path):
    name, vocabularies = BAD[what]
    path, header = copied(saved, name, tmp_path)
    rewritten(path, {**header, "vocabularies": vocabularies})
    with pytest.raises(kf.FreezeFileError, match=r"model\.freeze"):
        kf.load(path)


# What is not stored


@keras.saving.register_keras_serializable(package="test_vocabularies")
class WithFiles(layers.Layer):
    def call(self, inputs):
        return inputs

    def save_assets(self, folder):
        Path(folder, "file.txt").write_text("mine")

    def load_assets(self, folder):
        self.text = Path(folder, "file.txt").read_text()


@keras.saving.register_keras_serializable(package="test_vocabularies")
class OwnLookup(layers.StringLookup):
    def save_assets(self, folder):
        super().save_assets(folder)
        Path(folder, "file.txt").write_text("mine")


@keras.saving.register_keras_serializable(package="test_vocabularies")
class LowerLookup(layers.StringLookup):
    """One that keeps no files of its own."""


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (WithFiles, vocabulary_cases.VALUES),
        (lambda: OwnLookup(vocabulary=["a"]), vocabulary_cases.WORDS),
    ],
)
def test_a_layer_with_files_of_its_own_is_refused(make, data, tmp_path):
    model = model_of(make(), data)
    with pytest.raises(ValueError, match="stores files in addition to its variables"):
        kf.save(model, tmp_path / "model.freeze")
    assert list(tmp_path.iterdir()) == []


def test_a_subclass_of_a_lookup_is_stored(tmp_path):
    layer = LowerLookup()
    layer.adapt(vocabulary_cases.WORDS)
    model = model_of(layer, vocabulary_cases.WORDS)
    kf.save(model, tmp_path / "model.freeze")
    loaded = layer_in(kf.load(tmp_path / "model.freeze"))
    assert type(loaded) is LowerLookup
    assert loaded.get_vocabulary() == layer.get_vocabulary()


def test_a_vocabulary_that_is_no_text_is_refused(tmp_path):
    layer = layers.StringLookup()
    layer.adapt(np.array([[b"\xff\xfe"]]))
    with pytest.raises(ValueError, match="cannot be read"):
        kf.save(model_of(layer, vocabulary_cases.WORDS), tmp_path / "model.freeze")


def test_inspect_counts_the_tokens(saved):
    printed = str(kf.storage.inspect(saved[0] / "text.freeze"))
    count = layer_in(kf.load(saved[0] / "text.freeze")).vocabulary_size()
    assert f"vocabularies: {count} tokens" in printed
