"""Floating-point operations: of a model, and of the chips that run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

# Dense peak operations per second of known chips, in 16-bit matrix units and in 32 bits, from the makers' data sheets;
# the first name that is a part of the device's counts.
CHIPS: tuple[tuple[str, float, float], ...] = (
    ("GB200", 2500e12, 80e12),
    ("B200", 2250e12, 80e12),
    ("H200", 989e12, 67e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100", 989e12, 67e12),
    ("A100", 312e12, 19.5e12),
    ("A10G", 125e12, 31.2e12),
    ("A10", 125e12, 31.2e12),
    ("L40S", 362e12, 91.6e12),
    ("L40", 181e12, 90.5e12),
    ("L4", 121e12, 30.3e12),
    ("V100", 125e12, 15.7e12),
    ("T4", 65e12, 8.1e12),
    ("RTX 4090", 165e12, 82.6e12),
    ("RTX 3090", 71e12, 35.6e12),
    ("MI300X", 1307e12, 163.4e12),
    ("MI250X", 383e12, 95.7e12),
)


def measure_flops(
    model: nn.Module, forward_fn: Callable[[], Any], loss_fn: Callable[[Any], Tensor] | None = None
) -> int:
    """Return the floating-point operations of a forward, and of the backward with it where there is a loss.

    Args:
        model: The model; on the meta device nothing is computed.
        forward_fn: Runs its forward, and returns the output.
        loss_fn: The loss of an output, to count the backward as well.

    Example:
        ```python
        import torch

        from drivetrain import measure_flops

        with torch.device("meta"):
            model, batch = torch.nn.Linear(32, 2), torch.randn(8, 32)
        assert measure_flops(model, lambda: model(batch)) == 2 * 8 * 32 * 2
        ```
    """
    counter = FlopCounterMode(display=False)
    with counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()  # type: ignore[no-untyped-call]
    return int(counter.get_total_flops())


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Return the operations per second that a device could do at most; None where the chip is not known.

    Args:
        device: The device.
        precision: The name of the number format, such as `"bf16-mixed"`.
    """
    functions: Any = getattr(torch, device.type, None)
    if not hasattr(functions, "get_device_name"):
        return None
    name = functions.get_device_name(device)
    half = "16" in precision or "8" in precision
    return next((fast if half else single for chip, fast, single in CHIPS if chip in name), None)
