"""Callback that logs the norm of the gradients."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.step_schedule import StepLog, checked_every
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


class GradientNorm(Callback):
    """Callback that logs the norm of the gradients before they are clipped, over all processes and shards.

    It logs `grad_norm` every `log_every_n_steps` steps. With several optimizers the names are `grad_norm/0`,
    `grad_norm/1` and so on. Steps that are not logged compute nothing.

    Cost on a device, in steps that are logged: two kernels per parameter, fewer on CUDA, and one wait of the host.
    `by_parameter` adds one wait per parameter.

    Args:
        norm_type: The p of the p-norm.
        by_parameter: Also log the norm of each parameter, as `grad_norm/<name>`.
        every: The interval, in place of `log_every_n_steps`: a number of steps, or a duration such as `"500 steps"`,
            `"1M samples"`, `"10 min"` or `"10%"`.

    Raises:
        ConfigurationError: If `norm_type` is not above 0, or the Trainer has no logger.

    Example:
        ```python
        from drivetrain import GradientNorm, Trainer

        trainer = Trainer(callbacks=[GradientNorm()], logger="csv")
        ```
    """

    saves_within_steps = False

    def __init__(
        self, norm_type: float = 2.0, by_parameter: bool = False, every: int | str | Duration | None = None
    ) -> None:
        if not norm_type > 0:
            raise ConfigurationError(f"GradientNorm(norm_type={norm_type}): use a positive number, such as 2.0.")
        self.norm_type, self.by_parameter = float(norm_type), by_parameter
        self.every = checked_every(every, "GradientNorm")
        self.schedule = self.every if isinstance(self.every, Duration) else None
        self._logs: list[StepLog] = []

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        self._logs = [StepLog("GradientNorm", trainer, self.every).begin() for _ in trainer.optimizers]

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Optimizer) -> None:
        step = trainer.global_step + 1
        number = next(index for index, each in enumerate(trainer.optimizers) if each is optimizer)
        if not self._logs[number].is_due(step):
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = trainer.strategy.gradients
        name = f"grad_norm/{number}" if len(self._logs) > 1 else "grad_norm"
        # Clipping to an infinite norm changes nothing, but returns the norm over all shards.
        values = {name: float(gradients.clip_norm(parameters, math.inf, self.norm_type))}
        if self.by_parameter:
            held = {id(parameter) for parameter in parameters}
            for key, parameter in task.named_parameters():
                if id(parameter) in held and parameter.requires_grad:
                    values[f"grad_norm/{key}"] = float(gradients.clip_norm([parameter], math.inf, self.norm_type))
        self._logs[number].write(values, step)
