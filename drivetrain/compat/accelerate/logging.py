"""`get_logger` under its module's name."""

from drivetrain.runtime.logging import RankLogger as MultiProcessAdapter
from drivetrain.runtime.logging import get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]
