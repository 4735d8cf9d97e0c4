"""Plans: which strategy fits a model on given devices, and how fast it trains. This folder can be removed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

# public name -> the module that defines it
_EXPORTS = {
    **dict.fromkeys(("Plan", "plan"), "drivetrain.planning.planner"),
    "Cluster": "drivetrain.planning.hardware",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())


if TYPE_CHECKING:
    from drivetrain.planning.hardware import Cluster as Cluster
    from drivetrain.planning.planner import Plan as Plan
    from drivetrain.planning.planner import plan as plan
