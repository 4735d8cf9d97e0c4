"""Callback that finds a learning rate when training begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer
    from drivetrain.trainer.tuning.lr_search import LRFinder


MODES = ("exponential", "linear")
"""The ways in which the learning rate grows."""


@dataclass(frozen=True)
class LRRange:
    min_lr: float = 1e-8
    max_lr: float = 1.0
    num_training: int = 100
    mode: str = "exponential"
    early_stop_threshold: float | None = 4.0
    update_attr: bool = True
    attr_name: str = ""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigurationError(
                f"mode={self.mode!r} is not valid: mode should be either of {MODES}.{nearest(str(self.mode), MODES)}"
            )
        for name in ("min_lr", "max_lr"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigurationError(f"{name}={value!r} is not valid. Use a positive learning rate.")
        if not isinstance(self.num_training, int) or self.num_training < 1:
            raise ConfigurationError(f"num_training={self.num_training!r} is not valid. Use an integer of at least 1.")
        if self.early_stop_threshold is not None and not self.early_stop_threshold > 0:
            raise ConfigurationError(
                f"early_stop_threshold={self.early_stop_threshold!r}: use a positive number, or None to never stop.",
            )

    def rate(self, number: int) -> float:
        """Return the learning rate that the search tries in step `number`, counted from 0."""
        part = (number + 1) / self.num_training if number else 0.0
        if self.mode == "linear":
            return self.min_lr + part * (self.max_lr - self.min_lr)
        return float(self.min_lr * (self.max_lr / self.min_lr) ** part)


class LearningRateFinder(Callback):
    """Callback that searches for a learning rate when `fit` begins, and trains with it.

    The search trains the task for some steps with a growing learning rate and then restores the model, the optimizers
    and the loop. It suggests the learning rate at which the loss fell fastest. To search at other times, override
    `on_fit_start` and call `lr_find` in another hook.

    Args:
        min_lr: The first learning rate.
        max_lr: The last learning rate.
        num_training_steps: The number of learning rates to try, with one optimizer step each.
        mode: `"exponential"` or `"linear"` growth of the learning rate.
        early_stop_threshold: Stop once the smoothed loss exceeds the smallest one by this factor. None never stops
            early.
        update_attr: Write the suggested learning rate to the task.
        attr_name: The attribute or hyper-parameter that holds the learning rate. If empty, `lr` or `learning_rate`.
        weights_only: Has no effect, since the search writes no file.

    Attributes:
        optimal_lr: The result of the last search, or None before the first one.

    Raises:
        ConfigurationError: If an argument is out of range, if the task does not have exactly one optimizer, or if it
            has no such attribute.

    Example:
        ```python
        from drivetrain import LearningRateFinder, Trainer

        trainer = Trainer(callbacks=[LearningRateFinder(num_training_steps=50)], logger=False)
        ```
    """

    saves_within_steps = False

    def __init__(
        self,
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training_steps: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        weights_only: bool | None = None,
    ) -> None:
        self.tried = LRRange(
            min_lr, max_lr, num_training_steps, mode.lower(), early_stop_threshold, update_attr, attr_name
        )
        self.optimal_lr: LRFinder | None = None

    def lr_find(self, trainer: Trainer, task: Task) -> None:
        """Run the learning rate search, and store the rate that it suggests in `optimal_lr`.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
        """
        self.optimal_lr = trainer.tuning.find_learning_rate(task, self.tried)

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        self.lr_find(trainer, task)
