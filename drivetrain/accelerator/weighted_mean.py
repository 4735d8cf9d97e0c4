"""Gradients of a weighted mean over all micro-batches and processes, such as that over all tokens of a global batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies import Strategy


class WeightedMean:
    """Turns sums with weights into the gradient of their weighted mean.

    The mean over a global batch of `sum_i loss_i / sum_i weight_i` cannot be had by averaging each micro-batch's own
    mean where their weights differ. So the gradients of the sums are added up, the weights of all micro-batches and
    processes too, and the gradients scaled by their inverse once, before anything reads them. Until then they are
    scaled by a power of two of about that size: that keeps them in range, and loses no bit.

    Args:
        strategy: What averages gradients over processes.

    Attributes:
        in_use: Whether losses have weights; None before the first one.
        pending: Whether there are gradients of sums that `finish` has not been called for.
        total: What the losses of the last finished window weigh, over all processes.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._divisor = 1.0
        self._weights: list[Tensor] = []
        self.in_use: bool | None = None
        self.pending = False
        self.total: Tensor | None = None

    def decide(self, weight: Tensor | float | None) -> bool:
        """Find out whether losses have weights, by the first of all; call it on all processes.

        Args:
            weight: What the first loss of this process weighs, if it was given.

        Returns:
            Whether any process gave it.
        """
        if weight is None and not self._strategy.topology.environment.is_distributed:
            self.in_use = False  # without reading anything from the device
            return False
        own = self._checked(0.0 if weight is None else weight)
        given = torch.stack([own, torch.full_like(own, weight is not None)])
        total, givers = self._strategy.topology.sum(given).tolist()
        self.in_use = givers > 0
        self._divisor = _power_of_two(total)
        return self.in_use

    def part(self, loss: Tensor, weight: Tensor | float, counts: bool = True) -> Tensor:
        """What to differentiate for one micro-batch.

        Args:
            loss: The sum of this micro-batch's losses.
            weight: What they weigh together, such as the number of tokens.
            counts: Whether the micro-batch is real, rather than one that only keeps peers company.

        Raises:
            ConfigurationError: The weight is not one number, or needs gradients.
        """
        own = self._checked(weight)
        self.pending = True
        self._weights.append(own if counts else torch.zeros_like(own))
        return loss * (self._strategy.topology.averaging_processes / self._divisor if counts else 0.0)

    def expect(self) -> None:
        """Begin a window whose losses have weights, be it on other processes only."""
        self._weights.clear()
        self.pending = True

    def discard(self) -> None:
        """Forget the weights of a window that never came to its step."""
        self._weights.clear()
        self.pending = False

    def finish(self, parts: Iterable[tuple[nn.Module, Sequence[Optimizer]]]) -> None:
        """Normalise the window's gradients by the weight of all its micro-batches; call it on all processes.

        Args:
            parts: What the strategy prepared, and the optimizers that hold its parameters.

        Raises:
            ConfigurationError: This process's losses leave out parameters whose gradients the peers wait for.
        """
        parts, gradients = list(parts), self._strategy.gradients
        for model, _ in parts:
            gradients.require_reduced(model)  # else the sum below meets the reduction that the peers are still in
        device = self._strategy.topology.device
        own = torch.stack(self._weights).sum() if self._weights else torch.zeros((), dtype=_wide(device), device=device)
        self.total = total = self._strategy.topology.sum(own)
        # Without any weight there is no gradient either.
        factor = torch.where(
            total > 0, self._divisor / total, torch.zeros_like(total)
        )  # wide: gradients may be of 64 bits
        for model, optimizers in parts:
            gradients.scale(model, optimizers, factor)
        self.discard()

    def _checked(self, weight: Tensor | float) -> Tensor:
        device = self._strategy.topology.device
        if not isinstance(weight, Tensor | int | float) or (isinstance(weight, Tensor) and weight.numel() != 1):
            given = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)[:80]
            raise ConfigurationError(
                f"The weight of a loss is one number, such as the number of tokens it is the sum of; got {given}.",
                code="DT-084",
            )
        if isinstance(weight, Tensor) and weight.requires_grad:
            raise ConfigurationError("The weight of a loss must not depend on parameters; detach() it.", code="DT-084")
        return torch.as_tensor(weight).to(device=device, dtype=_wide(device)).reshape(())


def _power_of_two(weight: Tensor) -> float:
    value = float(weight)
    return 2.0 ** round(math.log2(value)) if value > 0 and math.isfinite(value) else 1.0


def _wide(device: torch.device) -> torch.dtype:
    """A type in which counts stay exact."""
    return torch.float32 if device.type == "mps" else torch.float64
