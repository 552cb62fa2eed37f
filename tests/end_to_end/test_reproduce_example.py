"""Tests of examples/reproduce.py."""

import json

import pytest
from example_scripts import run

from keras_freeze.paper.experiments import EXPERIMENTS
from keras_freeze.paper.runs import Run

SHORT = (
    "--dataset=mnist_5k",
    "--model=lenet_300_100",
    "--epochs=1",
    "--seeds=1",
    "--rates=0.99",
    "--steps_per_epoch=5",
)
CHANGES = "dataset=mnist_5k-model=lenet_300_100-epochs=1-seeds=1-rates=0.99-steps_per_epoch=5"


def lines_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def report_in(folder, name):
    return (folder / f"{name}-{CHANGES}" / "report.md").read_text(encoding="utf-8")


def tensorboard_folder(folder, method):
    settings = {"epochs": 1, "steps_per_epoch": 5}
    run_ = Run("mnist_5k", "lenet_300_100", method, 0.99, 0, **settings)
    return folder / "tensorboard" / run_.label


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One short run: its folder, the finished process, and the report that it wrote."""
    folder = tmp_path_factory.mktemp("reproduce")
    killed = tensorboard_folder(folder, "baseline") / "train" / "events.of.a.killed.run"
    killed.parent.mkdir(parents=True)
    killed.touch()
    flags = ("--experiment=lenet5_extreme_rates", "--tensorboard", f"--output_dir={folder}")
    process = run("reproduce.py", *flags, *SHORT)
    assert process.returncode == 0, process.stderr
    return folder, process, report_in(folder, "lenet5_extreme_rates")


def test_says_what_is_done_and_what_was_changed(finished):
    _, process, report = finished
    start = process.stdout.splitlines()[:3]
    assert start[0].startswith("lenet5_extreme_rates (Figure 2, right): ")
    assert start[2].startswith("3 runs, 0 of them finished; the others take 15 steps")
    for text in (start[1], report):
        assert "5,000 digits of MNIST instead of MNIST; LeNet-300-100 instead" in text
        assert "1 of 40 epochs" in text
        assert "1 of 5 seeds; rates 0.99" in text


def test_report_is_printed_and_has_the_accuracies_of_the_results(finished):
    folder, process, report = finished
    assert report in process.stdout
    by_method = {
        r["run"]["method"]: f"{100 * r['result']['test_accuracy']:.2f}" for r in lines_of(folder)
    }
    rows = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("| 0")]
    assert rows[0][3] == by_method["baseline"]
    assert rows[1][-2:] == [by_method["freezenet"], by_method["snip"]]


def test_the_picture_that_the_report_shows_is_there(finished):
    folder, _, report = finished
    assert "(lenet5_extreme_rates.png)" in report
    picture = folder / f"lenet5_extreme_rates-{CHANGES}" / "lenet5_extreme_rates.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_each_run_has_tensorboard_logs_of_its_own(finished):
    folder = finished[0]
    methods = ("baseline", "freezenet", "snip")
    folders = {tensorboard_folder(folder, method) for method in methods}
    assert set((folder / "tensorboard").iterdir()) == folders
    for logs in folders:  # and that of the run that was killed has no others
        assert len(list(logs.glob("train/events*"))) == 1


def test_other_experiments_take_the_runs_they_share_and_leave_earlier_reports(finished):
    folder, _, first_report = finished
    before = (folder / "results.jsonl").read_bytes()
    flags = ("--experiment=lenet5_sizes,lenet5_rates", f"--output_dir={folder}")
    process = run("reproduce.py", *flags, *SHORT)
    assert process.returncode == 0, process.stderr
    assert "3 runs, 3 of them finished" in process.stdout
    assert (folder / "results.jsonl").read_bytes() == before
    assert report_in(folder, "lenet5_sizes").startswith("## Table 2: ")
    assert report_in(folder, "lenet5_rates").startswith("## Figure S7: ")
    assert (folder / f"lenet5_sizes-{CHANGES}" / "lenet5_sizes.png").is_file()
    assert report_in(folder, "lenet5_extreme_rates") == first_report


def test_a_worker_leaves_the_report_to_the_chief(finished, tmp_path):
    (tmp_path / "results.jsonl").write_bytes((finished[0] / "results.jsonl").read_bytes())
    address = {"KERASTUNER_ORACLE_IP": "127.0.0.1", "KERASTUNER_ORACLE_PORT": "1"}
    flags = ("--experiment=lenet5_extreme_rates", f"--output_dir={tmp_path}", *SHORT)
    process = run("reproduce.py", *flags, **address, KERASTUNER_TUNER_ID="worker")
    assert process.returncode == 0, process.stderr
    assert "3 of them finished" in process.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_list_shows_every_experiment_with_its_work_and_writes_nothing(tmp_path):
    process = run("reproduce.py", "--list", f"--output_dir={tmp_path / 'run'}")
    assert process.returncode == 0, process.stderr
    names = [line.split()[0] for line in process.stdout.splitlines()]
    assert names == ["name", *EXPERIMENTS, "all", "Hours:"]
    assert not (tmp_path / "run").exists()


def test_a_failed_run_is_named_and_the_status_is_not_zero(tmp_path):
    flags = ("--experiment=lenet5_best_run", "--epochs=1", "--seeds=1")
    wrong = ("--dataset=mnist_5k", "--model=vgg16_d")  # whose images are too small
    process = run("reproduce.py", *flags, *wrong, f"--output_dir={tmp_path}")
    assert process.returncode == 1
    line = process.stderr.splitlines()[-1]
    assert line.startswith("reproduce.py: error: 1 of 1 runs have no result. ")
    assert "vgg16_d on mnist_5k, freezenet, q = 0.99" in line
    (report,) = tmp_path.glob("lenet5_best_run-dataset=mnist_5k-model=vgg16_d-*/report.md")
    assert "Runs: 0 of 1 finished" in report.read_text(encoding="utf-8")


def test_a_bad_flag_is_one_line_and_a_status(tmp_path):
    process = run("reproduce.py", "--experiment=lottery", f"--output_dir={tmp_path / 'run'}")
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert line.startswith("reproduce.py: error: experiment ")
    assert all(word in line for word in ("lottery", "lenet5_sizes", "architectures"))
    assert not (tmp_path / "run").exists()
