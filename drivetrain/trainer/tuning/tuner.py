"""`Tuner`, which searches for a learning rate or a batch size before a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback, Stage, Verb
from drivetrain.callbacks.batch_size_finder import BatchSizeFinder, BatchSizeRange
from drivetrain.callbacks.learning_rate_finder import LearningRateFinder, LRRange
from drivetrain.data import CombinedLoader, PendingBatch
from drivetrain.runtime.errors import ConfigurationError, nearest
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.memory import Attempt, attempt_together
from drivetrain.runtime.seeds import isolated_random_state, kept_generators
from drivetrain.trainer import task_checks
from drivetrain.trainer.compiling import uncompiled
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.hooks import is_overridden
from drivetrain.trainer.loops.batches import length_of
from drivetrain.trainer.task import Task
from drivetrain.trainer.tuning.lr_search import LRFinder, search_learning_rate
from drivetrain.trainer.tuning.trial import (
    MissingAttributeError,
    TrainingTrial,
    TunedAttribute,
    preserve_run,
    shown,
    try_evaluation,
)

if TYPE_CHECKING:
    from drivetrain.trainer.trainer import Trainer


logger = get_logger(__name__)

_STAGES = {stage.verb: stage for stage in Stage}


class Tuner:
    """Search for a learning rate, or for the largest batch size that fits into memory.

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
        """Search for a good learning rate by training with rising rates, and return the loss at each rate.

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
        """Search for the largest batch size that fits into memory, set it in the task or data module, and return it.

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
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def find_learning_rate(self, task: Task, tried: LRRange) -> LRFinder | None:
        # None with `fast_dev_run`. All ranks must call this together.
        if self._is_skipped("learning rate finder"):
            return None
        return search_learning_rate(self._trainer, task, tried)

    def check_batch_size(self, task: Task, tried: BatchSizeRange) -> None:
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
        # None with `fast_dev_run`. All ranks must call this together.
        stage = self._trainer.task_run.stage
        if stage is None or self._is_skipped("batch size scaler"):
            return None
        return search_batch_size(self._trainer, task, stage, tried)

    def _is_skipped(self, what: str) -> bool:
        if self._trainer.fast_dev_run:
            warnings.warn(f"Skipping {what} since `fast_dev_run` is enabled.", stacklevel=4)
        return bool(self._trainer.fast_dev_run)


# Search for the largest batch size that fits into memory on all ranks


PATIENCE = 60.0
"""Seconds that a rank out of memory waits for the other ranks to finish the trial."""


def search_batch_size(trainer: Trainer, task: Task, stage: Stage, tried: BatchSizeRange) -> int:
    """Find the largest batch size, within the limits of `tried`, that fits into memory. Set and return it.

    The batch size is an attribute of the task or its data module. All ranks must call this together, after the task is
    placed. Everything else is restored.
    """
    attribute = check_batch_size_search(trainer, task, stage, tried)
    before = attribute.value
    chosen = before
    try:
        with preserve_run(trainer, task, trains=stage is Stage.TRAIN):
            trials = _Trials(trainer, task, stage, tried, attribute)
            fitting = trials.run()
        chosen = tried.chosen(fitting)
    finally:
        # The previous size if the search failed.
        attribute.write(chosen)
        # Loaders made during the trials have another batch size.
        for source in trainer.task_run.sources.values():
            source.is_stale = True
    less = f", {tried.margin:.0%} less than the largest that fits" if chosen < fitting else ""
    trainer.announce(
        f"Batch-size search: {trials.done} trials; {attribute.name} is now {chosen}{less}, and was {before}. "
        f"{trials.ended} Nothing else has changed."
    )
    return chosen


def check_batch_size_search(trainer: Trainer, task: Task, stage: Stage, tried: BatchSizeRange) -> TunedAttribute:
    if trainer.task_run.sources[stage].is_given:
        raise ConfigurationError(
            f"The Batch size finder cannot be used with dataloaders passed directly to {stage.verb}(): their batch "
            f"size is fixed. Define {stage.loader_name}() in the task or a DataModule, and let it read "
            f"{tried.batch_arg_name}.",
        )
    try:
        return TunedAttribute.find(
            (tried.batch_arg_name,), task, trainer.datamodule, "Let the method that creates the loaders read it."
        )
    except MissingAttributeError:
        # With several loaders, an error about the missing attribute would be misleading.
        _refuse_several(trainer.task_run.sources[stage].raw(), stage)
        raise


def _refuse_several(loaders: Any, stage: Stage) -> None:
    if stage is not Stage.TRAIN and isinstance(loaders, list | tuple) and len(loaders) > 1:
        raise ConfigurationError(
            f"The Batch size finder cannot be used with multiple {stage.loader} dataloaders: there are "
            f"{len(loaders)}. Return only one from {stage.loader_name}().",
        )


class _Trials:
    def __init__(
        self, trainer: Trainer, task: Task, stage: Stage, tried: BatchSizeRange, attribute: TunedAttribute
    ) -> None:
        self._trainer, self._task, self._stage = trainer, task, stage
        self._tried, self._attribute = tried, attribute
        self._source = trainer.task_run.sources[stage]
        self._trial = TrainingTrial(trainer, task, splits=False) if stage is Stage.TRAIN else None
        # Pipeline stages exchange tensors in each pass, so no rank can try alone.
        self._apart = trainer.world_size > 1 and not trainer.strategy.schedules_microbatches
        loaders = self._source.raw()
        _refuse_several(loaders, stage)
        rows = _rows_of(loaders)
        # The batch size is that of a rank, which reads only its share of the rows.
        shards = trainer.strategy.topology.data_shard.count if trainer.use_distributed_sampler else 1
        self._rows = None if rows is None else max(1, rows // shards)  # rows per rank
        self._most = tried.max_val if self._rows is None else min(tried.max_val, self._rows)
        self.done, self.ended = 0, ""

    def run(self) -> int:
        tried = self._tried
        size: int | None = min(tried.init_val, self._most)
        lacking: int | None = None
        fitting = successes = 0
        failure: MemoryError | None = None
        with shown(self._trainer, "Batch-size search", tried.max_trials) as advance:
            while size is not None and successes < tried.max_trials:
                made = self._try(size)
                self.done += 1
                advance(batch_size=size)
                if made.enough:
                    fitting, successes = size, successes + 1
                else:
                    lacking, failure = size, made.failure or failure
                    self._task.on_batch_size_too_large(size)
                    if self._trainer.datamodule is not None:
                        self._trainer.datamodule.on_batch_size_too_large(size)
                following = tried.next_size(fitting, lacking, self._most)
                self._report(size, made.enough, following if successes < tried.max_trials else None)
                if following is None and not fitting:
                    raise RuntimeError(
                        "There is not enough memory for any batch size, not even for 1. Use a smaller model, or more "
                        "devices."
                    ) from failure
                size = following
        self._explain(fitting, lacking)
        return fitting or min(tried.init_val, self._most)

    def _report(self, size: int, fits: bool, following: int | None) -> None:
        verdict = "succeeded" if fits else "failed, because memory was not enough"
        if following is None:
            logger.info("Batch size %d %s.", size, verdict)
        else:
            logger.info("Batch size %d %s, trying batch size %d.", size, verdict, following)

    def _explain(self, fitting: int, lacking: int | None) -> None:
        rows = self._rows
        if lacking is not None:
            self.ended = f"Memory is not enough for {lacking}."
        elif fitting and rows is not None and fitting >= rows:
            self.ended = f"It is not less than the length of the data, {rows} rows per process."
            logger.info("The batch size %d is not less than the length of the data (%d rows).", fitting, rows)
        elif fitting >= self._tried.max_val:
            self.ended = f"No larger one was tried (max_val={self._tried.max_val})."
        else:
            self.ended = f"No more were tried (max_trials={self._tried.max_trials})."

    def _try(self, size: int) -> Attempt:
        self._attribute.write(size)
        what = "the batch-size search"
        if self._trial is not None and self._apart:
            # A rank out of memory in the middle of an all-reduce would leave the others waiting.
            alone = attempt_together(partial(self._trial.try_gradients, self._source.again()), what, PATIENCE)
            if not alone.enough:
                return alone
        return attempt_together(self._run_steps, what, PATIENCE)

    def _run_steps(self) -> None:
        trainer, task, steps = self._trainer, self._task, self._tried.steps_per_trial
        if self._trial is None:
            try_evaluation(trainer, task, self._stage, self._source.again(), steps)
            return
        trial = self._trial

        def run(number: int, window: list[PendingBatch]) -> bool:
            trial.step(window)
            return True

        trial.run(self._source.again(), steps, run)
        # Validation runs between training steps, so its memory must fit too.
        validation = trainer.task_run.sources[Stage.VALIDATE]
        if trainer.limit_val_batches != 0 and validation.is_defined() and is_overridden(task, Task, "validation_step"):
            try_evaluation(trainer, task, Stage.VALIDATE, validation.again(), steps)


def _rows_of(loaders: Any) -> int | None:
    if isinstance(loaders, CombinedLoader):
        loaders = loaders.loaders
    several = loaders.values() if isinstance(loaders, Mapping) else loaders
    each = list(several) if isinstance(several, list | tuple) or several is not loaders else [loaders]
    known = [length_of(getattr(loader, "dataset", None)) for loader in each]
    return max((length for length in known if length), default=None)
