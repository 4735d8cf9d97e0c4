"""Numbers of bytes as text, such as `"24GB"` and `1.24 GiB`, and what this machine and this process have of them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from drivetrain.runtime.errors import ConfigurationError

_DECIMAL = {name: 1000**power for power, name in enumerate(("", "K", "M", "G", "T"))}
_BINARY = {f"{name}I": 1024**power for power, name in enumerate(("", "K", "M", "G", "T")) if name}
_NAMES = ("B", "KiB", "MiB", "GiB", "TiB")


def parse_bytes(size: int | str) -> int:
    """Bytes, from a number or from text such as `"5GB"` or `"5G"` (of 1000 MB) or `"500MiB"` (of 1024 KiB).

    The case of letters has no meaning, but for `"Gb"` and its like: these are bits.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([KMGT]?I?)B?\s*", str(size), re.IGNORECASE)
    units = _DECIMAL | _BINARY
    if match is None or match[2].upper() not in units:
        raise ConfigurationError(f"{size!r} is no size; give bytes, or text such as '5GB' or '500MiB'.")
    bits = re.search(r"[KMGT]i?b\s*$", str(size)) is not None  # "5Gb" means bits
    return int(float(match[1]) * units[match[2].upper()]) // (8 if bits else 1)


def as_bytes(count: float) -> str:
    """A number of bytes with three digits or so, such as `1.24 GiB` (of 1024 MiB); `parse_bytes` reads it."""
    for unit in _NAMES[:-1]:
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} {_NAMES[-1]}"


_GROUP = Path("/sys/fs/cgroup")


def host_memory() -> tuple[int, int]:
    """Bytes of memory that this process can still take and of all there is: the machine's, or its container's."""
    import psutil

    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    try:
        limit = int((_GROUP / "memory.max").read_text())
        used = int((_GROUP / "memory.current").read_text())
    except (OSError, ValueError):  # no container, no limit ("max"), or another system
        return free, total
    return min(free, max(0, limit - used)), min(total, limit)


# This process as the system sees it: what memory it takes, and when it was started


def resident_bytes() -> int:
    """The resident memory of this process.

    On Linux it is read from a file. Elsewhere it is from psutil, whose import alone takes 20 ms.
    """
    found = _read("/proc/self/statm")
    if found:
        return int(found.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.Process().memory_info().rss)


def _read(path: str) -> bytes:
    """What a small file of the kernel's holds; nothing where there is none."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


# How many cores of the processor a process has


def cores_of_process(processes_here: int = 1) -> int:
    """The processor's cores for each process of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes_here)
