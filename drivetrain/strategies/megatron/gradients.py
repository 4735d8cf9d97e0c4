"""The gradients that megatron-core accumulates in buffers of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.gradients import Gradients, refuse_left_out_batch
from drivetrain.strategies.megatron.model import PlacedModel, PlacedModels
from drivetrain.strategies.megatron.optimizer import MegatronOptimizerFront
from drivetrain.strategies.topology import Topology


class BufferedGradients(Gradients):
    """Gradients in megatron-core's buffers, until its optimizer takes them.

    Args:
        models: All models of the strategy.
        topology: This process's place.
        clipping: The norm that the strategy was asked to clip to, if it was.
    """

    def __init__(self, models: PlacedModels, topology: Topology, clipping: float | None) -> None:
        self._models, self._topology, self._clipping = models, topology, clipping

    def sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Whether a backward in this context ends an accumulation window."""
        placed = self._models.find(model)
        return nullcontext() if enabled or placed is None or placed.optimizer is None else _within_window(placed)

    def held(self, model: nn.Module) -> Iterable[torch.Tensor]:
        """Gradients of an accumulation window."""
        placed = self._models.find(model)
        return [] if placed is None else placed.held_gradients()

    def zero_loss(self, task: nn.Module) -> torch.Tensor:
        """Refuse: every micro-batch goes through all stages and layers."""
        refuse_left_out_batch(task, self._topology.rank)

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, over all layers, stages and parts."""
        front = self._stepped(parameters)
        if front is None:
            return torch.zeros((), device=self._topology.device)
        if self._clipping is not None and max_norm not in (self._clipping, float("inf")):
            raise ConfigurationError(
                f"Megatron(gradient_clipping={self._clipping}) contradicts the loop, which clips to {max_norm}. "
                "Give one of the two.",
                code="DT-004",
            )
        front.prepare_gradients()
        total = _total_norm(front, norm_type)
        if max_norm != float("inf"):
            _clip(front, max_norm, total)
        return torch.tensor(total, device=self._topology.device)

    def clip_by_default(self, front: MegatronOptimizerFront) -> None:
        """Clip to the strategy's own norm, where the loop has not clipped."""
        if self._clipping is not None and not front.clipped and not front.prepare_gradients():
            _clip(front, self._clipping, _total_norm(front, 2.0))

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        """Clamp every gradient to [-value, value]."""
        front = self._stepped(parameters)
        if front is not None and not front.prepare_gradients():
            for parameter in front.stepped_parameters():
                if parameter.grad is not None:
                    parameter.grad.clamp_(-value, value)

    def adopt(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse."""
        raise ConfigurationError(
            "megatron-core settles which parameters it trains when the model is placed, so none can be added later. "
            'Train all from the start, or use strategy="ddp" or "fsdp".',
            code="DT-049",
        )

    def scale(self, model: nn.Module, optimizers: Sequence[Optimizer], factor: torch.Tensor) -> None:
        """Multiply the gradients of a window."""
        placed = self._models.find(model)
        if placed is not None and placed.optimizer is not None:
            for chunk in placed.wrapped:
                chunk.scale_gradients(factor)  # type: ignore[operator]

    def _stepped(self, parameters: Iterable[torch.Tensor]) -> MegatronOptimizerFront | None:
        """The optimizer that steps parameters: always all of a model's."""
        wanted = {id(parameter) for parameter in parameters}
        for placed in self._models:
            if placed.optimizer is not None and any(id(p) in wanted for p in placed.owner.parameters()):
                return placed.optimizer
        return None


def _total_norm(front: MegatronOptimizerFront, norm_type: float) -> float:
    if norm_type == 2.0:
        return float(front.inner.get_grad_norm())
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    norms = [
        float(get_grad_norm_fp32(part.get_main_grads_for_grad_norm(), norm_type, part.get_grad_stats_parallel_group()))
        for part in front.inner.chained_optimizers
    ]
    return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), norm_type))


def _clip(front: MegatronOptimizerFront, max_norm: float, total: float) -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    for part in front.parts:
        decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm, total, decoupled)
    front.__dict__["clipped"] = True


@contextmanager
def _within_window(placed: PlacedModel) -> Iterator[None]:
    before, placed.accumulates = placed.accumulates, True
    try:
        with ExitStack() as stack:
            for chunk in placed.wrapped:
                stack.enter_context(chunk.no_sync())  # type: ignore[operator]
            yield
    finally:
        placed.accumulates = before
