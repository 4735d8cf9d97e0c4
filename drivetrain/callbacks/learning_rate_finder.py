"""Find a learning rate when training begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.support.lr_range import LRRange

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer
    from drivetrain.trainer.tuning.lr_finder import LRFinder


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
        weights_only: Taken for Lightning's sake: no file is written.

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
