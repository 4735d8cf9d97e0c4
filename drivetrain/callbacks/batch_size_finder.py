"""Find the largest batch size that fits when a run begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback, Stage
from drivetrain.runtime.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


# Which batch sizes a search tries


MODES = ("power", "binsearch")
"""How the size is raised."""


@dataclass(frozen=True)
class BatchSizeRange:
    """Which batch sizes a search tries, and how; see `BatchSizeFinder`."""

    mode: str = "power"
    steps_per_trial: int = 3
    init_val: int = 2
    max_trials: int = 25
    batch_arg_name: str = "batch_size"
    margin: float = 0.05
    max_val: int = 8192

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigurationError(
                f"mode={self.mode!r}: should be either of {MODES}.{nearest(str(self.mode), MODES)}"
            )
        for name, least in (("steps_per_trial", 1), ("init_val", 1), ("max_trials", 0), ("max_val", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"{name}={value!r}: give a whole number of at least {least}.")
        if not 0.0 <= self.margin < 1.0:
            raise ConfigurationError(f"margin={self.margin!r}: give a share from 0.0 to below 1.0.")

    def next_size(self, fitting: int, lacking: int | None, most: int) -> int | None:
        """The size to try once some have been tried."""
        if lacking is None:
            return min(2 * fitting, most) if fitting < most else None
        if not fitting:
            return lacking // 2 or None
        middle = (fitting + lacking) // 2
        return middle if self.mode == "binsearch" and fitting < middle < lacking else None

    def chosen(self, fitting: int) -> int:
        """What becomes of the largest size that fits: less by the margin, where the search came close to the limit."""
        return max(1, int(fitting * (1 - self.margin))) if self.mode == "binsearch" else fitting


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
