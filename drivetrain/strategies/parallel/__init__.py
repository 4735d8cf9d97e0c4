"""Several kinds of parallelism over one grid of processes."""

from drivetrain.strategies.parallel.context import sequence_positions
from drivetrain.strategies.parallel.strategy import Parallel
from drivetrain.strategies.parallel.tensor import (
    Colwise,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Rowwise,
    SequenceParallel,
)

__all__ = [
    "Colwise",
    "Parallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Rowwise",
    "SequenceParallel",
    "sequence_positions",
]
