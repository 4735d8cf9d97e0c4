"""Resolve `accelerator` and `devices` on this machine, for libraries that do so before they create a Trainer."""

from __future__ import annotations

from typing import Any, Literal

from drivetrain.compat.lightning.accelerators import (
    Accelerator,
    CPUAccelerator,
    CUDAAccelerator,
    MPSAccelerator,
    XLAAccelerator,
)
from drivetrain.compat.lightning.pytorch.strategies.ddp import DDPStrategy
from drivetrain.compat.lightning.pytorch.strategies.strategy import SingleDeviceStrategy
from drivetrain.compat.lightning.pytorch.trainer.arguments import check_hardware, kind_of
from drivetrain.runtime.devices import available_device_kinds, get_device_kind

_PRECISION_INPUT = (
    Literal[64, 32, 16]
    | Literal["transformer-engine", "transformer-engine-float16", "16-true", "16-mixed", "bf16-true", "bf16-mixed"]
    | Literal["32-true", "64-true", "64", "32", "16", "bf16"]
)
_LITERAL_WARN = Literal["warn"]
_ACCELERATORS = {kind.kind: kind for kind in (CPUAccelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator)}


class _AcceleratorConnector:
    """The device type and count that a Trainer with these arguments would use. Starts no processes."""

    def __init__(
        self,
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        accelerator: str | Accelerator = "auto",
        strategy: Any = "auto",
        **_: Any,
    ) -> None:
        name = kind_of(accelerator)
        check_hardware(name, devices)
        self._accelerator_flag = self._choose_auto_accelerator() if name == "auto" else get_device_kind(name).name
        self.accelerator = _ACCELERATORS[self._accelerator_flag]()
        numbers = self.accelerator.parse_devices(self.accelerator.auto_device_count() if devices == "auto" else devices)
        self._devices_flag = len(numbers) if self._accelerator_flag == "cpu" else numbers
        self._parallel_devices = self.accelerator.get_parallel_devices(numbers)
        self.is_distributed = len(numbers) * num_nodes > 1
        if not isinstance(strategy, str):
            self.strategy = strategy
        else:
            self.strategy = DDPStrategy() if self.is_distributed else SingleDeviceStrategy(self._parallel_devices[0])

    @property
    def parallel_devices(self) -> list[Any]:
        """The devices of this machine's processes."""
        return self._parallel_devices

    @staticmethod
    def _choose_auto_accelerator() -> str:
        return available_device_kinds()[0].name
