"""The package megatron-core: whether it is there, and whether the device of a run is the one that it computes on."""

from __future__ import annotations

import importlib.util

import torch

from drivetrain.runtime.errors import ConfigurationError


def require_megatron() -> None:
    """Raise where the package is not installed."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise ConfigurationError(
            "strategy='megatron' needs the package megatron-core, which is not installed. Install it: "
            "pip install 'drivetrain[megatron]' (torch first: another package may choose another build of it).",
            code="DT-013",
        )


def require_device(device: torch.device) -> None:
    """Raise where what megatron-core makes would be on another device than the run's.

    Args:
        device: The device of the run.
    """
    try:
        made = torch.empty(0, device="cuda").device.type
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(
            f"strategy='megatron' needs CUDA GPUs: megatron-core makes its tensors there, and here is none ({error}). "
            "Use strategy=Parallel(tp=..., pp=...) or 'fsdp', which also run on the CPU.",
            code="DT-022",
        ) from None
    if made != device.type:
        raise ConfigurationError(
            f"strategy='megatron' computes on {made!r}, where megatron-core makes its tensors, but this run is on "
            f"{device.type!r}. Use accelerator='cuda', or strategy=Parallel(tp=..., pp=...).",
            code="DT-022",
        )
