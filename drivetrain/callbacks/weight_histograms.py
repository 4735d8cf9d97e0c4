"""Show how weights and gradients are distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.step_schedule import StepInterval
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.durations import Duration, interval_of
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.strategies.base import local_part

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


class WeightHistograms(Callback):
    """Gives the distribution of each parameter and of its gradient to the trackers that show histograms.

    Every so many steps `weights/<name>` and `gradients/<name>`, before gradients are clipped and the optimizer steps.
    TensorBoard, Weights & Biases, Comet, ClearML, Aim, DVCLive and SwanLab show them; other trackers leave them out,
    with one warning. Under strategies that shard the model every process gives a sample of its shards, so the
    distribution is that of the whole. Where a strategy keeps weights in an engine (DeepSpeed, Megatron) the callback is
    refused.

    Args:
        every_n_steps: Every so many optimizer steps, or in another unit: `"1M samples"`, `"10 min"`, `"10%"`.
        weights: Whether weights are shown.
        gradients: Whether gradients are shown.
        max_values: Of a larger tensor so many values, evenly spaced, are taken.

    Raises:
        ConfigurationError: If an argument cannot be, the Trainer has no logger, or the strategy keeps its weights.

    Example:
        ```python
        from drivetrain import Trainer, WeightHistograms

        trainer = Trainer(callbacks=[WeightHistograms(every_n_steps=500)], logger="csv")
        ```
    """

    saves_within_steps = False

    def __init__(
        self,
        every_n_steps: int | str | Duration = 100,
        weights: bool = True,
        gradients: bool = True,
        max_values: int = 10_000,
    ) -> None:
        interval = interval_of(every_n_steps, "WeightHistograms.every_n_steps")
        self.rhythm = interval if isinstance(interval, Duration) else None
        if (isinstance(interval, int) and interval < 1) or max_values < 1 or not (weights or gradients):
            raise ConfigurationError(
                f"WeightHistograms(every_n_steps={every_n_steps}, weights={weights}, gradients={gradients}, "
                f"max_values={max_values}): give at least one step and one value, and leave one of the two kinds on.",
            )
        self.every_n_steps, self.max_values = interval, max_values
        self._rhythm: StepInterval | None = None
        self.weights, self.gradients = weights, gradients

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        if not (trainer.loggers or trainer.barebones):
            raise ConfigurationError(
                "WeightHistograms has nowhere to log to: the Trainer has no logger. Give it one, such as "
                "Trainer(logger='tensorboard'), or take this callback out.",
            )
        assert trainer.model is not None
        self._rhythm = StepInterval(trainer, self.every_n_steps, "WeightHistograms.every_n_steps")
        trainer.strategy.state.parameters_in_place(trainer.model)  # raises where they are copies

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Optimizer) -> None:
        step = trainer.global_step + 1
        if self._rhythm is None or not self._rhythm.is_due(step):
            return
        assert trainer.model is not None
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        values: dict[str, Tensor] = {}
        for name, parameter in trainer.strategy.state.parameters_in_place(trainer.model).items():
            if id(parameter) in own and self.weights:
                values[f"weights/{name}"] = self._sample(parameter)
            if id(parameter) in own and self.gradients and parameter.grad is not None:
                values[f"gradients/{name}"] = self._sample(parameter.grad)
        if not trainer.strategy.state.holds_whole:
            values = _together(values)
        trainer.tracker_group.log_histogram(values, step)

    def _sample(self, tensor: Tensor) -> Tensor:
        flat = local_part(tensor.detach()).reshape(-1)
        stride = -(-flat.numel() // self.max_values) or 1
        return flat[::stride].float().cpu()


def _together(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The samples of all processes; call it on all."""
    found: dict[str, list[Tensor]] = {}
    for each in gather_object([values]):
        for name, sample in each.items():
            if sample.numel():
                found.setdefault(name, []).append(sample)
    return {name: torch.cat(samples) for name, samples in found.items()}
