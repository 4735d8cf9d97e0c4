"""How many cores of the processor a process has."""

from __future__ import annotations

import os


def cores_of_process(processes_here: int = 1) -> int:
    """The processor's cores for each process of this machine.

    Args:
        processes_here: Processes of the run on this machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes_here)
