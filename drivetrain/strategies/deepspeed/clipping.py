"""Norms, clipping and scaling of gradients that an engine holds in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from drivetrain.runtime.collectives import reduce
from drivetrain.strategies.deepspeed.engine import TrainedModel


def total_norm(trained: TrainedModel, parameters: Sequence[nn.Parameter], norm_type: float) -> Tensor:
    """The norm of the gradients of some parameters over all processes, a scalar; collective.

    Args:
        trained: Their engine's model.
        parameters: The model's parameters.
        norm_type: The order of the norm; may be infinite.
    """
    layout = trained.layout
    gradients = layout.gradients(parameters)
    infinite = norm_type == float("inf")
    local = torch.zeros((), device=trained.engine.device)
    if gradients:
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(gradients, norm_type)])
        local = norms.max() if infinite else norms.pow(norm_type).sum()
    if not layout.replicated:
        local = reduce(local, "max" if infinite else "sum")
    total = local if infinite else local.pow(1.0 / norm_type)
    return total / layout.loss_scale


def clip_to_norm(trained: TrainedModel, parameters: Sequence[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of this norm down to `max_norm` at most, as `torch.nn.utils.clip_grad_norm_` does."""
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    scale(trained, parameters, coefficient)


def scale(trained: TrainedModel, parameters: Sequence[nn.Parameter], factor: Tensor) -> None:
    """Multiply gradients."""
    _change(trained, parameters, lambda gradients: torch._foreach_mul_(gradients, factor.to(gradients[0].device)))


def clip_to_value(trained: TrainedModel, parameters: Sequence[nn.Parameter], value: float) -> None:
    """Clamp every gradient to [-value, value]."""
    bound = value * trained.layout.loss_scale

    def clamp(gradients: list[Tensor]) -> None:
        torch._foreach_clamp_min_(gradients, -bound)
        torch._foreach_clamp_max_(gradients, bound)

    _change(trained, parameters, clamp)


def _change(trained: TrainedModel, parameters: Sequence[nn.Parameter], change: Callable[[list[Tensor]], None]) -> None:
    gradients = trained.layout.gradients(parameters)
    if gradients:
        change(gradients)
        trained.layout.commit(parameters, gradients)
