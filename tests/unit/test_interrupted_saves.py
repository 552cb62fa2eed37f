"""Saves that are killed or that fail leave the old file or the whole new one."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from helpers import same_bits, values_of
from whole_files import whole_files

import keras_freeze as kf

# Keras reads every variable with it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.cases(2),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return whole_files(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.freeze"


NUM_KILLS = 20
# The parent never runs TensorFlow, whose threads would not survive the fork. PyTorch saves slowly
# in a forked process.
KILLED_SAVES = """
    import itertools, os, shutil, signal, sys, time
    import keras, numpy as np
    import keras_freeze as kf

    def model(seed):
        model = keras.Sequential([keras.Input((200,)), keras.layers.Dense(500)])
        rng = np.random.default_rng(seed)
        model.set_weights([rng.normal(size=w.shape) for w in model.get_weights()])
        return model

    def save_for_ever(path, first, written):
        models = [model(0), model(1)]
        for i in itertools.count(first):
            kf.save(models[i % 2], path)
            os.write(written, b".")

    path, num_kills = sys.argv[1], int(sys.argv[2])
    rng = np.random.default_rng(0)
    for i in range(num_kills):
        read, written = os.pipe()
        child = os.fork()
        if not child:
            try:
                save_for_ever(path, i, written)
            finally:
                os._exit(1)
        os.close(written)
        assert os.read(read, 1) == b"."
        time.sleep(rng.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        os.close(read)
        shutil.copy(path, f"{path}.{i}")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_killed_save_leaves_one_of_the_two_whole_files(path):
    command = [sys.executable, "-c", textwrap.dedent(KILLED_SAVES), str(path), str(NUM_KILLS)]
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow"}
    subprocess.run(command, check=True, env=environment)
    saved = [drawn(seed, (200, 500), (500,)) for seed in (0, 1)]
    found = []
    for i in range(NUM_KILLS):
        model = kf.load(path.with_name(f"{path.name}.{i}"), compile=False)
        equal = [all(map(same_bits, values_of(model.variables), values)) for values in saved]
        assert any(equal)
        found.append(equal.index(True))
    assert set(found) == {0, 1}


def drawn(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


@pytest.fixture
def old_file(files, path):
    path.write_bytes(files["seeded"].data)
    return path


def assert_save_fails_and_leaves(path, files):
    with pytest.raises(OSError, match=r"large|full|Permission"):
        kf.save(files["delta"].base, path, include_frozen=True)
    assert path.read_bytes() == files["seeded"].data
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_may_not_grow_leaves_the_old_one(files, old_file):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert_save_fails_and_leaves(old_file, files)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("where", "step"), [(Path, "write_bytes"), (os, "fsync"), (os, "replace")])
def test_a_full_disk_leaves_the_old_file(where, step, files, old_file, monkeypatch):
    def fail(*arguments):
        raise OSError("the disk is full")

    monkeypatch.setattr(where, step, fail, raising=False)
    assert_save_fails_and_leaves(old_file, files)


def test_a_folder_without_write_permission_leaves_the_old_file(files, old_file):
    old_file.parent.chmod(0o500)
    try:
        if os.access(old_file.parent, os.W_OK):
            pytest.skip("this user may write everywhere")
        assert_save_fails_and_leaves(old_file, files)
    finally:
        old_file.parent.chmod(0o700)
