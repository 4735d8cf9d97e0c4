"""The gradients that engines hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.deepspeed import clipping
from drivetrain.strategies.deepspeed.engine import Engines
from drivetrain.strategies.gradients import Gradients, refuse_left_out_batch, refuse_several_losses
from drivetrain.strategies.topology import Topology


class EngineGradients(Gradients):
    """Gradients that engines reduce and keep, whole or in parts.

    Args:
        engines: The engines of all prepared models.
        topology: This process's place.
    """

    def __init__(self, engines: Engines, topology: Topology) -> None:
        self._engines, self._topology = engines, topology

    def sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Whether a backward in this context ends an accumulation window."""
        trained = self._engines.find(model)
        return nullcontext() if enabled or trained is None else _within_window(trained.engine)

    def leaves(self, model: nn.Module, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Refuse: an engine runs one backward a step, to all of its parameters."""
        refuse_several_losses("A DeepSpeed engine runs one backward in a step, to all of its parameters.")

    def zero_loss(self, task: nn.Module) -> torch.Tensor:
        """Refuse at stage 3, where the peers' backward gathers over all processes."""
        if any(trained.settings.stage == 3 for trained in self._engines):
            refuse_left_out_batch(task, self._topology.rank)
        return super().zero_loss(task)

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`; returns the norm over all processes before."""
        given = list(parameters)
        norms = []
        for trained in self._engines:
            own = trained.own(given)
            if own:
                _check_norm(trained.settings.clipping, max_norm)
                norms.append((trained, own, clipping.total_norm(trained, own, norm_type)))
        if not norms:
            return torch.zeros((), device=self._topology.device)
        total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm for *_, norm in norms]), norm_type)
        if max_norm != float("inf"):
            for trained, own, _ in norms:
                clipping.clip_to_norm(trained, own, total, max_norm)
                trained.clipped = True
        return total

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        """Clamp every gradient to [-value, value]."""
        given = list(parameters)
        for trained in self._engines:
            clipping.clip_to_value(trained, trained.own(given), value)

    def adopt(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse."""
        raise ConfigurationError(
            "DeepSpeed settles which parameters it trains when the model is placed, so none can be added later. "
            'Train all from the start, or use strategy="ddp" or "fsdp".',
            code="DT-049",
        )

    def scale(self, model: nn.Module, optimizers: Sequence[Optimizer], factor: torch.Tensor) -> None:
        """Multiply the gradients of a window."""
        trained = self._engines.find(model)
        if trained is not None:
            clipping.scale(trained, trained.all_trained(), factor)


def _check_norm(configured: float | None, max_norm: float) -> None:
    if configured is not None and max_norm not in (configured, float("inf")):
        raise ConfigurationError(
            f"The DeepSpeed configuration says gradient_clipping={configured}, but the loop clips to {max_norm}. Give "
            "one of the two.",
            code="DT-055",
        )


@contextmanager
def _within_window(engine: Any) -> Iterator[None]:
    engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(True)
