"""Find the largest batch size that fits when a run begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback
from drivetrain.callbacks.stage import Stage
from drivetrain.callbacks.support.batch_size_range import BatchSizeRange

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


class BatchSizeFinder(Callback):
    """Searches for the largest batch size that memory is enough for when a run begins, and runs with it.

    A few steps are run with rising sizes, and everything is put back as it was; the task, its hyper-parameters or its
    data module then have the size, and their method makes the loader again. Several processes search together: a size
    that lacks memory on one lacks it on all. Override `on_fit_start` and another hook to search at other times.

    Args:
        mode: `"power"` doubles the size until memory lacks, and takes the largest that fits; `"binsearch"` then also
            tries those in between.
        steps_per_trial: Steps to run with each size.
        init_val: The first size.
        max_trials: How many sizes that fit are tried at most.
        batch_arg_name: The attribute or hyper-parameter of the task or the data module that holds the size.
        margin: By what share of the largest that fits the size is less, with `"binsearch"`.
        max_val: The largest size that is tried.

    Attributes:
        optimal_batch_size: What the last search has found; `init_val` before.

    Raises:
        ConfigurationError: If an argument cannot be, the loaders were given rather than made by a method, or nothing
            has such an attribute.

    Example:
        ```python
        from drivetrain import BatchSizeFinder, Trainer

        trainer = Trainer(callbacks=[BatchSizeFinder(mode="binsearch")], logger=False)
        ```
    """

    saves_within_steps = False

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        self.tried = BatchSizeRange(
            mode.lower(), steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val
        )
        self.optimal_batch_size: int | None = init_val

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        trainer.tuning.check_batch_size(task, self.tried)

    def scale_batch_size(self, trainer: Trainer, task: Task) -> None:
        """Search now.

        Args:
            trainer: The Trainer that runs.
            task: The task that it runs.
        """
        self.optimal_batch_size = trainer.tuning.find_batch_size(task, self.tried)

    def on_fit_start(self, trainer: Trainer, task: Task) -> None:
        self.scale_batch_size(trainer, task)

    def on_validation_start(self, trainer: Trainer, task: Task) -> None:
        if trainer.task_run.stage is Stage.VALIDATE:
            self.scale_batch_size(trainer, task)

    def on_test_start(self, trainer: Trainer, task: Task) -> None:
        self.scale_batch_size(trainer, task)

    def on_predict_start(self, trainer: Trainer, task: Task) -> None:
        self.scale_batch_size(trainer, task)
