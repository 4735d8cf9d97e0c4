"""Throughput of a training loop, computed from counts that the loop reports."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from drivetrain.callbacks.throughput_monitor import CHIPS, measure_flops
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.compat.lightning.fabric.fabric import Fabric

__all__ = ["Throughput", "ThroughputMonitor", "get_available_flops", "measure_flops"]


class _Reading(NamedTuple):
    time: float
    batches: int
    samples: int
    lengths: int | None
    flops: int | None


class Throughput:
    """Throughput over a window of recent updates."""

    def __init__(
        self,
        available_flops: float | None = None,
        world_size: int = 1,
        window_size: int = 100,
        separator: str = "/",
        using_sparse_model: bool | None = None,
        sparse_cuda_acceleration_factor: float = 2.0,
    ) -> None:
        if sparse_cuda_acceleration_factor < 1:
            raise AssertionError(
                f"A sparse acceleration factor cannot reduce what a device can do, got "
                f"{sparse_cuda_acceleration_factor}. Give at least 1."
            )
        if using_sparse_model is None and available_flops is not None:
            rank_zero_warn(
                "MFU assumes dense model FLOPs. Give using_sparse_model=True or False to say which they are."
            )
        sparse = bool(using_sparse_model) and available_flops is not None
        self.available_flops = available_flops * sparse_cuda_acceleration_factor if sparse else available_flops  # type: ignore[operator]
        self.world_size, self.window_size, self.separator = world_size, window_size, separator
        self._readings: deque[_Reading] = deque(maxlen=window_size)

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: int | None = None
    ) -> None:
        """Record the loop's total time, batches, samples, sequence lengths and FLOPs so far."""
        if self._readings:
            last = self._readings[-1]
            if (lengths is None) is not (last.lengths is None):
                raise RuntimeError(
                    "Lengths were given in some updates only: there need to be the same number of samples and lengths."
                )
            for name, before, now in (
                ("time", last.time, time),
                ("batches", last.batches, batches),
                ("samples", last.samples, samples),
            ):
                if now <= before:
                    raise ConfigurationError(f"{name}: Expected the value to increase, last: {before}, current: {now}.")
        if samples < batches:
            raise ConfigurationError(f"Expected samples ({samples}) to be greater or equal than batches ({batches}).")
        if lengths is not None and lengths < samples:
            raise ConfigurationError(f"Expected lengths ({lengths}) to be greater or equal than samples ({samples}).")
        self._readings.append(_Reading(time, batches, samples, lengths, flops))

    def compute(self) -> dict[str, float]:
        """Return the totals, and the rates once the window has enough updates."""
        if not self._readings:
            return {}
        first, last = self._readings[0], self._readings[-1]
        totals: dict[str, float] = {"time": last.time, "batches": last.batches, "samples": last.samples}
        if last.lengths is not None:
            totals["lengths"] = last.lengths
        if len(self._readings) < self.window_size or len(self._readings) < 2:
            return totals
        seconds = last.time - first.time
        rates = {
            "batches_per_sec": (last.batches - first.batches) / seconds,
            "samples_per_sec": (last.samples - first.samples) / seconds,
        }
        if last.lengths is not None and first.lengths is not None:
            rates["items_per_sec"] = (last.lengths - first.lengths) / seconds
        flops = [reading.flops for reading in self._readings][1:]
        if None not in flops:
            rates["flops_per_sec"] = sum(filter(None, flops)) / seconds
        named = {f"device{self.separator}{name}": value for name, value in rates.items()}
        if self.available_flops and "flops_per_sec" in rates:
            named[f"device{self.separator}mfu"] = rates["flops_per_sec"] / self.available_flops
        everywhere = {name: value * self.world_size for name, value in rates.items()} if self.world_size > 1 else {}
        return {**totals, **everywhere, **named}

    def reset(self) -> None:
        """Discard all recorded updates."""
        self._readings.clear()


class ThroughputMonitor(Throughput):
    """Throughput that is logged through Fabric."""

    def __init__(self, fabric: Fabric, **kwargs: Any) -> None:
        given = {"available_flops": get_available_flops(fabric.device, _dtype(fabric)), **kwargs}
        super().__init__(**{"world_size": fabric.world_size, "using_sparse_model": False, **given})
        self._fabric = fabric
        self.step = -1

    def compute_and_log(self, step: int | None = None, **kwargs: Any) -> dict[str, float]:
        """Compute the throughput, log it and return it."""
        self.step = self.step + 1 if step is None else step
        found = self.compute()
        self._fabric.log_dict(metrics=found, step=self.step, **kwargs)
        return found


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> int | None:
    """Return the peak FLOP/s of a device for a dtype, or None if unknown."""
    functions: Any = getattr(torch, device.type, None)
    if not hasattr(functions, "get_device_name"):
        return None
    name = functions.get_device_name(device)
    half = dtype in (torch.float16, torch.bfloat16) or "16" in str(dtype)
    for chip, fast, single in CHIPS:
        if chip.lower() in name.lower():
            return int(fast if half else single)
    rank_zero_warn(f"The peak of floating-point operations per second is not found for {name!r}. Give available_flops.")
    return None


def _dtype(fabric: Fabric) -> str:
    return str(getattr(fabric.accelerator.precision, "name", "32"))
