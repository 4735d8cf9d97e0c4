"""Act when the loss or the gradients are no longer finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drivetrain.callbacks.guards.guard import Guard
from drivetrain.runtime.collectives import reduce
from drivetrain.runtime.durations import Duration
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class NaNGuard(Guard):
    """Stops, skips or goes back when the loss or a gradient is infinite or NaN.

    All processes act together, whichever of them met it. With `every_n_steps=1` one number is read from the device
    in each step, before the optimizers step, so the weights are never spoilt. With `every_n_steps=100` nothing
    is read in between: the weights may be spoilt by the time it is seen, and `"stop"` or `"rollback"` deals
    with that. No checkpoint with weights that are not finite is saved while this guard is there.

    Under a precision that scales the loss (fp16), gradients that overflow are the scaler's business, which leaves
    the step out and lowers the scale: `check_gradients` then does nothing, the loss is still watched.

    Args:
        monitor: `"loss"` for what `training_step` returns, or the name of a metric that it logs.
        action: `"stop"` ends the run with an error that names the step, the batches and the rank. `"skip"` leaves
            the optimizer step out: parameters, optimizers and schedulers stay as they are (statistics that the
            forward updates, such as those of BatchNorm, have seen the batches). `"rollback"` returns to the newest
            checkpoint and leaves the batches out from then on.
        max_rollbacks: After so many of them the run ends with an error.
        check_gradients: Watch the gradients as well: one pass over them in each step. Automatic optimization only.
        every_n_steps: Read what was watched every so many steps, or in another unit: `"1M samples"`, `"1 min"`; 1 for
            `"skip"`.
        max_skips: After so many steps in a row that were left out the run ends with an error.

    Attributes:
        rollbacks: How often the run went back.
        skipped: The batches that were left out: (epoch, index in the epoch).

    Raises:
        ConfigurationError: If an argument is out of range, or cannot go with the run.
        DrivetrainError: During the run, by `action`.

    Example:
        ```python
        from drivetrain import ModelCheckpoint, NaNGuard, Trainer

        trainer = Trainer(callbacks=[NaNGuard(action="rollback"), ModelCheckpoint(every_n_train_steps=1000)])
        ```
    """

    def __init__(
        self,
        monitor: str = "loss",
        action: str = "stop",
        max_rollbacks: int = 3,
        check_gradients: bool = False,
        every_n_steps: int | str | Duration = 1,
        max_skips: int = 20,
    ) -> None:
        super().__init__(monitor, action, max_rollbacks, max_skips, every_n_steps)
        self.check_gradients = check_gradients

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        super().on_train_start(trainer, task)
        if self.check_gradients and self._is_manual:
            raise ConfigurationError(
                f"NaNGuard(check_gradients=True): {type(task).__name__} steps its optimizers by hand, so there is no "
                "moment to look at its gradients. Leave it False: the loss is watched.",
                code="DT-092",
            )

    def measure(self, trainer: Trainer, value: Tensor) -> Tensor:
        finite = torch.isfinite(value)
        if self.check_gradients and not self._rescales and trainer.task is not None:
            finite = finite & _are_finite([p.grad for p in trainer.task.parameters() if p.grad is not None], value)
        return 1.0 - finite.float()

    def judge(self, value: float) -> str | None:
        if value == 0.0:
            return None
        what = "the loss" if self.monitor == "loss" else self.monitor
        return f"{what} or a gradient is not finite" if self.check_gradients else f"{what} is not finite"

    def is_state_sound(self, trainer: Trainer, task: Task) -> bool:
        if not super().is_state_sound(trainer, task):
            return False
        like = torch.zeros((), device=trainer.strategy.topology.device)
        trained = [parameter for parameter in task.parameters() if parameter.requires_grad]
        statistics = [buffer for buffer in task.buffers() if buffer.is_floating_point()]
        # A buffer may hold infinities by intent, as attention masks do; NaN never is.
        sound = _are_finite(trained, like) & ~_have_nan(statistics, like)
        if float(reduce(sound.float(), "min")) == 1.0:
            return True
        logger.warning(
            f"NaNGuard: the model has parameters that are not finite after {trainer.global_step} steps, so nothing is "
            "saved."
        )
        return False


def _are_finite(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Whether this process's parts of tensors are finite, as a scalar on the device of `like`; nothing is read."""
    parts = [part for part in map(_local, tensors) if part.numel()]
    largest = [torch.linalg.vector_norm(part, math.inf) for part in parts]
    if not largest:
        return torch.ones((), dtype=torch.bool, device=like.device)
    return torch.isfinite(torch.stack([each.float().to(like.device) for each in largest])).all()


def _have_nan(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    found = [torch.isnan(_local(tensor)).any().to(like.device) for tensor in tensors]
    return torch.stack(found).any() if found else torch.zeros((), dtype=torch.bool, device=like.device)


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be sharded."""
    tensor = tensor.detach()
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.coalesce().values() if local.is_sparse else local
