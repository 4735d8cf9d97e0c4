"""Accelerator classes, one per device type."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.accelerators import (
    Accelerator,
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
    XLAAccelerator,
    find_usable_cuda_devices,
)
from drivetrain.compat.lightning.fabric.accelerators.registry import ACCELERATOR_REGISTRY as AcceleratorRegistry

__all__ = [
    "Accelerator",
    "AcceleratorRegistry",
    "CPUAccelerator",
    "CUDAAccelerator",
    "MPSAccelerator",
    "XLAAccelerator",
    "find_usable_cuda_devices",
]

__getattr__ = absent_names(__name__)
