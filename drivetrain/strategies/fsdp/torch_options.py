"""Torch's own words for what is asked of FSDP, for those who take or show options in them."""

from __future__ import annotations

from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

__all__ = ["CPUOffload", "MixedPrecision", "ShardedGradScaler", "ShardingStrategy"]
