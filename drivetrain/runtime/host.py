"""Properties of this process and its machine: resident memory, CPU cores, and byte counts as text."""

from __future__ import annotations

import os
import re
from pathlib import Path

from drivetrain.runtime.errors import ConfigurationError

_DECIMAL = {name: 1000**power for power, name in enumerate(("", "K", "M", "G", "T"))}
_BINARY = {f"{name}I": 1024**power for power, name in enumerate(("", "K", "M", "G", "T")) if name}
_NAMES = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_bytes(size: int | str) -> int:
    """Convert a size such as `"5GB"` or `"500MiB"` to a number of bytes.

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
    """Return the available and the total memory of the host in bytes."""
    import psutil

    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    try:
        # Files of cgroup v2, which contain the container's limit.
        limit = int((_GROUP / "memory.max").read_text())
        used = int((_GROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, no limit ("max"), or another system
        return free, total
    return min(free, max(0, limit - used)), min(total, limit)


# Memory and start time of processes


def resident_bytes() -> int:
    """Return the resident memory (RSS) of this process in bytes.

    On Linux it is read from a file, because importing psutil takes 20 ms.
    """
    found = _read_kernel_file("/proc/self/statm")
    if found:
        return int(found.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.Process().memory_info().rss)


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


def cpu_times() -> tuple[float, float]:
    """Return the seconds that all CPUs together have spent on work, and the sum of their busy and idle seconds.

    Only differences of two results are meaningful. On Linux they are read from a file, without psutil.
    """
    found = _read_kernel_file("/proc/stat").split(b"\n", 1)[0].split()[1:9]
    if found:
        user, nice, system, idle, waiting, *rest = map(float, found)
        busy = user + nice + system + sum(rest)
        return busy, busy + idle + waiting
    import psutil

    times = psutil.cpu_times()
    return sum(times) - times.idle, sum(times)


def cores_of_process(processes_here: int = 1) -> int:
    """Return the number of CPU cores per process if `processes_here` processes share this machine."""
    # The affinity mask counts only the cores that a scheduler has granted.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes_here)
