"""Data loaders of a run: where they come from, how they are prepared, and how training batches form steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from drivetrain.callbacks.base import Stage
from drivetrain.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
from drivetrain.data import BatchInfo, CombinedLoader, PendingBatch, PreparedLoader, TailPolicy
from drivetrain.runtime.collectives import gather_object
from drivetrain.runtime.errors import ConfigurationError, DataError, InvalidLoaderError
from drivetrain.runtime.pytrees import honor_type
from drivetrain.runtime.seeds import isolated_random_state, kept_generators, seed_all_generators
from drivetrain.runtime.timing import DATA, IDLE
from drivetrain.trainer.data_module import DataModule
from drivetrain.trainer.hooks import is_overridden, is_redefined
from drivetrain.trainer.metrics.logged_values import TRANSFER
from drivetrain.trainer.options import Limit, LimitPerLoader
from drivetrain.trainer.state.saved_run import StepSnapshot, at_start_of, saves_within_steps
from drivetrain.trainer.task import Task

if TYPE_CHECKING:
    from drivetrain.trainer.state.saved_run import SavedRun
    from drivetrain.trainer.trainer import Trainer


# Finding and preparing the loaders


Prepared: TypeAlias = PreparedLoader | CombinedLoader

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class LoaderSource:
    """Provides the data loaders of one stage, from the Trainer method's arguments, the data module or the task."""

    def __init__(self, trainer: Trainer, task: Task, stage: Stage, given: Any, data: DataModule | None) -> None:
        self._trainer, self._task, self._stage = trainer, task, stage
        self._given, self._data = given, data
        self._prepared: Prepared | None = None
        self.is_stale = False

    def is_defined(self) -> bool:
        method = self._stage.loader_name
        return (
            self._given is not None
            or (self._data is not None and is_overridden(self._data, DataModule, method))
            or is_overridden(self._task, Task, method)
        )

    @property
    def is_given(self) -> bool:
        return self._given is not None

    def again(self) -> LoaderSource:
        return LoaderSource(self._trainer, self._task, self._stage, self._given, self._data)

    def raw(self) -> Any:
        """Return the user's own loader or loaders for this stage, or None."""
        if self._given is not None:
            return self._given
        method = self._stage.loader_name
        owns = self._data is not None and is_overridden(self._data, DataModule, method)
        owner: Any = self._data if owns else self._task
        if not owns and not is_overridden(self._task, Task, method):
            return None
        actions = self._trainer.actions
        return actions.watch(actions.of_owner(owner, method), getattr(owner, method))()

    def _origin(self) -> str:
        method, fits = self._stage.loader_name, self._trainer.task_run.stage is Stage.TRAIN
        for owner, base in ((self._data, DataModule), (self._task, Task)):
            if self._given is None and owner is not None and is_overridden(owner, base, method):
                return f"returned from `{type(owner).__name__}.{method}()`"
        argument = f"{self._stage.loader}_dataloaders" if fits else "dataloaders"
        return f"passed to `Trainer.{'fit' if fits else self._stage.verb}({argument}=...)`"

    def prepare_training(self, again: bool = False) -> Prepared:
        if self._prepared is None or again or self.is_stale:
            self.forget_training()
            self._prepared = self._trainer.actions.watch("setup_train_dataloader", self._prepare_training)()
            self.is_stale = False
        return self._prepared

    def forget_training(self) -> None:
        # Checkpoints then no longer store the loader's position.
        if self._prepared is not None and self._prepared is not self._given:
            self._trainer.accelerator.forget_loader(self._prepared)
        self._prepared = None

    def _prepare_training(self) -> Prepared:
        raw = self.raw()
        if self._trainer.overfit_batches:
            raw = with_same_batches(raw, self._stage, self._most_batches())
        self._trainer.current.loaders[self._stage] = raw
        if raw is None:
            raise InvalidLoaderError(
                f"An invalid dataloader was {self._origin()}: there is no training data. Pass train_dataloaders to "
                f"fit(), or define train_dataloader() in {type(self._task).__name__} or a DataModule."
            )
        raw = self._trainer.combine_loaders(raw, self._stage)
        if isinstance(raw, CombinedLoader):
            return self._shared(raw).map(lambda loader: self._prepare(loader, 0, TailPolicy.WHOLE))
        return self._prepare(raw, 0, TailPolicy.WHOLE)

    def _most_batches(self) -> int | None:
        limit = self._trainer.overfit_batches
        # With a fraction, the number of batches depends on the loader's length, so the limit is None.
        return limit * self._trainer.world_size if isinstance(limit, int) else None

    def prepare_evaluation(self) -> list[Prepared]:
        raw = self.raw()
        if self._trainer.overfit_batches and self._trainer.task_run.stage is Stage.TRAIN:
            raw = with_same_batches(raw, self._stage, self._most_batches())
        self._trainer.current.loaders[self._stage] = raw
        self.is_stale = False
        # Within `fit`, a task without validation data simply is not validated.
        if raw is None and self._trainer.task_run.stage is not Stage.TRAIN:
            raise InvalidLoaderError(
                f"An invalid dataloader was {self._origin()}: it is None. Return a torch DataLoader, or another "
                "iterable of batches."
            )
        if raw is None:
            return []
        tail = TailPolicy.WHOLE if self._trainer.strategy.needs_even_batches else TailPolicy.UNEVEN
        if isinstance(raw, Mapping | list | tuple) and not raw:
            return []
        raw = self._trainer.combine_loaders(raw, self._stage)
        if isinstance(raw, CombinedLoader) and raw.mode != "sequential":
            return [self._shared(raw).map(lambda loader: self._prepare(loader, 0, tail))]
        several = raw.loaders if isinstance(raw, CombinedLoader) else [raw]
        return [self._prepare(loader, index, tail) for index, loader in enumerate(several)]

    def _shared(self, combined: CombinedLoader) -> CombinedLoader:
        reads_own = any(self._trainer.shard_of(loader) is not None for loader in combined.loaders)
        return combined if reads_own else combined.shared_by(self._trainer.strategy.topology.data_shard.count)

    def _prepare(self, loader: Any, index: int, tail: TailPolicy) -> PreparedLoader:
        if isinstance(loader, PreparedLoader):
            return loader
        if not hasattr(loader, "__iter__"):
            raise InvalidLoaderError(
                f"An invalid dataloader was {self._origin()}: the {self._stage.loader} data is a "
                f"{type(loader).__name__}, which cannot be iterated. Use a torch DataLoader, or another iterable of "
                "batches."
            )
        loader = self._trainer.adapt_loader(loader, self._stage)
        prepared = self._trainer.accelerator.prepare_data_loader(
            loader,
            tail=tail,
            place=self._placing(index),
            shard=self._trainer.shard_of(loader),
            fill=self._fills(),
        )
        if length_of(loader) == 0:  # the prepared one may be empty on this rank alone
            raise DataError(f"The {self._stage.loader} loader is empty: {_describe(loader)}.")
        return prepared

    def _fills(self) -> bool:
        placement = self._trainer.accelerator.preparation.batch_placement
        # Padding rows are removed from predictions afterwards, but cannot be removed from a mean.
        if self._stage is Stage.PREDICT:
            return True
        return placement is not None and placement.fills_evaluation and self._stage is not Stage.TRAIN

    def _placing(self, dataloader_idx: int) -> Callable[[Any], Any] | None:
        precision = self._trainer.accelerator.precision
        casts = type(precision).convert_batch is not _plain_convert()
        owners: list[Any] = []
        for name in _TRANSFER_HOOKS:
            if self._data is not None and is_redefined(self._data, DataModule, name):
                owners.append(self._data)
            else:
                owners.append(self._task if is_overridden(self._task, Task, name) else None)
        if not any(owners) and not casts:
            return None
        before, transfer, after = owners
        default = self._trainer.accelerator.default_placement() or (lambda batch: batch)
        device = self._trainer.strategy.topology.device

        def place(batch: Any) -> Any:
            if before is not None:
                batch = before.on_before_batch_transfer(batch, dataloader_idx)
            batch = transfer.transfer_batch_to_device(batch, device, dataloader_idx) if transfer else default(batch)
            if casts:
                batch = precision.convert_batch(batch)
            return after.on_after_batch_transfer(batch, dataloader_idx) if after is not None else batch

        def place_without_logging(batch: Any) -> Any:
            # A value logged here would be weighed by another batch's rows.
            with self._trainer.logged.forbidden(TRANSFER):
                return place(batch)

        return place_without_logging if any(owners) else place


def length_of(loader: Any) -> int | None:
    """Return a loader's number of batches, or None if it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def batches_to_run(length: int | None, limit: float | int | None, name: str) -> float:
    """Return how many of a loader's `length` batches to run, given the value `limit` of the Trainer option `name`."""
    if limit is None or (isinstance(limit, float) and limit == 1.0):
        return float("inf") if length is None else length
    if isinstance(limit, int):
        return limit if length is None else min(limit, length)
    if length is None:
        raise ConfigurationError(
            f"{name}={limit} is a fraction, but the loader's length is not known. With an `IterableDataset`, "
            f"`Trainer({name})` must be `1.0` or an int, a whole number of batches.",
        )
    batches = int(length * limit)
    if batches == 0 and limit > 0:
        raise ConfigurationError(
            f"{name}={limit} of {length} batches is less than one batch. Please increase the `{name}` "
            f"argument. Try at least {1 / length:.3g}, or a whole number of batches.",
        )
    return batches


def check_equal_lengths(batches: float, kind: str) -> None:
    # All ranks must call this together.
    everyone = gather_object([batches])
    if len(set(everyone)) > 1:
        counts = ", ".join(
            f"rank {rank} has an unknown number" if count == float("inf") else f"rank {rank} has {count:g}"
            for rank, count in enumerate(everyone)
        )
        raise DataError(
            f"The processes have different numbers of {kind} batches: {counts}. Processes with more batches would wait "
            "for the others forever. Give every process a loader of the same length, let use_distributed_sampler=True "
            "divide one loader, or limit the batches to the smallest number."
        )


def limits_of(
    loaders: Sequence[Any],
    limit: LimitPerLoader,
    name: str,
    even: bool = False,
    given: Any = None,
) -> list[float]:
    # The limit is applied to the loader's longest length on any rank. With `even`, ranks with different numbers of
    # batches are an error. The keys of a dict in `given` name the loaders.
    limits = _limit_per_loader(limit, len(loaders), list(given) if isinstance(given, Mapping) else None, name)
    lengths = [length_of(loader) for loader in loaders]
    if even:
        kind = name.removeprefix("limit_").removesuffix("_batches")
        for length, each in zip(lengths, limits, strict=True):
            check_equal_lengths(batches_to_run(length, each, name), kind)
    everyone: list[list[int | None]] = gather_object([lengths])
    longest = [None if None in lengths else max(lengths) for lengths in zip(*everyone, strict=True)]
    return [batches_to_run(length, each, name) for length, each in zip(longest, limits, strict=True)]


def _limit_per_loader(limit: Any, count: int, names: list[Any] | None, argument: str) -> list[Limit]:
    if isinstance(limit, Mapping):
        if names is None:
            raise ConfigurationError(f"{argument} is a dict, so the loaders must be a dict with the same keys.")
        unknown = [key for key in limit if key not in names]
        if unknown:
            known = ", ".join(map(repr, names))
            raise ConfigurationError(f"{argument} has the key {unknown[0]!r}, but the loaders are {known}.")
        return [limit.get(key) for key in names]
    if not isinstance(limit, list | tuple):
        return [limit] * count
    if len(limit) != count:
        raise ConfigurationError(
            f"{argument} has {len(limit)} limits for {count} loader{'s' * (count != 1)}. Give one per loader."
        )
    return list(limit)


def own_batches(loaders: Sequence[Any], limits: Sequence[float]) -> list[float]:
    # Other ranks may have more batches.
    lengths = [length_of(loader) for loader in loaders]
    return [limit if length is None else min(length, limit) for length, limit in zip(lengths, limits, strict=True)]


class _SameOrder(Sampler[Any]):
    """Sampler for `overfit_batches` that yields the same indices, in the same order, in every epoch.

    The first pass runs the user's sampler with a fixed seed, so its order is equal on all ranks and in a resumed run.
    """

    def __init__(self, sampler: Iterable[Any], most: int | None) -> None:
        self._sampler, self._most = sampler, most
        self._indices: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._indices is None:
            with isolated_random_state(), kept_generators(self._sampler):
                seed_all_generators(0)
                self._indices = list(islice(self._sampler, self._most))
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]


def with_same_batches(loader: Any, stage: Stage, most: int | None = None) -> Any:
    """Return a loader that repeats its first epoch's batches in every epoch, as `overfit_batches` requires.

    A shuffling loader then reads the dataset in order. Another sampler repeats its first pass. Loaders with a batch
    sampler or an iterable dataset are returned unchanged. In a dict, list or `CombinedLoader`, each loader is replaced.
    """
    if isinstance(loader, CombinedLoader):
        return loader.map(lambda each: with_same_batches(each, stage, most))
    if isinstance(loader, Mapping):
        return {name: with_same_batches(each, stage, most) for name, each in loader.items()}
    if isinstance(loader, list | tuple) and _are_loaders(loader):
        return honor_type(loader, (with_same_batches(each, stage, most) for each in loader))
    if not isinstance(loader, DataLoader) or loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return loader
    if isinstance(loader, PreparedLoader) or type(loader.sampler) is SequentialSampler:
        return loader
    sampler: Sampler[Any]
    if isinstance(loader.sampler, RandomSampler | DistributedSampler):
        warnings.warn(
            f"You requested to overfit but enabled {stage.loader} dataloader shuffling. overfit_batches uses the same "
            "batches in each epoch, so shuffling is turned off.",
            stacklevel=2,
        )
        samples: Any = loader.sampler.data_source if isinstance(loader.sampler, RandomSampler) else loader.dataset
        sampler = SequentialSampler(samples)
    else:
        sampler = _SameOrder(loader.sampler, None if most is None else most * loader.batch_size)
    # A subclass may have another constructor, so the loader is copied. `DataLoader.__setattr__` refuses to set
    # samplers after construction, so it is bypassed.
    same = copy.copy(loader)
    object.__setattr__(same, "sampler", sampler)
    object.__setattr__(same, "batch_sampler", BatchSampler(sampler, loader.batch_size, loader.drop_last))
    return same


def are_several(raw: Any) -> bool:
    """Return True if the user passed several loaders, in a dict or a list."""
    return isinstance(raw, Mapping) or (isinstance(raw, list | tuple) and bool(raw) and _are_loaders(raw))


def _are_loaders(items: Iterable[Any]) -> bool:
    return all(
        isinstance(item, DataLoader | CombinedLoader)
        or (isinstance(item, list | tuple) and bool(item) and _are_loaders(item))
        or (isinstance(item, Mapping) and bool(item) and _are_loaders(item.values()))
        for item in items
    )


def _plain_convert() -> Any:
    from drivetrain.strategies.precision import Precision

    return Precision.convert_batch


def _describe(loader: Any) -> str:
    if not isinstance(loader, DataLoader) or not hasattr(loader, "dataset"):
        return f"the {type(loader).__name__} yields no batches"
    size = length_of(loader.dataset)
    return (
        f"its dataset has {size} samples, batch_size={loader.batch_size}, drop_last={loader.drop_last}. "
        "Check the dataset's path and filters, or set drop_last=False"
    )


FOREVER = float("inf")


def epoch_length(trainer: Trainer, loader: PreparedLoader | CombinedLoader) -> float:
    # Infinity if the length is unknown.
    limit = trainer.overfit_batches or trainer.limit_train_batches
    name = "overfit_batches" if trainer.overfit_batches else "limit_train_batches"
    return batches_to_run(length_of(loader), limit, name)


def estimate_steps(trainer: Trainer, loader: PreparedLoader | CombinedLoader) -> float:
    """Return the number of optimizer steps that `fit` will take, or infinity if unknown."""
    batches = epoch_length(trainer, loader)
    if trainer.max_epochs < 0 or batches == FOREVER:
        steps = FOREVER
    else:
        # Rounded up: the last accumulation window of an epoch may be smaller.
        steps = sum(-(-batches // size) for size in _window_sizes(trainer))
    return min(steps, trainer.max_steps) if trainer.max_steps >= 0 else steps


def _window_sizes(trainer: Trainer) -> list[int]:
    schedules = [each for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)]
    if not schedules:
        return [trainer.accumulate_grad_batches] * trainer.max_epochs
    return [schedules[-1].get_accumulate_grad_batches(epoch) for epoch in range(trainer.max_epochs)]


class TrainingBatches:
    """Batches of the training loop, grouped into optimizer steps.

    Also tracks the loader's position for checkpoints.

    Attributes:
        loader: The prepared training loader.
        limit: Number of batches of this rank per epoch, or infinity if unknown.
        finished: Info of the last batch of the last finished optimizer step in this epoch, or None.
        origin: Position of the loader at the start of this pass.
        marked: Position of a `CombinedLoader` at the start of the current step. None for other loaders.
        snapshot: State of this process after the last finished step or validation.
    """

    def __init__(self, trainer: Trainer, source: LoaderSource) -> None:
        self._trainer, self._source = trainer, source
        self._progress = trainer.progress
        self.finished: BatchInfo | None = None
        self.origin: dict[str, Any] | None = None
        self.marked: dict[str, Any] | None = None
        self._saves_within_steps = saves_within_steps(trainer)
        self.snapshot = StepSnapshot(cast("Task", trainer.task), trainer.logged, trainer.progress)
        self._feed: Iterator[PendingBatch] = iter(())  # shared by `windows` and `following`
        self.limit: float = FOREVER
        self.loader: PreparedLoader | CombinedLoader
        self._take(source.prepare_training())

    @property
    def is_stale(self) -> bool:
        return self._source.is_stale

    @property
    def shards(self) -> int:
        """Number of ranks that divide each global training batch.

        It is 1 if every rank reads its own loader.
        """
        trainer = self._trainer
        loaders = self.loader.loaders if isinstance(self.loader, CombinedLoader) else [self.loader]
        reads_own = any(trainer.shard_of(each) is not None for each in loaders)
        return 1 if reads_own else trainer.strategy.topology.data_shard.count

    def reload(self) -> bool:
        every, progress = self._trainer.reload_dataloaders_every_n_epochs, self._progress
        is_due = every and progress.epoch and progress.epoch % every == 0
        # Loaders are stale after a change of their settings.
        if progress.batches_in_epoch or not (is_due or self.is_stale):
            return False
        self._trainer.accelerator.forget_loader(self.loader)
        self._take(self._source.prepare_training(again=True))
        return True

    def begin_epoch(self, saved: SavedRun | None) -> None:
        self.finished = None
        if saved is None:
            self.loader.set_epoch(self._progress.epoch)
            self.origin = at_start_of(self.loader.state_dict(), self._progress.epoch)
        else:
            saved.restore_loader(self.loader)
            self.origin = self.loader.state_dict()

    def end_epoch(self) -> None:
        # Positions recorded in this epoch would be wrong in a checkpoint of the next one.
        self.finished = self.origin = None

    def mark(self) -> None:
        self.snapshot.mark()
        # A combined loader can report only its present position, not one before a batch that was read ahead.
        self.marked = self.loader.state_dict() if isinstance(self.loader, CombinedLoader) else None

    def windows(self) -> Generator[list[PendingBatch], None, None]:
        """Iterate over an epoch's batches in groups, each with the micro-batches of one optimizer step.

        A list is complete before its first micro-batch is processed, so its size is known. Each batch moves to the
        device only when it is processed.
        """
        limit, size, progress = self.limit, self._trainer.accumulate_grad_batches, self._progress
        if progress.batches_in_epoch >= limit or progress.batches_are_done:
            return
        skips, timing = self._trainer.control.batches_to_skip, self._trainer.timing
        index = progress.batches_in_epoch
        marks_steps = size > 1 or self._saves_within_steps
        self.mark()
        pending = self.loader.iterate_pending(limit, together=True)
        self._feed = iter(self._trainer.actions.iterate_training(pending, self.loader))
        window: list[PendingBatch] = []
        try:
            if timing.on:
                timing.enter(DATA)
            for batch in self._feed:
                if skips and (progress.epoch, index) in skips:
                    index += 1
                    progress.batches_in_epoch = index
                    progress.total_batches += 1
                    continue
                batch.batch_idx = index
                window.append(batch)
                index += 1
                is_full = len(window) == size or batch.info.last or index == limit
                del batch  # a second reference would keep its tensors during the step
                if is_full:
                    if timing.on:
                        timing.enter(IDLE)
                    yield window
                    index = max(index, progress.batches_in_epoch)  # a step may have read more through `following`
                    window = []
                    if index >= limit:
                        return
                    if marks_steps:
                        self.mark()
                    if timing.on:
                        timing.enter(DATA)
            if window:
                yield window
        finally:
            self._feed = iter(())  # ends the workers if the loader was not read to its end

    def following(self, index: int) -> PendingBatch | None:
        if index + 1 >= self.limit:
            return None
        for batch in self._feed:
            batch.batch_idx = index + 1
            return batch
        return None

    @property
    def are_done(self) -> bool:
        return (self.finished is not None and self.finished.last) or self._progress.batches_in_epoch >= self.limit

    def _take(self, loader: PreparedLoader | CombinedLoader) -> None:
        self.loader = loader
        self.limit = self._trainer.current.training_batches = epoch_length(self._trainer, loader)
        check_equal_lengths(self.limit, "training")
