"""A pretend device: its module's calls are recorded, its tensors live on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from drivetrain import DeviceKind, register_device
from drivetrain.runtime.devices import unregister_device


class PretendModule:
    """Stands where `torch.cuda` would, and writes down what is asked of it."""

    def __init__(self, count: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.rng_state = torch.zeros(4, dtype=torch.uint8)
        self._count = count

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self._count

    def set_device(self, device: torch.device) -> None:
        self.calls.append(("set_device", device))

    def synchronize(self, device: torch.device | None = None) -> None:
        self.calls.append(("synchronize", device))

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache",))

    def manual_seed_all(self, seed: int) -> None:
        self.calls.append(("manual_seed_all", seed))

    def get_rng_state(self) -> torch.Tensor:
        return self.rng_state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.rng_state = state


class Pretend(DeviceKind):
    """A kind of device that no vendor makes."""

    NAME = "pretend"

    def __init__(self, count: int = 2) -> None:
        super().__init__(self.NAME, backend="gloo", aliases=("makebelieve",))
        self._module = PretendModule(count)

    @property
    def module(self) -> PretendModule:
        return self._module

    @property
    def autocast_type(self) -> str:
        return "cpu"

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")


@contextmanager
def pretend_device(count: int = 2) -> Iterator[Pretend]:
    """Register the pretend device for as long as the body runs."""
    kind = Pretend(count)
    register_device(kind)
    try:
        yield kind
    finally:
        unregister_device(kind.name)
