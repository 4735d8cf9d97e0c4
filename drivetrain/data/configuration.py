"""Options for sharding a loader's batches over processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, warn_ignored


@dataclass(frozen=True)
class DataShard:
    """The part of a dataset that a process reads, given as its index and the number of parts.

    `DataShard(0, 4)` is the first of four parts. Processes that work on one batch together (tensor, pipeline or context
    parallelism) have equal shards.

    Args:
        index: Number of the part, from 0 to `count - 1`.
        count: Number of parts.
        is_common: True if all processes read the same part, as when tensor parallelism spans all of them.

    Raises:
        ConfigurationError: If `index` is not one of the `count` parts.
    """

    index: int = 0
    count: int = 1
    is_common: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise ConfigurationError(
                f"DataShard(index={self.index}, count={self.count}): there must be at least one part, "
                "and the index must be from 0 to count - 1.",
            )


class TailPolicy(str, Enum):
    """Policy for the end of an epoch when no full batch is left for every process, for example to pad.

    Padding rows are the last rows of a batch, and the loader counts them (`BatchInfo.padding`). A single process never
    gets padding.
    """

    COMPLETE = "complete"
    """Every process gets a full batch, padded with the first samples of the epoch."""

    WHOLE = "whole"
    """Short batches stay short. A process without a batch gets a copy of the epoch's first batch, all of it padding.
    Each batch is therefore either real or padding, never both."""

    UNEVEN = "uneven"
    """Nothing is padded: some processes may get one batch fewer than others."""


@dataclass
class DataLoaderConfiguration:
    """Options for preparing data loaders: sharding, padding, random numbers and resumption.

    Args:
        split_batches: Split each batch of the user's loader over the processes, so that its batch size is that of all
            processes together. By default each process gets whole batches.
        dispatch_batches: Let only rank 0 read the data and send each process its batches. By default (None) this is
            done for iterable datasets if there are several processes. The other processes then read one batch, to
            detect a dataset that gives each process its own part. Such a dataset is refused (see
            `use_distributed_sampler`).
        even_batches: Pad the end of an epoch so that all processes get equally many full batches
            (`TailPolicy.COMPLETE`). If False, some processes may get one batch fewer.
        use_seedable_sampler: Give a `torch.utils.data.RandomSampler` its own generator, which is seeded with the seed
            plus the epoch at the start of each epoch.
        data_seed: Seed for `use_seedable_sampler`; the run's seed if None (see `set_seed`).
        non_blocking: Copy batches from pinned host memory to the device asynchronously.
        use_stateful_dataloader: Let loaders continue with the next sample after `Accelerator.load_state`. By default
            the next iteration begins at the start of the interrupted epoch, in its order, for scripts that skip batches
            by themselves. Prepared loaders always have `state_dict` and `load_state_dict`, so torchdata is not needed.
        use_distributed_sampler: Shard what loaders read over the processes. If False, each process uses all of its own
            loader, which reads its own part of the data. In training, all processes then need equally many batches.
        seed_samples: Derive each sample's random state from the seed, the epoch and the sample's index. By default
            (None) this is done if the run is seeded. False turns it off, and True requires a seed.
        num_workers: Deprecated, without effect: each loader keeps its own number of workers.

    Raises:
        ConfigurationError: If `num_workers` is neither `"auto"` nor None.

    Example:
        ```python
        from drivetrain import Accelerator, DataLoaderConfiguration

        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
        ```
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    use_distributed_sampler: bool = True
    seed_samples: bool | None = None
    num_workers: str | None = None

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            warn_of_workers("DataLoaderConfiguration", self.num_workers)


def warn_of_workers(owner: str, value: Any) -> None:
    if value != "auto":
        raise ConfigurationError(
            f"num_workers={value!r} is not allowed. Set the number in the loader: DataLoader(num_workers=...).",
        )
    hint = "Each loader keeps its own number: DataLoader(num_workers=...)."
    warn_ignored(owner, "num_workers", value, hint, since="0.1.0", removed_in="0.3.0", stacklevel=6)
