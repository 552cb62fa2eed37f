"""Runs that were interrupted go on, and end as if they had not been."""

import json
import shutil

import keras
import numpy as np
import pytest

from keras_freeze.paper import backup, datasets
from keras_freeze.paper.backup import Backup, Interrupted
from keras_freeze.paper.runs import Results, Run
from keras_freeze.paper.training import prepare
from keras_freeze.paper.training_callbacks import KeepBest
from keras_freeze.paper.tuning import sweep

EPOCHS = 4


@pytest.fixture(autouse=True)
def after_each_epoch(monkeypatch):
    monkeypatch.setattr(backup, "_SECONDS_BETWEEN_BACKUPS", 0.0)


class Interrupt(keras.callbacks.Callback):
    """Interrupts training in the middle of an epoch, from 0; notes which are begun."""

    def __init__(self, epoch=None):
        super().__init__()
        self.epoch, self.begun = epoch, []

    def on_epoch_begin(self, epoch, logs=None):
        self.begun.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        if self.begun[-1] == self.epoch:
            raise KeyboardInterrupt


def setup_of(method="freezenet", freeze_rate=0.99, **settings):
    settings = {"epochs": EPOCHS, "seed": 1, "l2": 0.01, "steps_per_epoch": 30, **settings}
    return prepare("mnist_5k", "lenet_300_100", method, freeze_rate, **settings)


def interrupted(path, *, epoch=2, **settings):
    with pytest.raises(KeyboardInterrupt):
        setup_of(**settings).fit([Interrupt(epoch)], verbose=False, backup=path)
    assert path.exists()


def bits_of(network):
    values = [*network.weights, *network.optimizer.variables]
    return [keras.ops.convert_to_numpy(value).tobytes() for value in values]


def check_same(result, expected):
    assert result.history == expected.history
    assert result.best_epoch == expected.best_epoch
    assert result.test_accuracy == expected.test_accuracy
    assert bits_of(result.model) == bits_of(expected.model)


CASES = [
    {"method": "freezenet-wd", "freeze_rate": 0.9},
    {"method": "snip", "freeze_rate": 0.9, "reinitializer": "xavier_normal"},
    {"method": "baseline", "steps_per_epoch": None},
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("settings", CASES, ids=lambda settings: settings["method"])
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, settings):
    expected = setup_of(**settings).fit(verbose=False)
    path = tmp_path / "run.npz"
    interrupted(path, epoch=1, **settings)
    interrupted(path, epoch=2, **settings)
    observer = Interrupt()
    result = setup_of(**settings).fit([observer], verbose=False, backup=path)
    assert observer.begun == [2, 3]
    check_same(result, expected)


def test_the_seconds_of_all_parts_are_counted(tmp_path, monkeypatch):
    path = tmp_path / "run.npz"
    interrupted(path)
    _change_about(path, lambda about: about["before"].update(seconds=1e6))
    assert 1e6 < setup_of().fit(verbose=False, backup=path).seconds < 1.1e6


def _cut_off(path):
    path.write_bytes(path.read_bytes()[:-100])


def _no_archive(path):
    path.write_bytes(b"nothing of the kind")


def _empty(path):
    path.write_bytes(b"")


def _damaged(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _of_another_seed(path):
    _change_about(path, lambda about: about["of"]["run"].update(seed=2))


def _of_another_version(path):
    _change_about(path, lambda about: about["of"]["versions"].update(keras="3.0"))


def _of_another_mask(path):
    _change_about(path, lambda about: about["of"].update(mask="0" * 40))


def _without_an_entry(path):
    with np.load(path) as file:
        arrays = dict(file)
    del arrays["weights/0"]
    np.savez(path, **arrays)


def _change_about(path, change):
    with np.load(path) as file:
        arrays = dict(file)
    about = json.loads(str(arrays["about"]))
    change(about)
    np.savez(path, **{**arrays, "about": np.array(json.dumps(about))})


@pytest.fixture(scope="module")
def file_of_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backup, "_SECONDS_BETWEEN_BACKUPS", 0.0)
        interrupted(path, epoch=1)
    return path


@pytest.fixture(scope="module")
def setup():
    return setup_of()


@pytest.mark.parametrize(
    "spoil",
    [
        _cut_off,
        _no_archive,
        _empty,
        _damaged,
        _of_another_seed,
        _of_another_version,
        _of_another_mask,
        _without_an_entry,
    ],
)
def test_what_a_run_cannot_go_on_from_is_warned_of(tmp_path, caplog, file_of_run, setup, spoil):
    path = tmp_path / "run.npz"
    shutil.copy(file_of_run, path)
    spoil(path)
    best, before = KeepBest(), bits_of(setup.network)
    assert Backup(path, setup.run, setup.network, best).restore() == Interrupted()
    assert "starts again" in caplog.text
    assert str(path) in caplog.text
    assert bits_of(setup.network) == before
    assert best.weights is None


def test_the_same_run_goes_on(file_of_run):
    setup, best = setup_of(), KeepBest()
    found = Backup(file_of_run, setup.run, setup.network, best).restore()
    assert found.epochs == best.epoch == 1
    assert found.history["val_accuracy"] == [best.accuracy]
    assert int(setup.network.optimizer.iterations) == 30
    for value, of_best in zip(setup.network.get_weights(), best.weights, strict=True):
        assert value.tobytes() == of_best.tobytes()


def test_a_backup_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    expected = setup_of().fit(verbose=False)
    check_same(setup_of().fit(verbose=False, backup=tmp_path / "missing" / "run.npz"), expected)
    assert "no new backup" in caplog.text


def test_a_run_whose_mask_moves_has_no_backup(tmp_path):
    path = tmp_path / "run.npz"
    setup_of(schedule="set").fit(verbose=False, backup=path)
    assert not path.exists()


@pytest.mark.parametrize("augment", [False, True])
def test_passes_whose_first_batch_is_read_count(augment):
    def load():
        return datasets.load("mnist_5k", augment=augment, seed=3)

    whole = load()
    for _ in range(3):
        expected = [x.numpy() for x, _ in whole]
    skipping = load()
    for _ in range(2):
        next(iter(skipping))
    for batch, (x, _) in zip(expected, skipping, strict=True):
        assert batch.tobytes() == x.numpy().tobytes()


# Sweeps


def execute_interrupted(monkeypatch, epoch):
    """Let runs be interrupted in this epoch; return the epochs that they begin."""
    observer = Interrupt(epoch)
    fit = keras.Model.fit

    def fit_and_interrupt(self, *args, callbacks, **kwargs):
        return fit(self, *args, callbacks=[*callbacks, observer], **kwargs)

    monkeypatch.setattr(keras.Model, "fit", fit_and_interrupt)
    return observer.begun


def test_a_sweep_goes_on_in_the_middle_of_a_run(tmp_path, monkeypatch, capsys):
    runs = [
        Run(
            "mnist_5k",
            "lenet_300_100",
            "freezenet",
            0.99,
            seed=seed,
            epochs=EPOCHS,
            steps_per_epoch=20,
        )
        for seed in range(2)
    ]
    expected = sweep(runs, tmp_path / "expected", verbose=False)
    assert [path.name for path in (tmp_path / "expected").iterdir()] == ["results.jsonl"]
    folder = tmp_path / "interrupted"
    with monkeypatch.context() as patch:
        execute_interrupted(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            sweep(runs, folder, verbose=False)
    assert len(list(folder.glob("unfinished-*.npz"))) == 1
    begun = execute_interrupted(monkeypatch, None)
    results = sweep(runs, folder)
    assert begun == [2, 3, 0, 1, 2, 3]
    going_on = [line for line in capsys.readouterr().err.splitlines() if "going on" in line]
    assert going_on == [f"{runs[0].label}: going on from its backup"]
    assert [path.name for path in folder.iterdir()] == ["results.jsonl"]
    for run in runs:
        differing = {"seconds"}
        found, wanted = (
            {k: v for k, v in each[run]["result"].items() if k not in differing}
            for each in (results, expected)
        )
        assert found == wanted
    assert len(Results(folder / "results.jsonl")) == 2


def test_a_run_with_more_callbacks_starts_again(tmp_path, monkeypatch):
    runs = [Run("mnist_5k", "lenet_300_100", "freezenet", 0.99, epochs=EPOCHS, steps_per_epoch=20)]
    execute_interrupted(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        sweep(runs, tmp_path, callbacks_of=lambda run: [Interrupt()], verbose=False)
    assert list(tmp_path.iterdir()) == []
