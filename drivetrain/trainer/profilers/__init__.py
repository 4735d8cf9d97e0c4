"""Profilers that measure the time of a run, by action, function or operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

_EXPORTS = {
    "AdvancedProfiler": "drivetrain.trainer.profilers.advanced",
    "PassThroughProfiler": "drivetrain.trainer.profilers.base",
    "Profiler": "drivetrain.trainer.profilers.base",
    "PyTorchProfiler": "drivetrain.trainer.profilers.pytorch",
    "SimpleProfiler": "drivetrain.trainer.profilers.simple",
    "XLAProfiler": "drivetrain.trainer.profilers.xla",
}

__all__ = [*sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())


if TYPE_CHECKING:
    from drivetrain.trainer.profilers.advanced import AdvancedProfiler as AdvancedProfiler
    from drivetrain.trainer.profilers.base import PassThroughProfiler as PassThroughProfiler
    from drivetrain.trainer.profilers.base import Profiler as Profiler
    from drivetrain.trainer.profilers.pytorch import PyTorchProfiler as PyTorchProfiler
    from drivetrain.trainer.profilers.simple import SimpleProfiler as SimpleProfiler
    from drivetrain.trainer.profilers.xla import XLAProfiler as XLAProfiler
