"""`Tuner`, which searches for a learning rate or a batch size before a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback, Stage, Verb
from drivetrain.callbacks.batch_size_finder import BatchSizeFinder, BatchSizeRange
from drivetrain.callbacks.learning_rate_finder import LearningRateFinder, LRRange
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.seeds import isolated_random_state, kept_generators
from drivetrain.trainer import task_checks
from drivetrain.trainer.compiling import uncompiled
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.task import Task
from drivetrain.trainer.tuning.batch_size_search import check_batch_size_search, search_batch_size
from drivetrain.trainer.tuning.lr_search import LRFinder, search_learning_rate

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


_STAGES = {stage.verb: stage for stage in Stage}


class Tuner:
    """Search for a learning rate, or for the largest batch size that fits into memory, before training.

    The task is set up as in the run and trains for some steps. Weights, optimizers and random generators are then
    restored. The following run therefore equals one without the search, apart from the value that was found.

    Args:
        trainer: Trainer of the run.

    Example:
        ```python
        from drivetrain import Trainer, Tuner

        tuner = Tuner(Trainer(max_epochs=3, logger=False, enable_progress_bar=False))
        ```
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: Task,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
        weights_only: bool | None = None,
    ) -> LRFinder | None:
        """Search for a learning rate by training with rates that rise after each optimizer step.

        Args:
            model: Task to train.
            train_dataloaders: Training loaders, as for `Trainer.fit`.
            val_dataloaders: Validation loaders, as for `Trainer.fit`. No validation runs.
            dataloaders: Must be None.
            datamodule: Data module that makes the loaders.
            method: Must be `"fit"`.
            min_lr: First learning rate.
            max_lr: Last learning rate.
            num_training: Number of learning rates, each tried for one optimizer step.
            mode: `"exponential"` or `"linear"`, the way in which the rate rises.
            early_stop_threshold: Stop if the smoothed loss exceeds the smallest one by this factor. None never stops
                early.
            update_attr: If True, set the attribute of the task to the suggested rate.
            attr_name: Attribute or hyper-parameter that holds the rate. If empty, `lr` or `learning_rate`.
            weights_only: Ignored, since no file is written.

        Returns:
            The losses and the suggestion, or None with `fast_dev_run`.

        Raises:
            ConfigurationError: If an argument is invalid, the task has no such attribute, or it has several optimizers.
        """
        if method != "fit":
            raise ConfigurationError(
                f"lr_find(method={method!r}) is not valid: only method='fit' uses a learning rate."
            )
        tried = LRRange(min_lr, max_lr, num_training, mode.lower(), early_stop_threshold, update_attr, attr_name)
        stage = self._check(LearningRateFinder, method, train_dataloaders, val_dataloaders, dataloaders)
        loaders = {Stage.TRAIN: train_dataloaders, Stage.VALIDATE: val_dataloaders}
        with self._placed(model, stage, loaders, datamodule) as task:
            return self._trainer.tuning.find_learning_rate(task, tried)

    def scale_batch_size(
        self,
        model: Task,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Search for the largest batch size that fits into memory.

        Args:
            model: Task to run.
            train_dataloaders: Must be None. A method of the task or data module makes the loaders.
            val_dataloaders: Validation loaders, as for `Trainer.fit`. Their batch size stays fixed.
            dataloaders: Must be None.
            datamodule: Data module that makes the loaders.
            method: Method to run: `"fit"`, `"validate"`, `"test"` or `"predict"`.
            mode: `"power"` doubles the size until memory runs out. `"binsearch"` then also tries sizes in between.
            steps_per_trial: Number of steps per batch size.
            init_val: First batch size.
            max_trials: Maximal number of batch sizes that fit.
            batch_arg_name: Attribute or hyper-parameter that holds the batch size.
            margin: Fraction by which the result is below the largest size that fits, with `"binsearch"`.
            max_val: Largest batch size to try.

        Returns:
            The batch size, which is also set in the task or data module, or None with `fast_dev_run`.

        Raises:
            ConfigurationError: If an argument is invalid, loaders were passed, or the attribute does not exist.
            RuntimeError: If not even a batch of one row fits.
            CollectiveError: If a rank out of memory could not reach the other ranks.
        """
        tried = BatchSizeRange(mode.lower(), steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val)
        stage = self._check(BatchSizeFinder, method, train_dataloaders, val_dataloaders, dataloaders)
        loaders = {stage: dataloaders}
        if stage is Stage.TRAIN:
            loaders = {Stage.TRAIN: train_dataloaders, Stage.VALIDATE: val_dataloaders}
        with self._placed(model, stage, loaders, datamodule) as task:
            self._trainer.tuning.check_batch_size(task, tried)
            return self._trainer.tuning.find_batch_size(task, tried)

    def _check(self, finder: type[Callback], method: str, training: Any, validating: Any, evaluating: Any) -> Stage:
        """Check the arguments of `lr_find` or `scale_batch_size`, and return the stage in which the search runs."""
        if method not in _STAGES:
            raise ConfigurationError(
                f"method {method!r} is invalid. Should be one of {', '.join(_STAGES)}.{nearest(method, _STAGES)}",
            )
        if method == "fit" and evaluating is not None:
            raise ConfigurationError(
                "With method='fit' `dataloaders` is of no use; please consider setting `train_dataloaders` and "
                "`val_dataloaders` instead.",
            )
        if method != "fit" and (training is not None or validating is not None):
            raise ConfigurationError(
                f"With method={method!r} `train_dataloaders` and `val_dataloaders` are of no use; please consider "
                "setting `dataloaders` instead.",
            )
        if any(isinstance(callback, finder) for callback in self._trainer.callbacks):
            raise ConfigurationError(
                f"Trainer is already configured with a `{finder.__name__}` callback, which searches when the run "
                "begins. Remove the callback, or do not use the Tuner.",
            )
        return _STAGES[Verb(method)]

    @contextmanager
    def _placed(
        self, model: Task, stage: Stage, loaders: dict[Stage, Any], datamodule: DataModule | None
    ) -> Iterator[Task]:
        """Set up a task for a search as its run would do, yield it, then tear down and restore the Trainer."""
        trainer, run = self._trainer, self._trainer.task_run
        task = uncompiled(model)
        if isinstance(loaders[stage], DataModule):
            loaders, datamodule = {**loaders, stage: None}, loaders[stage]
        progress = trainer.progress.state_dict()
        with ExitStack() as stack:
            # Exits run in reverse order: teardown first, then the counters, then random generators.
            stack.enter_context(isolated_random_state(devices=True))
            stack.enter_context(kept_generators(task, datamodule))
            stack.callback(trainer.progress.load_state_dict, progress)
            if stage is Stage.TRAIN:
                task_checks.check_task(task, loaders[stage], loaders[Stage.VALIDATE], datamodule)
            else:
                task_checks.check_evaluation(task, stage)
            run.attach(task, datamodule, stage, loaders)
            trainer.control.begin()
            stack.callback(run.tear_down, task, stage)
            run.set_up(task, stage)
            self._place(task, stage)
            trainer.current.stage = stage
            yield task
            for each, source in run.sources.items():
                # After a batch-size search, `trainer.train_dataloader` shows the loader with the new size.
                if source.is_stale and source.is_defined():
                    trainer.current.loaders[each] = source.raw()

    def _place(self, task: Task, stage: Stage) -> None:
        run, strategy = self._trainer.task_run, self._trainer.strategy
        if stage is not Stage.TRAIN:
            run.place_for_evaluation(task)
            return
        with strategy.init_context():
            task.configure_model()
        trainer = self._trainer
        task_checks.check_training_step(task, trainer.accumulate_grad_batches, trainer.gradient_clip_val)
        # As in `fit`, so that trial steps use the model and the optimizers of the run.
        run.place(task, run.configure_optimizers(task))


# Searches of a Trainer


class Tuning:
    """Learning-rate and batch-size searches of a Trainer, for `Tuner` and callbacks like `LearningRateFinder`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def find_learning_rate(self, task: Task, tried: LRRange) -> LRFinder | None:
        """Run the learning-rate search for a task, and return its `LRFinder`. Return None with `fast_dev_run`.

        All ranks must call this together.
        """
        if self._is_skipped("learning rate finder"):
            return None
        return search_learning_rate(self._trainer, task, tried)

    def check_batch_size(self, task: Task, tried: BatchSizeRange) -> None:
        """Raise `ConfigurationError` if a search could not change the batch size of the current stage."""
        stage = self._trainer.task_run.stage
        assert stage is not None
        attribute = check_batch_size_search(self._trainer, task, stage, tried)
        if attribute.is_twice_in_task:
            name = type(task).__name__
            warnings.warn(
                f"{name} has both an attribute {attribute.name} and a hyper-parameter of that name. The search "
                "changes both. Remove one of them.",
                stacklevel=3,
            )

    def find_batch_size(self, task: Task, tried: BatchSizeRange) -> int | None:
        """Find, set and return the largest batch size that fits into memory. Return None with `fast_dev_run`.

        The batch size is that of the current stage. All ranks must call this together.
        """
        stage = self._trainer.task_run.stage
        if stage is None or self._is_skipped("batch size scaler"):
            return None
        return search_batch_size(self._trainer, task, stage, tried)

    def _is_skipped(self, what: str) -> bool:
        if self._trainer.fast_dev_run:
            warnings.warn(f"Skipping {what} since `fast_dev_run` is enabled.", stacklevel=4)
        return bool(self._trainer.fast_dev_run)
