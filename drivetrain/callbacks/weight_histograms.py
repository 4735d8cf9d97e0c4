"""Callback that logs histograms of weights and gradients."""

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
    """Callback that logs histograms of each parameter and its gradient.

    They are named `weights/<name>` and `gradients/<name>`, and are taken before gradients are clipped and the
    optimizer steps. TensorBoard, Weights & Biases, Comet, ClearML, Aim, DVCLive and SwanLab display histograms. Other
    trackers ignore them, with one warning. If the strategy shards the model, every process contributes a sample of its
    shards, so the histogram is that of the whole parameter. Strategies whose engine holds the weights (DeepSpeed,
    Megatron) raise an error.

    Cost on a device, in steps that are logged: one copy of the sampled values to the host, and one wait.

    Args:
        every_n_steps: The number of optimizer steps between logs, or a duration such as `"1M samples"`, `"10 min"` or
            `"10%"`.
        weights: Log the weights.
        gradients: Log the gradients.
        max_values: The maximum number of values per tensor. Larger tensors are sampled at even distances.

    Raises:
        ConfigurationError: If an argument is out of range, if the Trainer has no logger, or if the strategy's engine
            holds the weights.

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
        self.schedule = interval if isinstance(interval, Duration) else None
        if (isinstance(interval, int) and interval < 1) or max_values < 1 or not (weights or gradients):
            raise ConfigurationError(
                f"WeightHistograms(every_n_steps={every_n_steps}, weights={weights}, gradients={gradients}, "
                f"max_values={max_values}): use at least one step and one value, and enable weights or gradients.",
            )
        self.every_n_steps, self.max_values = interval, max_values
        self._interval: StepInterval | None = None
        self.weights, self.gradients = weights, gradients

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        if not (trainer.loggers or trainer.barebones):
            raise ConfigurationError(
                "WeightHistograms needs a logger, but the Trainer has none. Give it one, such as "
                "Trainer(logger='tensorboard'), or remove this callback.",
            )
        assert trainer.model is not None
        self._interval = StepInterval(trainer, self.every_n_steps, "WeightHistograms.every_n_steps")
        trainer.strategy.state.parameters_in_place(trainer.model)  # raises if the strategy's engine holds the weights

    def on_before_optimizer_step(self, trainer: Trainer, task: Task, optimizer: Optimizer) -> None:
        step = trainer.global_step + 1
        if self._interval is None or not self._interval.is_due(step):
            return
        assert trainer.model is not None
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        values: dict[str, Tensor] = {}
        for name, parameter in trainer.strategy.state.parameters_in_place(trainer.model).items():
            if id(parameter) in own and self.weights:
                values[f"weights/{name}"] = self._sample(parameter)
            if id(parameter) in own and self.gradients and parameter.grad is not None:
                values[f"gradients/{name}"] = self._sample(parameter.grad)
        values = _on_host(values)
        if trainer.strategy.state.held_as != "whole":
            values = _together(values)
        trainer.tracker_group.log_histogram(values, step)

    def _sample(self, tensor: Tensor) -> Tensor:
        flat = local_part(tensor.detach()).reshape(-1)
        # Rounded up, so that at most `max_values` values remain.
        stride = -(-flat.numel() // self.max_values) or 1
        return flat[::stride].float()


def _on_host(values: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for device in {value.device for value in values.values()}:
        here = {name: value for name, value in values.items() if value.device == device}
        # one transfer for each device, not for each tensor
        parts = torch.split(torch.cat(list(here.values())).cpu(), [value.numel() for value in here.values()])
        found |= {name: part.clone() for name, part in zip(here, parts, strict=True)}
    return {name: found[name] for name in values}


def _together(values: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, list[Tensor]] = {}
    for each in gather_object([values]):
        for name, sample in each.items():
            if sample.numel():
                found.setdefault(name, []).append(sample)
    return {name: torch.cat(samples) for name, samples in found.items()}
