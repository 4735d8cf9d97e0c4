"""What warns of a run that trains nothing, or trains towards nothing; none of it costs a step anything."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.logging import get_logger
from drivetrain.strategies.precision import overrides
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class Finiteness:
    """Whether a run's logged values and weights are finite, as far as they were read anyway or at the end of epochs.

    Args:
        is_watched: Whether to warn; not where a callback guards the values.

    Attributes:
        is_finite: Whether all that was read so far is.
    """

    def __init__(self, is_watched: bool) -> None:
        self._is_watched = is_watched
        self._weights_are_finite = True  # the same on all processes
        self.is_finite = True

    def check_values(self, values: Iterable[tuple[str, float]], when: str) -> None:
        """Take numbers into account that are being written.

        Args:
            values: Names and numbers.
            when: The step or epoch, for the warning.
        """
        if self._is_watched and self.is_finite:
            found = next(((name, value) for name, value in values if not math.isfinite(value)), None)
            if found is not None:
                self._record(f"The logged value {found[0]!r} is {found[1]} {when}.")

    def check_weights(self, task: Task, when: str) -> None:
        """Take the weights into account; call it on all processes, at the end of an epoch.

        Args:
            task: The task.
            when: The epoch, for the warning.
        """
        if not (self._is_watched and self._weights_are_finite):
            return
        found = next((name for name in gather_object([_first_not_finite(task)]) if name is not None), None)
        if found is not None:
            self._weights_are_finite = False
            self._record(f"The weight {found!r} is not finite {when}, so a loss was not either.")

    def _record(self, what: str) -> None:
        if self.is_finite:
            logger.warning(
                f"{what} Training continues, and its checkpoints hold such weights. NaNGuard among the callbacks stops "
                "such a run, leaves such steps out, or returns to a checkpoint; Trainer(detect_anomaly=True) names the "
                "operation."
            )
        self.is_finite = False


class EpochHealth:
    """Looks after each epoch whether it has trained anything.

    Args:
        trainer: The trainer.
        task: Its task.
    """

    def __init__(self, trainer: Trainer, task: Task) -> None:
        self._trainer, self._task = trainer, task
        self._steps = self._batches = 0
        self._has_warned = False

    def begin_epoch(self) -> None:
        """Record where an epoch begins."""
        self._steps, self._batches = self._trainer.global_step, self._trainer.progress.total_batches

    def end_epoch(self) -> None:
        """Warn of an epoch without an optimizer step, and of weights that are not finite; call it on all processes."""
        trainer = self._trainer
        if trainer.barebones:
            return
        ran = trainer.progress.total_batches > self._batches
        if ran and trainer.global_step == self._steps and not self._has_warned:
            self._has_warned = True
            logger.warning(f"Epoch {trainer.current_epoch} took no optimizer step: {self._explain()}")
        trainer.finiteness.check_weights(self._task, f"after epoch {trainer.current_epoch}")

    def _explain(self) -> str:
        step = f"{type(self._task).__name__}.training_step"
        if not self._task.automatic_optimization:
            return f"automatic_optimization is False, and {step} stepped no optimizer."
        explained = f"{step} returned None for every batch"
        if overrides(self._trainer.accelerator.precision, "scale") or self._trainer.hooks.find("on_gradients_ready"):
            explained += ", or every step was left out: gradients overflowed, or a callback asked for it"
        return f"{explained}."


def _first_not_finite(task: Task) -> str | None:
    """The name of a parameter that is not finite in what this process holds of it, if there is one."""
    names: list[str] = []
    found: list[torch.Tensor] = []
    for name, parameter in task.named_parameters():
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        if local.is_floating_point() and local.element_size() > 1 and local.device.type != "meta":
            names.append(name)
            found.append(torch.isfinite(local).all())
    if not found:
        return None
    finite = torch.stack([each.to(found[0].device) for each in found]).tolist()
    return next((name for name, is_finite in zip(names, finite, strict=True) if not is_finite), None)
