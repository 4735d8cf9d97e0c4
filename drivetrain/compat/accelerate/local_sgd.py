"""`LocalSGD` under its module's name."""

from drivetrain.accelerator.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
