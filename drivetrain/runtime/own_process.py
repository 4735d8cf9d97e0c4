"""This process as the system sees it: what memory it takes, and when it was started."""

from __future__ import annotations

import os
import time


def resident_bytes() -> int:
    """The resident memory of this process.

    On Linux it is read from a file. Elsewhere it is from psutil, whose import alone takes 20 ms.
    """
    found = _read("/proc/self/statm")
    if found:
        return int(found.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import psutil

    return int(psutil.Process().memory_info().rss)


def started_at() -> float:
    """When this process was started, in seconds since 1970, to a second of what psutil has for it."""
    found = _read("/proc/self/stat")
    if found:
        ticks = int(found.rpartition(b")")[2].split()[19])  # since the machine was started; names hold any character
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        return round(booted + ticks / os.sysconf("SC_CLK_TCK"), 2)  # a tick is a hundredth
    import psutil

    return float(psutil.Process().create_time())


def started_since_boot(pid: int | str = "self") -> float | None:
    """Return when a process was started, in seconds since the machine was; None if that is not known.

    Unlike a time of day it stays the same when the clock is set.

    Args:
        pid: The number of the process; this one if it is `"self"`.
    """
    found = _read(f"/proc/{pid}/stat")
    return int(found.rpartition(b")")[2].split()[19]) / os.sysconf("SC_CLK_TCK") if found else None


def boot_id() -> str:
    """Return what the kernel names this run of the machine by; empty if it has no such name."""
    return _read("/proc/sys/kernel/random/boot_id").decode().strip()


def is_alive(pid: int, started: float) -> bool:
    """Return whether the process with a number is the one that was started then, and has not ended.

    Args:
        pid: The number.
        started: What `started_since_boot` returned in it; or its start in seconds since 1970, as psutil has it.
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
        return True  # somebody else's, which is there
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False


_TIMES_OF_DAY = 1e9
"""Seconds since 1970 are more than this, and no machine has run for 30 years."""


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
