"""Tests of the scripts in examples/."""

import json
import subprocess
import sys

import keras
import pytest
from example_scripts import ROOT, run, run_process

from keras_freeze.paper.run import SETTINGS


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One run of train.py: its folder and the finished process."""
    folder = tmp_path_factory.mktemp("train")
    flags = ("--model=lenet_300_100", "--epochs=1", f"--output_dir={folder}/run")
    return folder / "run", run_process("train.py", *flags, cwd=folder)


def test_train_prints_report_and_accuracies_and_writes_its_files(trained):
    folder, process = trained
    assert process.returncode == 0, process.stderr
    assert "Weights: 266,200, trained: 2,662" in process.stdout
    result = json.loads((folder / "result.json").read_text())
    assert f"Test accuracy {result['test_accuracy']:.2%}" in process.stdout
    assert result["test_accuracy"] > 0.5
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["curves.png", "history.csv", "mask.png", "model.keras", "result.json"]


def test_every_setting_of_a_run_is_a_flag_described_as_the_run_describes_it():
    helped = run("train.py", "--help")
    text = " ".join(helped.stdout.split())
    for name in SETTINGS:
        assert name == "measure" or f"--{name}:" in text
    assert "--l2: coefficient of the coupled weight decay, at least 0." in text
    assert "One of: baseline, freezenet," in text


def test_train_shows_progress_and_nothing_else_on_standard_error(trained):
    (line,) = trained[1].stderr.strip().splitlines()
    assert line.startswith("epoch 1/1, took ")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method=lottery"], ["method", "'lottery'", "'freezenet'"]),
        (["--freeze_rate=much"], ["freeze_rate", "much"]),
        (["--dataset=mnist", "--data_dir=no/such/folder"], ["data_dir", "no/such/folder"]),
    ],
)
def test_a_bad_flag_is_one_line_and_a_status(flags, words, tmp_path):
    process = run("train.py", *flags, f"--output_dir={tmp_path}")
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith("train.py: error: ")
    assert all(word in line for word in words)
    assert process.stdout == ""


@pytest.mark.exhaustive
def test_a_saved_network_is_loaded_with_its_mask_in_a_fresh_process(trained):
    script = (
        "import sys, keras, keras_freeze as kf\n"
        "model = keras.models.load_model(sys.argv[1])\n"
        "print(kf.get_mask(model).num_trained, kf.report(model).num_weights)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(trained[0] / "model.keras")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout.split() == ["2662", "266200"], process.stderr


def test_the_savedmodel_serves_the_same_outputs_without_keras_freeze(trained, tmp_path):
    flags = (f"--model_file={trained[0]}/model.keras", f"--output_dir={tmp_path}")
    process = run("export_savedmodel.py", *flags)
    assert process.returncode == 0, process.stderr
    assert "loaded without keras_freeze" in process.stdout
    difference = float(process.stdout.split("outputs:")[1])
    assert difference <= 1e-5


def test_demo_prints_three_runs_side_by_side_and_a_plot(tmp_path):
    process = run("demo.py", "--epochs=1", f"--output_dir={tmp_path}")
    assert process.returncode == 0, process.stderr
    rows = [line.split() for line in process.stdout.splitlines() if line.endswith("%")]
    assert [row[-4:-2] for row in rows] == [
        ["baseline", "430,500"],
        ["FreezeNet", "430"],
        ["SNIP", "430"],
    ]
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert str(tmp_path / "comparison.png") in process.stdout


@pytest.mark.parametrize(
    "script", ["train_on_several_devices.py", "export_savedmodel.py", "gallery/gan.py"]
)
def test_a_script_for_other_backends_says_so(script, monkeypatch, tmp_path):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    flags = () if "devices" in script else (f"--output_dir={tmp_path / 'run'}",)
    process = run(script, *flags)
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert "KERAS_BACKEND must be tensorflow" in line
    assert line.endswith("Received: torch")
    assert not (tmp_path / "run").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_fine_tune_runs_on_every_backend(backend, monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    flags = ("--epochs=1", "--rates=0.99", f"--output_dir={tmp_path}")
    process = run_process("fine_tune.py", *flags, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "bit for bit" in process.stdout
