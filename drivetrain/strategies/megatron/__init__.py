"""Megatron's parallelism (Shoeybi et al., 2019, https://arxiv.org/abs/1909.08053), through megatron-core itself."""

from drivetrain.strategies.megatron.strategy import Megatron

__all__ = ["Megatron"]
