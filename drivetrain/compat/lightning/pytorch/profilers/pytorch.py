"""`PyTorchProfiler`, with the names of blocks that tools for Lightning's traces search for."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn
from torch.profiler import kineto_available

from drivetrain.trainer.profilers import PyTorchProfiler as CorePyTorchProfiler
from drivetrain.trainer.profilers.pytorch import RegisterRecordFunction as CoreRegisterRecordFunction

__all__ = ["PyTorchProfiler", "RegisterRecordFunction"]

_KINETO_AVAILABLE = kineto_available()

warning_cache: set[str] = set()
"""What was warned of already: nothing, since Python's own filters decide what is shown again."""


class PyTorchProfiler(CorePyTorchProfiler):
    """`drivetrain.PyTorchProfiler`, whose blocks are named `[pl][profile]...` and `[pl][module]...`."""

    prefix: ClassVar[str] = "[pl]"


def RegisterRecordFunction(model: nn.Module) -> Any:
    """Make the forward of each module a block of what torch's profiler records in the body."""
    return CoreRegisterRecordFunction(model, "[pl][module]")
