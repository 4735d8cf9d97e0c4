"""Fully sharded data parallelism with torch's `fully_shard`: each process holds a shard of every parameter."""

from drivetrain.strategies.fsdp.strategy import FSDP

__all__ = ["FSDP"]
