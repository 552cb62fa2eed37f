"""What cannot be saved, and what cannot be loaded: errors that say why and what to do."""

import keras
import pytest
from keras import layers
from saved_models import assert_same_variables, mlp, save_and_load

import keras_freeze as kf
from keras_freeze.storage.container import DICTIONARIES, read_container, write_container

pytestmark = pytest.mark.cases(2, tensorflow=0, jax=0)


def test_an_unknown_distribution_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "model.freeze"
    model = mlp()
    kf.save(model, path)

    def name_another(header):
        header["variables"][0]["source"][1] = "cauchy"

    with_changed_header(path, name_another)
    with pytest.raises(kf.FreezeFileError, match="distribution 'cauchy'"):
        kf.load(path)
    assert kf.FreezeMask.load(path) == kf.get_mask(model)


def test_frozen_weights_from_nowhere_are_an_error_that_says_what_to_do(tmp_path):
    model = mlp()
    kernel = model.layers[1].kernel
    kernel.assign(kernel + 1.0)
    with pytest.raises(ValueError, match=r"dense.*/kernel.*reinitialize.*`base`.*include_frozen"):
        kf.save(model, tmp_path / "model.freeze")
    assert not (tmp_path / "model.freeze").exists()
    assert_same_variables(model, save_and_load(model, tmp_path, include_frozen=True))


def test_values_too_large_for_float16_are_an_error(tmp_path):
    model = mlp()
    bias = model.layers[1].bias
    bias.assign(bias + 1e6)
    pattern = r"`values` must be .*dense.*/bias.*Received: values='float16'"
    with pytest.raises(ValueError, match=pattern):
        kf.save(model, tmp_path / "model.freeze", values="float16")
    kf.save(model, tmp_path / "model.freeze", values="bfloat16")


def with_changed_header(path, change):
    container = read_container(path)
    change(container.header)
    write_container(
        path, container.header, container.mask, container.exponents, container.mantissas
    )


def test_other_numbers_from_a_keras_initializer_are_an_error_that_names_the_versions(tmp_path):
    path = tmp_path / "model.freeze"
    model = mlp(reinitialize=False)
    kf.save(model, path)

    def draw_others(header):
        header["versions"]["keras"] = "3.0.0"
        header["variables"][0]["source"][1]["config"]["seed"] += 1

    with_changed_header(path, draw_others)
    with pytest.raises(kf.FreezeFileError, match=r"kernel.*keras 3\.0\.0.*reinitialize"):
        kf.load(path)


def test_another_generator_is_an_error(tmp_path):
    path = tmp_path / "model.freeze"
    kf.save(mlp(), path)
    with_changed_header(path, lambda header: header.update(generator="philox-v2"))
    with pytest.raises(kf.FreezeFileError, match="philox-v2"):
        kf.load(path)


def test_another_version_of_the_format_is_an_error(tmp_path, monkeypatch):
    path = tmp_path / "model.freeze"
    monkeypatch.setattr("keras_freeze.storage.header.Header.version", 3)
    monkeypatch.setitem(DICTIONARIES, 3, DICTIONARIES[2])
    kf.save(mlp(), path)
    monkeypatch.undo()
    with pytest.raises(kf.FreezeFileError, match="version 3"):
        kf.load(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"\x89FREEZE\n", b"\x89FREEZE\r\n"])
def test_other_files_are_refused(content, tmp_path):
    path = tmp_path / "model.freeze"
    path.write_bytes(content)
    for read in (kf.load, kf.storage.inspect):
        with pytest.raises(kf.FreezeFileError, match=r"model\.freeze"):
            read(path)


def test_a_missing_file_is_the_usual_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        kf.load(tmp_path / "model.freeze")


def test_a_lambda_cannot_be_saved(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Lambda(lambda x: x * 2), layers.Dense(2)])
    with pytest.raises(ValueError, match="lambda function"):
        kf.save(model, tmp_path / "model.freeze")
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile(loss=lambda y, p: keras.ops.mean((y - p) ** 2))
    with pytest.raises(ValueError, match="lambda function"):
        kf.save(model, tmp_path / "model.freeze")
    assert not list(tmp_path.iterdir())


class Doubled(layers.Layer):
    def call(self, inputs):
        return inputs * 2


def squared(y, p):
    return keras.ops.mean((y - p) ** 2)


def toggled():
    model = mlp()
    model.layers[1].trainable = False
    return model


def shared_by_submodels():
    shared = layers.Dense(8)

    def submodel():
        inputs = keras.Input((8,))
        return keras.Model(inputs, layers.Dense(8)(shared(inputs)))

    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Add()([submodel()(inputs), submodel()(inputs)]))


def with_a_function_of_its_own():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile(loss=squared)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: keras.Sequential([keras.Input((4,)), Doubled()]), "Doubled"),
        (with_a_function_of_its_own, "squared"),
        (shared_by_submodels, "6 variables, and the model has 8"),
        (toggled, "trainable"),
    ],
    ids=["class", "function", "shared", "toggled"],
)
def test_what_could_not_be_loaded_again_is_not_saved(make, words, tmp_path):
    model = make()
    with pytest.raises(ValueError, match="could not be loaded") as error:
        kf.save(model, tmp_path / "model.freeze")
    assert words in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_class_can_be_known_for_a_while(tmp_path):
    model = keras.Sequential([keras.Input((4,)), Doubled(), layers.Dense(2)])
    with keras.saving.custom_object_scope({"Doubled": Doubled}):
        assert_same_variables(model, save_and_load(model, tmp_path))
    with pytest.raises(kf.FreezeFileError, match="Doubled"):
        kf.load(tmp_path / "model.freeze")


@pytest.mark.parametrize("path", [None, 5, b"model.freeze", ["a"]])
def test_what_is_no_path_is_named(path):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    for use in (
        lambda: kf.save(model, path),
        lambda: kf.load(path),
        lambda: kf.storage.inspect(path),
        lambda: kf.apply_delta(model, path),
        lambda: kf.remove_delta(model, path),
    ):
        with pytest.raises(TypeError, match="`path`"):
            use()


def test_folders_and_bases_that_do_not_exist_are_named(tmp_path):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    with pytest.raises(FileNotFoundError, match="`path`"):
        kf.save(model, tmp_path / "missing" / "model.freeze")
    with pytest.raises(IsADirectoryError, match="`path`"):
        kf.save(model, tmp_path)
    with pytest.raises(FileNotFoundError, match="`base`"):
        kf.save(model, tmp_path / "model.freeze", base="missing.keras")
    with pytest.raises(ValueError, match="`base` must be a built model"):
        kf.save(model, tmp_path / "model.freeze", base=keras.Sequential([layers.Dense(2)]))
    with pytest.raises(TypeError, match="`compile`"):
        kf.load(tmp_path / "model.freeze", compile="no")


def test_a_model_that_is_not_built_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="must be a built model"):
        kf.save(keras.Sequential([layers.Dense(2)]), tmp_path / "model.freeze")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"values": "float8"}, ValueError),
        ({"values": None}, ValueError),
        ({"include_frozen": 1}, TypeError),
        ({"include_optimizer": "yes"}, TypeError),
        ({"base": 3}, TypeError),
    ],
)
def test_bad_arguments_are_named(arguments, error, tmp_path):
    with pytest.raises(error, match=f"`{next(iter(arguments))}`"):
        kf.save(mlp(), tmp_path / "model.freeze", **arguments)


def test_something_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(TypeError, match="`model`"):
        kf.save("model", tmp_path / "model.freeze")
