"""`Tuning`: the searches of one Trainer, for its `Tuner` and for the callbacks that search within a run."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.support.batch_size_range import BatchSizeRange
from drivetrain.callbacks.support.lr_range import LRRange
from drivetrain.trainer.tuning.advice import Advice, advise
from drivetrain.trainer.tuning.batch_size_search import check_batch_size_search, search_batch_size
from drivetrain.trainer.tuning.lr_search import search_learning_rate

if TYPE_CHECKING:
    from drivetrain.trainer.data_module import DataModule
    from drivetrain.trainer.task import Task
    from drivetrain.trainer.trainer import Trainer
    from drivetrain.trainer.tuning.lr_finder import LRFinder


class Tuning:
    """Searches for the task that a Trainer has placed; each leaves the run as it found it.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def find_learning_rate(self, task: Task, tried: LRRange) -> LRFinder | None:
        """Search for a learning rate; call it on all processes.

        Args:
            task: The task that runs.
            tried: Which rates, and what becomes of the one found.

        Returns:
            What was found; None with `fast_dev_run`.
        """
        if self._is_skipped("learning rate finder"):
            return None
        return search_learning_rate(self._trainer, task, tried)

    def check_batch_size(self, task: Task, tried: BatchSizeRange) -> None:
        """Raise where the batch size of what runs cannot be searched, before anything is placed.

        Args:
            task: The task that runs.
            tried: Which sizes.
        """
        stage = self._trainer.task_run.stage
        assert stage is not None
        attribute = check_batch_size_search(self._trainer, task, stage, tried)
        if attribute.is_twice_in_task:
            name = type(task).__name__
            warnings.warn(
                f"{name} has both an attribute {attribute.name} and a hyper-parameter of that name; the search "
                "changes both.",
                stacklevel=3,
            )

    def find_batch_size(self, task: Task, tried: BatchSizeRange) -> int | None:
        """Search for the batch size of what runs; call it on all processes.

        Args:
            task: The task that runs.
            tried: Which sizes.

        Returns:
            The size; None with `fast_dev_run`.
        """
        stage = self._trainer.task_run.stage
        if stage is None or self._is_skipped("batch size scaler"):
            return None
        return search_batch_size(self._trainer, task, stage, tried)

    def advise(self, task: Task, loaders: Any, datamodule: DataModule | None) -> list[Advice]:
        """Try changes before anything is placed, and print those that pay; call it on all processes.

        Args:
            task: The task that is to be trained.
            loaders: Its training loaders; None where a method makes them.
            datamodule: Its data module, if there is one.

        Returns:
            At most three; none with `fast_dev_run`.
        """
        return [] if self._is_skipped("advice") else advise(self._trainer, task, loaders, datamodule)

    def _is_skipped(self, what: str) -> bool:
        if self._trainer.fast_dev_run:
            warnings.warn(f"Skipping {what} since `fast_dev_run` is enabled.", stacklevel=4)
        return bool(self._trainer.fast_dev_run)
