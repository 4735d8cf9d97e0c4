"""Fully sharded data parallelism on torch's `fully_shard`: each process holds a part of every parameter."""

from drivetrain.strategies.fsdp.strategy import FSDP

__all__ = ["FSDP"]
