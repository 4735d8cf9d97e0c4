"""Data loading: loaders that shard a user's loader over processes, keep its order and record padding."""

from __future__ import annotations

from drivetrain.data.batch_info import ActiveLoaders, BatchInfo
from drivetrain.data.combined import CombinedLoader
from drivetrain.data.configuration import DataLoaderConfiguration, DataShard, TailPolicy
from drivetrain.data.loader import PreparedLoader
from drivetrain.data.order import InterleavingSampler, PermutationSampler
from drivetrain.data.placement import PendingBatch
from drivetrain.data.preparation import SkippingLoader, prepare_loader, skip_first_batches
from drivetrain.data.reader import is_split_already, rebuilt

__all__ = [
    "ActiveLoaders",
    "BatchInfo",
    "CombinedLoader",
    "DataLoaderConfiguration",
    "DataShard",
    "InterleavingSampler",
    "PendingBatch",
    "PermutationSampler",
    "PreparedLoader",
    "SkippingLoader",
    "TailPolicy",
    "is_split_already",
    "prepare_loader",
    "rebuilt",
    "skip_first_batches",
]
