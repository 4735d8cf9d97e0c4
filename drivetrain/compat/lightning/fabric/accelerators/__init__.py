"""Accelerator classes, one per device type."""

from __future__ import annotations

from drivetrain.compat.handed_on import absent_names
from drivetrain.compat.lightning.accelerators import Accelerator as Accelerator
from drivetrain.compat.lightning.accelerators import CPUAccelerator as CPUAccelerator
from drivetrain.compat.lightning.accelerators import CUDAAccelerator as CUDAAccelerator
from drivetrain.compat.lightning.accelerators import MPSAccelerator as MPSAccelerator
from drivetrain.compat.lightning.accelerators import XLAAccelerator as XLAAccelerator
from drivetrain.compat.lightning.accelerators import find_usable_cuda_devices as find_usable_cuda_devices
from drivetrain.compat.lightning.fabric.accelerators.registry import ACCELERATOR_REGISTRY as ACCELERATOR_REGISTRY

__getattr__ = absent_names(__name__)
