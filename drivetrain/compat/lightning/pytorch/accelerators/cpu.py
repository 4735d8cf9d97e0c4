"""`CPUAccelerator` and the usage statistics of the machine."""

from __future__ import annotations

from drivetrain.compat.lightning.accelerators import CPUAccelerator, get_cpu_stats

__all__ = ["CPUAccelerator", "get_cpu_stats"]

_CPU_VM_PERCENT = "cpu_vm_percent"
_CPU_PERCENT = "cpu_percent"
_CPU_SWAP_PERCENT = "cpu_swap_percent"
