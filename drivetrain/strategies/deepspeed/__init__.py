"""DeepSpeed strategy with ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054)."""

from drivetrain.strategies.deepspeed.config import DummyOptim, DummyScheduler
from drivetrain.strategies.deepspeed.strategy import DeepSpeed

__all__ = ["DeepSpeed", "DummyOptim", "DummyScheduler"]
