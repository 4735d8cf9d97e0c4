"""Properties of this process and its machine: memory, start time, CPU cores, and byte counts as text."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from drivetrain.runtime.errors import ConfigurationError

_DECIMAL = {name: 1000**power for power, name in enumerate(("", "K", "M", "G", "T"))}
_BINARY = {f"{name}I": 1024**power for power, name in enumerate(("", "K", "M", "G", "T")) if name}
_NAMES = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_bytes(size: int | str) -> int:
    """Parse a number of bytes from an int or from text such as `"5GB"` (decimal) or `"500MiB"` (binary units).

    Case does not matter, except that a lower-case `b`, as in `"5Gb"`, means bits.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([KMGT]?I?)B?\s*", str(size), re.IGNORECASE)
    units = _DECIMAL | _BINARY
    if match is None or match[2].upper() not in units:
        raise ConfigurationError(f"{size!r} is not a size. Use a number of bytes, or text such as '5GB' or '500MiB'.")
    bits = re.search(r"[KMGT]i?b\s*$", str(size)) is not None  # "5Gb" means bits
    return int(float(match[1]) * units[match[2].upper()]) // (8 if bits else 1)


def as_bytes(count: float) -> str:
    """Format a number of bytes in binary units, such as `1.24 GiB`."""
    for unit in _NAMES[:-1]:
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} {_NAMES[-1]}"


_GROUP = Path("/sys/fs/cgroup")


def host_memory() -> tuple[int, int]:
    """Return the available and the total memory in bytes, of the machine or of its container."""
    import psutil

    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    try:
        limit = int((_GROUP / "memory.max").read_text())
        used = int((_GROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, no limit ("max"), or another system
        return free, total
    return min(free, max(0, limit - used)), min(total, limit)


# Memory and start time of processes


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes.

    On Linux it is read from a file, because importing psutil takes 20 ms.
    """
    found = _read_kernel_file("/proc/self/statm")
    if found:
        return int(found.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.Process().memory_info().rss)


def started_at() -> float:
    """Return the time at which this process started, in seconds since 1970, to within a second of psutil's value."""
    found = _read_kernel_file("/proc/self/stat")
    if found:
        ticks = int(found.rpartition(b")")[2].split()[19])  # since boot; the name in brackets may hold any character
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return round(booted + ticks / os.sysconf("SC_CLK_TCK"), 2)  # a tick is a hundredth
    import psutil

    return float(psutil.Process().create_time())


def started_since_boot(pid: int | str = "self") -> float | None:
    """Return the seconds between the machine's boot and a process's start, or None if unknown.

    Unlike a time of day, this value does not change when the clock is set.
    """
    found = _read_kernel_file(f"/proc/{pid}/stat")
    return int(found.rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK") if found else None


def boot_id() -> str:
    """Return the kernel's identifier of the current boot, or an empty string if there is none."""
    return _read_kernel_file("/proc/sys/kernel/random/boot_id").decode().strip()


def is_alive(pid: int, started: float) -> bool:
    """Return True if the process with this `pid` started at the given time and is still running.

    `started` is a value of `started_at` or `started_since_boot`.
    """
    import psutil

    try:
        process = psutil.Process(pid)
        if started < _TIMES_OF_DAY:
            same = started_since_boot(pid) == started
        else:
            same = abs(process.create_time() - started) < 2.0  # clocks are adjusted
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True  # another user's process, which exists
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False


_TIMES_OF_DAY = 1e9
"""Limit in seconds above which a start time counts from 1970, and below which from the machine's boot."""


def _read_kernel_file(path: str) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


# CPU cores


def cores_of_process(processes_here: int = 1) -> int:
    """Return the number of CPU cores per process on this machine, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes_here)
