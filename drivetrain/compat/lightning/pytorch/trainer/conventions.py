"""What a run takes for loaders, shows to hooks and begins with, as Lightning's does."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from drivetrain.callbacks.base import Callback, Stage
from drivetrain.compat.lightning.fabric.utilities import data
from drivetrain.compat.lightning.fabric.utilities.rank_zero import rank_zero_warn
from drivetrain.compat.lightning.fabric.utilities.warnings import PossibleUserWarning
from drivetrain.data import CombinedLoader, DataShard, InterleavingSampler, PendingBatch, rebuilt
from drivetrain.data.combined import is_structure
from drivetrain.runtime.collectives import broadcast_object_list, gather_object
from drivetrain.runtime.errors import ConfigurationError
from drivetrain.runtime.timing import CALLBACKS
from drivetrain.trainer import Task
from drivetrain.trainer import Trainer as CoreTrainer
from drivetrain.trainer.loops.fit_loop import FitLoop
from drivetrain.trainer.loops.progress import Phase
from drivetrain.trainer.optimizers import SCHEDULER_KEYS, SchedulerConfig

# What Lightning warns of in a loader.


def warn_of_loader(loader: object, stage: Stage, num_devices: int, spawns: bool) -> None:
    """Warn of a loader that is slow, or evaluates in a random order."""
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


# The order in which Lightning's processes read training data.


def interleaved(loader: Any, shard: DataShard, shuffle: bool) -> Any:
    """A loader whose processes take every n-th sample.

    The order of one process, which drivetrain itself keeps on several, would give other losses than Lightning there.
    That shuffles training data on several processes by the seed and the epoch, also where the loader does not.
    """
    if shard.count == 1 or not isinstance(loader, DataLoader) or loader.batch_size is None:
        return loader
    if type(loader).__iter__ is not DataLoader.__iter__ or isinstance(loader.sampler, DistributedSampler):
        return loader
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
    if type(loader.sampler) in (RandomSampler, SequentialSampler):
        sampler = InterleavingSampler(loader.dataset, shard, shuffle, seed)
    elif isinstance(loader.sampler, Sized):
        sampler = InterleavedOrder(loader.sampler, shard, shuffle, seed)
    else:
        return loader
    return rebuilt(loader, loader.dataset, batch_size=loader.batch_size, sampler=sampler, drop_last=loader.drop_last)


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
    """Return rank 0's indices if a sampler drew others in other processes, which would repeat and omit samples."""
    digests = gather_object([hashlib.blake2b(repr(drawn).encode(), digest_size=16).hexdigest()])
    if len(set(digests)) > 1:
        [drawn] = broadcast_object_list([drawn])
    return drawn


# What a run takes for loaders, shows to hooks and begins with, as Lightning's does.


class LightningFitLoop(FitLoop):
    """`FitLoop`, which validates before a stop within an epoch and calls most hooks of its start once."""

    def stop_epoch(self) -> bool:
        """Validate first if a callback or `max_time` ends the run, so that a checkpoint has its score."""
        is_done = super().stop_epoch()
        if not is_done and self._trainer.control.stops_by_request:
            self.validate_within_epoch()
        return is_done

    def call_epoch_start(self, is_again: bool) -> None:
        """Call `on_train_epoch_start`; for an epoch that a checkpoint was written within, of this package's callbacks.

        Those get ready for the rest of the epoch. Callbacks derived from them are called too.
        """
        if not is_again:
            super().call_epoch_start(is_again)
            return
        trainer, actions = self._trainer, self._trainer.actions
        name = "on_train_epoch_start"
        with trainer.timing.span(CALLBACKS):
            for callback in trainer.callbacks:
                if getattr(_own_class(callback), name) is not getattr(Callback, name):
                    hook = actions.watch(actions.of_callback(callback, name), getattr(callback, name))
                    hook(trainer, trainer.task)


def _own_class(callback: Callback) -> type:
    """The nearest of this package's classes that a callback is derived from."""
    package = __name__.partition(".")[0]
    return next(kind for kind in type(callback).__mro__ if kind.__module__.partition(".")[0] == package)


class LightningConventions(CoreTrainer):
    """`drivetrain.Trainer` with Lightning's conventions, which the mirror's Trainer is made of."""

    def begin_training(self, task: Task) -> None:
        """Begin without gradients, and refuse a checkpoint from after the last epoch that was asked for."""
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
        """Combine several loaders: a list is several, unless it holds numbers or strings."""
        mode = "max_size_cycle" if stage is Stage.TRAIN else "sequential"
        return CombinedLoader(given, mode) if is_structure(given) and given else given

    def read_scheduler(self, given: Any, monitor: str | None = None, by_hand: bool = False) -> SchedulerConfig:
        """Warn of the keys that a scheduler's dict cannot have, and leave them out."""
        if isinstance(given, Mapping):
            unknown = {key for key in given if key not in SCHEDULER_KEYS}
            if unknown:
                words = f"Found unsupported keys in the lr scheduler dict: {unknown}."
                warnings.warn(f"{words} Allowed are {', '.join(SCHEDULER_KEYS)}.", RuntimeWarning, stacklevel=2)
            given = {key: value for key, value in given.items() if key not in unknown}
        return super().read_scheduler(given, monitor, by_hand)

    def steps_without_loss(self, window: Sequence[PendingBatch]) -> int:
        """Count one step, if there was a batch."""
        # Another process may have had a batch, and all must count alike.
        return int(self.world_size > 1 or not all(batch.is_missing for batch in window))

    def make_fit_loop(self, *parts: Any) -> FitLoop:
        return LightningFitLoop(self, *parts)

    @property
    def validates_whole_epochs(self) -> bool:
        """Whether callbacks take it so: 1 as well as 1.0, which are the same to Lightning's."""
        return bool(self.val_check_interval == 1)

    @property
    def is_last_batch(self) -> bool:
        """Whether the last batch of an epoch is under way, or was the last that there was."""
        current, progress = self.current, self.progress
        if current.stage is Stage.TRAIN and current.batch_info is not None:
            return super().is_last_batch
        return progress.phase > Phase.BATCHES or (not progress.batches_in_epoch and current.last_epoch[0] > 0)
