"""Find a learning rate when training begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.runtime.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer
    from drivetrain.trainer.tuning.lr_search import LRFinder


# Which learning rates a search tries


MODES = ("exponential", "linear")
"""How the rate is raised."""


@dataclass(frozen=True)
class LRRange:
    """Which learning rates a search tries, and what becomes of the one that it finds; see `LearningRateFinder`."""

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
                f"mode={self.mode!r}: should be either of {MODES}.{nearest(str(self.mode), MODES)}"
            )
        for name in ("min_lr", "max_lr"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
                raise ConfigurationError(f"{name}={value!r}: give a learning rate above 0.")
        if not isinstance(self.num_training, int) or self.num_training < 1:
            raise ConfigurationError(f"num_training={self.num_training!r}: give a whole number of at least 1.")
        if self.early_stop_threshold is not None and not self.early_stop_threshold > 0:
            raise ConfigurationError(
                f"early_stop_threshold={self.early_stop_threshold!r}: give a number above 0, or None never to stop.",
            )

    def rate(self, number: int) -> float:
        """The rate of one of the steps."""
        part = (number + 1) / self.num_training if number else 0.0
        if self.mode == "linear":
            return self.min_lr + part * (self.max_lr - self.min_lr)
        return float(self.min_lr * (self.max_lr / self.min_lr) ** part)


class LearningRateFinder(Callback):
    """Searches for a learning rate when `fit` begins, and trains with it.

    The task is trained for some steps with a rate that rises, everything is put back as it was, and the rate at which
    the loss fell fastest becomes the task's. Override `on_fit_start` and another hook to search at other times.

    Args:
        min_lr: The first rate.
        max_lr: The last one.
        num_training_steps: How many rates, each for one optimizer step.
        mode: How the rate rises: `"exponential"` or `"linear"`.
        early_stop_threshold: Stop where the smoothed loss exceeds so many times the smallest one; None never to stop.
        update_attr: Whether the task gets the rate; else it is only found.
        attr_name: The attribute or hyper-parameter that holds the rate; `lr` or `learning_rate` if empty.
        weights_only: Without effect: no file is written.

    Attributes:
        optimal_lr: What the last search has found.

    Raises:
        ConfigurationError: If an argument cannot be, or the task has not one optimizer or no such attribute.

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
        """Search now.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
        """
        self.optimal_lr = trainer.tuning.find_learning_rate(task, self.tried)

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        self.lr_find(trainer, task)
