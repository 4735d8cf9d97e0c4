"""`CUDAAccelerator`."""

from __future__ import annotations

from drivetrain.compat.lightning.accelerators import CUDAAccelerator, find_usable_cuda_devices

__all__ = ["CUDAAccelerator", "find_usable_cuda_devices"]
