"""Local SGD: processes train independently and average their parameters every few steps."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn

from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.accelerator.accelerator import Accelerator


class LocalSGD:
    """Context manager for Local SGD, which averages parameters only every few steps.

    See Lin et al., "Don't use large mini-batches, use local SGD" (2018, https://arxiv.org/abs/1808.07217). At the end
    of the context, parameters are equal on all processes.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: The prepared model, replicated on every process.
        local_sgd_steps: The number of calls of `step` between two averages.
        enabled: False to disable the context.

    Raises:
        ConfigurationError: The model is sharded, or `local_sgd_steps` is less than 1.

    Example:
        ```python
        import torch
        from drivetrain import Accelerator, LocalSGD

        accelerator = Accelerator()
        model = torch.nn.Linear(4, 1)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with LocalSGD(accelerator, model, local_sgd_steps=8) as local:
            for batch in torch.randn(16, 2, 4):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                local.step()
        ```
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        if local_sgd_steps < 1:
            raise ConfigurationError(f"local_sgd_steps is {local_sgd_steps}, but must be at least 1.")
        self.enabled = enabled and accelerator.use_distributed
        if self.enabled and accelerator.strategy.state.held_as != "whole":
            raise ConfigurationError(
                f"LocalSGD needs a copy of the model on every process, but {accelerator.strategy!r} shards it. Use "
                "strategy='ddp'.",
            )
        self.accelerator, self.model, self.local_sgd_steps = accelerator, model, local_sgd_steps
        self.num_steps = 0
        self._unsynchronised = accelerator.no_sync(model if self.enabled else None)

    def __enter__(self) -> LocalSGD:
        self._unsynchronised.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # After an error, other processes may never reach this average.
        if self.enabled and kind is None:
            self._average()
        self._unsynchronised.__exit__(kind, error, traceback)

    def step(self) -> None:
        """Count an optimizer step. In every `local_sgd_steps`-th call, average the parameters over all processes.

        Call this after each step of the optimizer.
        """
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    @torch.no_grad()
    def _average(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for parameter, mean in zip(trained, reduce([p.detach() for p in trained], "mean"), strict=True):
            parameter.copy_(mean)
