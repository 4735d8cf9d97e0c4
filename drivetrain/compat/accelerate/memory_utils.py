"""The old place of `find_executable_batch_size`."""

from drivetrain.compat.accelerate.utils.memory import find_executable_batch_size

__all__ = ["find_executable_batch_size"]
