"""Lightning's conventions for data loaders, hooks and the start of a run."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from drivetrain.callbacks.base import Callback, Stage
from drivetrain.compat.lightning.fabric.utilities import data
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.compat.lightning.fabric.utilities.warnings import PossibleUserWarning
from drivetrain.data import CombinedLoader, DataShard, InterleavingSampler, PendingBatch, rebuilt
from drivetrain.data.combined import is_structure
from drivetrain.runtime import observer
from drivetrain.runtime.collectives import broadcast_object_list, gather_object
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.timing import CALLBACKS
from drivetrain.strategies.base import needs_closure
from drivetrain.trainer import Task
from drivetrain.trainer import Trainer as CoreTrainer
from drivetrain.trainer.loops.batches import TrainingBatches
from drivetrain.trainer.loops.evaluation_loop import EvaluationLoop
from drivetrain.trainer.loops.fit_loop import FitLoop
from drivetrain.trainer.loops.progress import Phase
from drivetrain.trainer.loops.run_control import EpochHealth
from drivetrain.trainer.loops.step import PlainStep
from drivetrain.trainer.optimizers import SCHEDULER_KEYS, SchedulerConfig
from drivetrain.trainer.prepared_task import TaskRun

# Lightning's warnings about data loaders


def warn_of_loader(loader: object, stage: Stage, num_devices: int, spawns: bool) -> None:
    """Warn about a slow data loader, or about one that shuffles during evaluation."""
    if not isinstance(loader, DataLoader):
        return
    name = stage.loader_name
    most = data.suggested_max_num_workers(num_devices)
    if loader.num_workers and not loader.persistent_workers and _starts_from_nothing(spawns):
        rank_zero_warn(
            f"The workers of '{name}' are started again for each epoch, from nothing. Consider setting "
            "`persistent_workers=True` in its `DataLoader`."
        )
    elif loader.num_workers < 2 <= most:
        rank_zero_warn(
            f"The '{name}' does not have many workers, so the model may wait for data. Consider increasing the value "
            f"of the `num_workers` argument to `num_workers={most}` in its `DataLoader`.",
            category=PossibleUserWarning,
        )
    if stage is not Stage.TRAIN and isinstance(loader.sampler, RandomSampler):
        rank_zero_warn(
            f"The '{name}' draws its samples in a random order. It is recommended that you turn shuffling off for "
            "val/test/predict dataloaders.",
            category=PossibleUserWarning,
        )


def _starts_from_nothing(spawns: bool) -> bool:
    return spawns or multiprocessing.get_start_method(allow_none=True) == "spawn"


# Order in which Lightning's processes read training data


def interleaved(loader: Any, shard: DataShard, shuffle: bool) -> Any:
    """Return a data loader whose ranks read every n-th sample.

    drivetrain keeps the single-process order on several ranks. Lightning's order differs: there, training data is
    shuffled by seed and epoch, even if the loader does not shuffle.
    """
    if shard.count == 1 or not isinstance(loader, DataLoader) or loader.batch_size is None:
        return loader
    if type(loader).__iter__ is not DataLoader.__iter__ or isinstance(loader.sampler, DistributedSampler):
        return loader
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
    sampler: InterleavingSampler
    if observer.current is not None and type(loader.sampler) is RandomSampler:
        # An observer compares the run with one process, and gives both the same order.
        sampler = InterleavedOrder(observer.current.loader(loader).sampler, shard, False, seed)
    elif type(loader.sampler) in (RandomSampler, SequentialSampler):
        sampler = InterleavingSampler(loader.dataset, shard, shuffle, seed)
    elif isinstance(loader.sampler, Sized):
        sampler = InterleavedOrder(loader.sampler, shard, shuffle, seed)
    else:
        return loader
    return rebuilt(loader, loader.dataset, batch_size=loader.batch_size, sampler=sampler, drop_last=loader.drop_last)


def draw_seed_of(loader: Any) -> None:
    """Draw the seed that a `DataLoader` draws when it is iterated.

    Lightning creates an iterator twice for a training loader that is loaded after the first epoch. Random numbers of
    the later steps would differ without this.
    """
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__ and not loader.num_workers:
        iter(loader)


def with_batch_for_each(loader: Any, shard: DataShard) -> Any:
    """Return an evaluation loader with smaller batches if it has fewer batches than there are processes.

    Otherwise a process would evaluate no sample, and code that concatenates its outputs would fail. A loader with fewer
    samples than processes gets batches of one sample.
    """
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return loader
    if type(loader.batch_sampler) is not BatchSampler or not isinstance(loader.sampler, Sized) or loader.drop_last:
        return loader
    samples, size = len(loader.sampler), loader.batch_size
    if size is None or -(-samples // size) >= shard.count:
        return loader
    size = -(-samples // shard.count)
    if -(-samples // size) < shard.count:
        size = max(1, samples // shard.count)
    return rebuilt(loader, loader.dataset, batch_size=size, sampler=loader.sampler, drop_last=False)


class InterleavedOrder(InterleavingSampler):
    """`InterleavingSampler` over the indices that another sampler draws in each epoch.

    Args:
        sampler: The sampler of a loader, with a length.
        shard: Part of the indices that this process reads.
        shuffle: Shuffle the drawn indices as well.
        seed: Seed of that shuffle.
    """

    def __init__(self, sampler: Any, shard: DataShard, shuffle: bool, seed: int) -> None:
        super().__init__(sampler, shard, shuffle, seed)
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        drawn = _equal_on_all(list(self.sampler))
        for place in super().__iter__():
            yield drawn[place]

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


def _equal_on_all(drawn: list[Any]) -> list[Any]:
    """Return rank 0's indices if ranks drew different ones, which would repeat and skip samples."""
    digests = gather_object([hashlib.blake2b(repr(drawn).encode(), digest_size=16).hexdigest()])
    if len(set(digests)) > 1:
        [drawn] = broadcast_object_list([drawn])
    return drawn


# Conventions for loaders, hooks and the start of a run


def draw_seeds_apart(trainer: CoreTrainer, loaders: Sequence[Any]) -> None:
    """Draw a number for each validation loader on ranks whose torch generator differs from that of rank 0.

    A `DataLoader` draws a seed when it is iterated. Lightning's ranks iterate one each, so the generators of all ranks
    advance. drivetrain draws with the state of rank 0, and only the ranks in this state advance.
    """
    states = gather_object([hashlib.blake2b(torch.get_rng_state().numpy().tobytes(), digest_size=16).hexdigest()])
    if states[trainer.global_rank] != states[0]:
        for loader in loaders:
            if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
                torch.empty((), dtype=torch.int64).random_()


class LightningFitLoop(FitLoop):
    """`FitLoop` that validates before stopping mid-epoch, and calls most start hooks only once."""

    validated_before = 0
    """Number of validation batches in this fit before the current epoch."""

    def __init__(
        self,
        trainer: CoreTrainer,
        step: PlainStep,
        batches: TrainingBatches,
        validation: EvaluationLoop | None,
        health: EpochHealth,
    ) -> None:
        super().__init__(trainer, step, batches, validation, health)
        self.step, run = step, self._run_validation
        if (
            run is None
            or validation is None
            or trainer.strategy.topology.data_shard.count == 1
            or not trainer.use_distributed_sampler
        ):
            return

        def run_with_seeds(*args: Any, **kwargs: Any) -> Any:
            validation.load()
            given = trainer.current.loaders[Stage.VALIDATE]
            draw_seeds_apart(trainer, given.loaders if isinstance(given, CombinedLoader) else [given])
            return run(*args, **kwargs)

        self._run_validation = run_with_seeds

    def stop_epoch(self) -> bool:
        """Stop the epoch. Validate first if a callback or `max_time` stops it, so that a checkpoint has a score."""
        is_done = super().stop_epoch()
        if not is_done and self._trainer.control.stops_by_request:
            self.validate_within_epoch()
        return is_done

    def call_epoch_start(self, is_again: bool) -> None:
        """Call `on_train_epoch_start`. If an epoch resumes midway, call it only on this package's callbacks.

        They prepare for the rest of the epoch. Subclasses of them are called too.
        """
        trainer, actions = self._trainer, self._trainer.actions
        if not is_again:
            self.validated_before = trainer.logged.evaluated.total(Stage.VALIDATE, alone=False)
            super().call_epoch_start(is_again)
            return
        name = "on_train_epoch_start"
        with trainer.timing.span(CALLBACKS):
            for callback in trainer.callbacks:
                if getattr(_own_class(callback), name) is not getattr(Callback, name):
                    hook = actions.watch(actions.of_callback(callback, name), getattr(callback, name))
                    hook(trainer, trainer.task)


def _own_class(callback: Callback) -> type:
    """Return the nearest base class of a callback that this package defines."""
    package = __name__.partition(".")[0]
    return next(kind for kind in type(callback).__mro__ if kind.__module__.partition(".")[0] == package)


class LightningTaskRun(TaskRun):
    """`TaskRun` that clears the gradients before an evaluation, after `configure_model`."""

    def place_for_evaluation(self, task: Task) -> nn.Module:
        placed = super().place_for_evaluation(task)
        task.zero_grad()
        return placed


class LightningConventions(CoreTrainer):
    """Mixin of the mirror's Trainer with Lightning's conventions."""

    def begin_training(self, task: Task) -> None:
        """Clear the gradients. Raise an error if the checkpoint is from after the last requested epoch."""
        task.zero_grad()
        if self.task_run.checkpoint_path is None:
            return
        epochs, most = self.progress.epoch + (self.progress.phase is Phase.CLOSING), self.options.max_epochs
        if 0 <= most < epochs:
            raise ConfigurationError(
                f"You restored a checkpoint with current_epoch={epochs}, but you have set Trainer(max_epochs={most}). "
                "Give the number of epochs in all.",
            )

    def combine_loaders(self, given: Any, stage: Stage) -> Any:
        """Combine data loaders. A list is several loaders, unless it holds numbers or strings."""
        mode = "max_size_cycle" if stage is Stage.TRAIN else "sequential"
        return CombinedLoader(given, mode) if is_structure(given) and given else given

    def read_scheduler(self, given: Any, monitor: str | None = None, by_hand: bool = False) -> SchedulerConfig:
        """Read a scheduler's configuration. Unknown keys are ignored with a warning."""
        if isinstance(given, Mapping):
            unknown = {key for key in given if key not in SCHEDULER_KEYS}
            if unknown:
                words = f"Found unsupported keys in the lr scheduler dict: {unknown}."
                warnings.warn(f"{words} Allowed are {', '.join(SCHEDULER_KEYS)}.", RuntimeWarning, stacklevel=2)
            given = {key: value for key, value in given.items() if key not in unknown}
        return super().read_scheduler(given, monitor, by_hand)

    def steps_without_loss(self, window: Sequence[PendingBatch]) -> int:
        """Return 1, the optimizer steps to count, or 0 if no batch was available."""
        # Another process may have had a batch, and step counts must be equal on all.
        return int(self.world_size > 1 or not all(batch.is_missing for batch in window))

    def make_fit_loop(self, *parts: Any) -> FitLoop:
        return LightningFitLoop(self, *parts)

    def replace_optimizers(self, optimizers: Sequence[Any]) -> None:
        """Replace the optimizers of a running `fit`, from the next step on. Schedulers keep their optimizers."""
        if not isinstance(self.loop, LightningFitLoop) or self.stage is None:
            raise ConfigurationError(
                "The optimizers can be replaced during fit, for example in on_train_epoch_start. Before, return them "
                "from configure_optimizers."
            )
        if any(map(needs_closure, optimizers)):
            raise ConfigurationError(
                "An optimizer that needs a closure, such as L-BFGS, cannot replace another one during fit. Return it "
                "from configure_optimizers."
            )
        engine, run = self.accelerator, self.task_run
        kept = [each for each in run.optimizers if any(each.optimizer is one for one in optimizers)]
        engine.prepared.forget([each for each in run.optimizers if each not in kept])
        run.optimizers = [engine.prepare_optimizer(each) for each in optimizers]
        self.loop.step.take_optimizers()

    @property
    def validates_whole_epochs(self) -> bool:
        """True if `val_check_interval` is 1 or 1.0, which Lightning's callbacks treat alike."""
        return bool(self.val_check_interval == 1)

    @property
    def is_last_batch(self) -> bool:
        """True if the epoch's last batch is running, or was the last to run."""
        current, progress = self.current, self.progress
        if current.stage is Stage.TRAIN and current.batch_info is not None:
            return super().is_last_batch
        return progress.phase > Phase.BATCHES or (not progress.batches_in_epoch and current.last_epoch[0] > 0)
