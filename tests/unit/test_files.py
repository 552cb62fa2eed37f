"""`replacing`: files that are replaced as a whole keep what belongs to them."""

import os
import socket
import stat
import subprocess
import sys

import keras
import numpy as np
import pytest
from helpers import two_dense_layers

import keras_freeze as kf
from keras_freeze._utils import files
from keras_freeze._utils.files import replacing

posix = pytest.mark.skipif(os.name != "posix", reason="permissions and links of POSIX")


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    return path


def replace(path, text="new"):
    with replacing(path) as temporary:
        temporary.write_text(text)
        return temporary


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


# Permissions


@posix
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o755, 0o444])
def test_a_replaced_file_keeps_its_permissions(mode, target):
    target.chmod(mode)
    replace(target)
    assert (target.read_text(), mode_of(target)) == ("new", mode)


@posix
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_usual_permissions(mask, tmp_path):
    before = os.umask(mask)
    try:
        replace(tmp_path / "file.txt")
    finally:
        os.umask(before)
    assert mode_of(tmp_path / "file.txt") == 0o666 & ~mask


@posix
def test_a_private_file_is_private_while_it_is_written(target):
    target.chmod(0o600)
    with replacing(target) as temporary:
        temporary.write_text("secret")
        assert mode_of(temporary) == 0o600


@posix
def test_permissions_are_kept_by_writers_that_make_the_file_anew(target):
    target.chmod(0o600)
    with replacing(target) as temporary:
        temporary.unlink()
        temporary.write_text("new")
    assert (target.read_text(), mode_of(target)) == ("new", 0o600)


@posix
def test_owner_and_group_are_kept(target):
    try:
        os.chown(target, 12_345, 23_456)
    except PermissionError:
        pytest.skip("only some users may give files away")
    replace(target)
    found = target.stat()
    assert (found.st_uid, found.st_gid, target.read_text()) == (12_345, 23_456, "new")


@posix
def test_another_group_gets_no_more_than_everybody(target, monkeypatch):
    try:
        os.chown(target, -1, 23_456)
    except PermissionError:
        pytest.skip("only some users may give files away")
    target.chmod(0o2664)

    def refuse(*arguments):
        raise PermissionError

    monkeypatch.setattr(os, "chown", refuse)
    replace(target)
    assert (target.read_text(), mode_of(target)) == ("new", 0o644)


@posix
def test_a_saved_network_keeps_the_permissions_of_the_file(tmp_path):
    model = two_dense_layers()
    path = tmp_path / "model.freeze"
    kf.save(model, path)
    path.chmod(0o600)
    kf.save(model, path)
    assert mode_of(path) == 0o600
    assert os.listdir(tmp_path) == ["model.freeze"]


# Links and what is no file


@posix
@pytest.mark.parametrize("relative", [True, False])
def test_a_symbolic_link_stays_and_its_target_is_replaced(relative, target, tmp_path):
    link = tmp_path / "folder" / "link.txt"
    link.parent.mkdir()
    link.symlink_to("../file.txt" if relative else target)
    chain = tmp_path / "chain.txt"
    chain.symlink_to(link)
    replace(chain)
    assert target.read_text() == "new"
    assert link.is_symlink()
    assert chain.is_symlink()
    assert os.listdir(link.parent) == ["link.txt"]


@posix
def test_the_missing_target_of_a_symbolic_link_is_written(tmp_path):
    link = tmp_path / "link.txt"
    link.symlink_to("file.txt")
    replace(link)
    assert (tmp_path / "file.txt").read_text() == "new"
    assert link.is_symlink()


@posix
def test_a_circle_of_symbolic_links_is_an_error(tmp_path):
    link = tmp_path / "link.txt"
    link.symlink_to(link)
    with pytest.raises(OSError, match=r"link\.txt"):
        replace(link)
    assert link.is_symlink()


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    socket.socket(socket.AF_UNIX).bind(str(path))


def link_to_device(path):
    path.symlink_to("/dev/null")


@posix
@pytest.mark.parametrize("make", [make_fifo, make_socket, link_to_device])
@pytest.mark.parametrize("write", [replace, lambda path: kf.save(two_dense_layers(), path)])
def test_what_is_no_file_is_refused_and_stays(make, write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # paths of sockets are short
    path = type(tmp_path)("special")
    make(path)
    before = path.lstat()
    with pytest.raises(ValueError, match=r"ordinary file.*'special'"):
        write(path)
    assert path.lstat().st_ino == before.st_ino
    assert os.listdir() == ["special"]


def test_a_folder_and_a_missing_folder_are_refused(tmp_path):
    with pytest.raises(IsADirectoryError, match="must name a file"):
        replace(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder that exists"):
        replace(tmp_path / "none" / "file.txt")


# Names


@posix
@pytest.mark.parametrize("name", ["n" * 251 + ".txt", "ü" * 125 + ".txt", "n." + "t" * 253])
def test_names_may_be_as_long_as_the_file_system_has_them(name, tmp_path):
    path = tmp_path / name
    for text in ("first", "second"):
        temporary = replace(path, text)
        assert path.read_text() == text
    assert temporary.name.startswith(".")
    assert len(os.fsencode(temporary.name)) <= 255
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["model.weights.h5", "model.keras", "figure.png", "plain"])
def test_the_temporary_name_ends_as_the_name_does(name, tmp_path):
    assert replace(tmp_path / name).name.endswith(f".{name}")


@posix
def test_a_network_is_saved_under_the_longest_name(tmp_path):
    path = tmp_path / ("n" * 248 + ".freeze")
    kf.save(two_dense_layers(), path)
    assert kf.load(path).count_params() == 6 * 8 + 8 + 8 * 3 + 3


def test_a_name_that_is_too_long_is_an_error(tmp_path):
    with pytest.raises(OSError, match=r"too long|Invalid|cannot find"):
        replace(tmp_path / ("n" * 300))
    assert os.listdir(tmp_path) == []


# Processes that were killed

KILLED = """
import os, sys
sys.argv, sys.orig_argv = ["-m"], ["python", "-m", "keras_freeze"]  # imports no Keras
from keras_freeze._utils.files import replacing
with replacing(sys.stdin.readline().strip()) as path:
    path.write_text("half")
    {end}
"""


def start(path, end):
    command = [sys.executable, "-c", KILLED.format(end=end)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdin.write(f"{path}\n")
    process.stdin.flush()
    return process


def hidden(folder):
    return [name for name in os.listdir(folder) if name.startswith(".")]


@posix
def test_what_a_killed_process_leaves_is_removed_by_the_next_one(target, tmp_path):
    assert start(target, "os._exit(9)").wait() == 9
    assert len(hidden(tmp_path)) == 1
    other = tmp_path / "other.txt"
    replace(other)
    assert len(hidden(tmp_path)) == 1  # it belongs to another file
    replace(target)
    assert sorted(os.listdir(tmp_path)) == ["file.txt", "other.txt"]


@posix
def test_what_a_living_process_writes_is_left_alone(target):
    process = start(target, "print('here', flush=True); sys.stdin.readline()")
    assert process.stdout.readline() == "here\n"
    (temporary,) = hidden(target.parent)
    replace(target)
    assert hidden(target.parent) == [temporary]
    process.communicate("\n")
    assert process.returncode == 0
    assert target.read_text() == "half"  # it was the last one to finish
    assert hidden(target.parent) == []


def test_savers_of_one_process_leave_each_other_alone(target):
    with replacing(target) as outer:
        outer.write_text("outer")
        replace(target, "inner")
        assert outer.read_text() == "outer"
    assert target.read_text() == "outer"


@pytest.mark.parametrize(("age", "is_removed"), [(0.0, False), (2 * files._A_DAY, True)])
def test_what_another_machine_writes_is_left_for_a_day(age, is_removed, target, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(files, "_machine", lambda: "deadbeef")
        temporary = files._temporary_beside(target)
    temporary.write_text("theirs")
    monkeypatch.setattr(files.time, "time", lambda: temporary.stat().st_mtime + age)
    replace(target)
    assert temporary.exists() != is_removed


def test_other_hidden_files_are_left_alone(target):
    start_of_name = files._start_of_temporaries(target)
    names = [".hidden", f"{start_of_name}", f"{start_of_name}notes", f".{target.name}.swp"]
    for name in names:
        (target.parent / name).write_text("mine")
    replace(target)
    assert sorted(hidden(target.parent)) == sorted(names)


# What fails


@pytest.mark.parametrize("step", ["fsync", "replace", "open"])
def test_a_disk_that_fails_leaves_the_old_file_and_nothing_else(step, target, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fail)
        with pytest.raises(OSError, match="No space left"):
            replace(target)
    assert target.read_text() == "old"
    assert os.listdir(target.parent) == ["file.txt"]


@posix
def test_a_folder_that_is_read_only_leaves_the_old_file(target):
    target.parent.chmod(0o500)
    try:
        if os.access(target.parent, os.W_OK):
            pytest.skip("this user may write everywhere")
        with pytest.raises(PermissionError, match=r"file\.txt"):
            replace(target)
        assert target.read_text() == "old"
        assert os.listdir(target.parent) == ["file.txt"]
    finally:
        target.parent.chmod(0o700)


# A base


def same_path(path):
    return path


def relative(path):
    return os.path.relpath(path)


def symbolic_link(path):
    link = path.with_name("symbolic.freeze")
    link.symlink_to(path)
    return link


def hard_link(path):
    link = path.with_name("hard.freeze")
    link.hardlink_to(path)
    return link


@pytest.mark.cases(1)
@posix
@pytest.mark.parametrize("name", [same_path, relative, symbolic_link, hard_link, str])
@pytest.mark.parametrize("swapped", [False, True])
def test_saving_over_the_base_is_refused(name, swapped, tmp_path, monkeypatch):
    path = tmp_path / "base.freeze"
    base = two_dense_layers()
    kf.save(base, path, include_frozen=True)
    monkeypatch.chdir(tmp_path)
    before = path.read_bytes()
    target, given = (path, name(path)) if swapped else (name(path), path)
    with pytest.raises(ValueError, match="must not be the file of the base"):
        kf.save(two_dense_layers(1), target, base=given)
    assert path.read_bytes() == before


def test_a_keras_file_may_be_a_base_but_not_the_target(tmp_path):
    path = tmp_path / "base.keras"
    base = two_dense_layers()
    base.save(path)
    with pytest.raises(ValueError, match="must not be the file of the base"):
        kf.save(base, path, base=path)
    kf.save(base, tmp_path / "delta.freeze", base=path)
    loaded = kf.load(tmp_path / "delta.freeze", base=path)
    expected = [keras.ops.convert_to_numpy(v) for v in base.variables]
    for value, variable in zip(expected, loaded.variables, strict=True):
        assert np.array_equal(value, keras.ops.convert_to_numpy(variable))
