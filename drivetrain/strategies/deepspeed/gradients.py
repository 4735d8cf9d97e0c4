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
from drivetrain.strategies.deepspeed.engine import Engines, TrainedModel
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

    def scale_held(self, model: nn.Module, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiply what a window holds once it is complete; until then DeepSpeed keeps it in many places."""
        trained = self._engines.find(model)
        if trained is None:
            super().scale_held(model, parameters, factor)
        elif trained.holds_gradients:
            trained.pending_scale *= factor

    def are_held(self, model: nn.Module) -> bool:
        """Whether the engine of a model holds gradients that it has not stepped with."""
        trained = self._engines.find(model)
        return trained is not None and trained.holds_gradients

    def discard(self, model: nn.Module) -> None:
        """Forget the gradients of a window that did not end."""
        trained = self._engines.find(model)
        if trained is not None:
            trained.discard_gradients()

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
                complete(trained)
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
            complete(trained)
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
            complete(trained)
            clipping.scale(trained, trained.all_trained(), factor)


def complete(trained: TrainedModel) -> None:
    """Multiply an engine's gradients by what the end of their window has left to do, if the window has ended."""
    if trained.is_complete and trained.pending_scale != 1.0:
        clipping.scale(trained, trained.all_trained(), torch.tensor(trained.pending_scale))
        trained.pending_scale = 1.0


def added_to(trained: TrainedModel) -> AbstractContextManager[None]:
    """Return a context in which a backward adds to complete gradients, which DeepSpeed would forget."""
    if not trained.is_complete or trained.layout.adds_backwards:
        return nullcontext()
    if trained.layout.offloads:
        raise ConfigurationError(
            f"A second backward through {type(trained.bare).__name__} before its step, which DeepSpeed's stages 1 and "
            "2 with offload_optimizer cannot add to the first. Add the losses and run one backward, or use stage 3.",
            code="DT-068",
        )
    return _adding(trained)


@contextmanager
def _adding(trained: TrainedModel) -> Iterator[None]:
    parameters = trained.all_trained()
    before = [gradient.clone() for gradient in trained.layout.gradients(parameters)]
    yield
    after = trained.layout.gradients(parameters)
    torch._foreach_add_(after, before)
    trained.layout.commit(parameters, after)


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
