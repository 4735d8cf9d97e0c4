"""A loss scaler for gradients of which each process holds a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class AgreeingGradScaler(torch.amp.GradScaler):
    """A `GradScaler` that checks this process's shards, and lets all processes skip a step or none.

    Torch's own checks one process's gradients, and cannot take plain tensors and sharded ones together.

    Args:
        device: The kind of device.
        largest: Returns the largest value of a scalar tensor over the processes.
        options: Arguments of `GradScaler`.
    """

    def __init__(self, device: str, largest: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
        super().__init__(device, **options)
        self._largest = largest

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad
                local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                if local.dtype == torch.float16 and not allow_fp16:
                    raise ValueError("Attempting to unscale FP16 gradients.")
                if local.numel():
                    groups.setdefault((local.device, local.dtype), []).append(local)
        flags = {found_inf.device: found_inf}
        with torch.no_grad():
            for (device, _), gradients in groups.items():
                flag = flags.setdefault(device, torch.zeros_like(found_inf, device=device))
                torch._amp_foreach_non_finite_check_and_unscale_(gradients, flag, inv_scale.to(device))
            overall = torch.stack([flag.to(found_inf.device) for flag in flags.values()]).max()
            overall = self._largest(overall.reshape(1)).reshape(())
        return {device: overall.to(device).reshape(flag.shape) for device, flag in flags.items()}
