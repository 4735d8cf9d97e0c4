"""The order in which Lightning's processes read training data."""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from drivetrain.data import DataShard, InterleavingSampler, rebuilt


def interleaved(loader: Any, shard: DataShard, shuffle: bool) -> Any:
    """A loader whose processes take every n-th sample.

    The order of one process, which drivetrain itself keeps on several, would give other losses than Lightning there.
    That shuffles training data on several processes by the seed and the epoch, also where the loader does not.

    Args:
        loader: The script's; one with a sampler, a batch sampler or an iteration of its own keeps it.
        shard: This process's share.
        shuffle: Whether in a random order.
    """
    if shard.count == 1 or not isinstance(loader, DataLoader) or loader.batch_size is None:
        return loader
    if type(loader).__iter__ is not DataLoader.__iter__:
        return loader
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        return loader
    seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
    sampler = InterleavingSampler(loader.dataset, shard, shuffle, seed)
    return rebuilt(loader, loader.dataset, batch_size=loader.batch_size, sampler=sampler, drop_last=loader.drop_last)
