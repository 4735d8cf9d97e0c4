"""Gradient compression for DDP: what is sent instead of the 32-bit gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from drivetrain.runtime.errors import ConfigurationError

COMMUNICATION_HOOKS = ("fp16", "bf16", "powersgd")


def bf16_hook(group: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket in bfloat16.

    Torch's own `bf16_compress_hook` asks for NCCL and so raises on gloo, which reduces bfloat16 well (torch 2.13).
    """
    group = group or dist.group.WORLD
    compressed = bucket.buffer().to(torch.bfloat16).div_(group.size())
    future = dist.all_reduce(compressed, group=group, async_op=True).get_future()

    def decompress(done: torch.futures.Future[Any]) -> torch.Tensor:
        buffer: torch.Tensor = bucket.buffer()
        buffer.copy_(done.value()[0])
        return buffer

    result: torch.futures.Future[torch.Tensor] = future.then(decompress)
    return result


def register_communication_hook(model: DistributedDataParallel, name: str, options: dict[str, Any]) -> None:
    """Register one of the hooks by name.

    Args:
        model: The DDP module.
        name: `"fp16"`, `"bf16"` or `"powersgd"` (Vogels et al., 2019, https://arxiv.org/abs/1905.13727).
        options: For PowerSGD, the arguments of torch's `PowerSGDState`.

    Raises:
        ConfigurationError: PowerSGD has no such option.
    """
    if name == "powersgd":
        settings = {"matrix_approximation_rank": 1, "start_powerSGD_iter": 2, **options}
        try:
            state = powerSGD_hook.PowerSGDState(process_group=None, **settings)
        except TypeError as error:
            allowed = [each for each in inspect.signature(powerSGD_hook.PowerSGDState).parameters if each[0] != "_"]
            raise ConfigurationError(
                f"comm_hook_options={options!r} do not suit PowerSGD ({error}). Allowed: {', '.join(allowed[1:])}."
            ) from error
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return
    register_function_hook(model, bf16_hook if name == "bf16" else default_hooks.fp16_compress_hook, None)


def register_function_hook(model: DistributedDataParallel, hook: Callable[..., Any], state: Any) -> None:
    """Register a function `(state, bucket) -> Future` with its state.

    Torch compares a hook's annotations with its own classes, which those of a module with postponed annotations,
    being strings, never equal; a lambda has none.
    """
    model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
