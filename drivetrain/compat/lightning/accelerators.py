"""Kinds of devices as Lightning's objects: whether there are any, and how many."""

from __future__ import annotations

import torch

from drivetrain.compat.lightning.instances import KindOfDevice
from drivetrain.runtime.devices import available_device_kinds
from drivetrain.runtime.errors import ConfigurationError


class Accelerator(metaclass=KindOfDevice):
    """A kind of device; `Trainer(accelerator=...)` takes an object of it for its name.

    `isinstance(trainer.accelerator, CUDAAccelerator)` is true where the Trainer runs on that kind of device.

    Attributes:
        kind: The name of the kind in drivetrain.
    """

    kind = "cpu"

    @classmethod
    def is_available(cls) -> bool:
        """Whether this machine has one."""
        return any(each.name == cls.kind for each in available_device_kinds())

    @classmethod
    def auto_device_count(cls) -> int:
        """How many of them there are."""
        return next((each.count() for each in available_device_kinds() if each.name == cls.kind), 0)

    @classmethod
    def get_parallel_devices(cls, devices: int | list[int]) -> list[torch.device]:
        """The devices of these numbers, or so many.

        Args:
            devices: Numbers of devices, or how many.
        """
        numbers = range(devices) if isinstance(devices, int) else devices
        return [torch.device("cpu") if cls.kind == "cpu" else torch.device(cls.kind, index) for index in numbers]


class CPUAccelerator(Accelerator):
    """The CPU."""

    kind = "cpu"

    @classmethod
    def auto_device_count(cls) -> int:
        """One process, unless more are asked for."""
        return 1


class CUDAAccelerator(Accelerator):
    """GPUs."""

    kind = "cuda"


class MPSAccelerator(Accelerator):
    """Apple's GPU."""

    kind = "mps"


class XLAAccelerator(Accelerator):
    """TPUs."""

    kind = "xla"


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """The numbers of this machine's GPUs.

    Args:
        num_devices: How many are wanted; -1 for all.

    Raises:
        ConfigurationError: There are not so many.
    """
    count = CUDAAccelerator.auto_device_count()
    if num_devices > count:
        raise ConfigurationError(f"find_usable_cuda_devices({num_devices}): there are {count} GPUs. Ask for fewer.")
    return list(range(count if num_devices < 0 else num_devices))
