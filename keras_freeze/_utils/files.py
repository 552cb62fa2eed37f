"""Atomic writes: files that are replaced completely or not at all."""

import contextlib
import hashlib
import os
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_LONGEST_NAME = 255  # bytes, where the file system does not say
_A_DAY = 86_400.0  # seconds


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path beside `path`, of the same suffix, that replaces it when the block ends.

    What was at `path` stays there if the block raises or the process dies in it. A file that is
    replaced keeps its permissions, and its owner and group where that is permitted; of a symbolic
    link the target is replaced. What a killed process has left beside `path` is removed.

    Raises:
        OSError: if the file cannot be written; `IsADirectoryError` for a folder.
        ValueError: for a device, a FIFO or a socket.

    Example:

    ```python
    with replacing("curves.png") as path:
        figure.savefig(path)
    ```
    """
    check_replaceable(path)
    target = Path(os.path.realpath(path))
    remove_leftovers(target)
    replaced = target.stat() if target.exists() else None
    temporary = _temporary_beside(target)
    try:
        _create(temporary, replaced, path)
        yield temporary
        _write_to_disk(temporary, os.O_RDWR)
        if replaced is not None:
            _take_over(target, temporary, replaced)
        os.replace(temporary, target)
        with contextlib.suppress(OSError):  # not every system does that for a folder
            _write_to_disk(target.parent, os.O_RDONLY)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_replaceable(path: str | os.PathLike[str], name: str = "path") -> None:
    """Check that a file can be written or replaced at a path.

    Raises:
        FileNotFoundError: if its folder does not exist.
        IsADirectoryError: if it is a folder.
        ValueError: if it is a device, a FIFO or a socket.
    """
    target = os.path.realpath(path)
    if not os.path.isdir(os.path.dirname(target)):
        raise FileNotFoundError(
            f"Argument `{name}` names no folder that exists: {os.fspath(path)!r}"
        )
    try:
        mode = os.stat(target).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(
            f"Argument `{name}` must name a file. Received: the folder {os.fspath(path)!r}"
        )
    if not stat.S_ISREG(mode):
        raise ValueError(
            f"Argument `{name}` must name an ordinary file, or one that is still to be written: a "
            "device, a FIFO or a socket cannot be replaced. "
            f"Received: {name}={os.fspath(path)!r}"
        )


def is_same_file(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Return whether two paths lead to one existing file, by whatever links."""
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)


def _create(temporary: Path, replaced: os.stat_result | None, path: str | os.PathLike[str]) -> None:
    """Create an empty file that nobody may read who may not read the one that it replaces."""
    mode = 0o666 if replaced is None else stat.S_IMODE(replaced.st_mode) & 0o700 | 0o600
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _take_over(target: Path, temporary: Path, replaced: os.stat_result) -> None:
    """Give a file the owner, group and permissions of the one that it replaces."""
    if os.name != "posix":
        temporary.chmod(stat.S_IMODE(replaced.st_mode))
        return
    mode = stat.S_IMODE(replaced.st_mode)
    for owner, group in ((replaced.st_uid, replaced.st_gid), (-1, replaced.st_gid)):
        with contextlib.suppress(OSError):  # only some may give files away
            os.chown(temporary, owner, group)
            break
    own = temporary.stat()
    if own.st_uid != replaced.st_uid:
        mode &= ~stat.S_ISUID
    if own.st_gid != replaced.st_gid:  # another group gets no more than everybody
        mode &= ~(stat.S_ISGID | stat.S_IRWXG) | (mode & stat.S_IRWXO) << 3
    temporary.chmod(mode)
    with contextlib.suppress(AttributeError, OSError):  # Linux has lists of further users
        access = os.getxattr(target, "system.posix_acl_access")
        os.setxattr(temporary, "system.posix_acl_access", access)


def _write_to_disk(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# The name of a temporary file begins with the file that it is to replace, the machine and the
# process, so that the next one to replace that file knows whether it is left from a dead process.


def _temporary_beside(target: Path) -> Path:
    start = f"{_start_of_temporaries(target)}{_machine()}-{os.getpid()}-{uuid.uuid4().hex[:8]}."
    most = _longest_name(target.parent) - len(start)
    end = os.fsencode(target.name)[-most:].decode(errors="ignore")
    return target.with_name(start + end)


def _start_of_temporaries(target: Path) -> str:
    return f".kf-{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:8]}-"


def _longest_name(folder: Path) -> int:
    try:
        return min(os.pathconf(folder, "PC_NAME_MAX"), _LONGEST_NAME)
    except (AttributeError, OSError, ValueError):  # not on Windows
        return _LONGEST_NAME


def _machine() -> str:
    """Return what identifies a running machine or container, in which process ids are unique."""
    known = [os.uname().nodename] if hasattr(os, "uname") else []
    with contextlib.suppress(OSError):  # only Linux has these
        known.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        known.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(known).encode(errors="replace")).hexdigest()[:8]


def remove_leftovers(target: Path) -> None:
    """Remove what killed processes have left that were to write a file."""
    start = _start_of_temporaries(target)
    with contextlib.suppress(OSError):
        for name in os.listdir(target.parent):
            if name.startswith(start):
                with contextlib.suppress(OSError):  # somebody else's, or removed by another process
                    leftover = target.with_name(name)
                    if _is_left_over(leftover, name.removeprefix(start)):
                        leftover.unlink()


def _is_left_over(path: Path, rest: str) -> bool:
    machine, _, rest = rest.partition("-")
    process = rest.partition("-")[0]
    if not (process.isascii() and process.isdigit()):
        return False
    if machine == _machine() and os.name == "posix":
        return not _is_alive(int(process))
    # A process of another machine that shares the folder, or from before a restart.
    return time.time() - path.stat().st_mtime > _A_DAY


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's
        return True
    return True
