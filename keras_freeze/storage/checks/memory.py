"""How much memory a `.freeze` file may take: by default a quarter of the free memory."""

import ctypes
import os
import sys
from pathlib import Path

from keras_freeze.storage.errors import FreezeFileError

_UNKNOWN_MEMORY = 1 << 32
_MEMORY = Path("/proc/meminfo")
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Return the memory in bytes that this process can still allocate, as the system reports it."""
    found = (_linux_memory(), _control_group_memory(), _posix_memory(), _windows_memory())
    return min((size for size in found if size is not None), default=_UNKNOWN_MEMORY)


def limit_of(max_bytes: int | None) -> int:
    """Return an argument `max_bytes`; for None a quarter of the free memory in bytes."""
    return free_memory() // 4 if max_bytes is None else max_bytes


def check_announced(needed: int, max_bytes: int | None) -> None:
    """Raise FreezeFileError if variables of this size in bytes are larger than the limit."""
    limit = limit_of(max_bytes)
    if needed > limit:
        raise FreezeFileError(
            f"The variables of the file take {needed:,} bytes, more than the limit of {limit:,} "
            "bytes (by default a quarter of the free memory). If you expect this size and trust "
            "the file, use `load(path, max_bytes=...)`."
        )


def _linux_memory() -> int | None:
    try:
        return 1024 * _fields(_MEMORY)["MemAvailable:"]
    except (OSError, KeyError, ValueError):
        return None


def _control_group_memory() -> int | None:
    try:
        most = int((_CONTROL_GROUP / "memory.max").read_text())
        used = int((_CONTROL_GROUP / "memory.current").read_text())
        cached = _fields(_CONTROL_GROUP / "memory.stat").get("inactive_file", 0)
        return max(most - used + cached, 0)
    except (OSError, ValueError):  # no limit is "max"
        return None


def _fields(path: Path) -> dict[str, int]:
    """Return the lines of a file that have a name and a number, and perhaps a unit."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _posix_memory() -> int | None:
    if _MEMORY.exists():  # which counts caches as free
        return None
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf(name)
        except (AttributeError, ValueError, OSError):
            continue
    return None


def _windows_memory() -> int | None:
    if sys.platform != "win32":
        return None
    status = (ctypes.c_uint64 * 8)()
    ctypes.cast(status, ctypes.POINTER(ctypes.c_uint32))[0] = ctypes.sizeof(status)
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return int(status[2])  # ullAvailPhys, after two 32-bit fields and ullTotalPhys
