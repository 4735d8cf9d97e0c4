"""`Gradients`: how the gradients of a prepared model are reduced, held, scaled and clipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.state import PartialState


class Gradients:
    """The gradients of one process on one device: plain tensors in `.grad`, complete after each backward.

    A strategy whose gradients are reduced, sharded or kept elsewhere has a subclass of its own.
    """

    def sync(self, model: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        """Whether forwards and backwards in this context reduce gradients over processes.

        Args:
            model: What `prepare` returned.
            enabled: False within an accumulation window.
        """
        return nullcontext()

    def held(self, model: nn.Module) -> Iterable[torch.Tensor]:
        """Gradients of an accumulation window that are not in `.grad` before they are reduced."""
        return ()

    def are_held(self, model: nn.Module) -> bool:
        """Whether gradients that no step was taken with are elsewhere than in `.grad`."""
        return any(True for _ in self.held(model))

    def scale_held(self, model: nn.Module, parameters: Sequence[nn.Parameter], factor: float) -> None:
        """Multiply the gradients that an accumulation window holds so far.

        Args:
            model: What `prepare` returned.
            parameters: The model's parameters that are to be scaled in `.grad`.
            factor: What to multiply with.
        """
        gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
        gradients.extend(self.held(model))
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def discard(self, model: nn.Module) -> None:
        """Forget those gradients, of a window that did not end."""

    def require_reduced(self, model: nn.Module) -> None:
        """Raise where this process's backward has left out gradients that its peers wait for.

        Nothing is exchanged, so it may precede a collective that those peers would not meet.

        Args:
            model: What `prepare` returned.

        Raises:
            ConfigurationError: Names the rank and the parameters.
        """

    def require_complete(self, parameter: torch.Tensor) -> None:
        """Raise if a backward does not leave a parameter's gradient complete, over all processes too.

        Raises:
            ConfigurationError: It is completed later, in `finish`.
        """

    def zero_loss(self, task: nn.Module) -> torch.Tensor:
        """A loss with gradients of zero, for a batch that a task leaves out while its peers wait for gradients.

        Raises:
            ConfigurationError: No batch can be left out here.
        """
        return zero_loss_of(task.parameters())

    def clip_norm(self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients down to a total norm of at most `max_norm`, over all shards.

        Args:
            parameters: The parameters whose gradients they are.
            max_norm: The largest norm allowed.
            norm_type: The p of the p-norm.

        Returns:
            The total norm before clipping, a scalar tensor on the device.
        """
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        """Clamp every gradient to [-value, value]."""
        nn.utils.clip_grad_value_(parameters, value)

    def scale(self, model: nn.Module, optimizers: Sequence[Optimizer], factor: torch.Tensor) -> None:
        """Multiply the gradients of a window, which have been reduced already.

        Args:
            model: What `prepare` returned.
            optimizers: Those whose parameters' gradients they are.
            factor: A scalar tensor, the same on all processes.
        """
        parameters = {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        gradients = [local_part(p.grad) for p in parameters.values() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))

    def adopt(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Take parameters that are trained from now on, and were frozen when the model was placed.

        Args:
            model: What `prepare` returned.
            parameters: The parameters, or this process's shards of them.

        Raises:
            ConfigurationError: What is trained is settled when the model is placed.
        """

    def finish(self, optimizers: Sequence[Optimizer]) -> None:
        """Complete what backwards have left to do, before the gradients of a window are unscaled, clipped or stepped.

        Args:
            optimizers: The bare optimizers, on all processes.
        """

    def leaves(self, model: nn.Module, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors that a backward leaves the gradients of some parameters in, for a backward to these alone.

        Args:
            model: What `prepare` returned.
            parameters: The parameters, or this process's shards of them.

        Raises:
            ConfigurationError: A backward cannot be limited to some parameters.
        """
        return list(parameters)

    def prepare_backward(self, model: nn.Module, loss: torch.Tensor) -> None:
        """Get ready for a backward that a task runs by itself, during its training step.

        Args:
            model: What `prepare` returned.
            loss: The loss that it goes back from.
        """


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average the gradients of all parameters that any process has one of; call it on all processes.

    Args:
        parameters: The same ones on all processes.
    """
    if not (parameters and PartialState().use_distributed):
        return
    here = torch.tensor([float(each.grad is not None) for each in parameters], device=parameters[0].device)
    for parameter, holders in zip(parameters, reduce(here, "sum").tolist(), strict=True):
        if holders:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = reduce(own, "mean")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor that may be sharded."""
    to_local = getattr(tensor, "to_local", None)
    local: torch.Tensor = tensor if to_local is None else to_local()
    return local


def refuse_several_losses(reason: str) -> NoReturn:
    """Raise where a backward cannot be limited to some parameters.

    Args:
        reason: Why, as a sentence.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(
        f'training_step returned a loss for each optimizer. {reason} Return one loss, or use strategy="ddp" or "fsdp".',
        code="DT-068",
    )


def refuse_left_out_batch(task: nn.Module, rank: int) -> NoReturn:
    """Raise where a task leaves out a batch, but its peers' backward gathers over all processes.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(
        f"{type(task).__name__}.training_step returned None on rank {rank}. With a sharded model every process must "
        "run as many forwards and backwards. Return a loss that counts for nothing instead, such as loss * 0, or leave "
        "the sample out of the dataset.",
        code="DT-052",
    )


def zero_loss_of(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """A loss of zero that depends on all of these that are trained.

    Args:
        parameters: The parameters.
    """
    parts = [parameter.reshape(-1)[:1].sum() for parameter in parameters if parameter.requires_grad]
    parts = [part.real if part.is_complex() else part for part in parts]
    return torch.stack(parts).nan_to_num(0.0, 0.0, 0.0).sum() * 0.0
