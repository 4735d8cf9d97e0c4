"""`Tuner`: searches for a learning rate or a batch size before a run."""

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
    """Searches for a learning rate or a batch size, with a Trainer, before a run of it.

    The task is set up as the run would, some steps are run, and everything is put back as it was, the generators of
    random numbers too: what follows is the run that would have been without the search, with the value that was found.

    Args:
        trainer: The trainer.

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
        """Search for a learning rate.

        Args:
            model: The task.
            train_dataloaders: As `Trainer.fit` takes them.
            val_dataloaders: As `Trainer.fit` takes them; nothing is validated.
            dataloaders: None.
            datamodule: Where loaders come from instead.
            method: `"fit"`.
            min_lr: The first rate.
            max_lr: The last one.
            num_training: How many rates, each for one optimizer step.
            mode: How the rate rises: `"exponential"` or `"linear"`.
            early_stop_threshold: Stop where the smoothed loss exceeds so many times the smallest one; None never to
                stop.
            update_attr: Whether the task gets the rate.
            attr_name: The attribute or hyper-parameter that holds the rate; `lr` or `learning_rate` if empty.
            weights_only: Without effect: no file is written.

        Returns:
            What was found; None with `fast_dev_run`.

        Raises:
            ConfigurationError: An argument cannot be, or the task has not one optimizer or no such attribute.
        """
        if method != "fit":
            raise ConfigurationError(f"lr_find(method={method!r}): method='fit' is the only one with a learning rate.")
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
        """Search for the largest batch size that memory is enough for.

        Args:
            model: The task.
            train_dataloaders: None: a method of the task or the data module makes them.
            val_dataloaders: The same.
            dataloaders: The same, for the other methods.
            datamodule: Where loaders come from instead.
            method: What is run: `"fit"`, `"validate"`, `"test"` or `"predict"`.
            mode: `"power"` doubles the size until memory lacks; `"binsearch"` then also tries those in between.
            steps_per_trial: Steps to run with each size.
            init_val: The first size.
            max_trials: How many sizes that fit are tried at most.
            batch_arg_name: The attribute or hyper-parameter that holds the size.
            margin: By what share of the largest that fits the size is less, with `"binsearch"`.
            max_val: The largest size that is tried.

        Returns:
            The size, which the task or the data module now has; None with `fast_dev_run`.

        Raises:
            ConfigurationError: An argument cannot be, loaders were given, or nothing has such an attribute.
            RuntimeError: Not even a batch of one row fits.
            CollectiveError: A process without memory could not reach the others.
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
        """The stage that a method is about, once the loaders fit it and no callback searches too."""
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
                "begins. Remove it, or call no Tuner.",
            )
        return _STAGES[Verb(method)]

    @contextmanager
    def _placed(
        self, model: Task, stage: Stage, loaders: dict[Stage, Any], datamodule: DataModule | None
    ) -> Iterator[Task]:
        """Set a task up and place it, as the verb does, for the body; then tear down, with nothing drawn or counted."""
        trainer, run = self._trainer, self._trainer.task_run
        task = uncompiled(model)
        if isinstance(loaders[stage], DataModule):
            loaders, datamodule = {**loaders, stage: None}, loaders[stage]
        progress = trainer.progress.state_dict()
        with ExitStack() as stack:
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
        run.place(task, run.configure_optimizers(task))


# `Tuning`: the searches of one Trainer, for its `Tuner` and for the callbacks that search within a run


class Tuning:
    """Searches for the task that a Trainer has placed; each leaves the run as it found it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def find_learning_rate(self, task: Task, tried: LRRange) -> LRFinder | None:
        """Search for a learning rate; call it on all processes."""
        if self._is_skipped("learning rate finder"):
            return None
        return search_learning_rate(self._trainer, task, tried)

    def check_batch_size(self, task: Task, tried: BatchSizeRange) -> None:
        """Raise where the batch size of what runs cannot be searched, before anything is placed."""
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
        """Search for the batch size of what runs; call it on all processes."""
        stage = self._trainer.task_run.stage
        if stage is None or self._is_skipped("batch size scaler"):
            return None
        return search_batch_size(self._trainer, task, stage, tried)

    def _is_skipped(self, what: str) -> bool:
        if self._trainer.fast_dev_run:
            warnings.warn(f"Skipping {what} since `fast_dev_run` is enabled.", stacklevel=4)
        return bool(self._trainer.fast_dev_run)
