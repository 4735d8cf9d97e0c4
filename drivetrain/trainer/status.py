"""What others may ask of a trainer: where it is, what it has logged, who it is made of."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.accelerator import Accelerator
from drivetrain.callbacks import Callback, EarlyStopping, ModelCheckpoint
from drivetrain.strategies import Strategy
from drivetrain.trackers import Tracker
from drivetrain.trainer.metrics.logged_value import Value
from drivetrain.trainer.metrics.logged_values import LoggedValues
from drivetrain.trainer.state.progress import Progress

if TYPE_CHECKING:
    from drivetrain.accelerator import PreparedOptimizer
    from drivetrain.trainer.task import Task


class TrainerStatus:
    """The read-only face of `Trainer`, in Lightning's words."""

    accelerator: Accelerator
    callbacks: list[Callback]
    loggers: list[Tracker]
    logged: LoggedValues
    progress: Progress
    task: Task | None
    task_optimizers: list[PreparedOptimizer]
    stage: str | None
    sanity_checking: bool
    should_stop: bool
    num_evaluation_batches: dict[str, list[float]]
    default_root_dir: str
    world_size_: int
    _logged_values: dict[str, float]

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self.accelerator.strategy

    @property
    def precision(self) -> str:
        """Name of the precision."""
        return self.accelerator.precision.name

    @property
    def current_epoch(self) -> int:
        """Epochs finished so far."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps taken so far."""
        return self.progress.global_step

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers."""
        return [optimizer.optimizer for optimizer in self.task_optimizers]

    @property
    def logger(self) -> Tracker | None:
        """The first tracker."""
        return self.loggers[0] if self.loggers else None

    @property
    def log_dir(self) -> str | None:
        """Where the first tracker writes, or the default directory; None without trackers."""
        for tracker in self.loggers:
            if tracker.log_dir is not None:
                return tracker.log_dir
        return self.default_root_dir if self.loggers else None

    # processes

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.accelerator.num_processes

    @property
    def global_rank(self) -> int:
        """Global rank of this process."""
        return self.accelerator.process_index

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.accelerator.local_process_index

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the main process."""
        return self.accelerator.is_main_process

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process, through the progress bar if there is one."""
        if not self.is_global_zero:
            return
        bar = self.progress_bar_callback
        if bar is not None:
            bar.print(*args, **kwargs)
        else:
            builtins.print(*args, **kwargs)

    # values

    @property
    def callback_metrics(self) -> dict[str, Value]:
        """All logged values by name, not yet turned into numbers: the latest of a step, the last of an epoch."""
        values = self.logged.callback_values()
        return {
            name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            for name, value in values.items()
        }

    @property
    def progress_bar_metrics(self) -> dict[str, Value]:
        """What the progress bar shows, not yet turned into numbers."""
        return self.logged.bar_values()

    @property
    def logged_metrics(self) -> dict[str, float]:
        """What the trackers got, the latest of each name."""
        return dict(self._logged_values)

    @property
    def num_val_batches(self) -> list[float]:
        """Batches of each validation loader."""
        return self.num_evaluation_batches.get("validation", [])

    @property
    def num_test_batches(self) -> list[float]:
        """Batches of each test loader."""
        return self.num_evaluation_batches.get("test", [])

    @property
    def num_predict_batches(self) -> list[float]:
        """Batches of each loader to predict."""
        return self.num_evaluation_batches.get("predict", [])

    # stages

    @property
    def training(self) -> bool:
        """Whether `fit` is training, not in a validation within."""
        return self.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether a validation runs, in `fit` or in `validate`; not in the sanity check."""
        return self.stage == "validate" and not self.sanity_checking

    @property
    def testing(self) -> bool:
        """Whether `test` runs."""
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether `predict` runs."""
        return self.stage == "predict"

    # callbacks

    def _first_callback(self, kind: type[Any]) -> Any:
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first checkpoint callback."""
        found: ModelCheckpoint | None = self._first_callback(ModelCheckpoint)
        return found

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """All checkpoint callbacks."""
        return [callback for callback in self.callbacks if isinstance(callback, ModelCheckpoint)]

    @property
    def early_stopping_callback(self) -> EarlyStopping | None:
        """The first early-stopping callback."""
        found: EarlyStopping | None = self._first_callback(EarlyStopping)
        return found

    @property
    def progress_bar_callback(self) -> Callback | None:
        """The first callback that is a progress bar."""
        return next((callback for callback in self.callbacks if callback.is_progress_bar), None)
