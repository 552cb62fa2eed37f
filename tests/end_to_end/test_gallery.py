"""The programs of examples/gallery/, run as a user runs them, and what they leave behind."""

import importlib.util

import format_reader
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags
from example_scripts import ROOT, run, run_process

import keras_freeze as kf

# With these flags a run takes seconds.
PROGRAMS = {
    "image_classification": ["--epochs=1", "--images=300", "--nodense"],
    "text_classification": ["--epochs=1", "--reviews=500", "--nodense"],
    "transformer": ["--epochs=2", "--sequences=2000", "--nodense"],
    "autoencoder": ["--epochs=1", "--images=300", "--nodense"],
    "gan": ["--epochs=1", "--images=300"],
}
WEIGHT_NAMES = ("kernel", "recurrent_kernel", "embeddings")


@pytest.fixture(
    scope="module",
    params=[
        "transformer",
        pytest.param("image_classification", marks=pytest.mark.exhaustive),
        pytest.param("text_classification", marks=pytest.mark.exhaustive),
        pytest.param("autoencoder", marks=pytest.mark.exhaustive),
        pytest.param("gan", marks=pytest.mark.exhaustive),
    ],
)
def program(request):
    return request.param


@pytest.fixture(scope="module")
def finished(program, tmp_path_factory):
    """One run of a program with little data: its folder and the finished process."""
    folder = tmp_path_factory.mktemp(program)
    arguments = [*PROGRAMS[program], f"--output_dir={folder}/run"]
    return folder / "run", run(f"gallery/{program}.py", *arguments)


@pytest.fixture(scope="module")
def model(program, finished):
    """The `.keras` model."""
    assert finished[1].returncode == 0, finished[1].stderr
    if program == "transformer":
        _register_layers(program)
    return keras.models.load_model(finished[0] / "model.keras")


def _register_layers(program):
    """Imports a program for its layers. Its flags go again: others have flags of these names."""
    folder = ROOT / "examples" / "gallery"
    spec = importlib.util.spec_from_file_location(program, folder / f"{program}.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        before = set(flags.FLAGS)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        for name in set(flags.FLAGS) - before:
            delattr(flags.FLAGS, name)


def test_program_ends_well_and_says_how_well_it_learned(program, finished):
    folder, process = finished
    assert process.returncode == 0, process.stderr
    words = {
        "image_classification": "Test accuracy, 95 % frozen:",
        "text_classification": "Test accuracy, 95 % frozen:",
        "transformer": "Digits in place, 95 % frozen:",
        "autoencoder": "Mean squared error, 95 % frozen:",
        "gan": "Distance from digits, 95 % frozen:",
    }
    assert words[program] in process.stdout
    assert (folder / "saved_model" / "saved_model.pb").is_file()


def test_five_per_cent_of_the_weights_are_trained(finished, model):
    header, section, *_ = format_reader.read_layout((finished[0] / "model.freeze").read_bytes())
    masks = list(format_reader.read_masks(header["variables"], section)[0].values())
    num_weights = sum(
        int(np.prod(v.shape)) for v in model.trainable_variables if v.name in WEIGHT_NAMES
    )
    assert sum(mask.size for mask in masks) == num_weights
    extra = sum(int(mask.sum()) for mask in masks) - num_weights // 20
    assert 0 <= extra <= sum(mask.sum() == 1 for mask in masks)  # one where a layer had none


def test_both_files_hold_the_same_weights_though_frozen_ones_are_drawn_anew(finished, model):
    file = finished[0] / "model.freeze"
    loaded = kf.load(file)
    values = model.get_weights()
    assert file.stat().st_size < sum(value.nbytes for value in values) / 4
    assert all(map(np.array_equal, loaded.get_weights(), values))


def test_the_savedmodel_predicts_what_the_keras_model_predicts(finished, model):
    shape, dtype = (64, *model.input_shape[1:]), model.inputs[0].dtype
    inputs = np.random.default_rng(0).uniform(0, 10 if dtype == "int32" else 1, shape)
    network = tf.saved_model.load(finished[0] / "saved_model")
    served = network.serve(tf.constant(inputs, dtype)).numpy()
    predicted = model.predict(inputs.astype(dtype), verbose=0)
    assert np.ptp(predicted, axis=0).max() > 1e-3  # different inputs, different outputs
    assert np.allclose(served, predicted, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["jax", "torch"])
@pytest.mark.parametrize("program", [program for program in PROGRAMS if program != "gan"])
def test_the_program_runs_on_every_backend(program, backend, monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    flags = (*PROGRAMS[program], f"--output_dir={tmp_path}")
    process = run_process(f"gallery/{program}.py", *flags)
    assert process.returncode == 0, process.stderr
    assert "frozen weights as at the start" in process.stdout
