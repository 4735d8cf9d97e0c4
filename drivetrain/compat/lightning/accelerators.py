"""Lightning's accelerator classes: device types with their availability and count."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.compat.instances import KindOfDevice
from drivetrain.runtime.devices import available_device_kinds
from drivetrain.runtime.errors import ConfigurationError


class Accelerator(metaclass=KindOfDevice):
    """Device type. `Trainer(accelerator=...)` accepts an instance in place of the type's name.

    `isinstance(trainer.accelerator, CUDAAccelerator)` is True if the Trainer runs on a CUDA device.

    Attributes:
        kind: Name of the device type in drivetrain.
    """

    kind = "cpu"

    @classmethod
    def is_available(cls) -> bool:
        """Return True if this machine has a device of this type."""
        return any(each.name == cls.kind for each in available_device_kinds())

    @classmethod
    def auto_device_count(cls) -> int:
        """Return the number of devices of this type."""
        return next((each.count() for each in available_device_kinds() if each.name == cls.kind), 0)

    @classmethod
    def name(cls) -> str:
        """Return the name of the device type, such as `"cuda"`."""
        return cls.kind

    @classmethod
    def parse_devices(cls, devices: int | str | list[int]) -> list[int]:
        """Return the device indices that the Trainer argument `devices` selects."""
        if isinstance(devices, str):
            devices = [int(each) for each in devices.split(",") if each] if "," in devices else int(devices)
        if isinstance(devices, int):
            return list(range(cls.auto_device_count() if devices < 0 else devices))
        return list(devices)

    @classmethod
    def get_parallel_devices(cls, devices: int | str | list[int]) -> list[torch.device]:
        """Return the devices with the given indices, or the first `devices` ones."""
        numbers = cls.parse_devices(devices)
        return [torch.device("cpu") if cls.kind == "cpu" else torch.device(cls.kind, index) for index in numbers]

    def setup_device(self, device: torch.device) -> None:
        """Make a device the current one. Raise `ConfigurationError` for a device of another type."""
        if device.type != self.kind:
            raise ConfigurationError(f"Device should be {self.kind.upper()}, got {device} instead.")
        if self.kind == "cuda":
            torch.get_device_module(device).set_device(device)

    def get_device_stats(self, device: torch.device | str) -> dict[str, Any]:
        """Return torch's memory statistics of a device."""
        return dict(getattr(torch, self.kind).memory_stats(device))

    def teardown(self) -> None:
        """Clean up after a run. The default does nothing."""


class CPUAccelerator(Accelerator):
    """The CPU."""

    kind = "cpu"

    def get_device_stats(self, device: torch.device | str) -> dict[str, float]:
        """Return the usage of CPU, memory and swap space in percent."""
        return get_cpu_stats()

    @classmethod
    def auto_device_count(cls) -> int:
        """Return 1: a run on the CPU uses one process unless `devices` asks for more."""
        return 1


class CUDAAccelerator(Accelerator):
    """NVIDIA or AMD GPUs."""

    kind = "cuda"


class MPSAccelerator(Accelerator):
    """Apple's GPU."""

    kind = "mps"

    @classmethod
    def auto_device_count(cls) -> int:
        """Return 1: a machine with MPS has one GPU."""
        return 1

    def get_device_stats(self, device: torch.device | str) -> dict[str, float]:
        """Return the usage of CPU, memory and swap space in percent."""
        return {name.replace("cpu", "M1"): value for name, value in get_cpu_stats().items()}


class XLAAccelerator(Accelerator):
    """TPUs."""

    kind = "xla"


def num_cuda_devices() -> int:
    """Return the number of GPUs of this machine."""
    return CUDAAccelerator.auto_device_count()


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """Return the indices of this machine's GPUs. Raise `ConfigurationError` if there are too few."""
    if num_devices == 0:
        return []
    count = CUDAAccelerator.auto_device_count()
    if count == 0:
        raise ConfigurationError(
            f"You requested to find {num_devices} devices but there are no visible CUDA devices on this machine.",
        )
    if num_devices > count:
        raise ConfigurationError(
            f"You requested to find {num_devices} devices but this machine only has {count} GPUs. Ask for fewer.",
        )
    return list(range(count if num_devices < 0 else num_devices))


def get_cpu_stats() -> dict[str, float]:
    """Return the usage of CPU, memory and swap space in percent."""
    import psutil

    return {
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_percent": psutil.cpu_percent(),
        "cpu_swap_percent": psutil.swap_memory().percent,
    }
