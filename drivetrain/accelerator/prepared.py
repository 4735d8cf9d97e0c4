"""What an engine has prepared: the models, optimizers, schedulers and loaders of a run, in the order of preparation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from drivetrain.data import PreparedLoader

if TYPE_CHECKING:
    from drivetrain.accelerator.optimizer import PreparedOptimizer
    from drivetrain.accelerator.scheduler import PreparedScheduler


class Prepared:
    """The objects that a run consists of, each list in the order of preparation.

    Attributes:
        models: The modules to call, as the strategy made them.
        optimizers: The optimizers, each over parameters of the models.
        schedulers: The learning-rate schedulers.
        loaders: The sharded loaders.
        registered: Further objects whose state belongs to the run.
    """

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[PreparedOptimizer] = []
        self.schedulers: list[PreparedScheduler] = []
        self.loaders: list[PreparedLoader] = []
        self.registered: list[Any] = []

    def optimizers_of(self, model: nn.Module) -> list[Optimizer]:
        """The bare optimizers that hold any of a model's parameters; all of them where there is one model only."""
        bare = [optimizer.optimizer for optimizer in self.optimizers]
        if len(self.models) == 1:
            return bare
        own = {id(parameter) for parameter in model.parameters()}
        return [one for one in bare if any(id(parameter) in own for parameter in parameters_of(one))]

    def owners_of(self, parameters: Iterable[torch.Tensor]) -> list[Optimizer]:
        """The bare optimizers that hold any of some parameters."""
        wanted = {id(parameter) for parameter in parameters}
        bare = (optimizer.optimizer for optimizer in self.optimizers)
        return [one for one in bare if any(id(parameter) in wanted for parameter in parameters_of(one))]

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step of any optimizer was skipped on overflow."""
        return any(optimizer.step_was_skipped for optimizer in self.optimizers)

    def forget(self, objects: Sequence[Any]) -> None:
        """Leave objects out of the run, by identity; those that were never prepared are ignored."""
        gone = {id(item) for item in objects}
        for group in self._groups():
            group[:] = [item for item in group if id(item) not in gone]

    def forget_model(self, model: nn.Module) -> None:
        """Leave a model out of the run, with the optimizers over nothing but its parameters and their schedulers."""
        own = {id(parameter) for parameter in model.parameters()}
        optimizers = [o for o in self.optimizers if all(id(parameter) in own for parameter in parameters_of(o))]
        gone = {id(optimizer) for optimizer in optimizers}
        schedulers = [s for s in self.schedulers if s.optimizers and all(id(o) in gone for o in s.optimizers)]
        self.forget([model, *optimizers, *schedulers])

    def clear(self) -> None:
        """Leave everything out but what was registered."""
        for group in self._groups():
            group.clear()

    def _groups(self) -> tuple[list[Any], ...]:
        return self.models, self.optimizers, self.schedulers, self.loaders


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters of an optimizer, group by group."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
