"""How a loader's batches are spread over processes: the options, and what the processes agree on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from drivetrain.runtime.errors import ConfigurationError, warn_ignored


@dataclass(frozen=True)
class DataShard:
    """Which part of the data a process reads.

    Processes that work on the same batch (tensor, pipeline or context parallel) have the same shard.

    Args:
        index: This part's number, from 0 to `count - 1`.
        count: How many parts the data is split into.

    Raises:
        ConfigurationError: If `index` is not one of the `count` parts.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise ConfigurationError(
                f"DataShard(index={self.index}, count={self.count}): there must be at least one part, "
                "and the index must be from 0 to count - 1.",
            )


class TailPolicy(str, Enum):
    """What happens at the end of an epoch, where there is not a full batch left for each process.

    Rows that fill a batch up are its last rows, and the loader counts them (`BatchInfo.padding`). In a world
    of one nothing is ever filled up.
    """

    COMPLETE = "complete"
    """Every process gets a full batch, filled up with the first samples of the epoch."""

    WHOLE = "whole"
    """Short batches stay short; a process for which there is none gets a copy of the epoch's first batch, all of it
    padding. So a batch is either real or padding, never both."""

    UNEVEN = "uneven"
    """Nothing is filled up: some processes may get one batch less than others."""


@dataclass
class DataLoaderConfiguration:
    """Options for how loaders are prepared.

    Args:
        split_batches: Split each batch of the user's loader over the processes, so that its batch size is that
            of all processes together. By default each process gets whole batches.
        dispatch_batches: Only rank 0 reads the data, and sends the others their batches. None means: for iterable
            datasets, if there are several processes; the others then read one batch, to find out whether each process
            reads a part of its own, which is refused (see `use_distributed_sampler`).
        even_batches: Complete the end of an epoch so that each process gets as many full batches
            (`TailPolicy.COMPLETE`). With False, some processes may get one batch less.
        use_seedable_sampler: Give a `torch.utils.data.RandomSampler` a generator of its own, seeded again at each
            epoch with the seed plus the epoch.
        data_seed: The seed for `use_seedable_sampler`. None means the run's seed (see `set_seed`).
        non_blocking: Copy batches to the device without waiting, where the host memory is pinned.
        use_stateful_dataloader: Let loaders continue by themselves after `Accelerator.load_state`: the next iteration
            begins with the next sample. By default it begins at the start of the epoch that was interrupted, in the
            same order, for scripts that skip what they have seen. Every prepared loader has `state_dict` and
            `load_state_dict`, so torchdata is not needed.
        use_distributed_sampler: Share out what loaders give over the processes. With False each process takes all of
            its own loader, which reads its part of the data by itself; all then need as many batches in training.
        seed_samples: In a seeded run, derive each sample's random state from the seed, the epoch and the sample's
            index. None means yes where the run is seeded; False switches it off; True insists on a seed.
        num_workers: Deprecated, without effect: each loader keeps its own number of workers.

    Raises:
        ConfigurationError: If `num_workers` is anything but `"auto"` or None.

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
    """Warn of `num_workers="auto"`, which has no effect any more."""
    if value != "auto":
        raise ConfigurationError(
            f"num_workers={value!r}: leave it out. A number belongs to the loader: DataLoader(num_workers=...).",
        )
    hint = "Each loader keeps its own number: DataLoader(num_workers=...)."
    warn_ignored(owner, "num_workers", value, hint, since="0.1.0", removed_in="0.3.0", stacklevel=6)
