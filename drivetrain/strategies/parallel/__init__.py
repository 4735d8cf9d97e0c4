"""Strategies that combine data, sharded, tensor, context and pipeline parallelism on one device mesh.

Public names are imported on first use, because the parts of torch behind them are slow to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.runtime.exports import load_export

# public name -> the module that defines it
_EXPORTS = {
    "sequence_positions": "drivetrain.strategies.parallel.context",
    "Parallel": "drivetrain.strategies.parallel.strategy",
    "Colwise": "drivetrain.strategies.parallel.tensor",
    "PrepareModuleInput": "drivetrain.strategies.parallel.tensor",
    "PrepareModuleInputOutput": "drivetrain.strategies.parallel.tensor",
    "PrepareModuleOutput": "drivetrain.strategies.parallel.tensor",
    "Rowwise": "drivetrain.strategies.parallel.tensor",
    "SequenceParallel": "drivetrain.strategies.parallel.tensor",
}

__all__ = [*sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    return load_export(name, _EXPORTS, globals())


if TYPE_CHECKING:
    from drivetrain.strategies.parallel.context import sequence_positions as sequence_positions
    from drivetrain.strategies.parallel.strategy import Parallel as Parallel
    from drivetrain.strategies.parallel.tensor import Colwise as Colwise
    from drivetrain.strategies.parallel.tensor import PrepareModuleInput as PrepareModuleInput
    from drivetrain.strategies.parallel.tensor import PrepareModuleInputOutput as PrepareModuleInputOutput
    from drivetrain.strategies.parallel.tensor import PrepareModuleOutput as PrepareModuleOutput
    from drivetrain.strategies.parallel.tensor import Rowwise as Rowwise
    from drivetrain.strategies.parallel.tensor import SequenceParallel as SequenceParallel
