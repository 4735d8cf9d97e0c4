"""Callback that finds the largest batch size that fits in memory when a run begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from drivetrain.callbacks.base import Callback, Stage
from drivetrain.runtime.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer


MODES = ("power", "binsearch")
"""The search modes."""


@dataclass(frozen=True)
class BatchSizeRange:
    """Options of a batch size search, which are checked here and documented in `BatchSizeFinder`."""

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
                f"mode={self.mode!r} is not valid: mode should be either of {MODES}.{nearest(str(self.mode), MODES)}"
            )
        for name, least in (("steps_per_trial", 1), ("init_val", 1), ("max_trials", 0), ("max_val", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigurationError(f"{name}={value!r} is not valid. Use an integer of at least {least}.")
        if not 0.0 <= self.margin < 1.0:
            raise ConfigurationError(f"margin={self.margin!r} is not valid. Use a fraction from 0.0 to below 1.0.")

    def next_size(self, fitting: int, lacking: int | None, most: int) -> int | None:
        # `fitting` is the largest size that fits so far (0 if none), `lacking` the smallest that does not (None if
        # none).
        # Double until a size fails, then bisect between the largest that fits and the smallest that fails.
        if lacking is None:
            return min(2 * fitting, most) if fitting < most else None
        if not fitting:
            return lacking // 2 or None
        middle = (fitting + lacking) // 2
        return middle if self.mode == "binsearch" and fitting < middle < lacking else None

    def chosen(self, fitting: int) -> int:
        return max(1, int(fitting * (1 - self.margin))) if self.mode == "binsearch" else fitting


class BatchSizeFinder(Callback):
    """Callback that searches for the largest batch size that fits in memory when a run begins, and uses it.

    The search runs a few steps with growing batch sizes and then restores the model, the optimizers and the loop. It
    writes the size to the task, its hyper-parameters or its data module, whose loader method then creates a new
    loader. With several processes, a size must fit on all of them. To search at other times, override `on_fit_start`
    and call `scale_batch_size` in another hook.

    Args:
        mode: `"power"` doubles the size until memory runs out, and takes the largest that fits. `"binsearch"` then
            also tries sizes in between.
        steps_per_trial: The number of steps to run with each size.
        init_val: The first size to try.
        max_trials: The maximum number of sizes that fit before the search ends.
        batch_arg_name: The attribute or hyper-parameter of the task or the data module that holds the batch size.
        margin: The fraction by which `"binsearch"` reduces the largest size that fits, as a reserve.
        max_val: The largest size to try.

    Attributes:
        optimal_batch_size: The result of the last search, or `init_val` before the first one.

    Raises:
        ConfigurationError: If an argument is out of range, if the loaders were passed in rather than created by a
            method, or if no object has an attribute named `batch_arg_name`.

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
        """Run the batch size search, and store the largest batch size that fits into memory in `optimal_batch_size`.

        Args:
            trainer: The running Trainer.
            task: The task that the Trainer runs.
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
