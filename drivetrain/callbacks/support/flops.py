"""Floating-point operations: of a model, and of the chips that run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

CHIPS: tuple[tuple[str, float, float], ...] = (
    ("GB200", 2500e12, 80e12),
    ("B200", 2250e12, 75e12),
    ("H200 NVL", 835e12, 60e12),
    ("H200", 989e12, 67e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100", 989e12, 67e12),
    ("A100", 312e12, 19.5e12),
    ("A10G", 70e12, 35e12),
    ("A10", 125e12, 31.2e12),
    ("L40S", 362e12, 91.6e12),
    ("L40", 181e12, 90.5e12),
    ("L4", 121e12, 30.3e12),
    ("V100", 125e12, 15.7e12),
    ("T4", 65e12, 8.1e12),
    ("RTX 4090", 165e12, 82.6e12),
    ("RTX 3090", 71e12, 35.6e12),
    ("MI355X", 2516e12, 157.3e12),
    ("MI300X", 1307e12, 163.4e12),
    ("MI250X", 191.5e12, 47.9e12),
)
"""Dense peak operations per second of known chips, in 16-bit matrix units with sums in 32 bits, and in 32 bits.

The first name that is a part of the device's counts. Sources, whose tables often give the 16-bit figure with 2:4
sparsity, twice that without:

- GB200, B200: NVIDIA Blackwell data sheet, "Individual Blackwell GPU Specifications" (5 and 4.5 PFLOPS with sparsity;
  80 and 75 TFLOPS FP32).
- H200, H200 NVL, H100, H100 NVL, H100 PCIe: NVIDIA H200 and H100 data sheets (1,979, 1,671 and 1,513 TFLOPS with
  sparsity).
- A100, A10, L40S, L40, L4: NVIDIA's data sheet of each. A10G, made for AWS, has about half of the matrix rate of an A10
  (70 TFLOPS): NVIDIA A10G data sheet.
- V100 (SXM2), T4: NVIDIA's data sheet of each, FP16, since they have no BF16.
- RTX 4090, RTX 3090: NVIDIA Ada and Ampere GA102 white papers, "Peak BF16 Tensor TFLOPS with FP32 Accumulate".
- MI355X, MI300X: AMD's data sheet of each. MI250X: AMD's data sheet (383 and 95.7 TFLOPS), halved, since each of its
  two dies is a device.
"""


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
