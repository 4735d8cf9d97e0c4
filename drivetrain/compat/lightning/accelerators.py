"""Kinds of devices as Lightning's objects: whether there are any, and how many."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.compat.instances import KindOfDevice
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
    def name(cls) -> str:
        """The name of the kind."""
        return cls.kind

    @classmethod
    def parse_devices(cls, devices: int | str | list[int]) -> list[int]:
        """The numbers of devices that an argument of a Trainer names."""
        if isinstance(devices, str):
            devices = [int(each) for each in devices.split(",") if each] if "," in devices else int(devices)
        if isinstance(devices, int):
            return list(range(cls.auto_device_count() if devices < 0 else devices))
        return list(devices)

    @classmethod
    def get_parallel_devices(cls, devices: int | str | list[int]) -> list[torch.device]:
        """The devices of these numbers, or so many."""
        numbers = cls.parse_devices(devices)
        return [torch.device("cpu") if cls.kind == "cpu" else torch.device(cls.kind, index) for index in numbers]

    def setup_device(self, device: torch.device) -> None:
        """Let new tensors go to a device where a process has several to choose from."""
        if device.type != self.kind:
            raise ConfigurationError(f"Device should be {self.kind.upper()}, got {device} instead.")
        if self.kind == "cuda":
            torch.get_device_module(device).set_device(device)

    def get_device_stats(self, device: torch.device | str) -> dict[str, Any]:
        """What torch counts of a device's memory."""
        return dict(getattr(torch, self.kind).memory_stats(device))

    def teardown(self) -> None:
        """Clean up after a run."""


class CPUAccelerator(Accelerator):
    """The CPU."""

    kind = "cpu"

    def get_device_stats(self, device: torch.device | str) -> dict[str, float]:
        """How much of the processors, the memory and the swap space is in use, in percent."""
        return get_cpu_stats()

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

    @classmethod
    def auto_device_count(cls) -> int:
        """One, which such a machine has."""
        return 1

    def get_device_stats(self, device: torch.device | str) -> dict[str, float]:
        """How much of the processors, the memory and the swap space is in use, in percent."""
        return {name.replace("cpu", "M1"): value for name, value in get_cpu_stats().items()}


class XLAAccelerator(Accelerator):
    """TPUs."""

    kind = "xla"


def num_cuda_devices() -> int:
    """Return how many GPUs this machine has."""
    return CUDAAccelerator.auto_device_count()


def find_usable_cuda_devices(num_devices: int = -1) -> list[int]:
    """The numbers of this machine's GPUs."""
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
    """Return how much of the processors, the memory and the swap space is in use, in percent."""
    import psutil

    return {
        "cpu_vm_percent": psutil.virtual_memory().percent,
        "cpu_percent": psutil.cpu_percent(),
        "cpu_swap_percent": psutil.swap_memory().percent,
    }
