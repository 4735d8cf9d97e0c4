"""`CPUAccelerator`, and the load of the machine."""

from __future__ import annotations

import psutil

from drivetrain.compat.lightning.accelerators import CPUAccelerator

__all__ = ["CPUAccelerator", "get_cpu_stats"]

_CPU_VM_PERCENT = "cpu_vm_percent"
_CPU_PERCENT = "cpu_percent"
_CPU_SWAP_PERCENT = "cpu_swap_percent"


def get_cpu_stats() -> dict[str, float]:
    """Return how much of the processors, the memory and the swap space is in use, in percent."""
    return {
        _CPU_VM_PERCENT: psutil.virtual_memory().percent,
        _CPU_PERCENT: psutil.cpu_percent(),
        _CPU_SWAP_PERCENT: psutil.swap_memory().percent,
    }
