"""Cross entropy of logits that are split over processes by class (Megatron-LM, https://arxiv.org/abs/1909.08053)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import loss_parallel

aten = torch.ops.aten

_FORWARD = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_BACKWARD = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)


class LossParallel:
    """Lets `F.cross_entropy` take such logits from `enable` to `disable`.

    Torch's `loss_parallel` returns losses that are DTensors, which mix with no plain tensor; here they are plain, so
    that a task that weighs, logs and adds them up stays as it is.
    """

    def __init__(self) -> None:
        self._context: AbstractContextManager[Any] | None = None

    def enable(self) -> None:
        """Start; nothing happens where it has been started."""
        if self._context is not None:
            return
        self._context = loss_parallel()
        self._context.__enter__()
        handlers = _handlers()
        for op in _FORWARD:
            handlers[op] = _with_plain_loss(handlers[op])
        for op in _BACKWARD:
            handlers[op] = _from_plain_loss(handlers[op])

    def disable(self) -> None:
        """Stop."""
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None


def _handlers() -> dict[Any, Callable[..., Any]]:
    handlers: dict[Any, Callable[..., Any]] = DTensor._op_dispatcher._custom_op_handlers
    return handlers


def _with_plain_loss(handler: Callable[..., Any]) -> Callable[..., Any]:
    def forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        loss, weight = handler(op, args, kwargs)
        return loss.to_local(), weight

    return forward


def _from_plain_loss(handler: Callable[..., Any]) -> Callable[..., Any]:
    def backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        gradient, logits, *rest = args
        if not isinstance(gradient, DTensor):
            mesh = logits.device_mesh
            gradient = DTensor.from_local(gradient, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return handler(op, (gradient, logits, *rest), kwargs)

    return backward
