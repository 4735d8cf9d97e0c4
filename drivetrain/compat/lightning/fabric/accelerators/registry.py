"""Registry of accelerator classes by name."""

from __future__ import annotations

from drivetrain.compat.lightning.accelerators import (
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
    XLAAccelerator,
)
from drivetrain.compat.lightning.registry import AcceleratorRegistry

__all__ = ["ACCELERATOR_REGISTRY"]

ACCELERATOR_REGISTRY = AcceleratorRegistry()
for _name, _kind in {
    "cpu": CPUAccelerator,
    "cuda": CUDAAccelerator,
    "mps": MPSAccelerator,
    "tpu": XLAAccelerator,
}.items():
    ACCELERATOR_REGISTRY.register(_name, _kind, description=_kind.__name__)
