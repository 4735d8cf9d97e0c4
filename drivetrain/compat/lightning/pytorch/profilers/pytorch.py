"""`PyTorchProfiler` with the block names that tools for Lightning's traces expect."""

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
    """`drivetrain.PyTorchProfiler` whose blocks are named `[pl][profile]...` and `[pl][module]...`."""

    prefix: ClassVar[str] = "[pl]"


def RegisterRecordFunction(model: nn.Module) -> Any:
    """Record each module's forward as a named block of torch's profiler, in the `with` body."""
    return CoreRegisterRecordFunction(model, "[pl][module]")
