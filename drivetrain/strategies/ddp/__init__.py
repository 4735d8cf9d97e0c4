"""Distributed data parallelism (Li et al., 2020, https://arxiv.org/abs/2006.15704)."""

from drivetrain.strategies.ddp.strategy import DDP

__all__ = ["DDP"]
