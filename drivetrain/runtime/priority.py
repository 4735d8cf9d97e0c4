"""Which of a process's threads the system runs first."""

from __future__ import annotations

import os
import sys
import threading

BACKGROUND = 10
"""Niceness of background work: about a tenth of a core where others want all of it, and all that they leave."""


def run_in_background(niceness: int = BACKGROUND) -> bool:
    """Let the threads of training have the processor before the calling thread, and the threads that it starts.

    The calling thread keeps this until it ends: an ordinary user may not take it back.

    Args:
        niceness: As `nice(1)` counts it, from 0 to 19.

    Returns:
        Whether it is so now. Only Linux gives threads priorities of their own.
    """
    if sys.platform != "linux":
        return False
    thread = threading.get_native_id()
    try:
        if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
    except OSError:  # a sandbox that forbids it
        return False
    return True
