"""The learning-rate search: raise the rate step by step, and watch the loss (Smith, 2017, https://arxiv.org/abs/1506.01186)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.callbacks import Callback
from drivetrain.callbacks.stage import Stage
from drivetrain.callbacks.support.lr_range import LRRange
from drivetrain.data import PendingBatch
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.seeds import isolated_random_state
from drivetrain.trainer.optimizers import parse_configured_optimizers
from drivetrain.trainer.task import Task
from drivetrain.trainer.tuning.attribute import TunedAttribute
from drivetrain.trainer.tuning.lr_finder import LRFinder
from drivetrain.trainer.tuning.rehearsal import TrainingRehearsal
from drivetrain.trainer.tuning.search_bar import shown
from drivetrain.trainer.tuning.undone import undone

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

NAMES = ("lr", "learning_rate")
SMOOTHING = 0.98  # the share of the running mean that each loss leaves of what was before


def search_learning_rate(trainer: Trainer, task: Task, tried: LRRange) -> LRFinder:
    """Train with rising learning rates, put everything back, and take the rate that the losses suggest.

    Call it on all processes, once the task is placed: their losses are averaged, so that all find the same.

    Args:
        trainer: The trainer.
        task: Its task.
        tried: Which rates.

    Returns:
        What was found.

    Raises:
        ConfigurationError: The task has not one optimizer.
        MissingAttributeError: It has no attribute for the rate, where one is to be updated.
    """
    attribute = None
    if tried.update_attr:
        names = (tried.attr_name,) if tried.attr_name else NAMES
        attribute = TunedAttribute.find(
            names, task, trainer.datamodule, "Give the name of yours as attr_name, or update_attr=False."
        )
    if len(trainer.task_optimizers) != 1:
        raise ConfigurationError(
            f"The learning-rate search only works with single optimizer: {type(task).__name__}.configure_optimizers "
            f"returned {len(trainer.task_optimizers)}. Search each task of one optimizer by itself.",
            code="DT-092",
        )
    found = LRFinder(tried.mode, tried.min_lr, tried.max_lr, tried.num_training)
    source = trainer.task_run.sources[Stage.TRAIN].again()
    losses = _SmoothedLosses(tried.early_stop_threshold)
    with undone(trainer, task, trains=True):
        watched = _Losses()
        rehearsal = TrainingRehearsal(trainer, task, [watched])
        groups = trainer.optimizers[0].param_groups

        def run(number: int, window: list[PendingBatch]) -> bool:
            rate = tried.rate(number)
            for group in groups:
                group["lr"] = rate
            rehearsal.step(window)
            loss = watched.take(trainer)
            continues = losses.add(loss)
            found.results["lr"].append(rate)
            found.results["loss"].append(losses.latest if loss is not None else math.nan)
            advance(lr=rate, loss=losses.latest)
            return continues

        with shown(trainer, "Learning-rate search", tried.num_training) as advance:
            rehearsal.run(source, tried.num_training, run, within_limits=True)
    suggestion = found.suggestion()
    if attribute is not None and suggestion is not None:
        before = attribute.value
        attribute.write(suggestion)
        _take_rate(trainer, task, suggestion)
        outcome = f"{attribute.name} is now {suggestion:.4g}, and was {before}"
    else:
        outcome = "none is suggested" if suggestion is None else f"{suggestion:.4g} is suggested"
    ended = f", where the loss {losses.verdict}" if losses.verdict else ""
    trainer.print(
        f"Learning-rate search: {len(found.results['lr'])} steps from {tried.min_lr:g} to "
        f"{found.results['lr'][-1]:.4g}{ended}; {outcome}. Nothing else has changed."
    )
    return found


def _take_rate(trainer: Trainer, task: Task, rate: float) -> None:
    """Let the optimizer and the schedulers that are there already be those of a run with this learning rate.

    Before the first step they are configured again, and what that makes is taken over; later the rate alone is.
    """
    groups = trainer.optimizers[0].param_groups
    before = [group["lr"] for group in groups]
    if trainer.global_step == 0:
        with isolated_random_state(devices=True):
            [optimizer], schedulers = parse_configured_optimizers(
                task.configure_optimizers(), strict=trainer.refuses_unknown_keys
            )
        if len(optimizer.param_groups) == len(groups):
            for group, configured in zip(groups, optimizer.param_groups, strict=True):
                group.update({name: value for name, value in configured.items() if name != "params"})
            for config, again in zip(trainer.lr_scheduler_configs, schedulers, strict=True):
                config.scheduler.load_state_dict(again.scheduler.state_dict())
    if [group["lr"] for group in groups] == before:
        for group in groups:
            group["lr"] = rate


class _Losses(Callback):
    """Adds up the losses of a step's micro-batches."""

    saves_within_steps = False

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, task: Task, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else None
        if loss is not None and not trainer.logged.skips:
            weight = torch.as_tensor(outputs.get("weight", 1.0), device=loss.device)
            mean = "weight" not in outputs
            self._sums.append(torch.stack([(loss * weight if mean else loss).float(), weight.float()]))

    def take(self, trainer: Trainer) -> float | None:
        """The mean loss of the step over all its micro-batches and processes; None where all were left out."""
        sums, self._sums = self._sums, []
        device = trainer.strategy.topology.device
        own = torch.stack(sums).sum(0).to(device) if sums else torch.zeros(2, device=device)
        total, weight = trainer.strategy.topology.sum(own).tolist()
        return total / weight if weight else None


class _SmoothedLosses:
    """A running mean of losses, and whether they have become so large that a search is over.

    Args:
        threshold: How many times the smallest mean; None never to stop.

    Attributes:
        latest: The mean so far.
        verdict: What ended the search, in words; empty where nothing has.
    """

    def __init__(self, threshold: float | None) -> None:
        self._threshold = threshold
        self._mean, self._count, self._best = 0.0, 0, math.inf
        self.latest, self.verdict = math.nan, ""

    def add(self, loss: float | None) -> bool:
        """Take the loss of one step; None where it had none. Returns whether the search continues."""
        if loss is None:
            return True
        self._count += 1
        self._mean = SMOOTHING * self._mean + (1 - SMOOTHING) * loss
        self.latest = self._mean / (1 - SMOOTHING**self._count)
        if self._threshold is not None and self._count > 1:
            if not math.isfinite(self.latest):
                self.verdict = "was no number any more"
            elif self.latest - self._best > (self._threshold - 1) * abs(self._best):
                self.verdict = f"exceeded {self._threshold:g} times the smallest one"
        self._best = min(self._best, self.latest)
        return not self.verdict
