"""Gradient compression for DDP: what is sent instead of the 32-bit gradients."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import parallel

from drivetrain.runtime.errors import ConfigurationError

COMMUNICATION_HOOKS = ("fp16", "bf16", "powersgd", "batched_powersgd")
COMMUNICATION_WRAPPERS = {"fp16": torch.float16, "bf16": torch.bfloat16}


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


def register_communication_hook(
    model: parallel.DistributedDataParallel, name: str, options: dict[str, Any], wrapper: str | None = None
) -> None:
    """Register one of the hooks by name.

    Args:
        model: The DDP module.
        name: `"fp16"`, `"bf16"`, `"powersgd"` (Vogels et al., 2019, https://arxiv.org/abs/1905.13727) or
            `"batched_powersgd"`, which compresses each bucket as one matrix.
        options: For PowerSGD, the arguments of torch's `PowerSGDState`.
        wrapper: A key of `COMMUNICATION_WRAPPERS`: the format that the hook is given its bucket in.

    Raises:
        ConfigurationError: PowerSGD has no such option.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    state: Any = None
    hook: Callable[..., Any] = bf16_hook if name == "bf16" else default_hooks.fp16_compress_hook
    if name in ("powersgd", "batched_powersgd"):
        # Without an epsilon a gradient of zeros, as of a parameter that took no part, becomes NaN.
        settings = {
            "matrix_approximation_rank": 1,
            "start_powerSGD_iter": 2,
            "orthogonalization_epsilon": 1e-8,
            **options,
        }
        try:
            state = powerSGD_hook.PowerSGDState(process_group=None, **settings)
        except TypeError as error:
            allowed = [each for each in inspect.signature(powerSGD_hook.PowerSGDState).parameters if each[0] != "_"]
            raise ConfigurationError(
                f"comm_hook_options={options!r} do not suit PowerSGD ({error}). Allowed: {', '.join(allowed[1:])}.",
                code="DT-006",
            ) from error
        hook = _power_sgd if name == "powersgd" else _batched_power_sgd
    if wrapper is not None:
        hook = _compressed(hook, COMMUNICATION_WRAPPERS[wrapper])
    register_function_hook(model, hook, state)


class _Bucket:
    """A bucket as torch's PowerSGD is to see it.

    Args:
        bucket: DDP's.
        buffer: What takes the place of its buffer.
        gradients: Views of that, each with a dimension: torch's hook reads the size of the first (torch 2.13).
    """

    def __init__(self, bucket: Any, buffer: torch.Tensor, gradients: list[torch.Tensor]) -> None:
        self._bucket, self._buffer, self._gradients = bucket, buffer, gradients

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bucket, name)

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients


def _power_sgd(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook  # slow to import

    gradients = [each if each.dim() else each.view(1) for each in bucket.gradients()]
    seen: Any = _Bucket(bucket, bucket.buffer(), gradients)
    return powerSGD_hook.powerSGD_hook(state, seen)


def _batched_power_sgd(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Compress a bucket as one square matrix.

    Torch's own `batched_powerSGD_hook` fails at its first compression, since it orthogonalizes a batch of matrices and
    gives it one (torch 2.13).
    """
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    own: torch.Tensor = bucket.buffer()
    side = math.ceil(own.numel() ** 0.5)
    padded = own.new_zeros(side * side)
    padded[: own.numel()] = own
    seen: Any = _Bucket(bucket, padded, [padded.view(side, side)])

    def cut(done: torch.futures.Future[Any]) -> torch.Tensor:
        return own.copy_(done.value()[: own.numel()])

    result: torch.futures.Future[torch.Tensor] = powerSGD_hook.powerSGD_hook(state, seen).then(cut)
    return result


def _compressed(hook: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """A hook that is given its bucket in another format, and whose result is in the bucket's own."""

    def compressed(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        own: torch.Tensor = bucket.buffer()
        bucket.set_buffer(own.to(dtype))

        def decompress(done: torch.futures.Future[Any]) -> torch.Tensor:
            value = done.value()
            own.copy_(value[0] if isinstance(value, list) else value)
            return own

        result: torch.futures.Future[torch.Tensor] = hook(state, bucket).then(decompress)
        return result

    return compressed


def register_function_hook(model: parallel.DistributedDataParallel, hook: Callable[..., Any], state: Any) -> None:
    """Register a function `(state, bucket) -> Future` with its state.

    Torch compares a hook's annotations with its own classes, which those of a module with postponed annotations,
    being strings, never equal; a lambda has none.
    """
    model.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
