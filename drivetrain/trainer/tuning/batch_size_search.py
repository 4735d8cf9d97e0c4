"""Search for the largest batch size that fits into memory on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Stage
from drivetrain.callbacks.batch_size_finder import BatchSizeRange
from drivetrain.data import CombinedLoader, PendingBatch
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.logging import get_logger
from drivetrain.runtime.memory import Attempt, attempt_together
from drivetrain.trainer.hooks import is_overridden
from drivetrain.trainer.loops.batches import length_of
from drivetrain.trainer.task import Task
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

PATIENCE = 60.0
"""Seconds that a rank out of memory waits for the other ranks to finish the trial."""


def search_batch_size(trainer: Trainer, task: Task, stage: Stage, tried: BatchSizeRange) -> int:
    """Search for the largest batch size that fits into memory, set it, and return it.

    The batch size is an attribute of the task or its data module.

    All ranks must call this together, after the task is placed. Everything else is restored.
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
    """Return the batch-size attribute for a search. Raise an error if there is none or loaders were given."""
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
    """Trials of a batch-size search. Each runs a few steps to see whether one batch size fits into memory."""

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
        """Try batch sizes until the search ends, and return the largest that fits into memory."""
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
        """Try a batch size for a few steps on all ranks. Return an `Attempt`, which records whether memory was enough.

        Gradients are first computed without an all-reduce, so that no rank waits for one that is out of memory.
        """
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
    """Return the number of rows of the largest dataset among the loaders, or None if none is known."""
    if isinstance(loaders, CombinedLoader):
        loaders = loaders.loaders
    several = loaders.values() if isinstance(loaders, Mapping) else loaders
    each = list(several) if isinstance(several, list | tuple) or several is not loaders else [loaders]
    known = [length_of(getattr(loader, "dataset", None)) for loader in each]
    return max((length for length in known if length), default=None)
