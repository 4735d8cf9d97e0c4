"""The cores of this machine, and each process's share of them. Imports no torch."""

from __future__ import annotations

import os

import psutil

from drivetrain.launch.options import LaunchOptions

THREADS_VARIABLE = "OMP_NUM_THREADS"


def available_cores() -> int:
    """Physical cores that this process may use, within its affinity mask and its container's quota."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def threads_per_process(options: LaunchOptions, local_processes: int) -> int | None:
    """Threads that each process is given; None where the environment sets it, or it takes every core.

    Args:
        options: What was asked for.
        local_processes: Processes on this machine.
    """
    if options.num_cpu_threads_per_process is not None:
        return options.num_cpu_threads_per_process
    if THREADS_VARIABLE in os.environ or local_processes == 1:
        return None
    # Torch takes every core for each process, which is far slower than an equal share.
    return max(1, available_cores() // local_processes)
